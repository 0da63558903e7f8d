"""What a client counted and found."""

from typing import Literal

import msgspec

from .handle import SandboxHandle


class ClientStats(msgspec.Struct, kw_only=True):
    """Counters of one client.

    Attributes:
        unisolated: Sandboxes that were started as plain processes because bubblewrap does not work here.
        renewal_failures: Heartbeats that were not answered.
        stop_failures: Sandboxes whose end was not confirmed; their keepers or their leases end them.
    """

    started: int = 0
    attached: int = 0
    detached: int = 0
    stopped: int = 0
    unisolated: int = 0
    renewal_failures: int = 0
    stop_failures: int = 0


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox as `SandboxClient.list` finds it.

    Attributes:
        state: ``dead`` means that its keeper was killed; `SandboxClient.reap` removes what is left.
        expires_ns: When a detached sandbox ends, Unix nanoseconds; None while it is owned.
    """

    handle: SandboxHandle
    state: Literal["running", "detached", "dead"]
    expires_ns: int | None
