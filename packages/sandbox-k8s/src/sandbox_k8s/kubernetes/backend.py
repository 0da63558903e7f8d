"""The back end of a cluster: a pod and a launcher per sandbox, an owner in an annotation."""

import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from sandbox_k8s.backend import RecordTime, Running
from sandbox_k8s.clock import Clock
from sandbox_k8s.errors import (
    AccessError,
    ClusterError,
    ConfigError,
    SandboxError,
    SandboxLostError,
    SandboxStartError,
)
from sandbox_k8s.handle import PodPlace, SandboxHandle
from sandbox_k8s.routes import Route
from sandbox_k8s.run_key import RunKey
from sandbox_k8s.spec import SandboxSpec
from sandbox_k8s.stats import ClientStats, ReapedSandbox, SandboxInfo
from sandbox_k8s.supervise import supervised
from sandbox_k8s.transport import LauncherClient

from . import records
from .access import ApiAccess
from .api import PodApi
from .config import KubernetesConfig
from .diagnosis import Diagnosis
from .forward import PortForwards
from .gate import StartGate
from .manifest import image_of, pod_manifest, pod_name, workdir_of
from .owners import Owners
from .paths import DataPaths
from .prefetch import Prefetch, PrefetchedImage, Progress
from .reaper import reap
from .starting import create_within_quota, until_failed, until_ready, why_lost
from .streams import ApiStreams
from .watch import FollowedPod, PodWatch

_log = logging.getLogger("sandbox_k8s")
_CLEAN_UP_S = 60.0
_ANSWER_S = 30.0


