"""`K8sDeployment` and `K8sRemoteRuntime` as users of swe-rex 1.4.0 use them, on this machine."""

import asyncio
import gc
import os
import signal
import subprocess
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import pytest
from anyio.abc import SocketAttribute

pytest.importorskip("swerex.runtime.remote", reason="needs the extra sandbox-k8s[swerex]")

from sandbox_k8s import (
    ConfigError,
    FencedError,
    LocalConfig,
    Sandbox,
    SandboxHandle,
    SandboxLostError,
    SandboxSpec,
    SyncSandbox,
    SyncSandboxClient,
)
from sandbox_k8s.launcher.keeper import STOP_SOCKET
from sandbox_k8s.routes import AddressRoute
from sandbox_k8s.swerex import (
    K8sConfigError,
    K8sDeployment,
    K8sDeploymentConfig,
    K8sError,
    K8sFencedError,
    K8sLostError,
    K8sNotFoundError,
    K8sRemoteRuntime,
    K8sStartupError,
)
from sandbox_k8s.transport import LauncherClient
from swerex import exceptions
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.config import get_deployment
from swerex.deployment.hooks.abstract import DeploymentHook
from swerex.deployment.hooks.status import SetStatusDeploymentHook
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

pytestmark = pytest.mark.anyio


@pytest.fixture
def local(root: Path) -> LocalConfig:
    return LocalConfig(root=root, isolation="process", grace_s=0.3)


@pytest.fixture
async def deployment(local: LocalConfig) -> AsyncIterator[K8sDeployment]:
    deployment = K8sDeployment(local=local)
    await deployment.start()
    yield deployment
    await deployment.stop()


@pytest.fixture
def runtime(deployment: K8sDeployment) -> K8sRemoteRuntime:
    return deployment.runtime


def bash(command: str, **options: Any) -> BashAction:
    return BashAction(command=command, **options)


async def test_the_life_of_a_deployment(local: LocalConfig) -> None:
    """SWE-agent/SWE-ReX#269, SWE-agent/SWE-agent#862: a deployment like the others."""
    config = K8sDeploymentConfig.model_validate(
        {"local": {"root": str(local.root), "isolation": "process"}, "sandbox": {"env": {"A": "1"}}}
    )
    said: list[tuple[str, str]] = []
    deployment = get_deployment(config)  # type: ignore[arg-type]  # a union of its own classes, duck-typed
    assert isinstance(deployment, AbstractDeployment)
    deployment.add_hook(SetStatusDeploymentHook("task-1", lambda id, message: said.append((id, message))))
    for unstarted in (deployment.is_alive(), deployment.detach()):  # type: ignore[attr-defined]
        with pytest.raises(exceptions.DeploymentNotStartedError):
            await unstarted
    await deployment.stop()
    for _ in range(2):
        await deployment.start()
        assert await deployment.is_alive(timeout=5)
        assert isinstance(deployment.runtime, RemoteRuntime)
        assert (await deployment.runtime.execute(Command(command="echo $A", shell=True))).stdout == "1\n"
        with pytest.raises(exceptions.DeploymentStartupError, match="already"):
            await deployment.start()
        runtime = deployment.runtime
        await deployment.stop()
        await deployment.stop()
        with pytest.raises(exceptions.DeploymentNotStartedError):
            _ = deployment.runtime
        with pytest.raises(ConfigError, match="closed"):
            await runtime.execute(Command(command="true"))
    assert said == 2 * [("task-1", "Starting sandbox"), ("task-1", "Starting runtime")]


def test_settings_survive_a_dump_and_name_their_mistakes(local: LocalConfig) -> None:
    config = K8sDeploymentConfig(image="i:1", local=local, sandbox={"lease_s": 30, "labels": {"task": "t"}})
    assert K8sDeploymentConfig.model_validate_json(config.model_dump_json()) == config
    assert (config.spec().image, config.spec().lease_s) == ("i:1", 30)
    for wrong, what in (
        ({"local": {"rot": "/x"}}, "LocalConfig: Object contains unknown field `rot`"),
        ({"local": {}, "kubernetes": {"injection": {"kind": "baked"}}}, "not both"),
        ({"colour": "red"}, "colour"),
    ):
        with pytest.raises(ValueError, match=what):
            K8sDeploymentConfig.model_validate(wrong)
    with pytest.raises(ConfigError, match="lease_s"):
        K8sDeploymentConfig.model_validate({"sandbox": {"lease_s": 0}})
    with pytest.raises(ConfigError, match="no place"):
        K8sDeploymentConfig().client()


