"""Every call, cancelled at each of its awaits in turn: nothing is left behind, and the client works on."""

import asyncio
import gc
import os
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from sandbox_k8s import (
    ClientConfig,
    FencedError,
    Injection,
    KubernetesConfig,
    LocalConfig,
    ResetRefusedError,
    Sandbox,
    SandboxClient,
    SandboxSpec,
)
from sandbox_k8s.routes import AddressRoute
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, why_no_process_pods
from sandbox_k8s.transport import LauncherClient, NoAnswerError

from .runs import client_of

pytestmark = pytest.mark.anyio
Call = Callable[[], Coroutine[Any, Any, object]]


class CancelledAt:
    """An awaitable that has ``cancel`` called when ``work`` suspends for the nth time."""

    def __init__(self, work: Coroutine[Any, Any, object], number: int, cancel: Callable[[], object]) -> None:
        self.reached = False
        self._work = work
        self._number = number
        self._cancel = cancel

    def __await__(self) -> Generator[Any, Any, object]:
        inner = self._work.__await__()
        step: Callable[[], Any] = lambda: inner.send(None)  # noqa: E731
        count = 0
        while True:
            try:
                waits_for = step()
            except StopIteration as done:
                return done.value
            if count == self._number:
                self.reached = True
                self._cancel()
            count += 1
            try:
                value = yield waits_for
            except BaseException as problem:
                step = lambda problem=problem: inner.throw(problem)  # noqa: E731
            else:
                step = lambda value=value: inner.send(value)  # noqa: E731


async def cancelled_at(number: int, kind: str, make: Call) -> bool:
    """Cancel a call at its nth await, as anyio or as asyncio cancels; False when it has fewer of them."""
    if kind == "scope":
        with anyio.CancelScope() as scope:
            call = CancelledAt(make(), number, scope.cancel)
            await call
        return call.reached

    async def run() -> None:
        await call

    task: asyncio.Task[None] | None = None
    call = CancelledAt(make(), number, lambda: task and task.cancel())
    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return call.reached


def points(every: bool) -> Iterator[int]:
    """The awaits at which calls are cancelled: each of them, or ever fewer."""
    number = 0
    while True:
        yield number
        number += 1 if every else 1 + number


class How(NamedTuple):
    """How calls are cancelled: as anyio or as asyncio does it, at every await or at some."""

    kind: str
    every: bool


def cases(*quick: str) -> pytest.MarkDecorator:
    """Every place and every way; by default only ``quick`` places, and some awaits."""
    few = How("scope", every=False)
    found = [pytest.param(where, few, id=f"{where}-some") for where in quick]
    for where in ("process", "fake"):
        for kind in ("scope", "task"):
            name = f"{where}-{kind}-every"
            found.append(pytest.param(where, How(kind, every=True), marks=pytest.mark.slow, id=name))
    return pytest.mark.parametrize(("where", "how"), found)


@pytest.fixture
def config(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClientConfig]:
    if where == "process":
        root = request.getfixturevalue("root")  # which looks for folders and processes in the end
        yield LocalConfig(root=root, isolation="process", grace_s=0.1)
        return
    if why_no_process_pods():
        pytest.skip(why_no_process_pods())
    pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
    with FakeCluster(FakeClusterConfig(pods="process", speed=50)) as cluster:
        yield KubernetesConfig(
            injection=Injection(kind="image_volume", image="example.com/tools:1"),
            kubeconfig=cluster.kubeconfig,
            run_key_file=tmp_path / "run.key",
            image="example.com/any:1",
            data_path="pod_ip",
            grace_s=0.1,
        )
        left = [pod for pod in cluster.pods() if "deletionTimestamp" not in pod["metadata"]]
        assert left == []


def descriptors() -> list[str]:
    """Sockets and pipes of this process."""
    found: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:
            continue  # the one of this very listing
    return [one for one in found if one.startswith(("socket:", "pipe:"))]


@asynccontextmanager
async def checked_client(config: ClientConfig) -> AsyncIterator[SandboxClient]:
    """A client that leaves no descriptor open."""
    before = len(descriptors())
    async with client_of(config) as client:
        yield client
    await closed(before)


async def closed(before: int) -> None:
    """Wait until there are no more descriptors than before."""
    # The fake cluster is in this process: its sockets, and those of pods that are ending, go a little later.
    with anyio.move_on_after(20):
        while len(descriptors()) > before:  # noqa: ASYNC110  (the system has no event for this)
            await anyio.sleep(0.01)
    assert len(descriptors()) <= before


async def alive(client: SandboxClient) -> list[str]:
    return [found.state for found in await client.list() if found.state != "dead"]


async def until(client: SandboxClient, states: list[str]) -> None:
    """Wait until those that are alive are in these states."""
    with anyio.fail_after(20):
        while await alive(client) != states:  # noqa: ASYNC110  (a lease of another client tells nobody)
            await anyio.sleep(0.01)


