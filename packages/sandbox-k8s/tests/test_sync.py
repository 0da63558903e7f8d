"""The blocking face: threads, Ctrl-C, forks, running loops, forgotten clients."""

import asyncio
import gc
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from inspect import signature
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from sandbox_k8s import (
    ConfigError,
    FencedError,
    LocalConfig,
    Sandbox,
    SandboxClient,
    SandboxLostError,
    SandboxSpec,
    Session,
    StartProgress,
    SyncSandbox,
    SyncSandboxClient,
    SyncSession,
    SyncWarmPool,
    WarmPool,
)
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.sync_loop import LoopThread

pytestmark = pytest.mark.anyio


@pytest.fixture
def config(root: Path) -> LocalConfig:
    return LocalConfig(root=root, isolation="process", grace_s=0.3)


@pytest.fixture
def client(config: LocalConfig) -> Iterator[SyncSandboxClient]:
    with SyncSandboxClient.local(config) as client:
        yield client


def test_the_life_of_a_sandbox(config: LocalConfig, tmp_path: Path) -> None:
    with SandboxClient.local(config).sync() as client:
        sandbox = client.start(SandboxSpec(env={"STAGE": "demo"}))
        result = sandbox.execute("echo $STAGE; exit 3", timeout_s=10)
        assert (result.exit_code, result.stdout) == (3, b"demo\n")
        session = sandbox.session()
        session.run("cd /; X=1")
        assert session.run("pwd; echo $X").stdout == b"/\n1\n"
        sandbox.write("a", b"1\r\n")
        sandbox.download("a", tmp_path / "a")
        sandbox.upload(tmp_path / "a", "b")
        assert sandbox.read("b") == b"1\r\n"
        handle = sandbox.detach()
        assert [one.state for one in client.list()] == ["detached"]
    with SyncSandboxClient.local(config) as client, client.attach(handle) as taken:
        with taken.session() as session:
            assert session.run("echo $X").stdout == b"1\n"
        assert taken.info()["sessions"] == {}
        guest = client.attach(handle, take_ownership=False)
        with pytest.raises(FencedError):
            guest.stop()


@pytest.mark.parametrize(
    ("face", "original"),
    [
        (SyncSandboxClient, SandboxClient),
        (SyncSandbox, Sandbox),
        (SyncSession, Session),
        (SyncWarmPool, WarmPool),
    ],
)
def test_the_faces_have_the_same_calls(face: type, original: type) -> None:
    left_out = {"sync", "clock", "leave", "launcher", "config", "local", "kubernetes"}
    for name, call in vars(original).items():
        if name.startswith("_") or name in left_out or not callable(call):
            continue
        assert list(signature(getattr(face, name)).parameters) == list(signature(call).parameters), name


def test_many_starts(client: SyncSandboxClient) -> None:
    first, wrong, last = client.start_many([SandboxSpec(), SandboxSpec(image="none:1"), SandboxSpec()])
    assert isinstance(wrong, ConfigError)
    assert [one.execute("echo up").stdout for one in (first, last)] == 2 * [b"up\n"]  # type: ignore[union-attr]


def test_a_pool_keeps_sandboxes_ready_and_stops_what_nobody_took(client: SyncSandboxClient) -> None:
    with client.warm_pool(size=1) as pool:
        with ThreadPoolExecutor(2) as threads:
            taken = [one.result() for one in [threads.submit(pool.take) for _ in range(2)]]
        assert [one.execute("echo up").stdout for one in taken] == 2 * [b"up\n"]
    assert {one.handle.sandbox_id for one in client.list()} == {one.id for one in taken}
    with pytest.raises(ConfigError, match="not open"):
        pool.take()


def test_a_pool_that_is_open_ends_with_its_client(config: LocalConfig) -> None:
    with SyncSandboxClient.local(config) as client, client.warm_pool(size=1) as pool:
        pool.take()
        client.close()
    with SyncSandboxClient.local(config) as client:
        assert client.list() == ()


def test_many_threads_at_once(client: SyncSandboxClient) -> None:
    sandbox = client.start()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda n: sandbox.execute(["echo", str(n)]).stdout, range(24)))
    assert answers == [b"%d\n" % number for number in range(24)]


