"""The official Python client, with its models and its WebSocket, against the fake cluster."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, why_no_process_pods

kubernetes: Any = pytest.importorskip(
    "kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed"
)
stream: Any = pytest.importorskip("kubernetes.stream")
pytestmark = [
    pytest.mark.skipif(bool(why_no_process_pods()), reason=why_no_process_pods()),
    # The library leaves sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(FakeClusterConfig(pods="process", speed=50)) as cluster:
        yield cluster
    gc.collect()


@pytest.fixture
def connect(cluster: FakeCluster) -> Any:
    """A client for each kind of call: streams and requests do not share one."""

    def make() -> Any:
        made = kubernetes.config.new_client_from_config(str(cluster.kubeconfig))
        return kubernetes.client.CoreV1Api(made)

    return make


def pod(name: str, *command: str) -> Any:
    container = {"name": "main", "image": "example.com/any:1", "command": [*command]}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"metadata": {"name": name, "labels": {"app": "x"}}, "spec": spec}


def test_the_life_of_a_pod(connect: Any) -> None:
    core = connect()
    core.create_namespaced_pod("default", pod("box", "sh", "-c", "echo hello; exec sleep 60"))
    with pytest.raises(kubernetes.client.ApiException) as problem:
        core.create_namespaced_pod("default", pod("box", "true"))
    assert (problem.value.status, problem.value.reason) == (409, "Conflict")
    watch = kubernetes.watch.Watch()
    kinds = []
    for event in watch.stream(
        core.list_namespaced_pod, "default", label_selector="app=x", timeout_seconds=20
    ):
        kinds.append(event["type"])
        if event["object"].status.phase == "Running":
            watch.stop()
    assert kinds[0] == "ADDED"
    found = core.read_namespaced_pod("box", "default")
    assert found.status.container_statuses[0].ready is True
    patched = core.patch_namespaced_pod("box", "default", {"metadata": {"annotations": {"a": "b"}}})
    assert patched.metadata.annotations == {"a": "b"}
    said = stream.stream(
        connect().connect_get_namespaced_pod_exec, "box", "default", command=["sh", "-c", "echo out; exit 3"],
        stdout=True, stderr=True, stdin=False, tty=False, _preload_content=False,
    )  # fmt: skip
    said.run_forever(timeout=10)
    assert (said.read_stdout(), said.returncode) == ("out\n", 3)
    assert core.read_namespaced_pod_log("box", "default") == "hello\n"
    reasons = {one.reason for one in core.list_namespaced_event("default").items}
    assert {"Scheduled", "Created", "Started"} <= reasons
    core.delete_namespaced_pod("box", "default")
    assert core.list_namespaced_pod("default").items == []


def test_an_old_version_is_an_error(connect: Any, cluster: FakeCluster) -> None:
    core = connect()
    cluster.restart_api_server()
    watch = kubernetes.watch.Watch()
    with pytest.raises(kubernetes.client.ApiException) as problem:
        list(watch.stream(core.list_namespaced_pod, "default", resource_version="1", timeout_seconds=5))
    assert problem.value.status == 410
