"""What a client counted and found."""

from typing import Literal

import msgspec

from .handle import SandboxHandle


class ClientStats(msgspec.Struct, kw_only=True):
    """Counters of one client.

    Attributes:
        unisolated: Sandboxes that were started as plain processes because bubblewrap does not work here.
        renewal_failures: Heartbeats, and renewals of pods' records, that failed; they are tried again.
        records_late: Times that less than a third was left of the record of a sandbox that is owned; when
            nothing is left, a reaper takes its pod.
        pod_ip: Connections to launchers by the pod's address.
        api_proxy: The same by the API server's pod proxy.
        port_forward: The same by port-forward.
        lists: Times that all pods of a run, or where events begin, were asked for.
        watches: Watches that were opened, also to go on with one that ended.
        watch_failures: Watches that could not be opened at once, or whose version expired as soon as listed.
        api_repeats: Requests to the API server that were sent again after no answer, "too many requests" or
            the server's own trouble.
        credential_failures: Times that the credentials could not be read; the last ones are used on.
        task_faults: Unforeseen errors in tasks of the client itself, which went on.
        stop_failures: Sandboxes whose end was not confirmed; their keepers or their leases end them.
        start_limit: How many starts may be under way at once now. With the two below a figure of this moment,
            no counter.
        starts_in_flight: Starts that are under way.
        starts_waiting: Starts that wait for their turn.
        start_slowdowns: How often the limit was halved, because the cluster had too much to do.
        breakers_opened: How often an image failed so often that its starts are refused for a while.
        breaker_refusals: Starts that were refused for that.
        pool_hits: Sandboxes that a warm pool had ready when somebody took one.
        pool_misses: Times that somebody had to wait for one.
        pool_dead: Sandboxes of warm pools that died before somebody took them.
        pool_failures: Starts of warm pools that failed.
        resets: Used sandboxes that were brought back to a clean state.
        resets_refused: Those that could not be, and were stopped.
        loop_stall_s: The longest time, while starts were under way, in which the event loop did nothing else.
        loop_stall_cpu_s: The same by the processor time of the loop's own thread: without what other
            processes and threads took meanwhile.
    """

    started: int = 0
    attached: int = 0
    detached: int = 0
    stopped: int = 0
    unisolated: int = 0
    renewal_failures: int = 0
    records_late: int = 0
    stop_failures: int = 0
    pod_ip: int = 0
    api_proxy: int = 0
    port_forward: int = 0
    lists: int = 0
    watches: int = 0
    watch_failures: int = 0
    api_repeats: int = 0
    credential_failures: int = 0
    task_faults: int = 0
    start_limit: int = 0
    starts_in_flight: int = 0
    starts_waiting: int = 0
    start_slowdowns: int = 0
    breakers_opened: int = 0
    breaker_refusals: int = 0
    pool_hits: int = 0
    pool_misses: int = 0
    pool_dead: int = 0
    pool_failures: int = 0
    resets: int = 0
    resets_refused: int = 0
    loop_stall_s: float = 0.0
    loop_stall_cpu_s: float = 0.0


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