class KubernetesBackend:
    """Sandboxes in the pods of one run. See `Backend` for the methods."""

    def __init__(self, config: KubernetesConfig, clock: Clock, stats: ClientStats) -> None:
        self.config = config
        self._clock = clock
        self._stats = stats

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Read the run key and the cluster's configuration; nothing is asked of the cluster yet.

        Raises:
            ConfigError: The run key file is not safe to use, or there is no usable kubeconfig.
            BackendUnavailableError: The client library is not installed.
        """
        self.key = RunKey(self.config.resolved_run_key_file())
        access = await anyio.to_thread.run_sync(ApiAccess, self.config)
        self.api = PodApi(access, self.config, self._clock)
        streams = ApiStreams(access)
        forwards = PortForwards(streams, self.config.namespace)
        self.watch = PodWatch(self.api, streams, self.config, self._stats)
        self._owners = Owners(self.api, self.watch, self.config, self._clock)
        self._paths = DataPaths(self.config, access, forwards, self._stats)
        self._forwards = forwards
        self._gate = StartGate(self.config, self._stats)
        self.api.on_create = self._gate.heard
        self.api.on_repeat = self._repeated
        async with AsyncExitStack() as open_ones:
            open_ones.callback(self.api.close)
            await open_ones.enter_async_context(streams.opened())
            await open_ones.enter_async_context(self._paths.opened())
            await open_ones.enter_async_context(forwards.opened())
            tasks = await open_ones.enter_async_context(anyio.create_task_group())
            # Stopping sandboxes needs the watch, also when the client's block was cancelled.
            watching = anyio.CancelScope(shield=True)
            tasks.start_soon(self._watch_in, watching)
            tasks.start_soon(supervised, "the pacing of starts", self._gate.run, self._stats)
            fresh = partial(access.keep_fresh, self._stats)
            tasks.start_soon(supervised, "reading the credentials", fresh, self._stats)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
                watching.cancel()

    def _repeated(self) -> None:
        self._stats.api_repeats += 1

    async def _watch_in(self, scope: anyio.CancelScope) -> None:
        with scope:
            await self.watch.run()

    async def start(self, spec: SandboxSpec) -> Running:
        """Create a pod, wait until it is ready and its launcher answers, and become its first owner."""
        async with self._gate.turn(image_of(spec, self.config)) as turn:
            return await self._start(spec, partial(self._gate.suffers, turn))

    async def _start(self, spec: SandboxSpec, suffers: Callable[[Diagnosis], None]) -> Running:
        sandbox_id = self._clock.new_id()[:16]
        request = self._clock.new_id()
        pod = self._manifest(spec, sandbox_id, request)
        followed = self.watch.follow(pod_name(sandbox_id))
        launcher: LauncherClient | None = None
        try:
            followed.created(await create_within_quota(self.api, pod, self.config))
            await until_ready(followed, self.config, suffers)
            launcher = await self._first_connection(followed)
            await launcher.call("/sbx/fence", {"epoch": 1})
            launcher.explain = partial(why_lost, followed)
            held = records.read_record(followed.pod or {}, self.config.cluster)
        except ClusterError as problem:
            await self._undo_start(followed.name, request, launcher)
            raise SandboxStartError(
                f"sandbox {sandbox_id}: {problem.args[0]}",
                evidence=problem.evidence,
                diagnosis=problem.diagnosis,
            ) from problem
        except BaseException:
            await self._undo_start(followed.name, request, launcher)
            raise
        # Not the record's epoch: whoever attaches at this very moment may have won the next one already.
        held = msgspec.structs.replace(held, handle=msgspec.structs.replace(held.handle, epoch=1))
        self._owners.hold(held)
        return Running(held.handle, launcher)

    async def guest(self, handle: SandboxHandle) -> Running:
        """Connect beside the owner."""
        place = self._place(handle)
        pod, held = await self._owners.read(place, handle.sandbox_id)
        return Running(held.handle, await self._connect(place.pod, pod, None))

    async def take(self, handle: SandboxHandle) -> Running:
        """Win the next epoch in the pod's annotations, then tell the launcher."""
        place = self._place(handle)
        pod, held = await self._owners.win(place, handle.sandbox_id)
        launcher = await self._connect(place.pod, pod, held.handle.epoch)
        await launcher.take_over(held.handle.lease_s)
        followed = self.watch.follow(place.pod)
        followed.created(pod)
        launcher.explain = partial(why_lost, followed)
        self._owners.hold(held)
        return Running(held.handle, launcher)

    def record(self, handle: SandboxHandle) -> RecordTime:
        """How much is left of the annotation's time."""
        return self._owners.record(handle)

    async def renewed(self, handle: SandboxHandle) -> None:
        """Push the annotation's time on, much less often than the launcher's lease."""
        await self._owners.renew(handle)

    async def detached(self, handle: SandboxHandle, expires_ns: int) -> None:
        """Record it, unless somebody else attached meanwhile."""
        await self._owners.leave(handle, expires_ns)

    async def stop(self, handle: SandboxHandle) -> None:
        """Delete the pod and wait until the API server has it no more."""
        await self._owners.delete(handle)

    def released(self, handle: SandboxHandle) -> None:
        """Follow it no more."""
        name = pod_name(handle.sandbox_id)
        self.watch.unfollow(name)
        self._forwards.close(name)
        self._owners.let_go(handle)

    async def list(self) -> tuple[SandboxInfo, ...]:
        """All sandboxes of this run."""
        found: list[SandboxInfo] = []
        pods = (await self.api.list(records.selector(self.config.run))).items
        for pod in filter(records.is_sandbox, pods):
            try:
                held = records.read_record(pod, self.config.cluster)
            except ConfigError as problem:
                _log.warning("%s; left out", problem)
                continue
            state = "dead" if held.ended else "starting" if held.starting else held.state
            expires_ns = held.expires_ns if state == "detached" else None
            found.append(SandboxInfo(handle=held.handle, state=state, expires_ns=expires_ns))
        return tuple(sorted(found, key=lambda info: info.handle.sandbox_id))

    async def reap(self, *, dry_run: bool) -> tuple[ReapedSandbox, ...]:
        """Delete pods that ended or outlived their annotation."""
        return await reap(self.api, self.config, self._clock.now_ns(), dry_run=dry_run)

    async def prefetch(
        self,
        images: Sequence[str],
        nodes: Sequence[str] | Mapping[str, str] | None,
        progress: Progress | None,
    ) -> tuple[PrefetchedImage, ...]:
        """Bring images to nodes, with pods that a reaper takes when this process is killed."""

        def annotations(request: str) -> dict[str, str]:
            now_ns = self._clock.now_ns()
            record = records.Record(
                key_id=self.key.key_id, workdir="/", lease_s=0, detached_lease_s=0, created_ns=now_ns
            )
            expires_ns = now_ns + int(self.config.start_timeout_s * 1e9)
            return records.annotations(record, request=request, epoch=0, expires_ns=expires_ns)

        return await Prefetch(self.api, self.watch, self.config, self._clock, annotations, progress).run(
            images, nodes
        )

    def token(self, pod: str) -> str:
        """The token of a pod's launcher."""
        return self.key.token("kubernetes", self.config.cluster, self.config.namespace, pod)

    def _manifest(self, spec: SandboxSpec, sandbox_id: str, request: str) -> dict[str, Any]:
        now_ns = self._clock.now_ns()
        record = records.Record(
            key_id=self.key.key_id,
            workdir=workdir_of(spec),
            lease_s=spec.lease_s,
            detached_lease_s=spec.detached_lease_s,
            created_ns=now_ns,
            labels=spec.labels,
        )
        lasts_s = records.lasts_s(self.config.record_s, spec.lease_s)
        expires_ns = now_ns + int((self.config.start_timeout_s + lasts_s) * 1e9)
        token = self.token(pod_name(sandbox_id))
        return pod_manifest(
            spec,
            self.config,
            sandbox_id=sandbox_id,
            token_hash=hashlib.sha256(token.encode()).hexdigest(),
            annotations=records.annotations(record, request=request, epoch=1, expires_ns=expires_ns),
        )

    async def _first_connection(self, followed: FollowedPod) -> LauncherClient:
        """Connect to a launcher that may still be coming up, or be on its way down.

        Raises:
            SandboxStartError: Its pod failed, or no way leads there.
            SandboxError: The way there is closed to us.
        """
        launcher: LauncherClient | None = None
        silent: SandboxError | None = None
        failed: SandboxStartError | None = None

        async def look() -> None:
            nonlocal failed
            failed = await until_failed(followed)
            tasks.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(look)
                try:
                    launcher = await self._connect(followed.name, followed.pod or {}, 1)
                except SandboxError as problem:
                    silent = problem  # raised below: the group would wrap it
                tasks.cancel_scope.cancel()
        except BaseException:
            if launcher is not None:  # we were cancelled between its answer and here
                with anyio.CancelScope(shield=True):
                    await launcher.close()
            raise
        if launcher is not None:
            return launcher
        if failed is None and silent is not None and not isinstance(silent, SandboxLostError):
            raise silent
        raise failed or SandboxStartError(str(silent), evidence="" if silent is None else silent.evidence)

    async def _connect(self, name: str, pod: dict[str, Any], epoch: int | None) -> LauncherClient:
        return await self._paths.connect(pod, self._client_maker(name, epoch), _ANSWER_S)

    def _client_maker(self, name: str, epoch: int | None) -> Callable[[Route], LauncherClient]:
        def make(route: Route) -> LauncherClient:
            where = f"sandbox {name.removeprefix('sbx-')} in pod {self.config.namespace}/{name}"
            return LauncherClient(
                route, self.token(name), epoch, margin_s=self.config.answer_margin_s, where=where
            )

        return make

    def _place(self, handle: SandboxHandle) -> PodPlace:
        place = handle.place
        if not isinstance(place, PodPlace):
            raise ConfigError(f"sandbox {handle.sandbox_id} is on a machine; use SandboxClient.local()")
        here = (self.config.cluster, self.config.namespace)
        if (place.cluster, place.namespace) != here:
            raise ConfigError(
                f"sandbox {handle.sandbox_id} lives in cluster {place.cluster!r}, namespace "
                f"{place.namespace!r}; this client is for {here}: see KubernetesConfig.cluster and .namespace"
            )
        if handle.key_id != self.key.key_id:
            raise AccessError(
                f"sandbox {handle.sandbox_id} was made with run key {handle.key_id}, "
                f"this client has {self.key.key_id}"
            )
        return place

    async def _undo_start(self, name: str, request: str, launcher: LauncherClient | None) -> None:
        """Delete the pod, also one whose creation was never answered."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLEAN_UP_S) as cleaning:
            if launcher is not None:
                await launcher.close()
            self._forwards.close(name)
            followed = self.watch.find(name)
            self.watch.unfollow(name)
            try:
                await self._owners.undo(name, request, None if followed is None else followed.pod)
            except ClusterError as problem:
                self._stats.stop_failures += 1
                _log.warning("pod %s is left to the reaper and its own lease: %s", name, problem)
        if cleaning.cancelled_caught:
            self._stats.stop_failures += 1
            _log.warning("pod %s is left to the reaper and its own lease", name)
