"""Sandboxes of sandbox-k8s as environments: what `local` and `k8s` share. Its errors become `EnvError`."""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from sandbox_k8s import (
    ClusterError,
    FileError,
    PodPlace,
    Sandbox,
    SandboxClient,
    SandboxError,
    SandboxLostError,
    SandboxSpec,
    SandboxStartError,
)
from token_tracking.sample import Scalar

from agent_flow.environments.creation import creating
from agent_flow.environments.memory import OOM_COMMAND, refuse_oom
from agent_flow.environments.stops import Stops
from agent_flow.errors import EnvError
from agent_flow.protocols import CommandOutput, EnvironmentSpec

logger = logging.getLogger(__name__)

_STOP_S = 60.0
_LOOK_S = 60.0
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_MACHINE = _NO_SPACE | {errno.EIO, errno.ENOMEM, errno.ENFILE, errno.EMFILE}
"""Why a file cannot be read or written although nobody named a wrong one."""


class SandboxEnvironment:
    """A sandbox with the task's repository in it, seen as the flow's environment."""

    def __init__(self, sandbox: Sandbox, spec: EnvironmentSpec, *, name: str, image: str = "") -> None:
        self._sandbox = sandbox
        self._name = name
        self._image = image
        self._watch_memory = spec.purpose == "grader" and isinstance(sandbox.handle.place, PodPlace)
        if spec.repository is not None:
            self.workdir = f"{sandbox.workdir}/{spec.repository.name}"
        else:
            self.workdir = spec.workdir or sandbox.workdir

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        described: dict[str, Scalar] = {
            "environment": self._name,
            "environment_backend": self._sandbox.backend_name,
        }
        place = self._sandbox.handle.place
        if isinstance(place, PodPlace):
            described["environment_image"] = self._image
            described["environment_image_digest"] = place.image_digest
        return described

    async def execute(
        self, command: Sequence[str], *, timeout_s: float, cwd: str | None = None
    ) -> CommandOutput:
        """Run an argument vector; see `Environment.execute`.

        Raises:
            EnvError: also when a process of a grader's pod was killed for its memory: what the tests say then
                is no verdict on the patch.
        """
        try:
            done = await self._sandbox.execute(list(command), timeout_s=timeout_s, cwd=cwd)
        except SandboxError as error:
            raise failure("execute", error) from error
        if done.infra_failed or (done.exit_code is None and not done.timed_out):
            evidence = done.infra_error or done.cancelled
            raise EnvError(
                "execute", f"no exit code for {' '.join(command)[:200]!r}", retryable=True, evidence=evidence
            )
        if self._watch_memory:
            try:
                seen = await self._sandbox.execute(list(OOM_COMMAND), timeout_s=_LOOK_S)
            except SandboxError as error:
                raise failure("execute", error) from error
            refuse_oom(seen.stdout)
        return CommandOutput(
            exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr, timed_out=done.timed_out
        )

    async def read(self, path: str) -> bytes:
        """A file's bytes."""
        try:
            return await self._sandbox.read(path)
        except SandboxError as error:
            raise failure("read", error) from error

    async def write(self, path: str, data: bytes) -> None:
        """Write a file's bytes."""
        try:
            await self._sandbox.write(path, data)
        except SandboxError as error:
            raise failure("write", error) from error

    async def upload(self, source: Path, target: str) -> None:
        """Copy a folder into the sandbox."""
        try:
            await self._sandbox.upload(source, target)
        except SandboxError as error:
            raise failure("upload", error) from error

    async def download(self, source: str, target: Path) -> None:
        """Copy a folder out of the sandbox."""
        try:
            await self._sandbox.download(source, target)
        except SandboxError as error:
            raise failure("download", error) from error


@asynccontextmanager
async def started(
    client: SandboxClient,
    sandbox: SandboxSpec,
    spec: EnvironmentSpec,
    stops: Stops,
    *,
    name: str,
    image: str = "",
) -> AsyncGenerator[SandboxEnvironment]:
    """A sandbox with the repository in it; stopped once at the end of the block, cancelled or not.

    Raises:
        EnvCreateError: it did not come up, or there is no such folder in its image.
    """
    with creating():
        try:
            running = await client.start(sandbox)
        except SandboxError as error:
            raise failure("start", error) from error
    try:
        environment = SandboxEnvironment(running, spec, name=name, image=image)
        with creating():
            if spec.repository is not None:
                await environment.upload(spec.repository, environment.workdir)
            else:
                await check_workdir(environment, image)
        yield environment
    finally:
        await _stop(running, stops)


async def check_workdir(environment: SandboxEnvironment, image: str) -> None:
    """Whether the image has the folder that the task names."""
    found = await environment.execute(["test", "-d", environment.workdir], timeout_s=_LOOK_S)
    if found.exit_code != 0:
        raise EnvError("workdir", f"no folder {environment.workdir!r} in the image {image!r}", fault="task")


async def _stop(sandbox: Sandbox, stops: Stops) -> None:
    with anyio.move_on_after(_STOP_S, shield=True) as limit:
        try:
            await sandbox.stop()
        except SandboxError as error:
            # It ends by itself with its lease; a finished rollout must not be lost over it.
            stops.failed += 1
            logger.warning("sandbox %s could not be stopped: %s", sandbox.id, error)
        else:
            stops.done += 1
    if limit.cancelled_caught:
        stops.failed += 1
        logger.warning("sandbox %s did not confirm its end within %g s", sandbox.id, _STOP_S)


def failure(cause: str, error: SandboxError) -> EnvError:
    """An error of sandbox-k8s as ours: whose fault it is, and what was seen, is kept.

    A pod's diagnosis names the cause (`image_not_found`, `oom_at_run`), so that counters tell them apart.
    """
    diagnosed = (
        error.diagnosis if isinstance(error, (SandboxStartError, SandboxLostError, ClusterError)) else None
    )
    named = cause if diagnosed is None or diagnosed.failure is None else diagnosed.failure
    by_machine = isinstance(error, FileError) and error.errno in _MACHINE
    if isinstance(error, FileError) and error.errno in _NO_SPACE:
        named = "no_space"
    return EnvError(
        named,
        str(error.args[0]),
        fault="infra" if by_machine else error.fault,
        retryable=by_machine or error.retryable,
        evidence=error.evidence,
    )
