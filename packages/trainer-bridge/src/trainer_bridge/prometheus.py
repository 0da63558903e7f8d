"""`PrometheusExporter`: a receiver's numbers over HTTP, in Prometheus' text format 0.0.4."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

from trainer_bridge.address import is_loopback
from trainer_bridge.errors import AddressError, BridgeError
from trainer_bridge.receiver import SampleReceiver
from trainer_bridge.stats import ReceiverStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "trainer_bridge_"
POLL_S = 0.1
"""`close` takes so long."""
REQUEST_S = 5.0
"""A client that takes longer to say what it wants is cut off."""

HELP = {
    "queued": "Rollouts that wait for the trainer.",
    "leased": "Rollouts in the trainer's hands.",
    "trained_not_saved": "Rollouts that were trained on and that no saved checkpoint holds yet.",
    "producers_connected": "Senders with a live connection.",
    "producers_lost": "Senders that ended without BYE.",
    "producers_unsettled": "Messages that senders last reported as not settled.",
    "weights_version": "Weight version last published; -1: none.",
    "staleness_mean": "Weight versions that the last step's rollouts were behind, on average.",
    "staleness_max": "The same, of the oldest.",
    "staleness_sum_total": "Weight versions behind, over all rollouts handed out.",
    "staleness_count_total": "Rollouts in staleness_sum_total.",
    "wait_s_total": "Seconds that the trainer has waited for rollouts.",
    "tokens_trained_total": "Tokens in the loss of committed rollouts.",
    "tokens_received_total": "Tokens that arrived.",
    "rollouts_received_total": "New rollouts that arrived.",
    "samples_received_total": "Their parts.",
    "rollouts_restored_total": "Rollouts that came from the store.",
    "rollouts_committed_total": "Rollouts committed for good.",
    "rollouts_dropped_total": "Rollouts dropped, by reason.",
    "steps_total": "Steps or single rollouts handed out.",
    "nacks_total": "Rollouts given back.",
    "groups_overdue_total": "Groups that were not complete at their deadline.",
    "groups_partial_total": "Groups handed out incomplete.",
    "duplicates_total": "Messages that came again.",
    "fenced_total": "Messages of an attempt that a later one has replaced.",
    "rejected_total": "Messages refused as malformed, by reason.",
    "unavailable_total": "Messages that a loaded checkpoint lacks and that nobody has any more.",
    "unaccounted": "What the receiver's ledger is off by: 0, or there is a fault in the package.",
    "groups_ready": "Groups that could be handed out.",
    "groups_incomplete": "Groups that wait for members.",
    "groups_unsized": "Of these: groups of which nobody has said how large they are.",
    "oldest_incomplete_s": "Seconds since the oldest of these began; 0: there is none.",
    "credit_beyond_queue_total": "Rollouts taken beyond a full queue, to complete groups.",
    "unread_total": "Messages left unread: their peer sent too many, or is in quarantine.",
    "quarantines_total": "Times that a peer was put into quarantine.",
    "connections_refused_total": "Connections whose key is not in the allow-list.",
    "rollouts_forgotten_total": "Rollout ids that deduplication no longer knows.",
    "stored": "Rollouts in the store.",
    "store_bytes": "Bytes of the store's segments.",
    "store_left_bytes": "Bytes until the store's quota or its disk is full; NaN: there is no store.",
    "store_trimmed_total": "Rollouts deleted from the store, as keep_committed says.",
    "store_faults_total": "Times that a segment of the store could not be deleted.",
    "store_damaged_total": "Records of the store that are damaged or missing.",
    "letters_not_kept_total": "Dead letters that were not written down.",
    "event_faults_total": "Exceptions that came out of on_event.",
    "observers": "Observers with a live connection.",
    "skipped_copies_total": "Copies that slow observers did not get.",
    "producer_connected": "1: this sender is connected.",
    "producer_queued": "Rollouts of this sender that wait for the trainer.",
    "producer_unsettled": "Messages that this sender last reported as not settled.",
    "producer_messages_total": "New rollouts of this sender.",
    "producer_rejected_total": "Refused messages of this sender.",
}
"""Every name that is exported, without its prefix."""

Series = tuple[Mapping[str, str], float]


def render(metrics: Mapping[str, float], stats: ReceiverStats) -> str:
    """The text of one scrape.

    Args:
        metrics: see `SampleReceiver.metrics`; its `dropped_REASON_total` become one series with a label.
        stats: of the same instant, or nearly so.
    """
    families: dict[str, list[Series]] = {
        name: [({}, value)]
        for name, value in metrics.items()
        if not (name.startswith("dropped_") or name in ("rollouts_dropped_total", "rejected_total"))
    }
    families["rollouts_dropped_total"] = _by_reason(stats.dropped)
    families["rejected_total"] = _by_reason(stats.rejected)
    _add_producers(families, stats)
    return "".join(_family(name, series) for name, series in sorted(families.items()))


def _add_producers(families: dict[str, list[Series]], stats: ReceiverStats) -> None:
    for each in stats.producers:
        label = {"producer": each.producer[:8], "name": each.name}
        for name, value in (
            ("producer_connected", each.presence == "connected"),
            ("producer_queued", each.queued),
            ("producer_unsettled", each.unsettled),
            ("producer_messages_total", each.messages),
            ("producer_rejected_total", each.rejected),
        ):
            families.setdefault(name, []).append((label, value))


def _by_reason(counts: Mapping[str, int]) -> list[Series]:
    return [({"reason": reason}, count) for reason, count in sorted(counts.items())]


def _family(name: str, series: Iterable[Series]) -> str:
    full = PREFIX + name
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {full} {HELP[name]}", f"# TYPE {full} {kind}"]
    lines += [f"{full}{_labels(labels)} {_number(value)}" for labels, value in series]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    """A peer chooses its name: it must not be able to end the line, or the label."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if float(value).is_integer() else repr(float(value))