class Steps(DeploymentHook):
    """Does something at one step of a start."""

    def __init__(self, step: str, then: Callable[[], object]) -> None:
        self._step = step
        self._then = then

    def on_custom_step(self, message: str) -> None:
        if message == self._step:
            self._then()


def fail() -> None:
    raise ZeroDivisionError


@asynccontextmanager
async def opened(local: LocalConfig) -> AsyncIterator[SyncSandboxClient]:
    client = await anyio.to_thread.run_sync(SyncSandboxClient.local(local).open)
    try:
        yield client
    finally:
        await anyio.to_thread.run_sync(client.close)


async def states(client: SyncSandboxClient) -> list[str]:
    return [found.state for found in await anyio.to_thread.run_sync(client.list)]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "sandbox-k8s client"]


@pytest.mark.parametrize("step", ["Starting sandbox", "Starting runtime"])
async def test_a_hook_that_fails_leaves_nothing(local: LocalConfig, step: str) -> None:
    own = K8sDeployment(local=local)
    own.add_hook(Steps(step, fail))
    with pytest.raises(ZeroDivisionError):
        await own.start()
    assert threads() == []
    async with opened(local) as client:
        shared = K8sDeployment(client=client)
        shared.add_hook(Steps(step, fail))
        with pytest.raises(ZeroDivisionError):
            await shared.start()
        assert await states(client) == []
        handle = await anyio.to_thread.run_sync(lambda: client.start().detach())
        shared.add_hook(Steps("Attaching to sandbox", fail if step == "Starting sandbox" else list))
        with pytest.raises(ZeroDivisionError):
            await shared.attach(handle)
        assert await states(client) == ["detached"]
        await anyio.to_thread.run_sync(lambda: client.attach(handle).stop())


@pytest.mark.parametrize("shared", [False, True])
async def test_stop_ends_a_start_that_is_under_way(local: LocalConfig, shared: bool) -> None:
    async with opened(local) as client:
        deployment = K8sDeployment(client=client) if shared else K8sDeployment(local=local)
        begun = asyncio.Event()
        deployment.add_hook(Steps("Starting sandbox", begun.set))
        starts = [asyncio.create_task(deployment.start()) for _ in range(2)]
        await begun.wait()
        await deployment.stop()
        for start in starts:
            with pytest.raises(K8sStartupError, match="was stopped while"):
                await start
        assert await states(client) == []
        await deployment.start()
        await deployment.stop()
    assert threads() == []


async def test_of_two_starts_at_once_one_is_refused_and_nothing_is_lost(local: LocalConfig) -> None:
    deployment = K8sDeployment(local=local)
    first, second = await asyncio.gather(deployment.start(), deployment.start(), return_exceptions=True)
    assert first is None
    assert isinstance(second, exceptions.DeploymentStartupError)
    assert await deployment.is_alive()
    with ThreadPoolExecutor(2) as pool:  # from loops of their own, too, they wait for each other
        list(pool.map(lambda call: asyncio.run(call()), 2 * [deployment.stop]))
    assert threads() == []


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancelled_stop_ends_the_sandbox(local: LocalConfig, cancels: int) -> None:
    async with opened(local) as client:
        deployment = K8sDeployment(client=client)
        await deployment.start()
        stop = asyncio.create_task(deployment.stop())
        for _ in range(cancels):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stop
        await deployment.stop()
        await anyio.to_thread.run_sync(wait_until, lambda: client.stats.stopped == 1)
        assert await states(client) == []


