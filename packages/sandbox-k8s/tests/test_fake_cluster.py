"""What only the fake cluster does: faults on command, the plugin, and the proxy that breaks connections."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes import classify
from sandbox_k8s.testing import (
    FakeCluster,
    FakeClusterConfig,
    FaultProxy,
    Faults,
    RefusalError,
    why_no_process_pods,
)
from sandbox_k8s.testing.courses import course_of, load
from sandbox_k8s.testing.kubelet import Kubelet
from sandbox_k8s.testing.nodes import Nodes
from sandbox_k8s.testing.store import Store

pytestmark = pytest.mark.anyio
RECORDINGS = Path(__file__).parent / "recordings"
PODS = "/api/v1/namespaces/default/pods"
needs_processes = pytest.mark.skipif(bool(why_no_process_pods()), reason=why_no_process_pods())


def pod(name: str, *command: str, **metadata: Any) -> Any:
    container = {"name": "box", "image": "example.com/any:1", "command": [*command] or ["sleep", "60"]}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"metadata": {"name": name, **metadata}, "spec": spec}


class Client:
    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http

    async def create(self, *words: str, **metadata: Any) -> Any:
        async with self.http.post(PODS, json=pod(*words, **metadata)) as answer:
            return await answer.json()

    async def get(self, path: str) -> Any:
        async with self.http.get(path) as answer:
            return await answer.json()


async def until(cluster: FakeCluster, name: str, holds: Callable[[Any], bool]) -> Any:
    """Ask until something holds of a pod; what is asked is the store, so it costs no request."""
    with anyio.fail_after(10):
        while not holds(found := cluster.pod(name)):  # noqa: ASYNC110
            await anyio.sleep(0.01)
    return found


def is_running(found: Any) -> bool:
    return found["status"]["phase"] == "Running"


def client_of(url: str, **options: Any) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, **options)


def test_what_the_fake_claims_was_recorded() -> None:
    """courses.json is made from the recordings, and from nothing else."""
    recordings = [json.loads(path.read_text()) for path in sorted(RECORDINGS.glob("*.json"))]
    wanted = {
        one["cause"]: course
        for one in recordings
        if "cause" in one and (course := course_of(one)) is not None
    }
    assert load() == wanted
    assert len(wanted) > 60


CAUSES = {
    "crash": "process_crashed",
    "image": "image_not_found",
    "image-auth-401": "image_auth",
    "image-rate-limit": "image_rate_limit",
    "config-secret-missing": "config_missing",
    "oom-at-start": "oom_at_start",
    "unschedulable-cpu": "unschedulable_resources",
}


async def test_a_doomed_pod_goes_the_way_of_the_recording_under_its_own_name() -> None:
    with FakeCluster(FakeClusterConfig(speed=100)) as cluster:
        async with client_of(cluster.url) as http:
            client = Client(http)
            assert set(CAUSES) <= set(cluster.causes())
            for cause in CAUSES:
                await client.create(f"of-{cause}", labels={"sim.fault": cause})
            found = {}
            with anyio.fail_after(10):
                while not set(CAUSES) <= found.keys():
                    for cause in CAUSES:
                        told = cluster.pod(f"of-{cause}")
                        query = f"fieldSelector=involvedObject.uid%3D{told['metadata']['uid']}"
                        events = (await client.get(f"/api/v1/events?{query}"))["items"]
                        diagnosis = classify(told, events, None)
                        if diagnosis.failure:
                            found[cause] = diagnosis.failure
    assert found == CAUSES


async def test_a_recording_is_told_with_the_times_and_names_of_the_pod() -> None:
    with FakeCluster(FakeClusterConfig(speed=100)) as cluster:
        cluster.doom("image-not-found")
        async with client_of(cluster.url) as http:
            await Client(http).create("own")
        waits = lambda found: "ImagePullBackOff" in json.dumps(found["status"])  # noqa: E731
        found = await until(cluster, "own", waits)
        text = json.dumps(found)
        assert "example.com/any:1" in text
        assert "registry.example.com" not in text
        assert found["status"]["containerStatuses"][0]["name"] == "box"
        created = datetime.fromisoformat(found["metadata"]["creationTimestamp"])
        for one in found["status"]["conditions"]:
            assert 0 <= (datetime.fromisoformat(one["lastTransitionTime"]) - created).total_seconds() <= 5
        with pytest.raises(ValueError, match="no recording of 'magic'"):
            cluster.doom("magic")


async def test_a_restarted_api_server_cuts_watches_and_has_forgotten_versions() -> None:
    with FakeCluster() as cluster:
        async with client_of(cluster.url) as http:
            version = (await Client(http).get(PODS))["metadata"]["resourceVersion"]
            await Client(http).create("a1")
            query = f"{PODS}?watch=1&resourceVersion={version}"
            async with http.get(query) as watch:
                assert json.loads(await watch.content.readline())["type"] == "ADDED"
                cluster.restart_api_server()
                with pytest.raises(aiohttp.ClientError):
                    await watch.content.read()
            async with http.get(query) as watch:
                event = json.loads(await watch.content.readline())
            assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
            page = f"{PODS}?limit=1"
            await Client(http).create("a2")
            first = await Client(http).get(page)
            await Client(http).create("a3")
            cluster.restart_api_server()
            expired = await Client(http).get(f"{page}&continue={first['metadata']['continue']}")
            assert expired["code"] == 410
            rest = await Client(http).get(f"{page}&continue={expired['metadata']['continue']}")
            assert [one["metadata"]["name"] for one in rest["items"]] == ["a2"]


async def test_a_lost_node_is_given_up_late_and_its_pods_come_back() -> None:
    with FakeCluster(FakeClusterConfig(speed=200)) as cluster:
        async with client_of(cluster.url) as http:
            await Client(http).create("a1")
            await until(cluster, "a1", is_running)
            cluster.lose_node()
            async with http.get(f"{PODS}/a1/log") as answer:
                assert answer.status == 500
                assert "error dialing backend" in (await answer.json())["message"]

            def ready(value: str) -> Callable[[Any], bool]:
                return lambda found: any(
                    (one["type"], one["status"]) == ("Ready", value) for one in found["status"]["conditions"]
                )

            lost = await until(cluster, "a1", ready("False"))
            assert lost["status"]["phase"] == "Running"
            node = await Client(http).get("/api/v1/nodes/node-1")
            assert node["spec"]["taints"][0]["key"] == "node.kubernetes.io/unreachable"
            assert {one["reason"] for one in node["status"]["conditions"]} == {"NodeStatusUnknown"}
            async with http.delete(f"{PODS}/a1", json={"gracePeriodSeconds": 1}) as answer:
                assert answer.status == 200
            await Client(http).create("a2")
            told = await until(cluster, "a2", lambda found: "conditions" in found["status"])
            assert told["status"]["conditions"][0]["reason"] == "Unschedulable"
            assert cluster.pod("a1")["metadata"]["deletionTimestamp"]
            cluster.find_node()
            await until(cluster, "a2", is_running)
            with pytest.raises(RefusalError, match='pods "a1" not found'):
                await until(cluster, "a1", lambda found: False)


async def test_creates_are_refused_and_clocks_are_wrong_on_command() -> None:
    with FakeCluster() as cluster:
        cluster.skew_clock(3600)
        message = "exceeded quota: pods, requested: pods=1, used: pods=5, limited: pods=5"
        cluster.refuse_creates(RefusalError(403, "Forbidden", message))
        async with client_of(cluster.url) as http:
            assert (await Client(http).create("a1"))["message"] == message
            made = await Client(http).create("a1")
        ahead = time.strftime("%Y-%m-%dT%H:", time.gmtime(time.time() + 3600))
        late = time.strftime("%Y-%m-%dT%H:", time.gmtime(time.time() + 3595))
        assert made["metadata"]["creationTimestamp"][:14] in (ahead, late)
        assert cluster.requests == {"POST pods": 2}


@needs_processes
async def test_a_process_is_killed_as_the_kernel_and_the_kubelet_do() -> None:
    with FakeCluster(FakeClusterConfig(pods="process", speed=50)) as cluster:
        async with client_of(cluster.url) as http:
            for name, reason in (("a1", "OOMKilled"), ("a2", "Evicted")):
                await Client(http).create(name)
                await until(cluster, name, is_running)
                cluster.kill_pod(name, reason)
                found = await until(cluster, name, lambda found: found["status"]["phase"] == "Failed")
                told = found["status"]["containerStatuses"][0]["state"]["terminated"]
                assert told["exitCode"] == 137
                assert reason in (told["reason"], found["status"].get("reason"))


@needs_processes
def test_no_process_outlives_its_cluster() -> None:
    """Also when the test forgets its pods."""
    mark = f"7{os.getpid()}.25"
    with FakeCluster(FakeClusterConfig(pods="process", speed=50)) as cluster:
        words = [
            "curl",
            "-sS",
            "-XPOST",
            "-HContent-Type: application/json",
            "-d",
            json.dumps(pod("a1", "sleep", mark)),
        ]
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        subprocess.run([*words, cluster.url + PODS], check=True, capture_output=True)
        deadline = time.monotonic() + 10
        while not is_running(cluster.pod("a1")):
            assert time.monotonic() < deadline
        assert mark in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
        folder = cluster.folder
    assert mark not in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
    assert not folder.exists()


async def test_many_pods_cost_one_watch(tmp_path: Path) -> None:
    count = 100
    with FakeCluster(FakeClusterConfig(speed=50)) as cluster:
        async with client_of(cluster.url) as http, http.get(f"{PODS}?watch=1") as watch:
            with anyio.fail_after(20):
                await asyncio.gather(*(Client(http).create(f"a{number}") for number in range(count)))
                running = set()
                while len(running) < count:
                    found = json.loads(await watch.content.readline())["object"]
                    if is_running(found):
                        running.add(found["status"]["podIP"])
        assert cluster.requests == {"POST pods": count, "WATCH pods": 1}


def test_the_plugin_gives_a_cluster_to_a_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, urllib.request\n"
        "@pytest.mark.fake_cluster(speed=7, nodes=('a', 'b'))\n"
        "def test_it(fake_cluster):\n"
        "    assert fake_cluster.config.speed == 7\n"
        "    assert urllib.request.urlopen(fake_cluster.url + '/readyz').read() == b'ok'\n"
        "    assert b'\"name\": \"b\"' in urllib.request.urlopen(fake_cluster.url + '/api/v1/nodes').read()\n"
    )
    words = [
        "-p",
        "sandbox_k8s.testing.plugin",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
        "-q",
        str(tmp_path),
    ]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert "1 passed" in ran.stdout, ran.stdout


KUBECTL = shutil.which("kubectl")


@needs_processes
@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_kubectl_drives_it() -> None:
    with FakeCluster(FakeClusterConfig(pods="process", speed=50)) as cluster:

        def kubectl(*words: str, stdin: str = "", code: int = 0) -> str:
            argv = [str(KUBECTL), "--kubeconfig", str(cluster.kubeconfig), *words]
            done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == code, done.stderr
            return done.stdout

        words = json.dumps(
            {"apiVersion": "v1", "kind": "Pod", **pod("box", "sh", "-c", "echo hello; exec sleep 60")}
        )
        assert kubectl("apply", "-f", "-", stdin=words) == "pod/box created\n"
        assert kubectl("apply", "-f", "-", stdin=words) == "pod/box unchanged\n"
        kubectl("wait", "--for=condition=Ready", "pod/box", "--timeout=10s")
        assert "box" in kubectl("get", "pods")
        assert json.loads(kubectl("get", "pod", "box", "-o", "json"))["status"]["phase"] == "Running"
        described = kubectl("describe", "pod", "box")
        assert "Started" in described
        assert "Successfully assigned default/box to node-1" in described
        assert kubectl("logs", "box") == "hello\n"
        assert kubectl("exec", "box", "--", "sh", "-c", "echo out; exit 3", code=3) == "out\n"
        assert kubectl("exec", "-i", "box", "--", "cat", stdin="given") == "given"
        kubectl("annotate", "pod", "box", "a=b")
        assert cluster.pod("box")["metadata"]["annotations"]["a"] == "b"
        assert 'pod "box" deleted' in kubectl("delete", "pod", "box", "--timeout=10s")
        assert cluster.pods() == []


async def test_the_proxy_breaks_requests_by_seed_and_the_rest_arrive() -> None:
    faults = Faults(seed=1, too_many_requests=0.2, server_error=0.2, reset=0.2)
    with FakeCluster() as cluster, FaultProxy(cluster.upstream, faults) as proxy:
        fates = []
        for _ in range(2):
            proxy._draws.clear()
            fate = []
            for _ in range(20):
                async with client_of(proxy.url) as http:
                    try:
                        # Not a GET: aiohttp itself repeats one whose connection broke.
                        async with http.post(f"{PODS}?dryRun=All", json=pod("a1")) as answer:
                            fate.append(answer.status)
                            if answer.status == 429:
                                assert answer.headers["Retry-After"] == "1"
                                assert await answer.text() == "Too many requests, please try again later.\n"
                    except aiohttp.ClientError:
                        fate.append(0)
            fates.append(fate)
        assert fates[0] == fates[1]
        assert set(fates[0]) == {0, 201, 429, 500}
        assert cluster.requests == {"POST pods": 2 * fates[0].count(201)}
        assert proxy.counts["reset"] == 2 * fates[0].count(0)


async def test_the_proxy_loses_the_answer_of_a_create_that_was_done() -> None:
    with FakeCluster() as cluster, FaultProxy(cluster.upstream, Faults(lost_answer=1.0)) as proxy:
        async with client_of(proxy.url) as http:
            with pytest.raises(aiohttp.ClientError):
                await Client(http).create("a1")
        assert [one["metadata"]["name"] for one in cluster.pods()] == ["a1"]


async def test_the_proxy_breaks_watches() -> None:
    with FakeCluster() as cluster, FaultProxy(cluster.upstream, Faults(doubled_event=1.0)) as proxy:
        async with client_of(proxy.url) as http:
            await Client(http).create("a1")
            watch = f"{PODS}?watch=1&timeoutSeconds=10"
            async with http.get(watch) as answer:
                first, second = [await answer.content.readline() for _ in range(2)]
                assert first == second
            proxy.faults = Faults(late_event=1.0, late_s=0.2)
            begun_s = anyio.current_time()
            async with http.get(watch) as answer:
                assert b'"a1"' in await answer.content.readline()
            assert anyio.current_time() - begun_s >= 0.2
            assert proxy.counts["late_event"] >= 1
            proxy.faults = Faults(cut_watch=1.0)
            async with http.get(watch) as answer:
                await answer.content.readline()
                with pytest.raises(aiohttp.ClientError):
                    await answer.content.read()
            for faults, silent in (
                (Faults(half_open_watch=1.0), True),
                (Faults(stalled_watch=1.0, stall_s=0.3), False),
            ):
                proxy.faults = faults
                async with http.get(watch) as answer:
                    await answer.content.readline()
                    await Client(http).create("a2" if silent else "a3")
                    with anyio.move_on_after(0.2):
                        raise AssertionError(await answer.content.readline())
                    with anyio.move_on_after(0.2 if silent else 5) as waiting:
                        await answer.content.readline()
                    assert waiting.cancelled_caught is silent


@needs_processes
async def test_the_proxy_carries_websockets() -> None:
    config = FakeClusterConfig(pods="process", speed=50)
    with FakeCluster(config) as cluster, FaultProxy(cluster.upstream, Faults()) as proxy:
        async with client_of(proxy.url) as http:
            await Client(http).create("a1")
            await until(cluster, "a1", is_running)
            path = f"{PODS}/a1/exec?command=cat&stdin=1&stdout=1"
            async with http.ws_connect(path, protocols=("v5.channel.k8s.io",)) as socket:
                assert socket.protocol == "v5.channel.k8s.io"
                await socket.send_bytes(b"\0through")
                await socket.send_bytes(b"\xff\0")
                said = [message.data async for message in socket]
            assert b"\1through" in said
            with pytest.raises(aiohttp.WSServerHandshakeError) as problem:
                await http.ws_connect(f"{PODS}/none/exec?command=true&stdout=1")
            assert problem.value.status == 404


async def test_it_ends_though_a_pod_s_time_runs_out_at_that_moment() -> None:
    """Seen once in CI: the cancel of a time-out that had run out was taken for that of the end."""

    class Waiting:
        async def run(self) -> None:
            tasks.append(asyncio.current_task())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    began.set()
                    await asyncio.Event().wait()
            await asyncio.Event().wait()

        def end(self) -> None:
            pass

    began, tasks = asyncio.Event(), []
    store = Store(SystemClock())
    kubelet = Kubelet(store, Nodes(store), {}, 1.0, lambda *_: Waiting())
    store.create("pods", pod("a", uid="1", namespace="default"))
    await began.wait()
    while not tasks[0].cancelling():  # noqa: ASYNC110 - the very step of the loop at which its time has run out
        await asyncio.sleep(0)
    with anyio.fail_after(5):
        await kubelet.close()
