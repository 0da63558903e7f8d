"""A sandbox of E2B with the task's repository in it, seen as the flow's environment."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec
from token_tracking.sample import Scalar

from agent_flow.clock import Clock
from agent_flow.environments.e2b_command import OWNER_FILE, PROGRAMS, Run, wrapped
from agent_flow.environments.process import KILL, MARK
from agent_flow.environments.tree import pack_tree, unpack_tree
from agent_flow.errors import EnvError
from agent_flow.protocols import CommandOutput, EnvironmentSpec

if TYPE_CHECKING:
    from agent_flow.environments.e2b_sandbox import E2bSandbox

logger = logging.getLogger(__name__)

_TREE_S = 600.0
_KILL_S = 30.0
_LOOK_S = 60.0
_GRACE_S = 5.0
_END_S = 1.0
"""From the marks of a command to its end, unless something holds its streams."""
_OVERRUN_S = 120.0
"""After a command's time-out, when nobody is there to end it, the sandbox does."""

_PACK = r"""
PROGRAMS
exec tar -c -f "$1" -C "$2" -- "$3"
""".replace("PROGRAMS", PROGRAMS)

_UNPACK = r"""
PROGRAMS
mkdir -p -- "$2" && tar -x -p -o -f "$1" -C "$2"
code=$?
rm -f -- "$1"
exit $code
""".replace("PROGRAMS", PROGRAMS)

_REMOVE = f'{PROGRAMS}; exec rm -f -- "$1"'