async def test_a_cancelled_detach_leaves_the_deployment_its_sandbox(local: LocalConfig) -> None:
    async with opened(local) as client:
        deployment = K8sDeployment(client=client)
        for number in range(4):
            await deployment.start()
            detach = asyncio.create_task(deployment.detach())
            for _ in range(number):
                await asyncio.sleep(0)
            detach.cancel()
            with pytest.raises(asyncio.CancelledError):
                await detach
            assert await states(client) == ["running"]
            assert (await deployment.runtime.execute(Command(command=["echo", "on"]))).stdout == "on\n"
            await deployment.stop()
            assert await states(client) == []


async def test_a_sandbox_whose_end_is_not_confirmed_is_renewed_no_more(
    local: LocalConfig, keeper_ended: Callable[[Path], Any]
) -> None:
    async with opened(local) as client:
        deployment = K8sDeployment(client=client, sandbox=SandboxSpec(lease_s=1.0))
        await deployment.start()
        folder = local.root / "sandboxes" / deployment.runtime.sandbox.id
        (folder / STOP_SOCKET).unlink()
        async with (
            await anyio.create_unix_listener(folder / STOP_SOCKET) as keeper,
            anyio.create_task_group() as tasks,
        ):

            async def answer(stream: anyio.abc.SocketStream) -> None:
                async with stream:
                    await stream.send(b'{"gone": false, "problem": "a file cannot be removed"}')

            tasks.start_soon(keeper.serve, answer)
            with pytest.raises(K8sLostError, match="cannot be removed"):
                await deployment.stop()
            tasks.cancel_scope.cancel()
        await deployment.stop()
        await keeper_ended(folder)  # else it is renewed for as long as the client lives


async def test_an_image_on_this_machine_is_refused_and_nothing_is_left(local: LocalConfig) -> None:
    with pytest.raises(K8sConfigError, match="runs no images"):
        await K8sDeployment(local=local, image="python:3.12").start()


async def test_sessions(runtime: K8sRemoteRuntime, tmp_path: Path) -> None:
    (tmp_path / "rc").write_text("PS1='(testbed) # '; export FROM_RC=1; echo said\n")
    created = await runtime.create_session(CreateBashSessionRequest(startup_source=[str(tmp_path / "rc")]))
    assert created.output == "said\n"
    with pytest.raises(exceptions.SessionExistsError):
        await runtime.create_session(CreateBashSessionRequest())
    observed = await runtime.run_in_session(bash("cd /; echo $FROM_RC; echo err >&2"))
    assert (observed.output, observed.exit_code) == ("1\nerr\n", 0)
    with pytest.raises(exceptions.NonZeroExitCodeError, match="what I say"):
        await runtime.run_in_session(bash("false", error_msg="what I say"))
    assert (await runtime.run_in_session(bash("false", check="silent"))).exit_code == 1
    with pytest.raises(exceptions.BashIncorrectSyntaxError) as wrong:
        await runtime.run_in_session(bash("if true; do"))
    assert "syntax error" in wrong.value.extra_info["bash_stderr"]
    with pytest.raises(exceptions.CommandTimeoutError) as late:
        await runtime.run_in_session(bash("echo partial; sleep 30", timeout=0.2))
    assert late.value.extra_info == {"output": "partial\n"}  # type: ignore[attr-defined]
    assert (await runtime.run_in_session(bash("pwd"))).output == "/\n"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runtime.run_in_session, bash("touch /tmp/$$.begun; sleep 600", check="silent"))
        await runtime.execute(Command(command="until ls /tmp/*.begun; do sleep 0.01; done", shell=True))
        assert await runtime.is_alive(timeout=5)
        await runtime.run_in_session(BashInterruptAction())
    await runtime.run_in_session(bash("rm /tmp/$$.begun"))
    await runtime.close_session(CloseBashSessionRequest())
    with pytest.raises(exceptions.SessionDoesNotExistError):
        await runtime.run_in_session(bash("true"))
    await runtime.close()


