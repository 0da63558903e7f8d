"""What the API server's own exec says of a command by the official client, and what a sandbox says of it.

The first test breaks the cluster (`breaking`).
"""

import functools
import gc
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import ClientConfig, CommandResult, PodPlace, Sandbox, SandboxClient, SandboxLostError
from sandbox_k8s.kubernetes.config import KubernetesConfig

from .breaking import BREAKABLE, without

official = pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.timeout(120),
    pytest.mark.parametrize("place", ["kubernetes"], indirect=True),
]


@pytest.fixture
def cluster(config: ClientConfig) -> KubernetesConfig:
    assert isinstance(config, KubernetesConfig)
    return config


@pytest.fixture
def api(cluster: KubernetesConfig) -> Iterator[Any]:
    """The official client."""
    with official.config.new_client_from_config(str(cluster.kubeconfig)) as client:
        yield official.client.CoreV1Api(client)


def exec_in(api: Any, sandbox: Sandbox, command: str, **options: Any) -> Any:
    """What ``kubernetes.stream.stream`` makes of a command in the sandbox's container."""
    from kubernetes.stream import stream

    place = sandbox.handle.place
    assert isinstance(place, PodPlace)
    words = ["sh", "-c", f"cd /workspace; {command}"]
    streams = {"stdin": False, "stdout": True, "stderr": True, "tty": False}
    call = api.connect_get_namespaced_pod_exec
    return stream(call, place.pod, place.namespace, command=words, **streams, **options)


@BREAKABLE
async def test_the_success_that_exec_reports_when_containerd_dies_is_never_a_result(
    cluster: KubernetesConfig, api: Any
) -> None:
    """Kubernetes 1.36: Success and a clean close (protocol v5) of a command that still runs."""
    forwarded = msgspec.structs.replace(cluster, data_path="port_forward")
    async with SandboxClient.kubernetes(cluster) as client, SandboxClient.kubernetes(forwarded) as other:
        straight, behind = await client.start(), await other.start()
        words = "until [ -e end ]; do sleep 0.05; done; echo whole; exit 7"
        ended: dict[str, CommandResult | SandboxLostError] = {}

        async def run(name: str, sandbox: Sandbox) -> None:
            try:
                ended[name] = await sandbox.execute(f"touch begun; {words}")
            except SandboxLostError as problem:
                ended[name] = problem

        theirs = await anyio.to_thread.run_sync(
            functools.partial(
                exec_in, api, straight, f"echo begun; ({words}) > theirs", _preload_content=False
            )
        )
        assert await anyio.to_thread.run_sync(theirs.readline_stdout, 10) == "begun"
        protocol = theirs.sock.headers["sec-websocket-protocol"]
        async with anyio.create_task_group() as tasks:
            for name, sandbox in (("straight", straight), ("behind", behind)):
                tasks.start_soon(run, name, sandbox)
                await sandbox.execute("until [ -e begun ]; do sleep 0.01; done")
            async with without("containerd"):
                assert (await straight.execute("exit 3")).exit_code == 3
                said = await anyio.to_thread.run_sync(_what_is_said, theirs)
                assert said == (0 if protocol == "v5.channel.k8s.io" else "connection lost")
                assert (await straight.execute("cat theirs")).stdout == b"", "it should still run"
                theirs.close()
            for sandbox in (straight, behind):
                await sandbox.write("end", b"")
        first, second = ended["straight"], ended["behind"]
        assert isinstance(first, CommandResult)
        assert (first.exit_code, first.stdout) == (7, b"whole\n")
        # The connection was cut with what carried it, or it was not: a 0 it never is.
        assert isinstance(second, SandboxLostError) or second.exit_code == 7
        assert (await straight.execute("until [ -s theirs ]; do sleep 0.01; done")).exit_code == 0
        assert (await behind.execute("exit 5")).exit_code == 5


def _what_is_said(theirs: Any) -> int | str:
    """The exit code that the official client reports: with protocol v5 a false one, with v4 none."""
    from websocket import WebSocketConnectionClosedException

    try:
        theirs.run_forever(timeout=20)
    except WebSocketConnectionClosedException:
        return "connection lost"
    code: int = theirs.returncode
    return code


# The official client never closes that socket.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*<ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
async def test_what_came_until_a_time_out_is_no_result(client: SandboxClient, api: Any) -> None:
    """The official client returns partial output as if it were all, and the command lives on."""
    sandbox = await client.start()
    words = "echo a; until [ -e end ]; do sleep 0.05; done; echo b"
    theirs = await anyio.to_thread.run_sync(
        functools.partial(exec_in, api, sandbox, f"{words}; touch theirs", _request_timeout=0.5)
    )
    assert theirs == "a\n"
    gc.collect()  # so that its open socket is found here, and not in the midst of another test
    ours = await sandbox.execute(f"{words}; touch ours", timeout_s=0.5)
    assert (ours.exit_code, ours.timed_out, ours.ok, ours.stdout) == (None, True, False, b"a\n")
    session = await sandbox.session()
    typed = await session.run(f"{words}; touch ours", timeout_s=0.5)
    assert (typed.exit_code, typed.timed_out, typed.ok, typed.stdout) == (None, True, False, b"a\n")
    await sandbox.write("end", b"")
    waited = await sandbox.execute("until [ -e theirs ]; do sleep 0.01; done", timeout_s=10)
    assert waited.exit_code == 0, "the official client's command should have lived on"
    assert (await sandbox.execute("[ -e ours ]")).exit_code == 1
