"""What ``ps`` and ``explain`` say of pods that do not come up, or are no sandboxes."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import KubernetesConfig, SandboxSpec
from sandbox_k8s.cli import main
from sandbox_k8s.cli.pods import seen
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import PodApi
from sandbox_k8s.kubernetes.config import Injection
from sandbox_k8s.kubernetes.manifest import pod_manifest, prefetch_manifest
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
pytestmark = pytest.mark.anyio
SANDBOX = "5a" * 8


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(FakeClusterConfig(speed=1000)) as cluster:
        yield cluster


@pytest.fixture
def made(cluster: FakeCluster) -> Any:
    """Create the pod of a sandbox as a worker does, and wait until it is in a state."""

    async def make(state: str, image: str = "example.com/any:1") -> None:
        config = KubernetesConfig(injection=Injection(kind="baked"), kubeconfig=cluster.kubeconfig)
        record = records.Record(
            key_id="k", workdir="/", lease_s=60.0, detached_lease_s=60.0, created_ns=SystemClock().now_ns()
        )
        pod = pod_manifest(
            SandboxSpec(image=image),
            config,
            sandbox_id=SANDBOX,
            token_hash="0" * 64,
            annotations=records.annotations(record, request="r", epoch=1, expires_ns=1 << 62),
        )
        api = PodApi(ApiAccess(config), config, SystemClock())
        await api.create(pod, records.REQUEST)
        while state not in msgspec.json.encode((await api.get(f"sbx-{SANDBOX}"))["status"]).decode():
            pass
        api.close()

    return make


async def aside(function: Callable[..., Any], *words: Any, **named: Any) -> Any:
    """The command line has an event loop of its own."""
    return await anyio.to_thread.run_sync(partial(function, *words, **named))


def shown(*words: str, capsys: pytest.CaptureFixture[str], cluster: FakeCluster) -> str:
    command, *rest = words
    assert main([command, "--kubeconfig", str(cluster.kubeconfig), *rest]) == 0
    return capsys.readouterr().out


async def test_a_pod_that_fails_is_shown_with_its_class_and_explained(
    cluster: FakeCluster, made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.doom("image-not-found")
    await made("ErrImagePull", image="example.com/none:1")
    row = await aside(shown, "ps", capsys=capsys, cluster=cluster)
    assert "image_not_found: " in row.splitlines()[1]
    assert f"{SANDBOX}  sbx-{SANDBOX}  default  starting  1" in row
    (found,) = json.loads(await aside(shown, "ps", "--json", capsys=capsys, cluster=cluster))
    assert (found["condition"], found["failure"]) == ("failed", "image_not_found")
    said = await aside(shown, "explain", SANDBOX[:4], capsys=capsys, cluster=cluster)
    assert said.splitlines()[0] == f"pod default/sbx-{SANDBOX}  failed: image_not_found"
    assert "event Failed" in said


async def test_what_only_events_tell(
    cluster: FakeCluster, made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.doom("volume-secret-missing")
    await made("ContainerCreating")
    with anyio.fail_after(10):
        while True:
            (row,) = json.loads(await aside(shown, "ps", "--json", capsys=capsys, cluster=cluster))
            if "failure" in row:
                break
    assert (row["condition"], row["failure"]) == ("failed", "volume_missing")
    assert "nope" in row["why"]


async def test_without_the_right_to_read_events_and_nodes_less_is_said_and_why(
    cluster: FakeCluster, made: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    cluster.doom("image-not-found")
    await made("ErrImagePull")
    cluster.forbid("list", "events")
    cluster.forbid("get", "nodes")
    assert "image_not_found" in await aside(shown, "ps", capsys=capsys, cluster=cluster)
    assert 'without events, which tell more and earlier: user "fake" may not list events' in caplog.text
    said = await aside(shown, "explain", SANDBOX, capsys=capsys, cluster=cluster)
    hints = [line for line in said.splitlines() if line.startswith("  hint")]
    assert [line.split("may not ")[1] for line in hints] == ["list events", "get nodes"]


async def test_any_pod_is_explained_by_its_name(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = KubernetesConfig(injection=Injection(kind="baked"), kubeconfig=cluster.kubeconfig)
    api = PodApi(ApiAccess(config), config, SystemClock())
    container = {"name": "main", "image": "example.com/any:1"}
    metadata = {"name": "web", "annotations": {"a": "b"}}
    await api.create({"metadata": metadata, "spec": {"containers": [container]}}, "a")
    while (await api.get("web"))["status"]["phase"] != "Running":
        pass
    api.close()
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    assert await aside(main, ["explain", "web"]) == 0
    assert capsys.readouterr().out.startswith("pod default/web  ready\n")
    # A file of that name is a file, unless a cluster is asked for.
    (tmp_path / "web").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert await aside(main, ["explain", "web"]) == 2
    assert await aside(main, ["explain", "--kubernetes", "web"]) == 0
    capsys.readouterr()
    assert await aside(main, ["explain", "-k", "web", "--node", "x"]) == 2
    assert "are for a FILE" in capsys.readouterr().err


async def test_a_pod_that_is_being_removed_is_shown_as_that_and_a_prefetch_pod_is_no_sandbox(
    cluster: FakeCluster, made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = KubernetesConfig(injection=Injection(kind="baked"), kubeconfig=cluster.kubeconfig)
    fetcher = prefetch_manifest(
        config,
        {"i": "example.com/a:1"},
        node="node-1",
        request="f" * 32,
        annotations={records.REQUEST: "f" * 32},
    )
    cluster.doom("stalled-pull")
    await made("ContainerCreating")
    api = PodApi(ApiAccess(config), config, SystemClock())
    await api.create(fetcher, records.REQUEST)
    assert await aside(main, ["exec", "--kubeconfig", str(cluster.kubeconfig), "ffff", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert f"there are 1, for example {SANDBOX}" in said
    pod = await api.get(f"sbx-{SANDBOX}")
    deletion = {
        **pod["metadata"],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 0,
    }
    api.close()
    found = seen({**pod, "metadata": deletion})
    assert (found.state, found.failure, found.why) == ("stopping", None, "it is being deleted")