class E2bHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that was left and can be attached to, in any process with the key. It holds no secret."""

    version: int = 1
    api_url: str
    sandbox_id: str
    workdir: str
    purpose: str
    described: dict[str, Scalar]


class E2bEnvironment:
    """See the module. Whoever attaches to its sandbox later takes it away from this object.

    The protocol knows no owner: commands look for one and are refused, files are read and written anyway.
    """

    def __init__(
        self,
        sandbox: E2bSandbox,
        clock: Clock,
        *,
        api_url: str,
        purpose: str,
        attached: E2bHandle | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._clock = clock
        self._api_url = api_url
        self._purpose = purpose
        self._attached = attached is not None
        self._described: dict[str, Scalar] = {}
        if attached is not None:
            self._described.update(attached.described)
        self._owner = clock.new_id()
        self._killed: int | None = None
        self._lease = anyio.Lock()
        self.workdir = attached.workdir if attached is not None else "/"
        self.detached = False
        """It was left to whoever has its handle."""

    @property
    def id(self) -> str:
        """Of the sandbox, as the service calls it."""
        return self._sandbox.id

    async def prepare(self, spec: EnvironmentSpec, *, template: str, workspace: str) -> None:
        """What a new sandbox needs: the repository of this machine, or that the template's is there.

        Raises:
            EnvError: it could not be brought, or there is no such folder (the task's fault).
        """
        template_id, backend = await self._sandbox.about()
        self._described = {
            "environment": "e2b",
            "environment_backend": backend,
            "environment_image": template,
            "environment_template": template_id,
        }
        where = workspace or (await self._look("pwd", 0)).stdout.decode("utf-8", "replace").strip()
        if spec.repository is not None:
            self.workdir = f"{where}/{spec.repository.name}"
            await self.upload(spec.repository, self.workdir)
            return
        self.workdir = spec.workdir or where
        found = await self._look('[ -d "$1" ]', 0, 1)
        if found.exit_code != 0:
            why = f"no folder {self.workdir!r} in the template {template!r}"
            raise EnvError("workdir", why, fault="task")

    async def _look(self, script: str, *codes: int) -> CommandOutput:
        """What a script of builtins says, with the work folder as its argument."""
        words = ["/bin/sh", "-c", script, "look", self.workdir]
        done = await self.execute(words, timeout_s=_LOOK_S)
        if done.exit_code not in codes:
            how = f"exit code {done.exit_code}" if not done.timed_out else f"no end within {_LOOK_S:g} s"
            evidence = f"{how}: {done.stderr.decode('utf-8', 'replace')[-2000:]}"
            raise EnvError("start", f"`{script}` failed in the sandbox", retryable=True, evidence=evidence)
        return done

    async def take_over(self) -> None:
        """Of a sandbox that was attached to: whoever had it before is `fenced` from now on."""
        await self._sandbox.write(OWNER_FILE, f"{self._owner}\n".encode())

    async def detach(self, lease_s: int) -> E2bHandle:
        """Leave the sandbox as it is, for whoever attaches within `lease_s`. This object is of no use then.

        Raises:
            EnvError: the service did not take the lease; the sandbox is still this object's.
        """
        async with self._lease:
            await self._sandbox.renew(lease_s)
            self.detached = True
        return E2bHandle(
            api_url=self._api_url,
            sandbox_id=self._sandbox.id,
            workdir=self.workdir,
            purpose=self._purpose,
            described=self._described,
        )

    async def renew(self, lease_s: int) -> None:
        """Extend the lease; of a sandbox that was left, it is no longer this object's to extend."""
        async with self._lease:
            if not self.detached:
                await self._sandbox.renew(lease_s)

    async def stop(self) -> None:
        """End the sandbox, unless somebody else has attached to it.

        Raises:
            EnvError: somebody has, or the service did not confirm its end.
        """
        if self._attached:
            try:
                await self.execute(["true"], timeout_s=_LOOK_S)
            except EnvError as error:
                if error.cause == "fenced":
                    raise
        await self._sandbox.kill()

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return self._described

    async def execute(
        self, command: Sequence[str], *, timeout_s: float, cwd: str | None = None
    ) -> CommandOutput:
        """Run an argument vector; see `Environment.execute`. Without `cwd` it runs in the user's home.

        Raises:
            EnvError: also when anything in a grader's sandbox was killed for its memory, and when somebody
                else has attached to the sandbox (`fenced`).
        """
        run, timed_out = await self._run(command, timeout_s, cwd or ".")
        stdout, _ = run.stream("stdout")
        stderr, words = run.stream("stderr")
        if timed_out:
            return CommandOutput(exit_code=None, stdout=stdout, stderr=stderr, timed_out=True)
        if run.error is not None:
            raise run.error
        shown = " ".join(command)[:200]
        if not words or not (words[0].isdigit() or words[0] in ("fenced", "cwd")):
            raise EnvError(
                "execute",
                f"no exit code for {shown!r}",
                retryable=True,
                evidence=stderr.decode("utf-8", "replace")[-2000:],
            )
        if words[0] == "fenced":
            raise EnvError("fenced", "somebody else has attached to this sandbox")
        if words[0] == "cwd":
            raise EnvError("execute", f"no such folder for {shown!r}", fault="agent")
        if self._purpose == "grader":
            self._refuse_oom(words[1:])
        return CommandOutput(exit_code=int(words[0]), stdout=stdout, stderr=stderr)

    def _refuse_oom(self, words: list[str]) -> None:
        """The kernel of the sandbox counts, as the control groups of a container do (see `memory`)."""
        killed = int(words[0]) if words and words[0].isdigit() else None
        if killed is None or self._killed is None:
            self._killed = killed
        elif killed > self._killed:
            raise EnvError(
                "oom",
                "a process of the grader was killed for its memory",
                fault="task",
                evidence=f"oom_kill in /proc/vmstat went from {self._killed} to {killed}",
            )

    async def _run(self, command: Sequence[str], timeout_s: float, folder: str) -> tuple[Run, bool]:
        """What a command has printed, and whether its time was up before it ended."""
        if self.detached:
            raise EnvError("detached", "this sandbox was left to whoever has its handle")
        mark, secret = self._clock.new_id(), self._clock.new_id()
        run = Run(secret)
        # Where nobody can have attached, the file is whatever the agent wrote.
        owner = self._owner if self._attached else ""
        words = wrapped(secret, command, owner=owner, watch=self._purpose == "grader", folder=folder)
        ended, timed_out = True, False
        async with anyio.create_task_group() as group:
            group.start_soon(self._read, run, words, mark, timeout_s + _OVERRUN_S)
            try:
                with anyio.move_on_after(timeout_s):
                    await run.done.wait()
                timed_out = not run.done.is_set()
            finally:
                if not run.done.is_set():
                    with anyio.CancelScope(shield=True):
                        ended = await self._kill(mark)
            with anyio.move_on_after(_GRACE_S if timed_out else _END_S):
                await run.over.wait()
            group.cancel_scope.cancel()
        if timed_out and not (ended and run.began):
            raise EnvError(
                "unreachable",
                "a command's time was up, and the sandbox did not answer",
                retryable=True,
                evidence=str(run.error or f"began: {run.began}, ended: {ended}, after {timeout_s:g} s"),
            )
        return run, timed_out

    async def _read(self, run: Run, words: Sequence[str], mark: str, timeout_s: float) -> None:
        error = None
        try:
            await self._sandbox.run(
                words, env={MARK: mark}, timeout_s=timeout_s, take=run.take, begin=run.begin
            )
        except EnvError as caught:
            error = caught
        # Not where this was cancelled: the command is not over then.
        run.end(error)

    async def _kill(self, mark: str) -> bool:
        """End what a command started, also what it put into the background or a session of its own.

        Returns whether the sandbox did so.
        """
        words = ["/bin/sh", "-c", KILL, "kill", MARK, mark]
        with anyio.move_on_after(_KILL_S):
            try:
                await self._sandbox.run(words, env={}, timeout_s=_KILL_S, take=lambda _output, _data: None)
            except EnvError as error:
                logger.warning("a command in sandbox %s may still run: %s", self._sandbox.id, error)
                return False
            return True
        logger.warning("a command in sandbox %s may still run", self._sandbox.id)
        return False

    async def read(self, path: str) -> bytes:
        """A file's bytes."""
        return await self._sandbox.read(path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file's bytes; its folders are made."""
        await self._sandbox.write(path, data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a folder into the sandbox."""
        path = PurePosixPath(target)
        archive = self._temporary()
        with tempfile.TemporaryFile() as spool:
            pack = partial(pack_tree, source, spool, name=path.name, owner=(0, 0))
            await anyio.to_thread.run_sync(pack)
            spool.seek(0)
            await self._sandbox.write_from(archive, spool, _TREE_S)
        words = ["/bin/sh", "-c", _UNPACK, "upload", archive, str(path.parent)]
        done = await self.execute(words, timeout_s=_TREE_S)
        if done.exit_code != 0:
            evidence = done.stderr.decode("utf-8", "replace")[-2000:]
            raise EnvError("upload", f"{source} to {target}", retryable=True, evidence=evidence)

    async def download(self, source: str, target: Path) -> None:
        """Copy a folder out of the sandbox."""
        path = PurePosixPath(source)
        archive = self._temporary()
        words = ["/bin/sh", "-c", _PACK, "download", archive, str(path.parent), path.name]
        try:
            done = await self.execute(words, timeout_s=_TREE_S)
            if done.exit_code != 0:
                evidence = done.stderr.decode("utf-8", "replace")[-2000:]
                raise EnvError("download", source, fault="agent", evidence=evidence)
            with tempfile.TemporaryFile() as spool:
                await self._sandbox.read_into(archive, spool, _TREE_S)
                spool.seek(0)
                await anyio.to_thread.run_sync(unpack_tree, spool, target)
        finally:
            with anyio.CancelScope(shield=True):
                await self.execute(["/bin/sh", "-c", _REMOVE, "download", archive], timeout_s=_LOOK_S)

    def _temporary(self) -> str:
        return f"/tmp/.agent-flow-{self._clock.new_id()[:16]}.tar"  # in the sandbox