@cases("process", "fake")
async def test_start(config: ClientConfig, how: How) -> None:
    async with checked_client(config) as client:
        for number in points(how.every):
            started: list[Sandbox] = []

            async def start(started: list[Sandbox] = started) -> None:
                started.append(await client.start())

            reached = await cancelled_at(number, how.kind, start)
            assert await alive(client) == len(started) * ["running"]
            for sandbox in started:
                await sandbox.stop()
            if not reached:
                break
        assert client.stats.stop_failures == 0


@cases("process")
async def test_stop(config: ClientConfig, how: How) -> None:
    async with checked_client(config) as client:
        for number in points(how.every):
            sandbox = await client.start()
            reached = await cancelled_at(number, how.kind, sandbox.stop)
            await sandbox.stop()
            assert await alive(client) == []
            if not reached:
                break


@cases("process", "fake")
async def test_detach_and_attach(config: ClientConfig, how: How) -> None:
    """However often both are cut off, the sandbox can be taken again, and its session is as it was."""
    async with checked_client(config) as client:
        sandbox = await client.start()
        await (await sandbox.session()).run("X=kept")
        more = {"detach", "attach"}
        for number in points(how.every):
            if not await cancelled_at(number, how.kind, sandbox.detach):
                more.discard("detach")
            if await alive(client) == ["running"]:
                await sandbox.detach()
            handle = sandbox.handle
            if not await cancelled_at(number, how.kind, lambda handle=handle: client.attach(handle)):
                more.discard("attach")
            sandbox = await client.attach(handle)
            assert (await (await sandbox.session()).run("echo $X")).stdout == b"kept\n"
            if not more:
                break
        await sandbox.stop()
        assert await alive(client) == []


@cases("process", "fake")
async def test_attaching_ones_own(config: ClientConfig, how: How) -> None:
    """However far it came, the client that used up the next epoch can still stop the sandbox."""
    async with checked_client(config) as client:
        for number in points(how.every):
            held = [await client.start()]

            async def attach(held: list[Sandbox] = held) -> None:
                held.append(await client.attach(held[0].handle))

            reached = await cancelled_at(number, how.kind, attach)
            await held[-1].stop()
            assert await alive(client) == []
            if not reached:
                break


@cases("process", "fake")
async def test_reset(config: ClientConfig, how: How) -> None:
    """Clean, stopped, or as it was, however far it came: never one that its client cannot stop."""
    async with checked_client(config) as client:
        for number in points(how.every):
            held = [await client.start()]
            with suppress(ResetRefusedError):  # without a PID namespace nothing can be marked
                await held[0].mark_clean()

            async def reset(held: list[Sandbox] = held) -> None:
                with suppress(ResetRefusedError):
                    held.append(await held[0].reset())

            reached = await cancelled_at(number, how.kind, reset)
            await held[-1].stop()
            # asyncio's cancel goes through the shield of the stop, which the client's end then makes good.
            assert how.kind == "task" or await alive(client) == []
            if not reached:
                break


@cases("process")
async def test_opening_and_leaving_a_client(config: ClientConfig, how: How) -> None:
    """Nothing of it goes on: no task, no descriptor; a sandbox that it could not end is renewed no more."""
    own = asyncio.all_tasks()
    for number in points(how.every):
        before = len(descriptors())

        async def live() -> None:
            async with client_of(config) as client:
                await client.start(SandboxSpec(lease_s=1.0))

        reached = await cancelled_at(number, how.kind, live)
        assert asyncio.all_tasks() == own
        async with client_of(config) as client:
            if how.kind == "scope":
                assert await alive(client) == []
            await until(client, [])
            await client.reap()
        await closed(before)
        if not reached:
            break


@cases("process")
async def test_many_starts_pools_and_prefetches(config: ClientConfig, how: How) -> None:
    """A sandbox that nobody was given is ended; pods of a prefetch are looked for by `config`."""
    async with checked_client(config) as client:

        async def start_many(held: list[Sandbox]) -> None:
            held += [one for one in await client.start_many([SandboxSpec()] * 2) if isinstance(one, Sandbox)]

        async def take(held: list[Sandbox]) -> None:
            async with client.warm_pool(size=1) as pool:
                held.append(await pool.take())

        async def prefetch(held: list[Sandbox]) -> None:
            await client.prefetch(["example.com/other:1"])

        for call in (start_many, take, *([prefetch] if isinstance(config, KubernetesConfig) else ())):
            for number in points(how.every):
                held: list[Sandbox] = []
                reached = await cancelled_at(number, how.kind, partial(call, held))
                # asyncio's cancel goes through shields, and the client's end makes good what it cut off.
                assert how.kind == "task" or len(await alive(client)) == len(held)
                for sandbox in held:
                    await sandbox.stop()
                if not reached:
                    break