async def test_commands_and_files(runtime: K8sRemoteRuntime, tmp_path: Path) -> None:
    result = await runtime.execute(Command(command=["sh", "-c", "echo o; echo e >&2; exit 4"]))
    assert (result.stdout, result.stderr, result.exit_code) == ("o\n", "e\n", 4)
    with pytest.raises(exceptions.CommandTimeoutError) as late:
        await runtime.execute(Command(command="echo partial; sleep 30", shell=True, timeout=0.2))
    assert late.value.extra_info["stdout"] == "partial\n"  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError):
        await runtime.execute(Command(command="no-such-program"))
    await runtime.write_file(WriteFileRequest(path="new/file", content="a\r\nü"))
    assert (await runtime.read_file(ReadFileRequest(path="new/file"))).content == "a\r\nü"
    with pytest.raises(FileNotFoundError):
        await runtime.read_file(ReadFileRequest(path="/no/such"))
    await runtime.execute(Command(command=r"printf 'a\xff' > binary", shell=True))
    with pytest.raises(exceptions.SwerexException, match="can't decode byte 0xff"):
        await runtime.read_file(ReadFileRequest(path="binary"))
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "script").write_text("#!/bin/sh\necho ran\n")
    (tree / "sub" / "script").chmod(0o755)
    (tree / "link").symlink_to("sub/script")
    await runtime.upload(UploadRequest(source_path=str(tree), target_path="copy"))
    assert (await runtime.execute(Command(command=["copy/link"]))).stdout == "ran\n"
    with pytest.raises(ValueError, match="not a file or directory"):
        await runtime.upload(UploadRequest(source_path="/no/such", target_path="x"))


async def test_one_connection_serves_all_calls(runtime: K8sRemoteRuntime) -> None:
    """The stock client opens and closes one per call."""
    await runtime.execute(Command(command="true"))
    seen = {id(protocol) for protocol in idle_connections(runtime)}
    await runtime.create_session(CreateBashSessionRequest())
    for _ in range(3):
        await runtime.run_in_session(bash("true"))
    assert {id(protocol) for protocol in idle_connections(runtime)} == seen
    assert len(seen) == 1


def idle_connections(runtime: K8sRemoteRuntime) -> list[object]:
    connector = runtime.sandbox.sandbox.launcher._http.connector
    return [protocol for held in connector._conns.values() for protocol, _ in held]


class Gateway:
    """A TCP port before a sandbox's socket, which can lose an answer, or cut a request in the middle.

    Attributes:
        lose: How many of the next answers are not let through; their connections are cut instead.
    """

    def __init__(self, socket: Path) -> None:
        self.lose = 0
        self.cuts = 0
        self._socket = socket
        self._open: list[anyio.abc.SocketStream] = []

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[int]:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, self._carry)
            yield listener.extra(SocketAttribute.local_port)
            tasks.cancel_scope.cancel()

    async def cut(self) -> None:
        self.cuts += 1
        for stream in self._open:
            await stream.aclose()

    async def _carry(self, stream: anyio.abc.SocketStream) -> None:
        self._open = [stream]
        async with (
            stream,
            await anyio.connect_unix(self._socket) as inside,
            anyio.create_task_group() as both,
        ):

            async def answers() -> None:
                async for data in inside:
                    if self.lose:
                        self.lose -= 1
                        await self.cut()
                        break
                    await stream.send(data)
                both.cancel_scope.cancel()

            both.start_soon(answers)
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for data in stream:
                    await inside.send(data)
            both.cancel_scope.cancel()


@asynccontextmanager
async def through(gateway_port: int, runtime: K8sRemoteRuntime) -> AsyncIterator[K8sRemoteRuntime]:
    """The same sandbox over another way."""
    client, sandbox = runtime.sandbox.client, runtime.sandbox.sandbox
    token = client.client._backend.key.token("local", sandbox.id)

    async def connect() -> LauncherClient:
        route = AddressRoute("127.0.0.1", gateway_port)
        return LauncherClient(route, token, sandbox.handle.epoch, margin_s=20.0, where="sandbox")

    launcher = await client.thread.call_from(connect)
    yield K8sRemoteRuntime(SyncSandbox(client, Sandbox(client.client, sandbox.handle, launcher, owned=True)))
    await client.thread.call_from(launcher.close)


