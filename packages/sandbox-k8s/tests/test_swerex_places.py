"""One deployment in every kind of place and over every way to its launcher; the real cluster too."""

from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import pytest
from sandbox_k8s import ClientConfig, Injection, KubernetesConfig
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, why_no_process_pods

pytest.importorskip("swerex.runtime.remote", reason="needs the extra sandbox-k8s[swerex]")

from sandbox_k8s.swerex import K8sDeployment, K8sStartupError
from swerex import exceptions
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest, UploadRequest

pytestmark = pytest.mark.anyio


async def use(config: ClientConfig, folder: Path) -> None:
    place = "kubernetes" if isinstance(config, KubernetesConfig) else "local"
    deployment = K8sDeployment(**{place: config})
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="cd /tmp; X=kept"))
    (folder / "data").write_bytes(bytes(range(256)) * 2000)
    await deployment.runtime.upload(UploadRequest(source_path=str(folder / "data"), target_path="/tmp/data"))
    counted = await deployment.runtime.execute(Command(command="wc -c < /tmp/data", shell=True))
    assert counted.stdout.strip() == "512000"
    handle = await deployment.detach()
    other = K8sDeployment(**{place: config})
    await other.attach(handle)
    kept = await other.runtime.run_in_session(BashAction(command="echo $X $PWD"))
    assert (kept.output, kept.exit_code) == ("kept /tmp\n", 0)
    assert await other.is_alive()
    blocking = other.runtime.sandbox  # the same sandbox by the blocking face
    assert await anyio.to_thread.run_sync(blocking.read, "/tmp/data") == bytes(range(256)) * 2000
    await other.stop()


@pytest.mark.parametrize(
    "place", ["bubblewrap", pytest.param("kubernetes", marks=pytest.mark.cluster)], indirect=True
)
async def test_every_place(config: ClientConfig, tmp_path: Path) -> None:
    await use(config, tmp_path)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    if why_no_process_pods():
        pytest.skip(why_no_process_pods())
    pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
    with FakeCluster(FakeClusterConfig(pods="process", speed=50)) as cluster:
        yield cluster


def settings(cluster: FakeCluster, folder: Path, path: str | None) -> KubernetesConfig:
    return KubernetesConfig(
        injection=Injection(kind="image_volume", image="example.com/tools:1"),
        kubeconfig=cluster.kubeconfig,
        run_key_file=folder / "run.key",
        image="example.com/any:1",
        data_path=path,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("path", [None, "api_proxy", "port_forward"])
async def test_every_way(cluster: FakeCluster, tmp_path: Path, path: str | None) -> None:
    await use(settings(cluster, tmp_path, path), tmp_path)
    assert [pod for pod in cluster.pods() if "deletionTimestamp" not in pod["metadata"]] == []


async def test_an_image_that_is_missing_is_a_startup_error_with_its_diagnosis(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """METR/vivaria#657: pods that could never start were waited for."""
    cluster.doom("image-not-found")
    deployment = K8sDeployment(kubernetes=settings(cluster, tmp_path, None))
    with pytest.raises(exceptions.DeploymentStartupError, match="image_not_found") as failed:
        await deployment.start()
    assert isinstance(failed.value, K8sStartupError)
    assert (failed.value.fault, failed.value.retryable) == ("image", False)
    await deployment.stop()