@cases("process")
async def test_looks_marks_and_guests(config: ClientConfig, how: How) -> None:
    async with checked_client(config) as client:
        sandbox = await client.start()
        session = await sandbox.session()
        await session.run("X=kept")

        async def mark() -> None:
            with suppress(ResetRefusedError):  # sessions are open
                await sandbox.mark_clean()

        async def be_a_guest() -> None:
            async with await client.attach(sandbox.handle, take_ownership=False) as guest:
                await guest.info()

        calls: list[Call] = [
            client.list,
            client.reap,
            sandbox.info,
            sandbox.log,
            sandbox.renew,
            session.interrupt,
            mark,
            be_a_guest,
        ]
        before = len(descriptors())
        for call in calls:
            for number in points(how.every):
                if not await cancelled_at(number, how.kind, call):
                    break
            assert (await session.run("echo $X")).stdout == b"kept\n"
            assert await alive(client) == ["running"]
        await closed(before + 1)  # a connection of our own may have been made anew beside one that was cut


@cases("process")
async def test_connections_of_replaced_owners_and_guests_are_closed(config: ClientConfig, how: How) -> None:
    async with checked_client(config) as client:
        first = sandbox = await client.start()
        before = len(descriptors())
        for _ in range(5):
            sandbox = await client.attach(sandbox.handle)
            with pytest.raises(FencedError):
                await first.execute("true")
            async with await client.attach(sandbox.handle, take_ownership=False) as guest:
                await guest.info()
        await sandbox.info()
        assert len(descriptors()) <= before + 1
        known = weakref.ref(guest)
        del guest
        async with await client.attach(sandbox.handle, take_ownership=False):
            gc.collect()
            assert known() is None
        await sandbox.stop()


@cases("process")
async def test_commands_sessions_and_uploads(config: ClientConfig, how: How, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in "abc":
        (tree / name).write_bytes(os.urandom(100_000))
    async with checked_client(config) as client:
        sandbox = await client.start()
        await (await sandbox.session()).run("X=kept")

        async def run() -> None:
            session = await sandbox.session()
            await session.run("MARKED=1 sleep 0.05")

        async def new_session() -> None:
            await (await sandbox.session("other")).close()

        calls: list[Call] = [
            lambda: sandbox.execute("MARKED=1 sleep 0.05"),
            run,
            new_session,
            lambda: sandbox.upload(tree, "copy"),
            lambda: sandbox.write("file", b"x" * 100_000),
            lambda: sandbox.read("file"),
            lambda: sandbox.download("copy", tmp_path / "back"),
        ]
        for call in calls:
            for number in points(how.every):
                reached = await cancelled_at(number, how.kind, call)
                if not reached:
                    break
                assert (await (await sandbox.session()).run("echo $X")).stdout == b"kept\n"
            quiet = await sandbox.execute(QUIET, timeout_s=5)
            assert quiet.exit_code == 0, quiet.stdout
        assert (await sandbox.execute("ls copy; wc -c < file")).stdout == b"a\nb\nc\n100000\n"
        assert names(tmp_path / "back") == {"a", "b", "c"}
        assert names(tmp_path) - {"run.key"} == {"back", "tree"}


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


QUIET = """
while grep -qsz '^MARKED=' /proc/[0-9]*/environ || ls -A | grep incoming; do sleep 0.02; done
"""


async def test_a_cancelled_command_ends_although_a_fork_has_its_connection_too(root: Path) -> None:
    """As with a data loader's workers: closing one copy of a descriptor tells the other side nothing."""
    async with SandboxClient.local(LocalConfig(root=root, isolation="process", grace_s=0.1)) as client:
        sandbox = await client.start()
        copies: list[int] = []
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sandbox.execute, "touch begun; MARKED=1 sleep 600")
                begun = await sandbox.execute("until [ -e begun ]; do sleep 0.01; done", timeout_s=5)
                assert begun.exit_code == 0
                for connection in sandbox.launcher._http.connector._acquired:
                    connected = connection.transport.get_extra_info("socket")
                    copies += [os.dup(connected.fileno())]
                tasks.cancel_scope.cancel()
            assert len(copies) == 1
            assert (await sandbox.execute(QUIET, timeout_s=5)).exit_code == 0
        finally:
            for copy in copies:
                os.close(copy)


async def test_a_launcher_that_cannot_be_reached_in_time_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing was sent, and a connection that comes too late is no lost sandbox."""
    monkeypatch.setattr("sandbox_k8s.transport._CONNECT_S", 0.1)
    with ExitStack() as sockets:
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # the system takes a few more than it was told
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        route = AddressRoute("127.0.0.1", full.getsockname()[1])
        launcher = LauncherClient(route, "key", 1, margin_s=20.0, where="the sandbox")
        try:
            with pytest.raises(NoAnswerError, match="could not be reached within"):
                await launcher.info()
        finally:
            await launcher.close()