async def test_a_request_whose_answer_is_lost_is_not_carried_out_twice(
    runtime: K8sRemoteRuntime, local: LocalConfig
) -> None:
    """allenai/open-instruct#1887: a gateway cuts answers off; `git commit` must not run again for that."""
    gateway = Gateway(local.root / "sandboxes" / runtime.sandbox.id / "http.sock")
    async with gateway.opened() as port, through(port, runtime) as far:
        gateway.lose = 2
        await far.execute(Command(command="echo one >> log", shell=True))
        gateway.lose = 1
        with pytest.raises(exceptions.NonZeroExitCodeError):
            await far.execute(Command(command="echo two >> log; false", shell=True, check=True))
        async with anyio.create_task_group() as tasks:

            async def cut() -> None:
                await runtime.execute(Command(command="until [ -e begun ]; do sleep 0.01; done", shell=True))
                await gateway.cut()

            tasks.start_soon(cut)
            with pytest.raises(K8sError, match="begun and cut off"):
                await far.execute(Command(command="echo three >> log; touch begun; sleep 9", shell=True))
    assert gateway.cuts == 4
    assert (await runtime.execute(Command(command=["cat", "log"]))).stdout == "one\ntwo\nthree\n"


async def test_a_lost_sandbox_and_another_owner_are_named(
    deployment: K8sDeployment, local: LocalConfig, keeper_ended: Callable[[Path], Any]
) -> None:
    runtime = deployment.runtime
    with SyncSandboxClient.local(local) as other:
        taken = await anyio.to_thread.run_sync(other.attach, runtime.sandbox.handle)
        alive = await deployment.is_alive()
        assert not alive
        assert "epoch" in alive.message
        for call in (
            runtime.execute(Command(command="true")),
            runtime.create_session(CreateBashSessionRequest()),
        ):
            with pytest.raises(K8sFencedError) as fenced:
                await call
            assert isinstance(fenced.value, FencedError)
            assert isinstance(fenced.value, exceptions.SwerexException)
        await deployment.stop()
        assert (await anyio.to_thread.run_sync(taken.execute, "echo on")).stdout == b"on\n"
        deployment = K8sDeployment(client=other)
        await deployment.attach(taken.handle)
        process = int((await anyio.to_thread.run_sync(deployment.runtime.sandbox.info))["pid"])
        os.kill(process, signal.SIGKILL)
        with pytest.raises(K8sLostError) as lost:
            await deployment.runtime.execute(Command(command="true"))
        assert isinstance(lost.value, SandboxLostError)
        assert not await deployment.is_alive()
        await deployment.stop()
        await keeper_ended(local.root / "sandboxes" / taken.id)


async def test_detach_and_attach_keep_the_sessions(local: LocalConfig) -> None:
    """siiRL's fork closed the shells when it detached: the next owner got SessionDoesNotExistError."""
    first = K8sDeployment(local=local)
    await first.start()
    await first.runtime.create_session(CreateBashSessionRequest())
    await first.runtime.run_in_session(bash("cd /tmp; X=kept"))
    handle = await first.detach()
    with pytest.raises(exceptions.DeploymentNotStartedError):
        _ = first.runtime
    await first.stop()
    second = K8sDeployment(local=local)
    await second.attach(SandboxHandle.from_json(handle.to_json()))
    assert (await second.runtime.run_in_session(bash("echo $X $PWD"))).output == "kept /tmp\n"
    await second.stop()
    with pytest.raises(K8sNotFoundError):
        await K8sDeployment(local=local).attach(handle)


async def test_a_detached_deployment_is_inert_under_garbage_collection(local: LocalConfig) -> None:
    """swe-rex 1.4.0: `AbstractDeployment.__del__` schedules `stop()` in whatever loop runs."""
    deployment = K8sDeployment(local=local)
    await deployment.start()
    handle = await deployment.detach()
    del deployment
    gc.collect()
    await anyio.lowlevel.checkpoint()
    again = K8sDeployment(local=local)
    await again.attach(handle)
    assert await again.is_alive()
    await again.stop()


