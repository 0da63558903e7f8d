"""The blocking face of the client: the same calls and results, for callers without an event loop."""

import builtins
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .client import SandboxClient
from .clock import Clock
from .config import ClientConfig, LocalConfig
from .errors import ConfigError, SandboxError
from .handle import SandboxHandle
from .kubernetes.config import KubernetesConfig
from .many import StartProgress
from .sandbox import Sandbox
from .spec import SandboxSpec
from .stats import ClientStats, ReapedSandbox, SandboxInfo
from .sync_loop import LoopThread
from .sync_pool import SyncWarmPool
from .sync_sandbox import SyncSandbox

if TYPE_CHECKING:
    from .kubernetes.prefetch import PrefetchedImage, Progress

_LEAVE_S = 5.0


class SyncSandboxClient:
    """Sandboxes of one back end, for blocking code: ``with SyncSandboxClient.local() as client:``.

    A thread of its own runs the event loop of one `SandboxClient`, renews the leases, and does what is asked
    from any number of threads. Ctrl-C ends the call under way and leaves nothing of it. Without ``with``,
    call `open` and `close`; a client that is only forgotten warns and ends its sandboxes.

    Every call raises `ConfigError` when the client is closed, in a fork, and in a thread that runs an event
    loop, which would stand still meanwhile: use `SandboxClient` there.
    """

    def __init__(self, client: SandboxClient) -> None:
        """Wrap a client that is not open. `SandboxClient.sync` says the same."""
        self.client = client
        self._thread: LoopThread | None = None

    @classmethod
    def local(cls, config: LocalConfig | None = None, *, clock: Clock | None = None) -> Self:
        """See `SandboxClient.local`."""
        return cls(SandboxClient.local(config, clock=clock))

    @classmethod
    def kubernetes(cls, config: KubernetesConfig, *, clock: Clock | None = None) -> Self:
        """See `SandboxClient.kubernetes`."""
        return cls(SandboxClient.kubernetes(config, clock=clock))

    def open(self) -> Self:
        """Open the back end.

        Raises:
            ConfigError: A setting is wrong, the run key file is not safe to use, or it is open already.
            BackendUnavailableError: What was insisted on is not there.
        """
        if self._thread is not None:
            raise ConfigError("a SyncSandboxClient is opened once; make another one")
        self._thread = LoopThread(
            self.client, name="sandbox-k8s client", leave_s=self.config.stop_timeout_s + _LEAVE_S
        )
        return self

    def close(self) -> None:
        """Stop what was started or attached here and not detached; calls under way end with an error."""
        self.thread.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def opened(self) -> bool:
        """Whether it was opened, and not closed since."""
        return self._thread is not None and not self._thread.closed

    @property
    def thread(self) -> LoopThread:
        """Where the calls run.

        Raises:
            ConfigError: The client was never opened.
        """
        if self._thread is None:
            raise ConfigError("the client is not open; use: with SyncSandboxClient.local() as client: ...")
        return self._thread

    @property
    def config(self) -> ClientConfig:
        """The settings of its back end."""
        return self.client.config

    @property
    def stats(self) -> ClientStats:
        """What it counted."""
        return self.client.stats

    def start(self, spec: SandboxSpec | None = None) -> SyncSandbox:
        """See `SandboxClient.start`."""
        started = self.thread.call(partial(self.client.start, spec), Sandbox.stop)
        return SyncSandbox(self, started)

    def start_many(
        self, specs: Sequence[SandboxSpec], *, progress: Callable[[StartProgress], object] | None = None
    ) -> builtins.list[SyncSandbox | SandboxError]:
        """See `SandboxClient.start_many`; ``progress`` is called in the client's thread."""
        started = self.thread.call(partial(self.client.start_many, specs, progress=progress), _stop_all)
        return [one if isinstance(one, SandboxError) else SyncSandbox(self, one) for one in started]

    def warm_pool(self, spec: SandboxSpec | None = None, *, size: int) -> SyncWarmPool:
        """See `SandboxClient.warm_pool`."""
        return SyncWarmPool(self, self.client.warm_pool(spec, size=size))

    def prefetch(
        self,
        images: Sequence[str],
        nodes: Sequence[str] | Mapping[str, str] | None = None,
        *,
        progress: "Progress | None" = None,
    ) -> "tuple[PrefetchedImage, ...]":
        """See `SandboxClient.prefetch`; ``progress`` is called in the client's thread."""
        return self.thread.call(partial(self.client.prefetch, images, nodes, progress=progress))

    def reset(self, sandbox: SyncSandbox) -> SyncSandbox:
        """See `SandboxClient.reset`."""
        return sandbox.reset()

    def attach(self, handle: SandboxHandle, *, take_ownership: bool = True) -> SyncSandbox:
        """See `SandboxClient.attach`."""
        attach = partial(self.client.attach, handle, take_ownership=take_ownership)
        return SyncSandbox(self, self.thread.call(attach, Sandbox.detach if take_ownership else None))

    def detach(self, sandbox: SyncSandbox) -> SandboxHandle:
        """See `Sandbox.detach`."""
        return sandbox.detach()

    def stop(self, sandbox: SyncSandbox) -> None:
        """See `Sandbox.stop`."""
        sandbox.stop()

    def list(self) -> tuple[SandboxInfo, ...]:
        """See `SandboxClient.list`."""
        return self.thread.call(self.client.list)

    def reap(self, *, dry_run: bool = False) -> tuple[ReapedSandbox, ...]:
        """See `SandboxClient.reap`."""
        return self.thread.call(partial(self.client.reap, dry_run=dry_run))


async def _stop_all(started: Sequence[Sandbox | SandboxError]) -> None:
    for one in started:
        if isinstance(one, Sandbox):
            await one.stop()
