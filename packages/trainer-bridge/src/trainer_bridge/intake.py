"""`Intake`: where a sender takes messages over, as far as there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer_bridge.address import absence_hint
from trainer_bridge.clock import Clock
from trainer_bridge.codec import Draft
from trainer_bridge.errors import (
    AuthError,
    BackpressureError,
    BridgeError,
    ClosedError,
    ConnectError,
    RefusedError,
    UnsendableError,
)
from trainer_bridge.sender_loop import SenderLoop
from trainer_bridge.stats import Receipt

RECHECK_S = 1.0
"""Who waits for room looks so often whether it can still come."""


class Intake:
    """Hands drafts to a sender's loop; safe from any thread but the loop's own, which cannot wait for itself.

    Args:
        loop: the sender's.
        address: the receiver's, for texts.
        settle: the acknowledgement that makes room, for texts.
        patience_s: without a spool, `take` puts up with the receiver's absence for so long. None: for ever.
    """

    def __init__(
        self, loop: SenderLoop, *, address: str, settle: str, patience_s: float | None, clock: Clock
    ) -> None:
        self._loop = loop
        self._address = address
        self._settle = settle
        self._patience_s = patience_s
        self._clock = clock
        self.closing = False

    def take(self, drafts: Sequence[Draft], seqs: list[int], timeout_s: float | None) -> None:
        """Take the drafts over from the `len(seqs)`-th on, adding the number of each to `seqs`.

        Raises:
            UnsendableError: one is larger than the receiver takes; nothing was taken.
            BackpressureError: no room for the next one within `timeout_s`; `seqs` says what was taken.
            BridgeError: as `check` and `SampleSender.send`.
        """
        loop = self._loop
        deadline_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        with loop.changed:
            if not seqs:
                self._check_sizes(drafts)
            for draft in drafts[len(seqs) :]:
                self._await_room(deadline_s)
                seqs.append(loop.append(draft))
            # With a full window the next acknowledgement wakes the thread anyhow.
            sendable = loop.session.next_to_send() is not None
        if sendable:
            loop.wake()
        loop.outbox.wait_durable(seqs[-1])

    def check(self) -> None:
        """The caller holds `loop.changed`.

        Raises:
            ClosedError: the sender is closed.
            RefusedError: the receiver said no.
            ConnectError: it has been away for longer than `patience_s`.
            BridgeError: the sender's thread has failed.
        """
        loop = self._loop
        if self.closing:
            raise ClosedError(f"the sender to {self._address} is closed")
        if loop.failure is not None:
            raise BridgeError(f"the sender to {self._address} has failed: {loop.failure}") from loop.failure
        refusal = loop.session.refusal
        if refusal is not None:
            raise RefusedError(f"{self._address} refused this sender: {refusal.text}", refusal.code)
        if loop.absent_since_s is not None and self._patience_s is not None:
            away_s = self._clock.monotonic_s() - loop.absent_since_s
            if away_s > self._patience_s:
                raise self.absence(away_s)

    def absence(self, away_s: float) -> ConnectError:
        """What to raise when nobody has answered for so long."""
        stranger = self._loop.stranger
        if stranger:
            return AuthError(f"no session with {self._address} for {away_s:.1f} s: {stranger}")
        return ConnectError(
            f"no trainer-bridge receiver has answered at {self._address} for {away_s:.1f} s: "
            f"{absence_hint(self._address)}; start one (`trainer-bridge receive --bind ...`), or give a "
            "spool so that samples wait"
        )

    def _check_sizes(self, drafts: Sequence[Draft]) -> None:
        most = self._loop.session.max_payload
        for draft in drafts:
            nbytes = len(draft.payload)
            if most is not None and nbytes > most:
                raise UnsendableError(
                    f"rollout {draft.head.rollout_id.hex()}: {nbytes} bytes of arrays, the receiver "
                    f"at {self._address} takes at most {most} (ReceiverConfig.max_payload_bytes)"
                )

    def _await_room(self, deadline_s: float | None) -> None:
        loop = self._loop
        asked = False
        while True:
            self.check()
            if not loop.outbox.is_full(loop.session.unsettled):
                return
            if not asked:
                loop.wake()  # earlier rollouts of the same call may wait to be sent
                asked = True
            remaining_s = None if deadline_s is None else deadline_s - self._clock.monotonic_s()
            if remaining_s is not None and remaining_s <= 0:
                bound = (
                    "a spool or a larger max_unsettled"
                    if self._patience_s is not None
                    else "a larger spool_quota_bytes"
                )
                raise BackpressureError(
                    f"{loop.session.unsettled} messages to {self._address} are not acknowledged "
                    f"({self._settle}) and there is no room for more: the trainer is slower than the "
                    f"workers, or commits too rarely; wait, or give {bound}"
                )
            loop.listener.check_outside("a send without room")
            loop.session.crowded += 1
            try:
                loop.changed.wait(RECHECK_S if remaining_s is None else min(remaining_s, RECHECK_S))
            finally:
                loop.session.crowded -= 1


class Handover:
    """One `send` in steps, for callers that must not wait in a thread: `SampleSender.handover` makes it."""

    def __init__(self, intake: Intake, loop: SenderLoop, drafts: Sequence[Draft]) -> None:
        self._intake = intake
        self._loop = loop
        self._drafts = drafts
        self._seqs: list[int] = []

    def advance(self) -> Receipt:
        """Take over what there is room for now; call it again after a BackpressureError.

        What was taken over stays so: a later call goes on with the rest.

        Raises:
            BackpressureError: there is no room for all yet.
            BridgeError: as `SampleSender.send`.
        """
        self._intake.take(self._drafts, self._seqs, 0.0)
        return Receipt(tuple(self._seqs))

    def on_room(self, call: Callable[[], None]) -> None:
        """`call` is called, in the sender's thread, whenever `advance` may do better than before."""
        with self._loop.changed:
            self._loop.room.add(call)
            self._loop.session.crowded += 1

    def off_room(self, call: Callable[[], None]) -> None:
        """No more."""
        with self._loop.changed:
            self._loop.room.discard(call)
            self._loop.session.crowded -= 1
