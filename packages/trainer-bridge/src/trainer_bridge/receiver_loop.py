"""`ReceiverLoop`: the one thread in which a receiver's network, session, store and pool meet."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from trainer_bridge import bundle, codec
from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.clock import Clock
from trainer_bridge.codec import Data, Frames, decode_data
from trainer_bridge.dead_letters import DeadLetters, letter_of_refusal
from trainer_bridge.errors import BridgeError, ErrorCode, ProtocolError, UnsendableError
from trainer_bridge.guard import Guard
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.listener import Listener
from trainer_bridge.member import Member
from trainer_bridge.messages import Bundle, DataHead, Message
from trainer_bridge.payload import Buffer
from trainer_bridge.pool import Pool
from trainer_bridge.receiver_events import Changes, ReceiverEvent, Refusals, name_of
from trainer_bridge.receiver_stats import status_of
from trainer_bridge.resume import go_on_from, take_in
from trainer_bridge.session import Identity, ReceiverSession
from trainer_bridge.store import Store
from trainer_bridge.transport import ServerTransport

log = logging.getLogger(__name__)

TICK_S = 0.1
BATCH = 64


class ReceiverLoop:
    """Takes messages in, acknowledges them, and pools them for the consumer until it is stopped.

    `changed` guards the session, the pool and the public fields; it is notified when a rollout came, when a
    group's deadline passed, and at the end.

    Args:
        pool: of the same session.
        letters: for messages that cannot be read.
        on_event: called without the lock; what it raises is logged once and counted.
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
        self.listener = Listener(on_event, f"the receiver at {transport.address}")
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
        self._changes = Changes()
        self._refused = Refusals()
        self._told: list[ReceiverEvent] = []
        self._arrived = False
        """A rollout came in this step: the consumer is to be told at its end."""
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
        for ended in self.pool.ends.take_finished():
            if self.store is not None:
                self._at.update((each.position, each.identity) for each in ended)
                # Acknowledged when that is on the disk: a step in one piece.
                self.store.commit_many([(each.position, each.dropped) for each in ended])
            else:
                for resolved in ended:
                    due = self.session.mark_committed(resolved.identity, self._clock.monotonic_s())
                    self.session.has_news |= due
        full = self.store is not None and self.store.room.level == "full"
        self.session.limit(0 if full else self.pool.allowance, starved=self.pool.starved and not full)
        news = self.session.has_news or self.session.steps.waiting_peers
        if news and threading.current_thread() is not self._thread:
            self._transport.wake()

    def load(self, state: ReceiverState) -> None:
        """Go on from a checkpoint; the caller holds `changed`.

        Raises:
            BridgeError: rollouts were handed out already, or the state is damaged.
        """
        lost = go_on_from(state, self.pool, self.session.ledger, self.store, self._clock.monotonic_s())
        if lost:
            self._told.append(ReceiverEvent("store", lost))
        self.settle()

    def checkpoint_saved(self, state: ReceiverState) -> None:
        """A checkpoint is on the disk; the caller holds `changed`."""
        self.pool.ends.saved(state)
        self.pool.moved_s = self._clock.monotonic_s()
        self.settle()
        if self.store is not None:
            self.store.checkpoint_saved(state)

    def wake(self) -> None:
        """Something is to be sent."""
        self._transport.wake()

    def stop(self) -> None:
        """End the thread and free everything."""
        self.listener.check_outside("close")
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
                    unheard = event.kind in ("store", "waiting") and not self.listener
                    log.log(logging.WARNING if unheard else logging.INFO, "%s", event.text)
                    self.listener.tell(event)
                    self.pool.meter.event_faults = self.listener.faults
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
        take_in(store, self.pool, self.session.ledger, self._letters, self._clock)
        self.settle()

    def _step(self) -> None:
        now_s = self._clock.monotonic_s()
        ranked = bool(self.session.steps.ranks)  # before the last one may be lost
        for peer, frames, user in self._transport.receive(BATCH):
            if self.guard.admits(peer, user, now_s):
                self._on_frames(peer, frames, user, now_s)
        if self._arrived:
            self._arrived = False
            self.settle()
            self.changed.notify_all()
        if self.store is not None:
            self.store.check()
            self._after_disk(self.store, now_s)
        self._expire(now_s)
        self.session.tick(now_s)
        self._flush(now_s)
        if ranked or self.session.steps.ranks or self.session.steps.waiting_peers:
            self._serve_ranks()

    def _expire(self, now_s: float) -> None:
        self.pool.seen_s = now_s
        due_s = self.pool.groups.next_due_s()
        if due_s is not None and due_s <= now_s:
            self.pool.expire(now_s)
            self.settle()
            self.changed.notify_all()

    def _patience(self) -> float:
        due_s = self.session.next_due_s
        return TICK_S if due_s is None else min(max(due_s - self._clock.monotonic_s(), 0.0), TICK_S)

    def _on_frames(
        self, peer: bytes, frames: Sequence[Buffer], user: str, now_s: float, *, bundled: bool = False
    ) -> None:
        head: DataHead | None = None
        try:
            message = decode_head(frames[0] if frames else b"")
            if bundled and not isinstance(message, DataHead):
                raise ProtocolError(ErrorCode.UNKNOWN_KIND, f"a BUNDLE with {type(message).__name__} in it")
            if isinstance(message, Bundle):
                for each in bundle.split(message, frames):
                    self._on_frames(peer, each, user, now_s, bundled=True)
                return
            if not isinstance(message, DataHead):
                self.guard.charge(peer, now_s)
                if len(frames) != 1:
                    raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, f"{len(frames)} frames, 1 is right")
                self.session.on_message(peer, message, now_s, user)
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
            who = name_of(peer, self.session.peers.get(peer), user)
            self._refused.add(who, error)
            if self.guard.malformed(peer, user, now_s):
                self._quarantine(peer, who)

    def _quarantine(self, peer: bytes, name: str) -> None:
        text = f"too many malformed messages; nothing more is read from {name} for a while"
        self.session.reject(peer, None, ProtocolError(ErrorCode.QUARANTINED, text))
        self._told.append(ReceiverEvent("rejected", f"quarantine: {text}"))

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
        self._arrived = True
        for observer in self.session.observers():
            if self._transport.send(observer, frames) != "sent":
                self.session.skipped_copies += 1

    def _after_disk(self, store: Store, now_s: float) -> None:
        while self._storing and self._storing[0][0] <= store.synced:
            self.session.mark_stored(self._storing.popleft()[1], now_s)
        for position in store.take_committed():
            self.session.mark_committed(self._at.pop(position), now_s)
        store.tick(now_s)
        news = store.room.take_news()
        if news:
            self._told += [ReceiverEvent("store", text) for text in news]
            self.settle()

    def _flush(self, now_s: float) -> None:
        for peer, message in self.session.take_messages(now_s):
            self._say(peer, message)
        observers, self.session.status_due = self.session.status_due, []
        for observer in observers:
            status = status_of(observer, self._transport, self.session, self.pool, self.store, self.guard)
            if status is not None:
                self._say(observer, status)

    def _say(self, peer: bytes, message: Message) -> None:
        head = self._encoded(peer, message)
        # A full queue is no loss: everything a receiver says is absolute, and said again.
        if head is not None and self._transport.send(peer, (head,)) == "gone":
            self.session.unreachable(peer)

    def _encoded(self, peer: bytes, message: Message) -> bytes | None:
        """None: no message can hold the answer. That is the doing of its peer, which is one no longer."""
        try:
            return encode_head(message)
        except UnsendableError as error:
            if peer in self.session.peers:  # else it is the farewell of one that was given up
                self.session.reject(peer, None, ProtocolError(ErrorCode.TOO_LARGE, f"the answer: {error}"))
                self.session.unreachable(peer)
                text = f"peer {peer.hex()} was given up, it cannot be answered: {error}"
                self._told.append(ReceiverEvent("rejected", text))
            return None

    def _serve_ranks(self) -> None:
        steps = self.session.steps
        self.settle()
        for peer in steps.waiting_peers:
            while (item := steps.next_out(peer)) is not None:
                if isinstance(item, Member):
                    frames = self._frames_of(item)
                elif (head := self._encoded(peer, item)) is not None:
                    frames = (head,)
                else:
                    break
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
        if member.data is None:
            raise BridgeError(f"rollout {member.rollout_id.hex()} was leased without its data")
        # Not from the store: what could be read when it was leased may be damaged by now.
        head = member.data.head
        draft = codec.draft(member.data.samples, group_size=head.group_size)
        return draft.numbered(head.producer, head.epoch, head.sequence, head.created_ns)

    def _events(self) -> list[ReceiverEvent]:
        self.pool.meter.letters_not_kept = self._letters.not_kept
        events = [*self._refused.take(self._clock.monotonic_s()), *self._told]
        self._told = []
        events += [ReceiverEvent("rejected", text) for text in self.session.refusals.take_news()]
        events += [ReceiverEvent("waiting", text) for text in self.pool.take_news()]
        producers = self._changes.of_producers(self.session.ledger.producers)
        if producers:
            self.pool.moved_s = self._clock.monotonic_s()
            self.changed.notify_all()
        return events + producers + self._changes.of_drops(self.pool.meter.dropped)
