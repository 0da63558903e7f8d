"""The back end of this machine: a folder, a keeper and a launcher per sandbox, an owner in a locked file."""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.to_thread
import msgspec

from . import bubblewrap
from .backend import Running
from .clock import Clock
from .config import LocalConfig
from .errors import AccessError, BackendUnavailableError, ConfigError, FencedError, SandboxNotFoundError
from .handle import Isolation, LocalPlace, SandboxHandle
from .launcher import archive
from .launcher.keeper import SOCKET
from .local import PYTHON_PREFIX, KeeperProcess, ask_to_stop, order_for, start_keeper
from .routes import UnixRoute
from .run_key import RunKey
from .spec import SandboxSpec
from .stats import ClientStats, ReapedSandbox, SandboxInfo
from .store import SandboxState, Store
from .sweep import sweep
from .transport import LauncherClient

if TYPE_CHECKING:
    from .kubernetes.prefetch import PrefetchedImage, Progress

_log = logging.getLogger("sandbox_k8s")
_CLEAN_UP_S = 20.0


class LocalBackend:
    """Sandboxes below one root folder. See `Backend` for the methods."""

    def __init__(self, config: LocalConfig, clock: Clock, stats: ClientStats) -> None:
        self.config = config
        self._clock = clock
        self._stats = stats
        self._keepers: dict[str, KeeperProcess] = {}
        self._left_running: list[KeeperProcess] = []
        self._claimed: dict[str, int] = {}
        """Epochs that were used up here, and that the launcher was not heard to confirm."""

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Open the root folder and choose the isolation.

        Raises:
            ConfigError: The root or the run key file is not safe to use.
            BackendUnavailableError: bubblewrap was insisted on and does not work.
        """
        root = self.config.resolved_root()
        self.store = Store(root)
        self.key = RunKey(self.config.run_key_file or root / "run.key")
        self._isolation: Isolation = await self._choose_isolation()
        self._starts = anyio.CapacityLimiter(self.config.start_concurrency_max)
        yield

    async def start(self, spec: SandboxSpec) -> Running:
        """Start a sandbox: its keeper starts the launcher, whose first fence makes this client the owner."""
        async with self._starts:
            return await self._start(spec)

    async def _start(self, spec: SandboxSpec) -> Running:
        self._collect_keepers()
        _refuse_what_only_pods_have(spec)
        bubblewrap.check_read_only(spec.read_only_paths, self.store.root)
        sandbox_id = self._clock.new_id()[:16]
        folder = self.store.create(sandbox_id)
        keeper: KeeperProcess | None = None
        launcher: LauncherClient | None = None
        try:
            # The lock keeps reap away from a sandbox that has no keeper yet.
            with self.store.locked(sandbox_id):
                order = order_for(
                    folder,
                    self._isolation,
                    spec,
                    sandbox_id=sandbox_id,
                    token=self._token(sandbox_id),
                    start_timeout_s=self.config.start_timeout_s,
                )
                keeper = start_keeper(order)
                await keeper.ready(folder, self.config.start_timeout_s + 1.0)
                handle = self._handle(sandbox_id, spec, order["settings"]["workdir"])
                launcher = self.launcher(handle, handle.epoch)
                await launcher.call("/sbx/fence", {"epoch": handle.epoch})
                self.store.write(SandboxState(handle=handle))
                self._keepers[sandbox_id] = keeper
        except BaseException:
            await self._undo_start(sandbox_id, keeper, launcher)
            raise
        finally:
            if keeper is not None:
                keeper.close()
        self._stats.unisolated += self._isolation == "process" and self.config.isolation == "auto"
        return Running(handle, launcher)

    async def guest(self, handle: SandboxHandle) -> Running:
        """Connect beside the owner."""
        self._check_handle(handle)
        held = self.store.read(handle.sandbox_id).handle
        return Running(held, self.launcher(held, None))

    async def take(self, handle: SandboxHandle) -> Running:
        """Become the owner, under the lock of the sandbox's state."""
        self._check_handle(handle)
        sandbox_id = handle.sandbox_id
        with self.store.locked(sandbox_id, wait=False) as free:
            if not free:
                raise FencedError(f"sandbox {sandbox_id} is being attached by another worker at this moment")
            if not self.store.kept(sandbox_id):
                raise SandboxNotFoundError(f"sandbox {sandbox_id} has ended; run: sandbox-k8s reap")
            held = self.store.read(sandbox_id)
            taken = msgspec.structs.replace(held.handle, epoch=held.handle.epoch + 1)
            # The number is used up first: if the launcher does not answer, the next try counts on from it.
            self.store.write(msgspec.structs.replace(held, handle=taken))
            self._claimed[sandbox_id] = taken.epoch
            launcher = self.launcher(taken, taken.epoch)
            await launcher.take_over(taken.lease_s)
            self.store.write(SandboxState(handle=taken))
            del self._claimed[sandbox_id]
        return Running(taken, launcher)

    def record(self, handle: SandboxHandle) -> None:
        """None: the keeper hears of renewals from the launcher."""

    async def renewed(self, handle: SandboxHandle) -> None:
        """The keeper hears of renewals from the launcher; only ended keepers are looked after here."""
        self._collect_keepers()

    async def detached(self, handle: SandboxHandle, expires_ns: int) -> None:
        """Record it, unless somebody else attached meanwhile."""
        with self.store.locked(handle.sandbox_id, wait=False) as free:
            if free and self.store.read(handle.sandbox_id).handle.epoch == handle.epoch:
                self.store.write(SandboxState(handle=handle, detached=True, expires_ns=expires_ns))

    async def stop(self, handle: SandboxHandle) -> None:
        """End it through its keeper, under the lock of its state: nobody becomes its owner meanwhile."""
        sandbox_id = handle.sandbox_id
        try:
            with self.store.locked(sandbox_id, wait=False) as free:
                if not free:
                    raise FencedError(f"sandbox {sandbox_id} is being attached by another worker")
                held = self.store.read(sandbox_id).handle.epoch
                if held not in (handle.epoch, self._claimed.get(sandbox_id)):
                    raise FencedError(f"sandbox {sandbox_id} belongs to epoch {held}, you are {handle.epoch}")
                await ask_to_stop(self.store.folder(sandbox_id))
        except SandboxNotFoundError:
            await ask_to_stop(self.store.folder(sandbox_id))  # it is ending by itself
        keeper = self._keepers.get(handle.sandbox_id)
        if keeper is not None:
            await keeper.ended()
        await self._remove_leftovers(handle.sandbox_id)

    def released(self, handle: SandboxHandle) -> None:
        """A keeper that still runs is collected later."""
        self._claimed.pop(handle.sandbox_id, None)
        keeper = self._keepers.pop(handle.sandbox_id, None)
        if keeper is not None and not keeper.collect():
            self._left_running.append(keeper)

    async def list(self) -> tuple[SandboxInfo, ...]:
        """All sandboxes of this root."""
        found: list[SandboxInfo] = []
        for sandbox_id in self.store.ids():
            try:
                held = self.store.read(sandbox_id)
            except SandboxNotFoundError:
                continue  # it is just starting or just ending
            alive: Literal["running", "detached"] = "detached" if held.detached else "running"
            state = alive if self.store.kept(sandbox_id) else "dead"
            found.append(SandboxInfo(handle=held.handle, state=state, expires_ns=held.expires_ns))
        return tuple(found)

    async def prefetch(
        self,
        images: Sequence[str],
        nodes: Sequence[str] | Mapping[str, str] | None,
        progress: "Progress | None",
    ) -> "tuple[PrefetchedImage, ...]":
        """Refuse: there are no images here."""
        raise ConfigError("the local back end runs no images; prefetch is for SandboxClient.kubernetes()")

    async def reap(self, *, dry_run: bool) -> tuple[ReapedSandbox, ...]:
        """Remove what killed keepers left behind. Living sandboxes end by their leases, not by this."""
        return await anyio.to_thread.run_sync(sweep, self.store, self._clock.now_ns(), dry_run)

    def launcher(self, handle: SandboxHandle, epoch: int | None) -> LauncherClient:
        """New connections to a sandbox's launcher; None for the epoch is a guest."""
        return LauncherClient(
            UnixRoute(self.store.folder(handle.sandbox_id) / SOCKET),
            self._token(handle.sandbox_id),
            epoch,
            margin_s=self.config.answer_margin_s,
            where=f"sandbox {handle.sandbox_id}",
        )

    def keeper(self, sandbox_id: str) -> KeeperProcess | None:
        """The keeper of a sandbox that this client started and owns; None for others."""
        return self._keepers.get(sandbox_id)

    def _token(self, sandbox_id: str) -> str:
        return self.key.token("local", sandbox_id)

    def _collect_keepers(self) -> None:
        """Collect the keepers of released sandboxes that have ended, so that they are no zombies of ours."""
        self._left_running = [keeper for keeper in self._left_running if not keeper.collect()]

    async def _choose_isolation(self) -> Isolation:
        if self.config.isolation == "process":
            return "process"
        why = await anyio.to_thread.run_sync(bubblewrap.why_unusable, PYTHON_PREFIX)
        if not why:
            return "bubblewrap"
        if self.config.isolation == "bubblewrap":
            raise BackendUnavailableError(f"LocalConfig.isolation is 'bubblewrap', but {why}")
        _log.warning(
            "sandboxes run as plain processes WITHOUT isolation: they can see this user's files, other "
            "processes and the network, because %s. LocalConfig(isolation='process') accepts this silently.",
            why,
        )
        return "process"

    def _check_handle(self, handle: SandboxHandle) -> None:
        place = handle.place
        if not isinstance(place, LocalPlace):
            raise ConfigError(f"sandbox {handle.sandbox_id} lives in a pod; use SandboxClient.kubernetes()")
        if Path(place.root) != self.store.root:
            raise ConfigError(
                f"sandbox {handle.sandbox_id} lives in {place.root}, this client in {self.store.root}; "
                f"use LocalConfig(root={place.root!r})"
            )
        if handle.key_id != self.key.key_id:
            raise AccessError(
                f"sandbox {handle.sandbox_id} was made with run key {handle.key_id}, "
                f"this client has {self.key.key_id}"
            )

    def _handle(self, sandbox_id: str, spec: SandboxSpec, workdir: str) -> SandboxHandle:
        return SandboxHandle(
            place=LocalPlace(root=str(self.store.root), isolation=self._isolation),
            sandbox_id=sandbox_id,
            epoch=1,
            key_id=self.key.key_id,
            workdir=workdir,
            lease_s=spec.lease_s,
            detached_lease_s=spec.detached_lease_s,
            created_ns=self._clock.now_ns(),
            labels=spec.labels,
        )

    async def _undo_start(
        self, sandbox_id: str, keeper: KeeperProcess | None, launcher: LauncherClient | None
    ) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLEAN_UP_S):
            if launcher is not None:
                await launcher.close()
            if keeper is not None:
                keeper.terminate()
                await keeper.ended()
            await self._remove_leftovers(sandbox_id)

    async def _remove_leftovers(self, sandbox_id: str) -> None:
        """Remove the folder if its keeper was killed before it could."""
        if not self.store.kept(sandbox_id):
            await anyio.to_thread.run_sync(archive.remove_tree, self.store.folder(sandbox_id))


def _refuse_what_only_pods_have(spec: SandboxSpec) -> None:
    if spec.image is not None:
        raise ConfigError(
            f"SandboxSpec.image is {spec.image!r}, but the local back end runs no images; "
            "use SandboxClient.kubernetes()"
        )