class PrometheusExporter:
    """Answers `GET /metrics` until it is closed; the receiver may be closed before or after it.

    Args:
        receiver: whose numbers.
        bind: `HOST:PORT`; port 0: any free one.
        insecure: allow a host that other machines can reach. There is no authentication: names of workers
            and all counts are readable by whoever can connect.

    Raises:
        AddressError: `bind` is malformed, in use, or reachable by others without `insecure`.
    """

    def __init__(
        self, receiver: SampleReceiver, bind: str = "127.0.0.1:0", *, insecure: bool = False
    ) -> None:
        host, port = _split(bind, insecure=insecure)
        try:
            self._server = _Server(receiver, (host, port))
        except OSError as error:
            raise AddressError(
                f"cannot serve metrics at {bind}: {error.strerror or error}; give another port (0: any free)"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        """What to scrape."""
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(POLL_S,),
            name=f"trainer-bridge metrics {self.url}",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Answer no more. Calling it again does nothing."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> PrometheusExporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _split(bind: str, *, insecure: bool) -> tuple[str, int]:
    parts = urlsplit(f"//{bind}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number
        host = port = None
    if host is None or port is None or parts.netloc != bind:
        raise AddressError(f"{bind!r} is not an address for metrics: write HOST:PORT, as 127.0.0.1:9108")
    if not insecure and not is_loopback(host):
        raise AddressError(
            f"{bind!r}: other machines could read the metrics there. Bind 127.0.0.1 and scrape through an "
            "agent on this machine; or, on a network where every host is trusted, write insecure=True "
            "(--insecure)"
        )
    return host, port


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, receiver: SampleReceiver, address: tuple[str, int]) -> None:
        self.receiver = receiver
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]  # made by it alone

    def do_GET(self) -> None:
        if urlsplit(self.path).path != "/metrics":
            self._answer(404, "text/plain; charset=utf-8", "ask for /metrics\n")
            return
        receiver = self.server.receiver
        try:
            text = render(receiver.metrics(), receiver.stats())
        except BridgeError as error:
            self._answer(503, "text/plain; charset=utf-8", f"{error}\n")
            return
        self._answer(200, CONTENT_TYPE, text)

    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is no news."""

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
