"""`ReceiverLoop`: the one thread in which a receiver's network, session, store and queue meet."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from trainer_bridge.clock import Clock
from trainer_bridge.codec import Data, Frames, decode_data
from trainer_bridge.errors import BridgeError, ErrorCode, ProtocolError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.messages import DataHead
from trainer_bridge.payload import Buffer
from trainer_bridge.session import Identity, ReceiverSession
from trainer_bridge.session.peers import Presence
from trainer_bridge.store import Store
from trainer_bridge.transport import ServerTransport

log = logging.getLogger(__name__)

TICK_S = 0.1
BATCH = 64


class ReceiverEvent(NamedTuple):
    """Something a user of the receiver may want to show. Told in its own thread: return quickly."""

    kind: Literal["producer", "rejected"]
    text: str


class Waiting(NamedTuple):
    """A message in the queue."""

    identity: Identity
    data: Data | None
    """None: it lies in the store only."""
    nbytes: int
    position: int
    """Its place in the store; 0 without one."""


class Counts(msgspec.Struct):
    """Rollouts, unless said otherwise, since the start."""

    messages: int = 0
    samples: int = 0
    tokens: int = 0
    restored: int = 0
    leased: int = 0
    committed: int = 0


class ReceiverLoop:
    """Takes messages in, acknowledges them, and queues them for the consumer until it is stopped.

    `changed` guards the session, the queue and the public fields; it is notified when the queue grows and at
    the end.

    Args:
        on_event: called without the lock.
    """

    def __init__(
        self,
        *,
        transport: ServerTransport,
        session: ReceiverSession,
        store: Store | None,
        clock: Clock,
        on_event: Callable[[ReceiverEvent], None] | None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._on_event = on_event
        self.session = session
        self.store = store
        self.changed = threading.Condition()
        self.queue: deque[Waiting] = deque()
        self.counts = Counts()
        self.closing = False
        self.failure: Exception | None = None
        """What ended the thread before its time."""
        self._storing: deque[tuple[int, Identity]] = deque()
        self._at: dict[int, Identity] = {}
        """Position in the store -> message, until its commit is on the disk."""
        self._presence: dict[bytes, Presence] = {}
        self._refusals: list[ReceiverEvent] = []
        if store is not None:
            self._restore(store)
        self._thread = threading.Thread(
            target=self._run, name=f"trainer-bridge receiver {transport.address}", daemon=True
        )
        self._thread.start()

    def take(self) -> tuple[Waiting, str]:
        """The first message of the queue, and its producer's name; the caller holds `changed`."""
        waiting = self.queue.popleft()
        self.counts.leased += 1
        if self.session.mark_taken(waiting.identity, waiting.nbytes):
            self._transport.wake()
        return waiting, self.session.ledger.producers[waiting.identity.producer].name

    def commit(self, waiting: Waiting) -> None:
        """The consumer is done with a message; the caller holds `changed`."""
        self.counts.leased -= 1
        self.counts.committed += 1
        if self.store is not None:
            self.store.commit(waiting.position)  # acknowledged when that is on the disk
        elif self.session.mark_committed(waiting.identity, self._clock.monotonic_s()):
            self._transport.wake()

    def wake(self) -> None:
        """Something is to be sent."""
        self._transport.wake()

    def stop(self) -> None:
        """End the thread and free everything."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self._transport.wake()
        self._thread.join()

    # -- the thread

    def _run(self) -> None:
        try:
            while not self.closing:
                self._transport.wait(self._patience())
                with self.changed:
                    self._step()
                    events = self._events()
                for event in events:
                    log.info("%s", event.text)
                    if self._on_event is not None:
                        self._on_event(event)
        except Exception as error:
            log.exception("the receiver at %s has failed", self._transport.address)
            with self.changed:
                self.failure = error
        finally:
            self._finish()

    def _finish(self) -> None:
        with self.changed:
            try:
                if self.store is not None:
                    self.store.close()
                    self._after_disk(self.store, 0.0)
            except BridgeError as error:
                log.exception("the store could not be closed")
                self.failure = error
            if self.failure is None:
                # After a failure nothing more is acknowledged: what it was about may not be stored.
                self.session.say_bye("the receiver closed")
                self._flush(math.inf)
            self._transport.close()
            self.changed.notify_all()

    def _restore(self, store: Store) -> None:
        for held in store.held():
            identity = self.session.ledger.restore(held.head, committed=held.committed, nbytes=held.nbytes)
            if not held.committed:
                self._at[held.position] = identity
                self.queue.append(Waiting(identity, None, held.nbytes, held.position))
                self.counts.restored += 1
        if store.last:
            log.info("%d rollouts in the store, %d of them not committed", store.last, self.counts.restored)

    def _step(self) -> None:
        now_s = self._clock.monotonic_s()
        for peer, frames in self._transport.receive(BATCH):
            self._on_frames(peer, frames, now_s)
        if self.store is not None:
            self.store.check()
            self._after_disk(self.store, now_s)
        self.session.tick(now_s)
        self._flush(now_s)

    def _patience(self) -> float:
        due_s = self.session.next_due_s
        return TICK_S if due_s is None else min(max(due_s - self._clock.monotonic_s(), 0.0), TICK_S)

    def _on_frames(self, peer: bytes, frames: Sequence[Buffer], now_s: float) -> None:
        head: DataHead | None = None
        try:
            message = decode_head(frames[0] if frames else b"")
            if not isinstance(message, DataHead):
                if len(frames) != 1:
                    raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"{len(frames)} frames, 1 is right")
                self.session.on_message(peer, message, now_s)
                return
            head = message
            if len(frames) != 2:
                raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"DATA of {len(frames)} frames, 2 are right")
            if self.session.on_data(peer, head, now_s):
                self._accept(Frames(bytes(frames[0]), frames[1]), decode_data(head, frames[1]))
        except ProtocolError as error:
            self.session.reject(peer, head, error)
            self._refusals.append(ReceiverEvent("rejected", f"a message was refused: {error}"))

    def _accept(self, frames: Frames, data: Data) -> None:
        accepted = self.session.accept(data, frames.nbytes)
        if accepted is None:
            return
        position = 0
        if self.store is not None:
            position = self.store.append(frames)
            self._storing.append((position, accepted.identity))
            self._at[position] = accepted.identity
        self.counts.messages += 1
        self.counts.samples += len(data.samples)
        self.counts.tokens += sum(len(sample) for sample in data.samples)
        self.queue.append(Waiting(accepted.identity, data, accepted.nbytes, position))
        self.changed.notify_all()
        for observer in self.session.observers():
            if self._transport.send(observer, frames) != "sent":
                self.session.skipped_copies += 1

    def _after_disk(self, store: Store, now_s: float) -> None:
        while self._storing and self._storing[0][0] <= store.synced:
            self.session.mark_stored(self._storing.popleft()[1], now_s)
        for position in store.take_committed():
            self.session.mark_committed(self._at.pop(position), now_s)

    def _flush(self, now_s: float) -> None:
        for peer, message in self.session.take_messages(now_s):
            # A full queue is no loss: everything a receiver says is absolute, and said again.
            if self._transport.send(peer, (encode_head(message),)) == "gone":
                self.session.unreachable(peer)

    def _events(self) -> list[ReceiverEvent]:
        events, self._refusals = self._refusals, []
        for producer in self.session.ledger.producers.values():
            if self._presence.get(producer.id) != producer.presence:
                self._presence[producer.id] = producer.presence
                if producer.presence != "away":
                    who = f"{producer.name} ({producer.id.hex()[:8]})"
                    events.append(ReceiverEvent("producer", f"producer {who} {producer.presence}"))
        return events
