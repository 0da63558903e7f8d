"""What a client counted and found."""

from typing import Literal

import msgspec

from .handle import SandboxHandle


class ClientStats(msgspec.Struct, kw_only=True):
    """Counters of one client.

    Attributes:
        unisolated: Sandboxes that were started as plain processes because bubblewrap does not work here.
        renewal_failures: Heartbeats that were not answered.
        pod_ip: Connections to launchers by the pod's address.
        api_proxy: The same by the API server's pod proxy.
        port_forward: The same by port-forward.
        lists: Times that all pods of a run, or where events begin, were asked for.
        watches: Watches that were opened, also to go on with one that ended.
        watch_failures: Watches that could not be opened at once.
        stop_failures: Sandboxes whose end was not confirmed; their keepers or their leases end them.
    """

    started: int = 0
    attached: int = 0
    detached: int = 0
    stopped: int = 0
    unisolated: int = 0
    renewal_failures: int = 0
    stop_failures: int = 0
    pod_ip: int = 0
    api_proxy: int = 0
    port_forward: int = 0
    lists: int = 0
    watches: int = 0
    watch_failures: int = 0


class ReapedSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """What was (or would be) removed.

    Attributes:
        why: What was wrong with it, one line.
        processes: Left-over processes on this machine that were killed.
    """

    sandbox_id: str
    why: str
    processes: int = 0


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox as `SandboxClient.list` finds it.

    Attributes:
        state: ``dead`` means that it does not run any more, or that its keeper was killed;
            `SandboxClient.reap` removes what is left. ``starting`` is a pod that is not up yet.
        expires_ns: When a detached sandbox ends, Unix nanoseconds; None while it is owned.
    """

    handle: SandboxHandle
    state: Literal["starting", "running", "detached", "dead"]
    expires_ns: int | None
