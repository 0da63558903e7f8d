"""`SenderLoop`: the one thread in which a sender's network, session and outbox meet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from trainer_bridge.block_pool import BlockPool
from trainer_bridge.bundle import FEATURE, Bundler
from trainer_bridge.clock import Clock
from trainer_bridge.codec import Draft, Frames
from trainer_bridge.config import Timing
from trainer_bridge.control import ControlState
from trainer_bridge.errors import (
    BridgeError,
    DamagedError,
    ErrorCode,
    ProtocolError,
    SpoolError,
    reason_of,
)
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.listener import Listener
from trainer_bridge.outbox import Outbox
from trainer_bridge.payload import Buffer
from trainer_bridge.session import SenderSession
from trainer_bridge.transport import ClientTransport

log = logging.getLogger(__name__)

TICK_S = 0.1
BATCH = 64

EventKind = Literal["connected", "disconnected", "refused", "dropped", "lost", "control"]
_WARNINGS: tuple[EventKind, ...] = ("disconnected", "refused", "dropped", "lost")


class SenderEvent(NamedTuple):
    """Something a user of the sender may want to show. Told in the sender's own thread: return quickly."""

    kind: EventKind
    text: str


class SenderLoop:
    """Moves messages between outbox and network until it is stopped.

    `changed` guards the outbox, the session and the public fields; it is notified when something was settled,
    when the state of the session changed, and at the end.

    Args:
        address: for texts.
        blocks: memory of bundles.
        on_event: called without the lock; what it raises is logged once and counted.
    """

    def __init__(
        self,
        *,
        address: str,
        transport: ClientTransport,
        outbox: Outbox,
        session: SenderSession,
        blocks: BlockPool,
        timing: Timing,
        clock: Clock,
        on_event: Callable[[SenderEvent], None] | None,
    ) -> None:
        self._address = address
        self._transport = transport
        self._timing = timing
        self._clock = clock
        self.listener = Listener(on_event, f"the sender to {address}")
        self._blocks = blocks
        self.outbox = outbox
        self.session = session
        self.changed = threading.Condition()
        self.failure: Exception | None = None
        """What ended the thread before its time."""
        self.last_error = ""
        self.unreadable = 0
        """Messages of the receiver that could not be read."""
        self.connects = 0
        self.stranger = ""
        """Why the peer and we do not know each other; empty: they do, or no peer was met."""
        self.absent_since_s: float | None = clock.monotonic_s()
        """Since when no receiver is there. None: one is."""
        self.room: set[Callable[[], None]] = set()
        """Called in the thread, without the lock, when there may be room, or never will be. Each does no more
        than wake somebody. Put in and taken out from any thread (both are atomic)."""
        self._closing = False
        self._stop = False
        self._checkpoint_s = clock.monotonic_s()
        self._dropped_told = 0
        self._damage_told = ""
        self._too_large = ""
        """The last message that was, for people."""
        self._thread = threading.Thread(
            target=self._run, name=f"trainer-bridge sender {address}", daemon=True
        )
        self._thread.start()

    @property
    def over(self) -> bool:
        """True: nothing more will be acknowledged (refused, failed or stopped)."""
        return self.session.state == "refused" or self.failure is not None or not self._thread.is_alive()

    def append(self, draft: Draft) -> int:
        """Number a message and put it into the outbox; the caller holds `changed`, and wakes later."""
        seq = self.outbox.last + 1
        epoch = self.outbox.streams[-1].epoch
        self.outbox.append(draft.numbered(self.outbox.producer, epoch, seq, self._clock.now_ns()))
        self.session.last = seq
        return seq

    def wake(self) -> None:
        """Something is to be sent."""
        self._transport.wake()

    def say_bye(self) -> None:
        """End the session in order; the caller holds `changed`."""
        self._closing = True
        self.session.say_bye("closed")
        self._transport.wake()

    def stop(self) -> None:
        """End the thread and free everything."""
        self._stop = True
        self._transport.wake()
        self._thread.join()

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._stop:
                self._transport.wait(TICK_S)
                with self.changed:
                    state, unsettled = self.session.state, self.session.unsettled
                    events = self._step()
                    news = self.session.unsettled < unsettled or self.session.state != state
                    if news:
                        self.changed.notify_all()
                if news:
                    self._tell_room()
                for event in events:
                    self._tell(event)
        except Exception as error:
            log.exception("the sender to %s has failed", self._address)
            with self.changed:
                self.failure = error
                self.last_error = str(error)
        finally:
            self._finish()

    def _finish(self) -> None:
        with self.changed:
            try:
                self.outbox.close(self.session.settled)
            except BridgeError as error:
                self.failure = error
                self.last_error = str(error)
            self.session.disconnected()
            self._transport.close()
            self.changed.notify_all()
        self._tell_room()

    def _step(self) -> list[SenderEvent]:
        now_s = self._clock.monotonic_s()
        state = self.session.state
        control = self.session.control.state
        unsettled = self.session.unsettled
        self._take_in(now_s)
        if not self.session.tick(now_s):
            self.last_error = f"{self._address} was silent for {self._timing.peer_timeout_s} s"
            self.session.disconnected()
            self._transport.reopen()
        self._pump(now_s)
        if self.session.unsettled < unsettled:
            self.outbox.settle(self.session.settled)
        if now_s - self._checkpoint_s >= self._timing.heartbeat_s:
            self._checkpoint_s = now_s
            self.outbox.checkpoint(self.session.settled)
        self._note_damage()
        return self._events(state, control, now_s)

    def _take_in(self, now_s: float) -> None:
        for event in self._transport.events(BATCH):
            if event.kind == "up":
                self.stranger = ""
                self.session.connected(now_s)
            elif event.kind == "unknown":
                self._on_stranger(event.text)
            elif event.kind == "down":
                self.session.disconnected()
            else:
                self._on_frames(event.frames, now_s)

    def _on_stranger(self, text: str) -> None:
        if text != self.stranger:  # it comes with every attempt
            log.warning("no session with %s: %s", self._address, text)
        self.stranger = self.last_error = text

    def _on_frames(self, frames: Sequence[Buffer], now_s: float) -> None:
        try:
            message = decode_head(frames[0] if frames else b"")
        except ProtocolError as error:
            self.last_error = str(error)
            self.unreadable += 1
            if self.unreadable == 1:
                log.warning("%s sent what cannot be read (counted from now on): %s", self._address, error)
            self.session.on_garbage(error)
            return
        self.session.on_message(message, now_s)

    def _pump(self, now_s: float) -> None:
        # What is lost is found when it is to be sent, and the receiver must hear of it: it gives no credit
        # for what comes after a number that it waits for.
        if self._say():
            self._send_data(now_s)
            self._say()

    def _say(self) -> bool:
        """Send all but DATA. False: there is no connection; the session repeats what matters."""
        return all(self._transport.send((encode_head(m),)) for m in self.session.take_messages())

    def _send_data(self, now_s: float) -> None:
        for _ in range(BATCH):
            bundler = Bundler(self.session.max_payload or 0)
            seqs = self._gather(bundler, now_s)
            if not seqs:
                return
            if not self._transport.send(bundler.frames(self._blocks)):
                self.session.not_sent(seqs)
                return
        self._transport.wake()  # more is to be sent, but incoming messages have their turn first

    def _gather(self, bundler: Bundler, now_s: float) -> list[int]:
        """The message to send now; or several, if the peer takes bundles."""
        session = self.session
        bundles = FEATURE in session.features
        seqs: list[int] = []
        while (seq := session.next_to_send()) is not None:
            try:
                frames = self._read(seq)
            except SpoolError as error:
                self._note_unread(error)
                break
            if frames is None:
                continue
            if not bundler.takes(frames):
                break
            seqs.append(seq)
            session.mark_sent(seq, len(frames.payload), now_s)
            if not bundles:
                break
        return seqs

    def _read(self, seq: int) -> Frames | None:
        """None: it is lost, or too large for this receiver, and settled as such; the others go on.

        Raises:
            SpoolError: it cannot be read just now.
        """
        try:
            frames = self.outbox.frames(seq)
        except DamagedError as error:
            self.outbox.mark_lost(seq, str(error))
            self.session.lose(seq)
            return None
        most = self.session.max_payload
        if most is not None and len(frames.payload) > most:
            # Sent, it would end the connection, and again after each new one.
            self._too_large = (
                f"message {seq} has {len(frames.payload)} bytes of arrays, and it takes at most {most} "
                "(ReceiverConfig.max_payload_bytes)"
            )
            self.session.drop(seq, ErrorCode.TOO_LARGE)
            return None
        return frames

    def _note_unread(self, error: SpoolError) -> None:
        """The spool gives a message back another time (too many open files, say): at the next tick."""
        if not self.outbox.disk_faults:
            log.warning("%s; trying again (counted from now on)", error)
        self.outbox.disk_faults += 1
        self.last_error = str(error)

    def _note_damage(self) -> None:
        session = self.session
        if session.damage != self._damage_told:
            if not self._damage_told:
                log.warning("%s: %s; it is sent again (counted from now on)", self._address, session.damage)
            self._damage_told = self.last_error = session.damage

    def _events(self, before: str, wanted: ControlState, now_s: float) -> list[SenderEvent]:
        session = self.session
        events: list[SenderEvent] = []
        if session.state == "open" != before:
            self.connects += 1
            self.absent_since_s = None
            events.append(SenderEvent("connected", f"connected to {self._address}"))
        elif before == "open" and session.state in ("down", "greeting") and not self._closing:
            self.absent_since_s = now_s
            self.last_error = f"connection to {self._address} lost"
            events.append(SenderEvent("disconnected", f"{self.last_error}, trying again"))
        elif session.state == "refused" != before and session.refusal is not None:
            self.last_error = session.refusal.text
            events.append(SenderEvent("refused", f"{self._address} refused this sender: {self.last_error}"))
        dropped = sum(session.dropped.values())
        if dropped > self._dropped_told:
            self._dropped_told = dropped
            reasons = ", ".join(f"{reason_of(code)} {n}" for code, n in session.dropped.items())
            text = f"{self._address} refuses messages as invalid: {reasons}"
            if self._too_large:
                text = f"{text}; the last that is too_large: {self._too_large}"
                self.last_error = text
            events.append(SenderEvent("dropped", text))
        losses = self.outbox.take_losses()
        if losses:
            more = f" (and {len(losses) - 1} more places)" if len(losses) > 1 else ""
            self.last_error = f"lost in the spool, {self.outbox.lost} messages so far: {losses[0]}{more}"
            events.append(SenderEvent("lost", self.last_error))
        control = session.control.state
        if control is not wanted and control.generation:
            text = f"{control.run_state}, weights version {control.weights_version}"
            events.append(SenderEvent("control", text))
        return events

    def _tell(self, event: SenderEvent) -> None:
        log.log(logging.WARNING if event.kind in _WARNINGS else logging.INFO, "%s", event.text)
        self.listener.tell(event)

    def _tell_room(self) -> None:
        for call in tuple(self.room):
            call()
