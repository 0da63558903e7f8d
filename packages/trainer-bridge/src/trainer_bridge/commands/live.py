"""What a running receiver says of the rollouts in its hands, for an audit of its files."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from trainer_bridge.clock import SystemClock
from trainer_bridge.errors import ConnectError
from trainer_bridge.keys import CurveKeys
from trainer_bridge.messages import Status
from trainer_bridge.observer import SampleObserver

MOVING = ("rollouts_received_total", "rollouts_committed_total", "rollouts_dropped_total", "nacks_total")
"""Counters that rise when anything moves, beside what is in hand."""
IN_HAND = ("queued", "leased", "trained_not_saved")


class Peer(NamedTuple):
    """Where the receiver is, and how it is reached."""

    address: str
    timeout_s: float
    insecure: bool
    keys: CurveKeys | None


class Live:
    """How a receiver stood before and after its files were read."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}

    def count(self, name: str) -> int:
        """One of its metrics, as last said."""
        return int(self._after.get(name, 0.0))

    @property
    def in_hand(self) -> int:
        """Rollouts that its store holds and that are not committed there."""
        return sum(self.count(name) for name in IN_HAND)

    @property
    def stood_still(self) -> bool:
        """Nothing moved while the files were read: they and it speak of one moment."""
        return all(self._before.get(name) == self._after.get(name) for name in (*MOVING, *IN_HAND))

    def line(self) -> str:
        """For people."""
        when = "" if self.stood_still else " (it went on while the files were read: this is a later moment)"
        return (
            f"of these, the receiver at {self.address} says: queued {self.count('queued')}, leased "
            f"{self.count('leased')}, trained on and in no saved checkpoint {self.count('trained_not_saved')}"
            f"{when}"
        )

    def event(self) -> dict[str, object]:
        """For scripts."""
        counts = {name: self.count(name) for name in (*IN_HAND, "unaccounted")}
        return {"address": self.address, **counts, "stood_still": self.stood_still}

    def faults(self, waiting: int) -> list[str]:
        """What cannot be.

        Args:
            waiting: uncommitted rollouts in the store that was read. More than the receiver has in hand is
                none: what it dropped stays uncommitted until a checkpoint holds it.
        """
        faults: list[str] = []
        off_by = self.count("unaccounted")
        if off_by:
            faults.append(f"the ledger of the receiver at {self.address} is off by {off_by}")
        if self.stood_still and self.in_hand > waiting:
            faults.append(
                f"the receiver at {self.address} has {self.in_hand} rollouts in hand, and the store here "
                f"{waiting} that are not committed: is it the receiver of another run?"
            )
        return faults

    def said_before(self, status: Status) -> None:
        """Its word before the files are read."""
        self._before = status.metrics

    def said_after(self, status: Status) -> None:
        """Its word after that."""
        self._after = status.metrics


@contextmanager
def asked(peer: Peer) -> Generator[Live]:
    """Ask a receiver how it stands before and after the body; takes and acknowledges nothing.

    Raises:
        ConnectError, AuthError, RefusedError: it does not answer, or does not want to.
    """
    live = Live(peer.address)
    with SampleObserver(
        peer.address, connect_timeout_s=peer.timeout_s, insecure=peer.insecure, keys=peer.keys
    ) as observer:
        first = _next_status(observer, None, peer)
        live.said_before(first)
        yield live
        # What lies in the socket is older than the end of the reading: the second one from now is not.
        second = _next_status(observer, observer.status, peer)
        live.said_after(_next_status(observer, second, peer))


def _next_status(observer: SampleObserver, known: Status | None, peer: Peer) -> Status:
    clock = SystemClock()
    end_s = clock.monotonic_s() + peer.timeout_s
    while observer.status is None or observer.status is known:
        if observer.ended is not None or clock.monotonic_s() > end_s:
            raise ConnectError(f"the receiver at {peer.address} does not say how it stands")
        observer.next(0.1)
    return observer.status
