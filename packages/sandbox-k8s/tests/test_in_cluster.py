"""Inside a pod: the service account's token and its renewal, and a sweep that needs no run key."""

from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from sandbox_k8s import ClusterError, ConfigError, Injection, KubernetesConfig, SandboxClient, SandboxSpec
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.kubernetes.reaper import sweep
from sandbox_k8s.testing import FakeCluster

why = "the extra sandbox-k8s[kubernetes] is not installed"
incluster = pytest.importorskip("kubernetes.config.incluster_config", reason=why)
certifi = pytest.importorskip("certifi", reason=why)
CONFIG = KubernetesConfig(injection=Injection(kind="baked"), image="any:1")


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The token's file in a pod."""
    path = tmp_path / "token"
    path.write_text("first")
    monkeypatch.setattr(incluster, "SERVICE_TOKEN_FILENAME", str(path))
    monkeypatch.setattr(incluster, "SERVICE_CERT_FILENAME", certifi.where())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "2001:db8::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return path


def a_minute_later(monkeypatch: pytest.MonkeyPatch, minutes: int) -> None:
    """For the library, which reads the file again each minute."""
    clock = SimpleNamespace(now=lambda: datetime.now() + timedelta(minutes=minutes, seconds=1))
    later = SimpleNamespace(datetime=clock, timedelta=timedelta)
    monkeypatch.setattr(incluster, "datetime", later)


def test_a_pods_account_is_found_and_its_token_read_again(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = ApiAccess(CONFIG)
    assert access.base_url == "https://[2001:db8::1]:443/"
    assert access.options()["headers"] == {"authorization": "bearer first"}
    token.write_text("second")
    a_minute_later(monkeypatch, 1)
    assert access.options()["headers"] == {"authorization": "bearer second"}


@pytest.mark.parametrize("harm", ["emptied", "removed"])
def test_a_token_that_cannot_be_read_now_is_an_error_that_passes(
    token: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """It ended a client's watch, and the client with it, with an error of the library."""
    access = ApiAccess(CONFIG)
    if harm == "emptied":
        token.write_text("")
    else:
        token.unlink()
    a_minute_later(monkeypatch, 1)
    with pytest.raises(ClusterError, match="reading the credentials") as failed:
        access.options()
    assert (failed.value.code, failed.value.retryable) == (0, True)
    token.write_text("third")
    a_minute_later(monkeypatch, 3)
    assert access.options()["headers"] == {"authorization": "bearer third"}


def test_without_an_account_the_error_says_where_was_looked(
    tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token.unlink()
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"\$KUBECONFIG is not set, .*no pod with a service account"):
        ApiAccess(CONFIG)


@pytest.mark.anyio
async def test_one_sweep_for_all_runs_makes_no_run_key(tmp_path: Path) -> None:
    with FakeCluster() as cluster:
        config = msgspec.structs.replace(
            CONFIG, kubeconfig=cluster.kubeconfig, run_key_file=tmp_path / "run.key"
        )
        async with SandboxClient.kubernetes(config) as client:
            backend = client._backend
            assert isinstance(backend, KubernetesBackend)
            for number, (run, expired) in enumerate((("a", True), ("b", True), ("b", False))):
                backend.config = msgspec.structs.replace(config, run=run)
                pod = backend._manifest(SandboxSpec(), f"{number:016x}", "0" * 32)
                if expired:
                    pod["metadata"]["annotations"][records.EXPIRES] = "1"
                await backend.api.create(pod, records.REQUEST)
        elsewhere = msgspec.structs.replace(config, run="a", run_key_file=tmp_path / "none" / "run.key")
        only_a = await sweep(elsewhere, SystemClock(), dry_run=True)
        assert [one.sandbox_id for one in only_a] == ["0" * 16]
        reaped = await sweep(elsewhere, SystemClock(), every_run=True)
        assert {one.sandbox_id for one in reaped} == {f"{number:016x}" for number in (0, 1)}
        left = [pod for pod in cluster.pods() if "deletionTimestamp" not in pod["metadata"]]
        assert [pod["metadata"]["labels"][records.SANDBOX] for pod in left] == [f"{2:016x}"]
        assert not (tmp_path / "none").exists()
