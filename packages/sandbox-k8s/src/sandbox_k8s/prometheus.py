"""The counters of a client in Prometheus's text format, for whoever serves ``/metrics``."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from .stats import ClientStats


class _Series(NamedTuple):
    """How a field of `ClientStats` is called for Prometheus."""

    name: str
    kind: Literal["counter", "gauge", "untyped"]
    text: str
    labels: tuple[tuple[str, str], ...] = ()


_CONNECTIONS = "Connections to launchers, by the way that leads there."
_KNOWN: Mapping[str, _Series] = {
    "started": _Series("started_total", "counter", "Sandboxes that were started."),
    "attached": _Series("attached_total", "counter", "Sandboxes that were attached."),
    "detached": _Series("detached_total", "counter", "Sandboxes that were detached."),
    "stopped": _Series("stopped_total", "counter", "Sandboxes that were stopped."),
    "unisolated": _Series("unisolated_total", "counter", "Sandboxes started without isolation."),
    "renewal_failures": _Series("renewal_failures_total", "counter", "Heartbeats and records that failed."),
    "records_late": _Series("records_late_total", "counter", "Records with less than a third of their time."),
    "stop_failures": _Series("stop_failures_total", "counter", "Sandboxes whose end was not confirmed."),
    "pod_ip": _Series("connections_total", "counter", _CONNECTIONS, (("path", "pod_ip"),)),
    "api_proxy": _Series("connections_total", "counter", _CONNECTIONS, (("path", "api_proxy"),)),
    "port_forward": _Series("connections_total", "counter", _CONNECTIONS, (("path", "port_forward"),)),
    "lists": _Series("lists_total", "counter", "Lists of the run's pods and of where events begin."),
    "watches": _Series("watches_total", "counter", "Watches that were opened."),
    "watch_failures": _Series("watch_failures_total", "counter", "Watches that could not be opened at once."),
    "api_repeats": _Series(
        "api_repeats_total", "counter", "Requests to the API server that were sent again."
    ),
    "credential_failures": _Series("credential_failures_total", "counter", "Failed reads of credentials."),
    "task_faults": _Series("task_faults_total", "counter", "Unforeseen errors of the client's own tasks."),
    "start_limit": _Series("start_limit", "gauge", "Starts that may be under way at once."),
    "starts_in_flight": _Series("starts_in_flight", "gauge", "Starts that are under way."),
    "starts_waiting": _Series("starts_waiting", "gauge", "Starts that wait for their turn."),
    "start_slowdowns": _Series("start_slowdowns_total", "counter", "Times that the limit was halved."),
    "breakers_opened": _Series("breakers_opened_total", "counter", "Images whose starts were refused."),
    "breaker_refusals": _Series("breaker_refusals_total", "counter", "Starts refused for their image."),
    "pool_hits": _Series("pool_hits_total", "counter", "Sandboxes that a warm pool had ready."),
    "pool_misses": _Series("pool_misses_total", "counter", "Times that a warm pool was empty."),
    "pool_dead": _Series("pool_dead_total", "counter", "Sandboxes that died in a warm pool."),
    "pool_failures": _Series("pool_failures_total", "counter", "Starts of warm pools that failed."),
    "resets": _Series("resets_total", "counter", "Used sandboxes that were made clean."),
    "resets_refused": _Series("resets_refused_total", "counter", "Used sandboxes that could not be."),
    "loop_stall_s": _Series("loop_stall_seconds", "gauge", "Longest stall of the event loop during starts."),
    "loop_stall_cpu_s": _Series("loop_stall_cpu_seconds", "gauge", "The same, computing alone."),
}
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def prometheus_text(stats: ClientStats, labels: Mapping[str, str] | None = None) -> str:
    """A client's counters as Prometheus reads them (text format 0.0.4, one sample per field).

    Args:
        stats: Of `SandboxClient.stats`.
        labels: On every sample, for example ``{"run": "r1"}``; None is none.

    Returns:
        Lines for the body of an answer of content type ``text/plain; version=0.0.4``; series begin with
        ``sandbox_k8s_``, and times are in seconds.
    """
    families: dict[str, list[str]] = {}
    for field, value in msgspec.structs.asdict(stats).items():
        series = _KNOWN.get(field) or _Series(field, "untyped", f"ClientStats.{field}.")
        name = f"sandbox_k8s_{series.name}"
        head = [f"# HELP {name} {series.text}", f"# TYPE {name} {series.kind}"]
        of_series = {**(labels or {}), **dict(series.labels)}
        families.setdefault(name, head).append(f"{name}{_shown(of_series)} {value}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _shown(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""