def test_errors_are_the_asynchronous_ones_and_nothing_opens_twice(config: LocalConfig, root: Path) -> None:
    client = SyncSandboxClient.local(config)
    with pytest.raises(ConfigError, match="not open"):
        client.list()
    with client:
        with pytest.raises(ConfigError, match="opened once"):
            client.open()
        sandbox = client.start()
        sandbox.stop()
        with pytest.raises(SandboxLostError):
            sandbox.execute("true")
    client.close()
    with pytest.raises(ConfigError, match="closed"):
        client.list()
    root.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        SyncSandboxClient.local(config).open()
    root.chmod(0o700)
    assert "sandbox-k8s client" not in [thread.name for thread in threading.enumerate()]


def test_a_running_loop_is_not_blocked(client: SyncSandboxClient) -> None:
    """kr8s-org/kr8s#217: blocking calls beside asynchronous ones waited for each other for ever."""

    async def call() -> None:
        with pytest.raises(ConfigError, match="runs an event loop"):
            client.list()
        assert await anyio.to_thread.run_sync(client.list) == ()

    anyio.run(call)


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_ctrl_c_ends_the_command_and_the_client_goes_on(client: SyncSandboxClient) -> None:
    sandbox = client.start()

    def interrupt() -> None:
        sandbox.execute("until [ -e begun ]; do sleep 0.01; done", timeout_s=5)
        interrupt_main()

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.execute("touch begun; exec sleep 600", env={"INTERRUPTED": "1"})
    other.join()
    quiet = "while grep -qsz '^INTERRUPTED=' /proc/[0-9]*/environ; do sleep 0.01; done"
    assert sandbox.execute(quiet, timeout_s=5).exit_code == 0


class InterruptingClock(SystemClock):
    """Ctrl-C when the client asks for an id or for the time, as often as told."""

    def __init__(self) -> None:
        self.interrupts = ""

    def new_id(self) -> str:
        self._perhaps("id")
        return super().new_id()

    def now_ns(self) -> int:
        self._perhaps("time")
        return super().now_ns()

    def _perhaps(self, when: str) -> None:
        if self.interrupts == when:
            self.interrupts = ""
            interrupt_main()


@pytest.mark.parametrize("when", ["id", "time"])
def test_ctrl_c_while_a_sandbox_starts_leaves_nothing(config: LocalConfig, when: str) -> None:
    """NovaSky-AI/SkyRL#1194: sandboxes stayed behind after Ctrl-C."""
    clock = InterruptingClock()
    with SyncSandboxClient.local(config, clock=clock) as client:
        clock.interrupts = when
        with pytest.raises(KeyboardInterrupt):
            client.start()
        assert client.list() == ()
        assert client.start().execute("echo on").stdout == b"on\n"


def test_a_result_that_ctrl_c_kept_from_its_caller_is_undone() -> None:
    undone: list[str] = []

    async def make() -> str:
        with anyio.CancelScope(shield=True):
            interrupt_main()
            await anyio.lowlevel.checkpoint()
        return "made"

    async def undo(result: str) -> None:
        undone.append(result)

    thread = LoopThread(nullcontext(), name="test", leave_s=5.0)
    with pytest.raises(KeyboardInterrupt):
        thread.call(make, undo)
    assert undone == ["made"]
    thread.close()


async def test_a_call_that_asyncio_cancels_twice_is_undone_all_the_same() -> None:
    """A second `Task.cancel` goes through the shields of anyio."""
    made, undone = threading.Event(), threading.Event()
    begun = anyio.Event()

    async def make() -> str:
        asyncio_loop.call_soon_threadsafe(begun.set)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(made.wait)
        return "made"

    async def undo(result: str) -> None:
        undone.set()

    asyncio_loop = asyncio.get_running_loop()
    thread = await anyio.to_thread.run_sync(lambda: LoopThread(nullcontext(), name="test", leave_s=5.0))
    call = asyncio.create_task(thread.call_from(make, undo))
    await begun.wait()
    for _ in range(2):
        call.cancel()
        await anyio.lowlevel.checkpoint()
    with pytest.raises(asyncio.CancelledError):
        await call
    made.set()
    assert await anyio.to_thread.run_sync(undone.wait, 5.0)
    await anyio.to_thread.run_sync(thread.close)


def test_ctrl_c_while_a_sandbox_is_detached_leaves_it_its_owners(config: LocalConfig) -> None:
    """Nobody else would know its handle."""
    clock = InterruptingClock()
    with SyncSandboxClient.local(config, clock=clock) as client:
        sandbox = client.start()
        sandbox.session().run("X=kept")
        clock.interrupts = "time"
        with pytest.raises(KeyboardInterrupt):
            sandbox.detach()
        assert [one.state for one in client.list()] == ["running"]
        assert sandbox.session().run("echo $X").stdout == b"kept\n"
        sandbox.stop()
        assert client.list() == ()


