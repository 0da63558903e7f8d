"""`Gauge`: rates and lags of a receiver, from what it says of itself and from the copies that came."""

from __future__ import annotations

import math
from collections import deque

from trainer_bridge.commands.output import plain
from trainer_bridge.messages import Status
from trainer_bridge.observer import Seen

WINDOW_S = 10.0
"""Rates are means over about so long."""

PRODUCER_COLUMNS = ("producer", "id", "state", "queued", "credit", "unsettled", "lag s")


class Gauge:
    """Fed with statuses and copies; says how things stand."""

    def __init__(self) -> None:
        self._statuses: deque[tuple[float, Status]] = deque()
        self._lag_s: dict[bytes, float] = {}

    @property
    def status(self) -> Status | None:
        """The latest. None: there was none."""
        return self._statuses[-1][1] if self._statuses else None

    def take_status(self, status: Status, now_s: float) -> bool:
        """Take one in; False: it is the one that is known."""
        if status is self.status:
            return False
        self._statuses.append((now_s, status))
        while len(self._statuses) > 2 and now_s - self._statuses[1][0] > WINDOW_S:
            self._statuses.popleft()
        return True

    def take_copy(self, seen: Seen, now_ns: int) -> None:
        """A rollout arrived; its lag is measured from the sender's clock to this machine's."""
        self._lag_s[bytes.fromhex(seen.producer)] = (now_ns - seen.created_ns) / 1e9

    def rate(self, name: str) -> float:
        """Growth of a counter per second. NaN: there are no two statuses yet."""
        if len(self._statuses) < 2:
            return math.nan
        (before_s, before), (after_s, after) = self._statuses[0], self._statuses[-1]
        grown = after.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)
        return grown / (after_s - before_s) if after_s > before_s else math.nan

    def event(self) -> dict[str, object]:
        """For scripts."""
        status = self.status
        if status is None:
            return {"event": "status"}
        return {
            "event": "status",
            "rollouts_per_s": _finite(self.rate("rollouts_received_total")),
            "samples_per_s": _finite(self.rate("samples_received_total")),
            "tokens_per_s": _finite(self.rate("tokens_received_total")),
            "committed_per_s": _finite(self.rate("rollouts_committed_total")),
            "metrics": {name: _finite(value) for name, value in status.metrics.items()},
            "producers": [
                {
                    "name": name,
                    "producer": producer.hex(),
                    "presence": presence,
                    "queued": queued,
                    "credit": credit,
                    "unsettled": unsettled,
                    "lag_s": self._lag_s.get(producer),
                }
                for name, producer, presence, queued, credit, unsettled in status.producers
            ],
        }

    def lines(self) -> list[str]:
        """For people: what comes in and goes out, and what became of it."""
        status = self.status
        if status is None:
            return ["the receiver has not said yet how it stands"]
        m = status.metrics
        dropped = {
            name.removeprefix("dropped_").removesuffix("_total"): int(value)
            for name, value in m.items()
            if name.startswith("dropped_")
        }
        mean, most = (_number(m.get(f"staleness_{which}", math.nan)) for which in ("mean", "max"))
        reasons = ", ".join(f"{plain(reason)} {n}" for reason, n in dropped.items())
        return [
            f"in {_number(self.rate('samples_received_total'))} samples/s, "
            f"{_number(self.rate('tokens_received_total'))} tokens/s; committed "
            f"{_number(self.rate('rollouts_committed_total'))} rollouts/s; weights "
            f"{m.get('weights_version', -1):.0f}, staleness mean {mean}, max {most}",
            f"queued {m.get('queued', 0):.0f}, leased {m.get('leased', 0):.0f}, trained and not saved "
            f"{m.get('trained_not_saved', 0):.0f}, committed {m.get('rollouts_committed_total', 0):.0f}, "
            f"dropped {sum(dropped.values())}{f' ({reasons})' if reasons else ''}, refused "
            f"{m.get('rejected_total', 0):.0f}, repeated {m.get('duplicates_total', 0):.0f}",
        ]

    def producer_rows(self) -> list[tuple[str, ...]]:
        """Rows of `PRODUCER_COLUMNS`; `id` is what samples show as their producer."""
        if self.status is None:
            return []
        return [
            (
                plain(name),
                producer.hex()[:8],
                presence,
                str(queued),
                str(credit),
                str(unsettled),
                _number(self._lag_s.get(producer, math.nan)),
            )
            for name, producer, presence, queued, credit, unsettled in self.status.producers
        ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"
