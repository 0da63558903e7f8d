"""`ReceiverLoop`: the one thread in which a receiver's network, session, store and pool meet."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.clock import Clock
from trainer_bridge.codec import Data, Frames, decode_data
from trainer_bridge.dead_letters import DeadLetters, letter_of_refusal
from trainer_bridge.errors import BridgeError, ErrorCode, ProtocolError
from trainer_bridge.guard import Guard
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.member import Member
from trainer_bridge.messages import DataHead, Hello
from trainer_bridge.payload import Buffer
from trainer_bridge.pool import Pool
from trainer_bridge.receiver_stats import status_of
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import Identity, ReceiverSession
from trainer_bridge.session.peers import Presence
from trainer_bridge.store import Store
from trainer_bridge.transport import ServerTransport

log = logging.getLogger(__name__)

TICK_S = 0.1
BATCH = 64


class ReceiverEvent(NamedTuple):
    """Something a user of the receiver may want to show. Told in its own thread: return quickly."""

    kind: Literal["producer", "rejected", "dropped"]
    text: str


class ReceiverLoop:
    """Takes messages in, acknowledges them, and pools them for the consumer until it is stopped.

    `changed` guards the session, the pool and the public fields; it is notified when a rollout came, when a
    group's deadline passed, and at the end.

    Args:
        pool: of the same session.
        letters: for messages that cannot be read.
        on_event: called without the lock.
    """

    def __init__(
        self,
        *,
        transport: ServerTransport,
        session: ReceiverSession,
        pool: Pool,
        store: Store | None,
        letters: DeadLetters,
        guard: Guard,
        clock: Clock,
        on_event: Callable[[ReceiverEvent], None] | None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._on_event = on_event
        self.session = session
        self.pool = pool
        self.store = store
        self.guard = guard
        self._letters = letters
        self.changed = threading.Condition()
        self.closing = False
        self.failure: Exception | None = None
        """What ended the thread before its time."""
        self._storing: deque[tuple[int, Identity]] = deque()
        self._at: dict[int, Identity] = {}
        """Position in the store -> message, while its commit is on the way to the disk."""
        self._dropped: set[str] = set()
        """Reasons that were told."""
        self._presence: dict[bytes, Presence] = {}
        self._refusals: list[ReceiverEvent] = []
        self._thread = threading.Thread(
            target=self._run, name=f"trainer-bridge receiver {transport.address}", daemon=True
        )
        if store is not None:
            self._restore(store)
        self._thread.start()

    def settle(self) -> None:
        """Carry out what the pool decided; the caller holds `changed`."""
        for lease in self.session.steps.take_abandoned():
            now_s = self._clock.monotonic_s()
            if lease.nacked:
                self.pool.nack(lease.lease, None, lease.reason, now_s)
            else:
                self.pool.release(lease.lease, now_s)
        for resolved in self.pool.ends.take_finished():
            if self.store is not None:
                self._at[resolved.position] = resolved.identity
                # Acknowledged when that is on the disk.
                self.store.commit(resolved.position, dropped=resolved.dropped)
            else:
                due = self.session.mark_committed(resolved.identity, self._clock.monotonic_s())
                self.session.has_news |= due
        self.session.limit(self.pool.allowance)
        news = self.session.has_news or self.session.steps.waiting_peers
        if news and threading.current_thread() is not self._thread:
            self._transport.wake()

    def load(self, state: ReceiverState) -> None:
        """Go on from a checkpoint; the caller holds `changed`.

        Raises:
            BridgeError: rollouts were handed out already, or the state is damaged.
        """
        done = state.watermark()
        committed = SeqSet()
        again: list[tuple[DataHead, int, int]] = []
        for held in self.store.held() if self.store is not None else ():
            identity = Identity(held.head.producer, held.head.epoch, held.head.sequence)
            if identity in done:
                committed.add(held.position)
            elif held.committed:
                again.append((held.head, held.nbytes, held.position))
        members = (
            Member.stored(self.session.ledger.reopen(head, nbytes), head, nbytes=nbytes, position=position)
            for head, nbytes, position in again
        )
        self.pool.load(state, members, self._clock.monotonic_s())
        if self.store is not None:
            self.store.rewind(committed)
        self.settle()
        log.info("a checkpoint was loaded: %d stored rollouts after it come again", len(again))

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
                self.pool.meter.restored += 1
                self.pool.offer(
                    Member.stored(identity, held.head, nbytes=held.nbytes, position=held.position),
                    self._clock.monotonic_s(),
                )
        self.settle()
        if store.last:
            restored = self.pool.meter.restored
            log.info("%d rollouts in the store, %d of them not committed", store.last, restored)

    def _step(self) -> None:
        now_s = self._clock.monotonic_s()
        ranked = bool(self.session.steps.ranks)  # before the last one may be lost
        for peer, frames, user in self._transport.receive(BATCH):
            if self.guard.admits(peer, user, now_s):
                self._on_frames(peer, frames, user, now_s)
        if self.store is not None:
            self.store.check()
            self._after_disk(self.store, now_s)
        self._expire(now_s)
        self.session.tick(now_s)
        self._flush(now_s)
        if ranked or self.session.steps.ranks:
            self._serve_ranks()

    def _expire(self, now_s: float) -> None:
        due_s = self.pool.groups.next_due_s()
        if due_s is not None and due_s <= now_s:
            self.pool.expire(now_s)
            self.settle()
            self.changed.notify_all()

    def _patience(self) -> float:
        due_s = self.session.next_due_s
        return TICK_S if due_s is None else min(max(due_s - self._clock.monotonic_s(), 0.0), TICK_S)

    def _on_frames(self, peer: bytes, frames: Sequence[Buffer], user: str, now_s: float) -> None:
        head: DataHead | None = None
        try:
            message = decode_head(frames[0] if frames else b"")
            if not isinstance(message, DataHead):
                self.guard.charge(peer, now_s)
                if len(frames) != 1:
                    raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"{len(frames)} frames, 1 is right")
                if isinstance(message, Hello) and message.role == "producer":
                    self.guard.claim(message.peer, user)
                self.session.on_message(peer, message, now_s)
                return
            head = message
            if len(frames) != 2:
                raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"DATA of {len(frames)} frames, 2 are right")
            if self.session.on_data(peer, head, now_s):
                self._accept(Frames(bytes(frames[0]), frames[1]), decode_data(head, frames[1]))
            else:
                self.guard.charge(peer, now_s)
        except ProtocolError as error:
            self.session.reject(peer, head, error)
            self._letters.add(letter_of_refusal(head, frames, error, self._clock.now_ns()))
            self._refusals.append(ReceiverEvent("rejected", f"a message was refused: {error}"))
            if self.guard.malformed(peer, user, now_s):
                self._quarantine(peer, user or peer.hex())

    def _quarantine(self, peer: bytes, name: str) -> None:
        text = f"too many malformed messages; nothing more is read from {name} for a while"
        self.session.reject(peer, None, ProtocolError(ErrorCode.QUARANTINED, text))
        self._refusals.append(ReceiverEvent("rejected", f"quarantine: {text}"))

    def _accept(self, frames: Frames, data: Data) -> None:
        accepted = self.session.accept(data, frames.nbytes)
        if accepted is None:
            return
        position = 0
        if self.store is not None:
            position = self.store.append(frames)
            self._storing.append((position, accepted.identity))
        self.pool.meter.arrive(len(data.samples), sum(len(sample) for sample in data.samples))
        self.pool.offer(Member.arrived(accepted, frames, position), self._clock.monotonic_s())
        self.settle()
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
        observers, self.session.status_due = self.session.status_due, []
        for observer in observers:
            here = self._transport.address
            status = status_of(observer, here, self.session, self.pool, self.store, self.guard)
            if status is not None:
                self._transport.send(observer, (encode_head(status),))

    def _serve_ranks(self) -> None:
        steps = self.session.steps
        self.settle()
        for peer in steps.waiting_peers:
            while (item := steps.next_out(peer)) is not None:
                frames = self._frames_of(item) if isinstance(item, Member) else (encode_head(item),)
                answer = self._transport.send(peer, frames)
                if answer == "gone":
                    self.session.unreachable(peer)
                if answer != "sent":
                    break  # full: the rest goes out at the next step
                steps.mark_sent(peer)
        self.settle()
        self.changed.notify_all()

    def _frames_of(self, member: Member) -> Frames:
        if member.frames is not None:
            return member.frames
        if self.store is None:
            raise BridgeError(f"rollout {member.rollout_id.hex()} is to be sent to a rank and is not stored")
        return self.store.frames(member.position)

    def _events(self) -> list[ReceiverEvent]:
        events, self._refusals = self._refusals, []
        for producer in self.session.ledger.producers.values():
            if self._presence.get(producer.id) != producer.presence:
                self._presence[producer.id] = producer.presence
                if producer.presence != "away":
                    who = f"{producer.name} ({producer.id.hex()[:8]})"
                    events.append(ReceiverEvent("producer", f"producer {who} {producer.presence}"))
                    self.pool.moved_s = self._clock.monotonic_s()
                    self.changed.notify_all()
        for reason in self.pool.meter.dropped:
            if reason not in self._dropped:
                self._dropped.add(reason)
                events.append(
                    ReceiverEvent("dropped", f"rollouts are dropped: {reason} (counted from now on)")
                )
        return events
