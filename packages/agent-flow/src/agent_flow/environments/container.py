"""A container of docker or podman as an environment, through the program's command line."""

from __future__ import annotations

import logging
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
from token_tracking.sample import Scalar

from agent_flow.clock import Clock
from agent_flow.environments.memory import OOM_COMMAND, refuse_oom
from agent_flow.environments.process import KEPT, KILL, MARK, Kept
from agent_flow.environments.tree import pack_tree, unpack_tree
from agent_flow.errors import EnvError
from agent_flow.protocols import CommandOutput

logger = logging.getLogger(__name__)

_PROGRAM_S = 120.0
_TREE_S = 600.0
_GRACE_S = 2.0
_KILL_S = 30.0

_COMMAND = r"""
cd -- "$2" 2>/dev/null || { printf '\n%s cwd\n' "$1" >&2; exit 0; }
mark=$1; shift 2
( exec "$@" )
printf '\n%s %s\n' "$mark" "$?" >&2
"""


class ProgramOutput(msgspec.Struct, frozen=True, kw_only=True):
    """How a call of the container program ended."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """What it said of a failure."""
        return self.stderr.decode("utf-8", "replace").strip()[-2000:]


class ContainerProgram:
    """`docker` or `podman`."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def run(
        self,
        *arguments: str,
        timeout_s: float = _PROGRAM_S,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
    ) -> ProgramOutput:
        """Call it and wait for its end.

        Raises:
            EnvError: it took too long, or cannot be started.
        """
        command = [self.name, *arguments]
        with anyio.move_on_after(timeout_s):
            try:
                done = await anyio.run_process(
                    command,
                    input=b"" if stdin is None else None,
                    stdin=stdin,
                    stdout=subprocess.PIPE if stdout is None else stdout,
                    check=False,
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvError("program", f"{self.name} cannot be started: {error}") from error
            return ProgramOutput(code=done.returncode, stdout=done.stdout or b"", stderr=done.stderr or b"")
        said = " ".join(command[:3])
        raise EnvError("program", f"`{said}` took longer than {timeout_s:g} s", retryable=True)


class ContainerEnvironment:
    """A running container with the task's repository in it."""

    def __init__(
        self,
        program: ContainerProgram,
        container: str,
        clock: Clock,
        *,
        workdir: str,
        described: Mapping[str, Scalar],
        watch_memory: bool,
    ) -> None:
        self._program = program
        self._container = container
        self._clock = clock
        self._described = described
        self._watch_memory = watch_memory
        self.workdir = workdir

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return self._described

    async def execute(
        self, command: Sequence[str], *, timeout_s: float, cwd: str | None = None
    ) -> CommandOutput:
        """Run an argument vector; see `Environment.execute`. Without `cwd` it runs in `/`."""
        mark = self._clock.new_id()
        stdout, stderr = Kept(KEPT), Kept(KEPT)
        lost = anyio.Event()
        with anyio.move_on_after(timeout_s) as limit:
            await self._command(mark, command, cwd or "/", stdout, stderr, lost=lost)
        if limit.cancelled_caught:
            if lost.is_set():
                raise EnvError(
                    "unreachable",
                    "a command's time was up, and the container did not answer",
                    retryable=True,
                    evidence=f"{' '.join(command)[:200]!r} could not be ended after {timeout_s:g} s",
                )
            return CommandOutput(exit_code=None, stdout=stdout.value(), stderr=stderr.value(), timed_out=True)
        said, code = self._ending(mark, stderr.value(), command)
        if self._watch_memory:
            refuse_oom(await self._counts())
        return CommandOutput(exit_code=code, stdout=stdout.value(), stderr=said)

    async def _counts(self) -> bytes:
        return (await self._program.run("exec", self._container, *OOM_COMMAND)).stdout

    def _ending(self, mark: str, stderr: bytes, command: Sequence[str]) -> tuple[bytes, int]:
        """The command's own stderr, and its exit code from the line after it.

        The program's own exit code would not do: it may be that of a failure of the program.
        """
        said, found, rest = stderr.rpartition(f"\n{mark} ".encode())
        if not found:
            raise EnvError(
                "execute",
                f"no exit code for {' '.join(command)[:200]!r}: the container is gone",
                retryable=True,
                evidence=stderr.decode("utf-8", "replace")[-2000:],
            )
        word, _, late = rest.partition(b"\n")
        if word == b"cwd":
            raise EnvError("execute", f"no such folder for {' '.join(command)[:200]!r}", fault="agent")
        return said + late, int(word)

    async def _command(
        self,
        mark: str,
        command: Sequence[str],
        cwd: str,
        stdout: Kept,
        stderr: Kept,
        stdin: bytes = b"",
        lost: anyio.Event | None = None,
    ) -> None:
        """Run a command; `lost` is set when it had to be ended and that did not work."""
        interactive = ["-i"] if stdin else []
        call = [self._program.name, "exec", *interactive, "-e", f"{MARK}={mark}", self._container]
        call += ["sh", "-c", _COMMAND, "agent-flow", mark, cwd, *command]
        process = await anyio.open_process(
            call, stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, start_new_session=True
        )
        ended = False
        try:
            async with anyio.create_task_group() as group:
                over = anyio.Event()
                group.start_soon(_read, process.stdout, stdout)
                group.start_soon(_read, process.stderr, stderr, f"\n{mark} ".encode(), over)
                if process.stdin is not None:
                    group.start_soon(_feed, process.stdin, stdin)
                await over.wait()
                # A process that the command left behind may hold the streams open.
                with anyio.move_on_after(_GRACE_S) as left:
                    await process.wait()
                ended = True
                if left.cancelled_caught:
                    group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                if not ended and not await self._kill(mark) and lost is not None:
                    lost.set()
                if process.returncode is None:
                    process.kill()
                await process.aclose()

    async def _kill(self, mark: str) -> bool:
        """End what a command started, also what it put into the background or a session of its own.

        Returns whether the container did so.
        """
        words = ("exec", self._container, "sh", "-c", KILL, "kill", MARK, mark)
        try:
            done = await self._program.run(*words, timeout_s=_KILL_S)
            if done.code == 0:
                return True
            why = done.text
        except EnvError as error:
            why = str(error)
        logger.warning("a command in container %s may still run: %s", self._container, why)
        return False

    async def _script(self, script: str, path: str, stdin: bytes = b"") -> bytes:
        """Run a script of ours with a path, without a limit on its output."""
        mark = self._clock.new_id()
        stdout, stderr = Kept(None), Kept(KEPT)
        command = ["sh", "-c", script, "agent-flow", path]
        with anyio.move_on_after(_TREE_S) as limit:
            await self._command(mark, command, "/", stdout, stderr, stdin)
        if limit.cancelled_caught:
            raise EnvError("file", f"{path!r} took longer than {_TREE_S:g} s", retryable=True)
        said, code = self._ending(mark, stderr.value(), command)
        if code != 0:
            evidence = said.decode("utf-8", "replace")[-2000:]
            if "No space left on device" in evidence:
                raise EnvError("no_space", f"{path!r}: the disk is full", retryable=True, evidence=evidence)
            raise EnvError("file", f"{path!r} cannot be used", fault="agent", evidence=evidence)
        return stdout.value()

    async def read(self, path: str) -> bytes:
        """A file's bytes."""
        return await self._script('exec cat -- "$1"', path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file's bytes; its folders are made."""
        content = "exec cat" if data else ":"
        await self._script(f'mkdir -p -- "$(dirname -- "$1")" && {content} > "$1"', path, data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a folder into the container."""
        path = PurePosixPath(target)
        made = await self._script('mkdir -p -- "$1" && id -u && id -g', str(path.parent))
        owner = tuple(int(number) for number in made.split())
        with tempfile.TemporaryFile() as spool:
            pack = partial(pack_tree, source, spool, name=path.name, owner=(owner[0], owner[1]))
            await anyio.to_thread.run_sync(pack)
            spool.seek(0)
            done = await self._program.run(
                "cp", "-a", "-", f"{self._container}:{path.parent}", timeout_s=_TREE_S, stdin=spool
            )
        if done.code != 0:
            raise EnvError("upload", f"{source} to {target}", retryable=True, evidence=done.text)

    async def download(self, source: str, target: Path) -> None:
        """Copy a folder out of the container."""
        with tempfile.TemporaryFile() as spool:
            done = await self._program.run(
                "cp", f"{self._container}:{source}", "-", timeout_s=_TREE_S, stdout=spool
            )
            if done.code != 0:
                raise EnvError("download", source, fault="agent", evidence=done.text)
            spool.seek(0)
            await anyio.to_thread.run_sync(unpack_tree, spool, target)


async def _read(
    stream: anyio.abc.ByteReceiveStream | None,
    kept: Kept,
    mark: bytes | None = None,
    over: anyio.Event | None = None,
) -> None:
    """Read to the end; `over` is set when the mark has come, or nothing more can."""
    try:
        if stream is not None:
            async for data in stream:
                kept.add(data)
                if mark is not None and over is not None and kept.holds(mark):
                    over.set()
    finally:
        if over is not None:
            over.set()


async def _feed(stream: anyio.abc.ByteSendStream, data: bytes) -> None:
    try:
        async with stream:
            await stream.send(data)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return  # it ended without reading everything; its exit code says how