@pytest.mark.parametrize("shared", [False, True])
def test_a_forgotten_deployment_warns_and_ends_its_sandbox(local: LocalConfig, shared: bool) -> None:
    """mini-swe-agent's environments have no clean-up but this."""
    with SyncSandboxClient.local(local) as client:
        deployment = K8sDeployment(client=client) if shared else K8sDeployment(local=local)
        before = set(threading.enumerate())
        asyncio.run(deployment.start())
        own = set(threading.enumerate()) - before
        held = [deployment]
        del deployment
        with pytest.warns(ResourceWarning, match="never closed|neither stopped"):
            forget(held)
        for thread in own:
            thread.join()
    assert shared or own


def forget(held: list[K8sDeployment]) -> None:
    gone = weakref.ref(held[0])
    held.clear()
    gc.collect()
    # The client's thread may be at the end of the call that started it, and hold it, too.
    wait_until(lambda: gone() is None)


def test_a_forgotten_deployment_ends_its_sandbox_also_where_warnings_are_errors(
    local: LocalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda problem: raised.append(problem.exc_type))
    with SyncSandboxClient.local(local) as client, warnings.catch_warnings():
        deployment = K8sDeployment(client=client)
        asyncio.run(deployment.start())
        held = [deployment]
        del deployment
        warnings.simplefilter("error")
        forget(held)
        assert raised == [ResourceWarning]
        wait_until(lambda: client.stats.stopped == 1)


def wait_until(done: Callable[[], bool]) -> None:
    """Of what goes on in another thread; nobody there tells of it."""

    async def look() -> None:
        with anyio.fail_after(10):
            while not done():  # noqa: ASYNC110
                await anyio.sleep(0.01)

    anyio.run(look)


AT_EXIT = """
import asyncio, sys, warnings
from pathlib import Path
from sandbox_k8s import LocalConfig
from sandbox_k8s.swerex import K8sDeployment
warnings.simplefilter("error")
local = LocalConfig(root=Path(sys.argv[1]), isolation="process")
detached, forgotten = K8sDeployment(local=local), K8sDeployment(local=local)
for one in (detached, forgotten):
    asyncio.run(one.start())
print(asyncio.run(detached.detach()).to_json().decode())
"""


def test_at_exit_the_detached_lives_and_the_forgotten_ends(
    local: LocalConfig, script: Callable[..., subprocess.Popen[str]]
) -> None:
    process = script(AT_EXIT, str(local.root))
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    handle = SandboxHandle.from_json(out)
    with SyncSandboxClient.local(local) as client:
        assert [one.handle for one in client.list()] == [handle]
        client.attach(handle).stop()


def test_one_event_loop_per_call_and_many_threads(local: LocalConfig) -> None:
    """As SWE-agent and mini-swe-agent call: the lease is renewed between the loops."""
    with SyncSandboxClient.local(local) as client, ThreadPoolExecutor(4) as threads:
        clock = client.start()

        def roll_out(number: int) -> str:
            deployment = K8sDeployment(client=client, sandbox=SandboxSpec(lease_s=1.0))
            asyncio.run(deployment.start())
            asyncio.run(deployment.runtime.create_session(CreateBashSessionRequest()))
            asyncio.run(deployment.runtime.run_in_session(bash(f"N={number}")))
            clock.execute("sleep 1.3")  # longer than the lease, and no loop of this thread runs
            output = asyncio.run(deployment.runtime.run_in_session(bash("echo $N"))).output
            asyncio.run(deployment.stop())
            return output

        assert list(threads.map(roll_out, range(2))) == ["0\n", "1\n"]
    assert client.stats.started == client.stats.stopped == 3


async def test_a_cancelled_call_ends_its_command(runtime: K8sRemoteRuntime) -> None:
    waiting = asyncio.create_task(
        runtime.execute(
            Command(command="touch begun; sleep 90", shell=True, env={"CUT": "1", "PATH": "/bin"})
        )
    )
    await runtime.execute(Command(command="until [ -e begun ]; do sleep 0.01; done", shell=True))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    quiet = "while grep -qsz '^CUT=' /proc/[0-9]*/environ; do sleep 0.01; done"
    await runtime.execute(Command(command=quiet, shell=True, timeout=5))