class Reluctant:
    """What a loop thread holds, and does not leave before it is told."""

    def __init__(self) -> None:
        self.may_leave = threading.Event()
        self.left = False

    async def __aenter__(self) -> "Reluctant":
        return self

    async def __aexit__(self, *problem: object) -> None:
        interrupt_main()
        while not self.may_leave.is_set():  # noqa: ASYNC110  (told by a thread that may be the interpreter's last)
            await anyio.sleep(0.01)
        self.left = True


def test_ctrl_c_while_a_client_closes_ends_the_wait_alone() -> None:
    held = Reluctant()
    thread = LoopThread(held, name="test", leave_s=5.0)
    with pytest.raises(KeyboardInterrupt):
        thread.close()
    assert not thread.closed
    held.may_leave.set()
    thread.close()
    assert (thread.closed, held.left) == (True, True)


INTERRUPTED_CLOSE = """
import atexit, sys
from contextlib import suppress
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.test_sync import LoopThread, Reluctant
def use():
    thread = LoopThread(held, name="test", leave_s=5.0)
    atexit.register(held.may_leave.set)  # the exit has begun
    with suppress(KeyboardInterrupt):
        thread.close()
held = Reluctant()
atexit.register(lambda: print("left:", held.left))
use()  # and nobody knows the thread any more
"""


def test_the_exit_waits_for_a_close_that_ctrl_c_interrupted(
    script: Callable[..., subprocess.Popen[str]],
) -> None:
    process = script(INTERRUPTED_CLOSE, str(Path(__file__).parents[1]))
    out, err = process.communicate(timeout=30)
    assert out == "left: True\n", err


def test_a_client_is_not_closed_by_a_callback_of_its_own(client: SyncSandboxClient) -> None:
    refused: list[ConfigError] = []

    def close(progress: StartProgress) -> None:
        try:
            client.close()
        except ConfigError as problem:
            refused.append(problem)

    (sandbox,) = client.start_many([SandboxSpec()], progress=close)
    assert "callback of its own" in str(refused[0])
    assert isinstance(sandbox, SyncSandbox)
    sandbox.stop()


def test_closing_ends_the_calls_of_other_threads(config: LocalConfig) -> None:
    with SyncSandboxClient.local(config) as client, ThreadPoolExecutor(1) as threads:
        sandbox = client.start()
        under_way = threads.submit(sandbox.execute, "touch begun; sleep 600")
        sandbox.execute("until [ -e begun ]; do sleep 0.01; done", timeout_s=5)
        client.close()
        with pytest.raises(ConfigError, match="closed before"):
            under_way.result()
    assert client.stats.stopped == 1


def test_a_forgotten_client_warns_and_ends_its_sandboxes(config: LocalConfig, root: Path) -> None:
    client = SyncSandboxClient.local(config).open()
    client.start()
    stats, thread = client.stats, thread_of(client)
    forgotten = [client]
    del client
    with pytest.warns(ResourceWarning, match="never closed"):
        forget(forgotten)
    thread.join()
    assert stats.stopped == 1


def forget(held: list[SyncSandboxClient]) -> None:
    held.clear()
    gc.collect()


def thread_of(client: SyncSandboxClient) -> threading.Thread:
    assert not client.thread.closed
    return next(one for one in threading.enumerate() if one.name == "sandbox-k8s client")


FORKED = """
import os, sys
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from sandbox_k8s import *
client = SyncSandboxClient.local(LocalConfig(root=Path(sys.argv[1]), isolation="process")).open()
detached, mine = client.start(), client.start()
handle = detached.detach()
if os.fork() == 0:
    try:
        mine.execute("true")
    except ConfigError as refused:
        print(refused, flush=True)
    sys.exit()  # at exit, too, the fork must leave its parent's sandboxes alone
os.wait()
print(mine.execute("echo alive").stdout_text.strip(), flush=True)
"""


def test_a_fork_is_refused_and_exit_without_close_ends_what_is_owned(
    config: LocalConfig, root: Path, script: Callable[..., subprocess.Popen[str]]
) -> None:
    process = script(FORKED, str(root))
    out, err = process.communicate(timeout=30)
    lines = out.splitlines()
    assert "a fork has none of its threads" in lines[0], err
    assert lines[1:] == ["alive"], err
    assert process.returncode == 0
    with SyncSandboxClient.local(config) as client:
        (left,) = client.list()
        assert left.state == "detached"
        client.attach(left.handle).stop()
