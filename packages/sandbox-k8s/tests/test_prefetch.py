"""Images that are brought to nodes before sandboxes need them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from sandbox_k8s import ClientConfig, ConfigError, LocalConfig, SandboxClient
from sandbox_k8s.cli.main import main
from sandbox_k8s.cli.problems import EXIT_INFRA
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.kubernetes.prefetch import PrefetchedImage, of_container
from sandbox_k8s.kubernetes.watch import FollowedPod
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
    with FakeCluster(FakeClusterConfig(speed=50, nodes=("n1", "n2", "n3"))) as cluster:
        yield cluster


@pytest.fixture
def fake_config(cluster: FakeCluster, tmp_path: Path) -> KubernetesConfig:
    return KubernetesConfig(
        injection=Injection(kind="image_volume", image="example.com/tools:1"),
        kubeconfig=cluster.kubeconfig,
        run_key_file=tmp_path / "run.key",
        data_path="api_proxy",
        image="example.com/any:1",
    )


async def test_every_node_gets_every_image_and_no_pod_is_left(
    cluster: FakeCluster, fake_config: KubernetesConfig
) -> None:
    told: list[tuple[PrefetchedImage, int, int]] = []

    def tell(found: PrefetchedImage, done: int, total: int) -> None:
        told.append((found, done, total))

    cluster.cordon("n3")
    images = [f"example.com/task:{number}" for number in range(10)]
    async with SandboxClient.kubernetes(fake_config) as client:
        found = await client.prefetch([*images, images[0]], progress=tell)
        assert await client.list() == ()
    assert cluster.pods() == []
    assert cluster.requests["POST pods"] == 4, "two nodes, eight images of ten in one pod"
    assert [(one.node, one.image) for one in found] == [
        (node, image) for node in ("n1", "n2", "n3") for image in images
    ]
    assert {one.node for one in found if one.diagnosis is None} == {"n1", "n2"}
    assert {one.diagnosis.failure for one in found if one.diagnosis is not None} == {
        "unschedulable_nodes_down"
    }
    assert [(done, total) for _, done, total in told] == [(number, 30) for number in range(1, 31)]


async def test_an_image_that_is_missing_is_named_for_each_node(
    cluster: FakeCluster, fake_config: KubernetesConfig
) -> None:
    cluster.doom("image-not-found")
    async with SandboxClient.kubernetes(fake_config) as client:
        found = await client.prefetch(["example.com/missing:1"], ["n2"])
    assert [(one.node, one.diagnosis and one.diagnosis.failure) for one in found] == [
        ("n2", "image_not_found")
    ]
    assert cluster.pods() == []


async def test_an_image_of_which_nothing_can_be_started_is_there_all_the_same(
    cluster: FakeCluster, fake_config: KubernetesConfig
) -> None:
    """Without a tools image (the command line knows none) there is no loader to run."""
    cluster.doom("start-error-never")
    async with SandboxClient.kubernetes(fake_config) as client:
        (found,) = await client.prefetch(["example.com/present:1"], ["n1"])
    assert found.diagnosis is None


async def test_a_node_that_is_not_there_is_named_at_once(
    cluster: FakeCluster, fake_config: KubernetesConfig
) -> None:
    async with SandboxClient.kubernetes(fake_config) as client:
        found = await client.prefetch(["example.com/a:1"], ["nope", "n1"])
        assert {one.node: one.diagnosis and one.diagnosis.why for one in found} == {
            "n1": None,
            "nope": "there is no node 'nope'",
        }
        assert cluster.requests["POST pods"] == 1
        cluster.forbid("get", "nodes")
        assert [one.diagnosis for one in await client.prefetch(["example.com/a:1"], ["n1"])] == [None]


def test_prefetch_is_about_clusters_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prefetch", "--root", "/tmp/x", "a:1"])
    assert "unrecognized arguments: --root" in capsys.readouterr().err


async def test_labels_choose_nodes(cluster: FakeCluster, fake_config: KubernetesConfig) -> None:
    async with SandboxClient.kubernetes(fake_config) as client:
        found = await client.prefetch(["example.com/a:1"], {"kubernetes.io/hostname": "n2"})
        assert [(one.node, one.diagnosis) for one in found] == [("n2", None)]
        assert await client.prefetch(["example.com/a:1"], {"pool": "none"}) == ()


async def test_giving_up_leaves_no_pod_and_killed_ones_are_the_reapers(
    cluster: FakeCluster, fake_config: KubernetesConfig
) -> None:
    cluster.doom("stalled-pull")
    async with SandboxClient.kubernetes(fake_config) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.prefetch, ["example.com/slow:1"], ["n1"])
            while not cluster.pods():  # noqa: ASYNC110
                await anyio.sleep(0.01)
            pod = cluster.pods()[0]
            tasks.cancel_scope.cancel()
        left = [one for one in cluster.pods() if "deletionTimestamp" not in one["metadata"]]
        assert left == []
    held = records.read_record(pod, fake_config.cluster)
    assert held.expires_ns > held.handle.created_ns
    assert not records.is_sandbox(pod)


def two_images(first: dict[str, Any], second: dict[str, Any]) -> FollowedPod:
    followed = FollowedPod("p")
    statuses = [
        {"name": name, "ready": False, "restartCount": 0, "image": name, "imageID": "", "state": state} | more
        for name, state, more in (("one", first.pop("state"), first), ("two", second.pop("state"), second))
    ]
    followed.see(
        {
            "kind": "Pod",
            "metadata": {
                "name": "p",
                "namespace": "default",
                "uid": "u",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "nodeName": "n",
                "containers": [{"name": "one", "image": "a"}, {"name": "two", "image": "b"}],
            },
            "status": {"phase": "Pending", "containerStatuses": statuses},
        }
    )
    return followed


async def test_one_image_of_a_pod_says_nothing_of_the_other() -> None:
    """A single list of images in one container list must not fail together (one container per image)."""
    missing = {"waiting": {"reason": "ErrImagePull", "message": 'failed to resolve: "a": not found'}}
    ended = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": None, "finishedAt": None}}
    followed = two_images({"state": missing}, {"state": ended, "imageID": "sha256:1"})
    found = of_container(followed, "one")
    assert found is not None
    assert found.failure == "image_not_found"
    assert of_container(followed, "two") is None
    waiting = two_images({"state": missing}, {"state": {"waiting": {"reason": "ContainerCreating"}}})
    found = of_container(waiting, "two")
    assert found is not None
    assert (found.state, found.failure) == ("starting", None)


@pytest.mark.parametrize(("field", "there"), [("initContainers{tools}", False), ("containers{two}", True)])
async def test_the_tools_that_were_pulled_are_not_the_image(field: str, there: bool) -> None:
    """With init-copy each pod pulls the tools first, and that event counted for every image of it."""
    creating = {"waiting": {"reason": "PodInitializing"}}
    followed = two_images({"state": dict(creating)}, {"state": dict(creating)})
    involved = {"kind": "Pod", "name": "p", "uid": "u", "fieldPath": f"spec.{field}"}
    followed.hear(
        {"metadata": {"uid": "e"}, "reason": "Pulled", "type": "Normal", "involvedObject": involved}
    )
    assert (of_container(followed, "two") is None) is there


async def test_one_machine_has_no_images(root: Path) -> None:
    async with SandboxClient.local(LocalConfig(root=root, isolation="process")) as client:
        with pytest.raises(ConfigError, match="no images"):
            await client.prefetch(["a"])


def test_the_command_line_says_what_is_where(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.doom("image-not-found")
    where = ["--kubeconfig", str(cluster.kubeconfig), "--run-key-file", str(tmp_path / "run.key")]
    assert main(["prefetch", *where, "--node", "n2", "example.com/missing:1"]) == EXIT_INFRA
    assert main(["prefetch", *where, "--label", "kubernetes.io/hostname=n1", "example.com/a:1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/1] n2 example.com/missing:1: image_not_found: ")
    assert lines[1:] == ["0 of 1 are there", "[1/1] n1 example.com/a:1: there", "1 of 1 are there"]


@pytest.mark.cluster
@pytest.mark.parametrize("place", ["kubernetes"], indirect=True)
@pytest.mark.parametrize("kind", ["image_volume", "init_copy"])
async def test_a_real_node_has_the_images_afterwards(config: ClientConfig, kind: str) -> None:
    assert isinstance(config, KubernetesConfig)
    assert config.image is not None
    injection = msgspec.structs.replace(config.injection, kind=kind)
    settings = msgspec.structs.replace(config, injection=injection, failing_timeout_s=5.0)
    images = [config.image, "localhost/sandbox-k8s-test-nowhere:1"]
    async with SandboxClient.kubernetes(settings) as client:
        found = {one.image: one.diagnosis for one in await client.prefetch(images)}
        assert found[config.image] is None
        problem = found["localhost/sandbox-k8s-test-nowhere:1"]
        assert problem is not None
        assert problem.failure is not None
        assert problem.failure.startswith("image_")
