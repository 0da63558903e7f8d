"""`docker`: one container per rollout and one per grading, through the docker or podman command line."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Literal

import anyio
import msgspec
from token_tracking.sample import Scalar

from agent_flow.config import Count
from agent_flow.environments.container import ContainerEnvironment, ContainerProgram
from agent_flow.environments.creation import creating
from agent_flow.environments.identity import GIT_IDENTITY
from agent_flow.environments.stops import Stops
from agent_flow.errors import ConfigError, EnvCreateError, EnvError, Fault
from agent_flow.protocols import Environment, EnvironmentSpec, ProviderContext

logger = logging.getLogger(__name__)

_LOOK_S = 20.0
_STOP_S = 60.0
_LABEL = "agent-flow.run"
_KEEP = 'trap "exit 0" TERM; sleep "$1" & wait'

_CAUSES: tuple[tuple[str, Fault, bool, re.Pattern[str]], ...] = (
    ("image_name_invalid", "image", False, re.compile("invalid reference format|repository name must", re.I)),
    (
        "image_auth",
        "image",
        False,
        re.compile("access denied|unauthorized|authentication required|denied:", re.I),
    ),
    (
        "image_not_found",
        "image",
        False,
        re.compile(
            "manifest unknown|no such image|image not known|not found: manifest|name unknown"
            "|repository does not exist|short-name .* did not resolve|image not found"
            "|manifest for .* not found",
            re.I,
        ),
    ),
    ("image_architecture", "image", False, re.compile("exec format error|no matching manifest", re.I)),
    ("no_shell", "image", False, re.compile(r"/bin/sh.*(?:no such file|not found)", re.I | re.S)),
    ("no_space", "infra", True, re.compile("no space left|disk quota", re.I)),
)
"""What the programs print when a container does not start; neither has a code for it."""


class DockerEnvironments:
    """Starts containers: the task's image, or `image` where it names none. The images need `sh`."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[environment]` with `provider = "docker"`."""

        program: Literal["", "docker", "podman"] = ""
        """Empty: the first of them that answers. `CONTAINERS_CONF`, `DOCKER_HOST` and the like are heeded."""
        image: str = ""
        """For tasks that name none."""
        pull: Literal["missing", "always", "never"] = "missing"
        """When an image is fetched."""
        cpus: Annotated[float, msgspec.Meta(ge=0)] = 0.0
        """Cores of a container. 0: no limit."""
        memory_mib: Annotated[int, msgspec.Meta(ge=0)] = 0
        """Its memory; a grader's process that is killed for it gives no reward, not 0. 0: no limit."""
        pids_limit: Annotated[int, msgspec.Meta(ge=0)] = 4096
        """Processes at once. 0: no limit."""
        network: bool = False
        """Whether containers may reach the network."""
        workspace: str = "/workspace"
        """Folder in the container for repositories that come from this machine."""
        user: str = ""
        """User in the place of the image's."""
        platform: str = ""
        """Such as `linux/amd64`. Empty: this machine's."""
        env: Mapping[str, str] = {}
        """Of everything that runs in a container, on top of the image's own. No secrets: a model sees it."""
        run_arguments: tuple[str, ...] = ()
        """More words for `docker run`, before the image."""
        start_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
        """Of one start, the image's pull included."""
        max_lifetime_s: Count = 14400
        """A container ends by itself after so long, also when its worker was killed."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._config = config
        self._clock = context.clock
        self._where = f"{context.file.path} [environment]"
        self.run_id = context.clock.new_id()
        self._program: ContainerProgram | None = None
        self._version = ""
        self.stops = Stops()

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """Find a program that works; at the end, remove the run's containers that still live.

        Raises:
            ConfigError: there is none.
        """
        program = await self._find()
        self._program = program
        try:
            yield
        finally:
            self._program = None
            with anyio.CancelScope(shield=True):
                await self._sweep(program)

    async def _find(self) -> ContainerProgram:
        names = [self._config.program] if self._config.program else ["docker", "podman"]
        why: list[str] = []
        for name in names:
            program = ContainerProgram(name)
            try:
                # Docker's client answers `version` without its daemon, and `ps` does not.
                asked = await program.run("ps", "-q", timeout_s=_LOOK_S)
                told = await program.run("version", "--format", "{{.Client.Version}}", timeout_s=_LOOK_S)
            except EnvError as error:
                why.append(error.message)
                continue
            if asked.code == 0 and told.code == 0:
                self._version = told.stdout.decode("utf-8", "replace").strip()
                return program
            why.append(f"{name}: {asked.text or told.text}")
        raise ConfigError(
            f"no container program works: {'; '.join(why)}",
            where=self._where,
            fix="start docker's daemon, or install podman",
        )

    async def _sweep(self, program: ContainerProgram) -> None:
        try:
            listed = await program.run("ps", "-aq", "--filter", f"label={_LABEL}={self.run_id}")
            for container in listed.stdout.decode().split():
                await program.run("rm", "-f", "-v", container)
        except EnvError as error:
            logger.warning("containers may be left: %s", error)

    def open(self, spec: EnvironmentSpec) -> AbstractAsyncContextManager[Environment]:
        """A fresh container; with a working copy of the repository unless that is in its image."""
        if self._program is None:
            raise EnvCreateError("client", "open was called outside session")
        image = spec.image or self._config.image
        if not image:
            raise EnvCreateError(
                "image", "the task names no image, and environment.image is empty", fault="task"
            )
        return self._open(self._program, spec, image)

    @asynccontextmanager
    async def _open(
        self, program: ContainerProgram, spec: EnvironmentSpec, image: str
    ) -> AsyncGenerator[Environment]:
        name = f"agent-flow-{self._clock.new_id()[:16]}"
        try:
            with creating():
                opened = await self._create(program, spec, image, name)
            yield opened
        finally:
            with anyio.CancelScope(shield=True):
                await self._stop(program, name)

    async def _create(
        self, program: ContainerProgram, spec: EnvironmentSpec, image: str, name: str
    ) -> ContainerEnvironment:
        await self._start(program, name, image)
        described = await self._describe(program, name, image)
        repository = spec.repository
        workdir = f"{self._config.workspace}/{repository.name}" if repository else spec.workdir or "/"
        opened = ContainerEnvironment(
            program,
            name,
            self._clock,
            workdir=workdir,
            described=described,
            watch_memory=spec.purpose == "grader",
        )
        if repository is not None:
            await opened.upload(repository, workdir)
        else:
            found = await opened.execute(["test", "-d", workdir], timeout_s=_LOOK_S)
            if found.exit_code != 0:
                raise EnvError("workdir", f"no folder {workdir!r} in the image {image!r}", fault="task")
        return opened

    async def _start(self, program: ContainerProgram, name: str, image: str) -> None:
        config = self._config
        words = ["run", "--detach", "--rm", "--name", name, "--label", f"{_LABEL}={self.run_id}"]
        words += ["--pull", config.pull, "--entrypoint", "/bin/sh"]
        words += ["--network", "none"] if not config.network else []
        words += ["--cpus", str(config.cpus)] if config.cpus else []
        words += ["--memory", f"{config.memory_mib}m"] if config.memory_mib else []
        words += ["--pids-limit", str(config.pids_limit)] if config.pids_limit else []
        words += ["--user", config.user] if config.user else []
        words += ["--platform", config.platform] if config.platform else []
        for key, value in {**GIT_IDENTITY, **config.env}.items():
            words += ["--env", f"{key}={value}"]
        words += [*config.run_arguments, image, "-c", _KEEP, "agent-flow", str(config.max_lifetime_s)]
        done = await program.run(*words, timeout_s=config.start_timeout_s)
        if done.code != 0:
            raise start_failure(image, done.text)

    async def _describe(self, program: ContainerProgram, name: str, image: str) -> dict[str, Scalar]:
        looked = await program.run("inspect", "--format", "{{.Image}}", name)
        digest = looked.stdout.decode("ascii", "replace").strip() if looked.code == 0 else ""
        return {
            "environment": "docker",
            "environment_backend": f"{program.name} {self._version}",
            "environment_image": image,
            "environment_image_digest": f"sha256:{digest}"
            if re.fullmatch("[0-9a-f]{64}", digest)
            else digest,
        }

    async def _stop(self, program: ContainerProgram, name: str) -> None:
        """Once, whatever happened before; a finished rollout must not be lost over a failure of it."""
        try:
            done = await program.run("rm", "-f", "-v", name, timeout_s=_STOP_S)
        except EnvError as error:
            self.stops.failed += 1
            logger.warning("container %s could not be removed: %s", name, error)
            return
        if done.code == 0 or "no such container" in done.text.lower():
            self.stops.done += 1
        else:
            self.stops.failed += 1
            logger.warning("container %s could not be removed: %s", name, done.text)


def start_failure(image: str, said: str) -> EnvError:
    """Why a container did not start, from what the program printed."""
    for cause, fault, retryable, pattern in _CAUSES:
        if pattern.search(said):
            message = f"the image {image!r} cannot be started"
            return EnvError(cause, message, fault=fault, retryable=retryable, evidence=said)
    return EnvError("start", f"no container of {image!r}", retryable=True, evidence=said)
