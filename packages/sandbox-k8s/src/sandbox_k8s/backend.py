"""What a back end does for a client: one life cycle, two kinds of places."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .config import ClientConfig
from .handle import SandboxHandle
from .spec import SandboxSpec
from .stats import ReapedSandbox, SandboxInfo
from .transport import LauncherClient

if TYPE_CHECKING:
    from .kubernetes.prefetch import PrefetchedImage, Progress


class Running(NamedTuple):
    """A sandbox that answers, and the connections to its launcher."""

    handle: SandboxHandle
    launcher: LauncherClient


class RecordTime(NamedTuple):
    """What is left of a record that says that a sandbox is alive.

    Attributes:
        left_s: Until whoever reads it takes the sandbox for dead.
        lasts_s: The same when it has just been renewed.
    """

    left_s: float
    lasts_s: float

    @property
    def due(self) -> bool:
        """Whether it is time to renew it."""
        return self.left_s <= self.lasts_s * 2 / 3

    @property
    def late(self) -> bool:
        """Whether it should have been renewed long ago."""
        return self.left_s < self.lasts_s / 3


class Backend(Protocol):
    """Where sandboxes live: on this machine or in pods.

    Whatever is cancelled or fails in here leaves nothing behind: no sandbox without an owner, no open
    connection. The epoch of the handle that is passed in says who asks.
    """

    @property
    def config(self) -> ClientConfig:
        """The settings."""
        ...

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Check the settings and hold what all sandboxes share; the client is inside for its whole life.

        Raises:
            ConfigError: The settings do not fit the place.
            BackendUnavailableError: The place is not there.
        """
        ...

    async def start(self, spec: SandboxSpec) -> Running:
        """Start a sandbox of epoch 1.

        Raises:
            ConfigError: The spec asks for what this place does not have.
            SandboxStartError: It did not come up; nothing is left of it.
        """
        ...

    async def guest(self, handle: SandboxHandle) -> Running:
        """Connect without becoming the owner."""
        ...

    async def take(self, handle: SandboxHandle) -> Running:
        """Become the owner: win the next epoch, then tell the launcher, whose answer is the change.

        Raises:
            SandboxNotFoundError: It has ended.
            FencedError: Another worker is quicker.
            AccessError: It was made with another run key.
            ConfigError: It lives in another place than this client's.
        """
        ...

    def record(self, handle: SandboxHandle) -> RecordTime | None:
        """How much is left of its record; None where there are none."""
        ...

    async def renewed(self, handle: SandboxHandle) -> None:
        """Told again and again that a sandbox is owned, and when its record is due.

        Raises:
            FencedError: Another worker owns it.
        """
        ...

    async def detached(self, handle: SandboxHandle, expires_ns: int) -> None:
        """Record that it waits for its next owner until then; an epoch that is not the owner's is ignored."""
        ...

    async def stop(self, handle: SandboxHandle) -> None:
        """End a sandbox and wait until it is gone.

        Also one of this client's whose next epoch a `take` of its own has won without getting through.

        Raises:
            FencedError: Another worker owns it, or is about to.
            SandboxLostError: Its end was not confirmed.
        """
        ...

    def released(self, handle: SandboxHandle) -> None:
        """It is not this client's any more: stopped, detached, or taken by another worker."""
        ...

    async def list(self) -> tuple[SandboxInfo, ...]:
        """All sandboxes of this place, of any client, by id."""
        ...

    async def prefetch(
        self,
        images: Sequence[str],
        nodes: Sequence[str] | Mapping[str, str] | None,
        progress: "Progress | None",
    ) -> "tuple[PrefetchedImage, ...]":
        """Bring images to nodes.

        Raises:
            ConfigError: This place has no images.
        """
        ...

    async def reap(self, *, dry_run: bool) -> tuple[ReapedSandbox, ...]:
        """Remove what ended, or outlived its lease."""
        ...
