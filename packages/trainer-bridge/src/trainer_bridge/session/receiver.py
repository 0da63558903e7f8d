"""`ReceiverSession`: who is connected, and what each peer must be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer_bridge.codec import Data
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.control import ControlBoard
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.messages import Ack, Bye, Credit, DataHead, Error, Hello, Message, Report
from trainer_bridge.rank_messages import Ask, Done, Ready
from trainer_bridge.session.allotment import Allotment
from trainer_bridge.session.handshake import negotiate, welcome
from trainer_bridge.session.ledger import Ledger
from trainer_bridge.session.peers import Accepted, Identity, Peer, Presence, Producer
from trainer_bridge.session.refusals import Refusals
from trainer_bridge.session.steps import StepTable

ACK_DELAY_S = 0.005
"""An ACK waits so long for more to say."""
ACK_EVERY = 8
"""So much news is worth an ACK at once: neither a full window nor a step's commit waits for the delay."""


class ReceiverSession:
    """Handshakes, acknowledgements, credit and copies for observers, for all peers of one receiver.

    Args:
        receiver: 16 bytes, fresh for this start.
        board: the control state that all peers are told.
        admit: raises ProtocolError for a HELLO that the named key must not say. None: everyone may.
    """

    def __init__(
        self,
        *,
        receiver: bytes,
        config: ReceiverConfig,
        board: ControlBoard,
        admit: Callable[[Hello, str], None] | None = None,
    ) -> None:
        self._receiver = receiver
        self._config = config
        self._board = board
        self.ledger = Ledger(config.remember_rollouts, config.max_producers)
        self.steps = StepTable()
        self.peers: dict[bytes, Peer] = {}
        self.rejected: dict[int, int] = {}
        """Refused messages: error code -> count."""
        self.beyond_credit = 0
        """Messages left unread because their producer was never given credit for them."""
        self.skipped_copies = 0
        """Copies that an observer did not get because it was too slow."""
        self.refusals = Refusals()
        self.status_due: list[bytes] = []
        """Observers that are to be told how the receiver stands."""
        self.has_news = False
        """A producer must hear of new credit now, not at the next heartbeat."""
        self.beyond_queue = 0
        """Rollouts that came beyond the queue of their producer: the consumer waited for groups."""
        self.allotment = Allotment(queue_messages=config.queue_messages, queue_bytes=config.queue_bytes)
        self._admit = admit
        self._out: list[tuple[bytes, Message]] = []

    # -- the transport says

    def on_message(self, peer_id: bytes, message: Message, now_s: float, user: str = "") -> None:
        """Take in anything but DATA; `user` is the name of the key it came under."""
        if isinstance(message, Hello):
            self._on_hello(peer_id, message, user, now_s)
            return
        peer = self.peers.get(peer_id)
        if peer is None:
            if not isinstance(message, Bye | Error):
                self._refuse(peer_id, 0, ErrorCode.NO_SESSION, "say HELLO first")
            return
        peer.heard_s = now_s
        if isinstance(message, Ask | Ready | Done):
            if peer.role == "rank" and message.session == peer.session:
                self.steps.on_message(peer_id, peer.id, message)
        elif isinstance(message, Bye) and message.session == peer.session:
            self._forget(peer_id, peer, "finished")
            words = self.ledger.producers[peer.id].account if peer.role == "producer" else "bye"
            self._out.append((peer_id, Bye(peer.session, words)))
        elif isinstance(message, Report) and peer.role == "producer":
            producer = self.ledger.producers[peer.id]
            if message.session == peer.session and self.ledger.pass_over(producer, message.holes):
                peer.ack_due = True  # with it goes the credit that waits for this
            producer.report(message, now_s)
        elif isinstance(message, Credit) and peer.role == "observer" and message.session == peer.session:
            peer.copy_limit = min(message.sequence_limit, peer.copies + self._config.observer_copies)

    def on_data(self, peer_id: bytes, head: DataHead, now_s: float) -> bool:
        """Look at the head of a DATA message. True: it is new; decode it, and call `accept` or `reject`.

        Raises:
            ProtocolError: it must not come from this peer, or not at this place; call `reject`.
        """
        peer = self.peers.get(peer_id)
        if peer is None:
            self._refuse(peer_id, 0, ErrorCode.NO_SESSION, "say HELLO first")
            return False
        peer.heard_s = now_s
        if peer.role != "producer" or head.producer != peer.id:
            raise ProtocolError(ErrorCode.WRONG_ROLE, "DATA under another producer's id, or from an observer")
        if head.sequence > self.ledger.producers[peer.id].highest_limit:
            # Not refused: a message that is refused again and again is dropped, and this one may be good.
            self.beyond_credit += 1
            return False
        peer.unsaid += 1
        if peer.unsaid >= ACK_EVERY:
            peer.ack_due = True
        elif peer.ack_by_s is None:
            peer.ack_by_s = now_s + ACK_DELAY_S
        return self.ledger.is_new(self.ledger.producers[peer.id], head)

    def accept(self, data: Data, nbytes: int) -> Accepted | None:
        """A new message decoded well. None: its rollout is here already, there is nothing to deliver."""
        beyond = self.allotment.is_beyond(self.ledger.producers[data.head.producer])
        accepted = self.ledger.accept(data, nbytes)
        self.beyond_queue += beyond and accepted is not None
        return accepted

    def reject(self, peer_id: bytes, head: DataHead | None, error: ProtocolError) -> None:
        """A message is not valid: count it and tell its sender which one."""
        self.rejected[error.code] = self.rejected.get(error.code, 0) + 1
        peer = self.peers.get(peer_id)
        if peer is not None and peer.role == "producer":
            self.ledger.producers[peer.id].rejected += 1
        epoch, sequence = (head.epoch, head.sequence) if head is not None else (0, 0)
        session = peer.session if peer is not None else 0
        self._out.append((peer_id, Error(session, error.code, error.detail, epoch, sequence)))

    def observers(self) -> Iterator[bytes]:
        """Observers that get a copy of what was just accepted; one that is behind is skipped and counted."""
        for peer_id, peer in self.peers.items():
            if peer.role != "observer":
                continue
            if peer.copies < peer.copy_limit:
                peer.copies += 1
                yield peer_id
            else:
                self.skipped_copies += 1

    def unreachable(self, peer_id: bytes) -> None:
        """The transport has no way to this peer any more."""
        peer = self.peers.get(peer_id)
        if peer is not None:
            self._forget(peer_id, peer, "lost")

    def tick(self, now_s: float) -> None:
        """Let time pass: heartbeats go out, silent peers are given up."""
        timing = self._config.timing
        for peer_id, peer in list(self.peers.items()):
            if now_s - peer.heard_s > timing.peer_timeout_s:
                self._forget(peer_id, peer, "lost")
            elif now_s - peer.told_s >= timing.heartbeat_s:
                peer.told_s = now_s
                self._out.append((peer_id, self._board.state.message(peer.session)))
                if peer.role == "producer":
                    peer.ack_due = peer.credit_due = True
                elif peer.role == "observer":
                    self.status_due.append(peer_id)

    # -- the owner says

    def mark_taken(self, identity: Identity, nbytes: int) -> None:
        """A message left the queue: its place is free."""
        self.ledger.mark_taken(identity, nbytes)
        peer = self._peer_of(identity.producer)
        if peer is not None:
            self._note_credit(peer)

    def mark_returned(self, identity: Identity, nbytes: int) -> None:
        """The consumer gave a message back: it takes a place of the queue again."""
        self.ledger.mark_returned(identity, nbytes)

    def limit(self, places: int | None, *, starved: bool = False) -> None:
        """Bound how much may be on its way, over all producers together.

        The staleness allowance is such a bound, so that backpressure and staleness are one number.

        Args:
            places: rollouts that may still be sent. None: only each producer's own queue bounds it.
            starved: the consumer waits for groups that are not complete, so that full queues must get room.
        """
        if places is None and not starved and self.allotment.is_plain:
            return
        producers = [peer for peer in self.peers.values() if peer.role == "producer"]
        known = [self.ledger.producers[peer.id] for peer in producers]
        if self.allotment.set(places, known, starved=starved):
            for peer in producers:
                self._note_credit(peer)

    def has_credit(self, producer: Producer) -> bool:
        """True: the producer is connected and may send something new."""
        return self.credit_left(producer) > 0

    def is_crowded(self, producer: Producer, now_s: float) -> bool:
        """True: it has credit and a message to send, and does not: it has no room for more itself."""
        if producer.crowded_s is None or not self.has_credit(producer):
            return False
        # What it told of right before may be on its way.
        return now_s - producer.crowded_s >= 2 * self._config.timing.heartbeat_s

    def credit_left(self, producer: Producer) -> int:
        """New messages that a producer may still send; 0 if it is not connected, or has no bytes left."""
        peer = self._peer_of(producer.id)
        if peer is None:
            return 0
        credit = self.allotment.credit(producer, peer.session)
        return self.allotment.places(producer) if credit.byte_limit else 0

    def mark_stored(self, identity: Identity, now_s: float) -> None:
        """The message is on the store's disk."""
        self._ack_later(self.ledger.mark_stored(identity), now_s)

    def mark_committed(self, identity: Identity, now_s: float) -> bool:
        """The consumer is done with the message for good. True: there is something to send, now or soon."""
        return self._ack_later(self.ledger.mark_committed(identity), now_s)

    @property
    def next_due_s(self) -> float | None:
        """When `take_messages` has more to say if nothing else happens. None: at the heartbeat."""
        return min((p.ack_by_s for p in self.peers.values() if p.ack_by_s is not None), default=None)

    def publish(self) -> None:
        """The control state changed: tell everyone now, not at the next heartbeat."""
        for peer_id, peer in self.peers.items():
            self._out.append((peer_id, self._board.state.message(peer.session)))

    def say_bye(self, reason: str) -> None:
        """The receiver closes: tell all peers."""
        for peer_id, peer in self.peers.items():
            self._out.append((peer_id, Bye(peer.session, reason)))

    def take_messages(self, now_s: float) -> list[tuple[bytes, Message]]:
        """What is to be sent now; one ACK for each producer that something new is known for."""
        for peer_id, peer in self.peers.items():
            if peer.ack_due or (peer.ack_by_s is not None and now_s >= peer.ack_by_s):
                peer.ack_due = False
                peer.ack_by_s = None
                peer.unsaid = 0
                self._out.append((peer_id, Ack(peer.session, self.ledger.producers[peer.id].levels())))
                self._note_credit(peer)
            if peer.credit_due:
                self._out.append((peer_id, self._tell_credit(peer)))
        self.has_news = False
        out, self._out = self._out, []
        return out

    # -- inside

    def _on_hello(self, peer_id: bytes, hello: Hello, user: str, now_s: float) -> None:
        known = self.peers.get(peer_id)
        if known is not None and hello.session < known.session:
            return  # overtaken by a later one on the same connection
        try:
            agreed = negotiate(hello)
            if self._admit is not None:
                self._admit(hello, user)
            producer = self._claim(peer_id, hello) if hello.role == "producer" else None
        except ProtocolError as error:
            self.rejected[error.code] = self.rejected.get(error.code, 0) + 1
            self.refusals.add(hello, error)
            self._refuse(peer_id, hello.session, error.code, error.detail)
            return
        self.refusals.forgive(hello.name)
        if known is not None and (known.role, known.id) != (hello.role, hello.peer):
            self._forget(peer_id, known, "lost")  # it speaks for somebody else now
        peer = Peer(hello.session, hello.role, hello.peer, hello.name, heard_s=now_s, told_s=now_s)
        self.peers[peer_id] = peer
        if hello.role == "rank":
            self.steps.on_hello(peer_id, hello.peer, hello.session)
        if hello.role == "observer":
            # Once it is welcome it sees what comes, also before its first CREDIT is here.
            peer.copy_limit = self._config.observer_copies
        credit = Credit(peer.session, peer.copy_limit, 0) if producer is None else self._tell_credit(peer)
        acks = producer.levels() if producer is not None else ()
        answer = welcome(
            hello, agreed, receiver=self._receiver, config=self._config, acks=acks, credit=credit
        )
        self._out += [(peer_id, answer), (peer_id, self._board.state.message(peer.session))]

    def _claim(self, peer_id: bytes, hello: Hello) -> Producer:
        """Give a producer id to the connection that asks for it; an older connection loses it."""
        known = self.ledger.producers.get(hello.peer)
        holder = self._peer_of(hello.peer) if known is not None and known.epoch == hello.epoch else None
        if holder is not None and hello.session < holder.session:
            # The HELLO of a connection that broke may be read after its successor's.
            raise ProtocolError(ErrorCode.SUPERSEDED, "the same producer has connected again since")
        producer = self.ledger.claim(hello)
        if producer.peer is not None and producer.peer != peer_id:
            old = self.peers.pop(producer.peer, None)
            if old is not None:
                self._refuse(
                    producer.peer, old.session, ErrorCode.SUPERSEDED, "the same producer connected again"
                )
        producer.peer = peer_id
        producer.presence = "connected"
        return producer

    def _forget(self, peer_id: bytes, peer: Peer, presence: Presence) -> None:
        if peer.role == "producer":
            producer = self.ledger.producers[peer.id]
            self._out.append((peer_id, Ack(peer.session, producer.levels())))
            self.ledger.disconnect(producer, presence)
        del self.peers[peer_id]
        if peer.role == "rank":
            self.steps.on_lost(peer_id)

    def _note_credit(self, peer: Peer) -> None:
        if not peer.credit_due:
            credit = self.allotment.credit(self.ledger.producers[peer.id], peer.session)
            if self.allotment.has_moved(peer, credit):
                peer.credit_due = self.has_news = True

    def _tell_credit(self, peer: Peer) -> Credit:
        producer = self.ledger.producers[peer.id]
        credit = self.allotment.credit(producer, peer.session)
        peer.credit_due = False
        peer.sequence_limit, peer.byte_limit = credit.sequence_limit, credit.byte_limit
        producer.highest_limit = max(producer.highest_limit, credit.sequence_limit)
        return credit

    def _peer_of(self, producer_id: bytes) -> Peer | None:
        peer_id = self.ledger.producers[producer_id].peer
        return self.peers.get(peer_id) if peer_id is not None else None

    def _ack_later(self, producer_ids: set[bytes], now_s: float) -> bool:
        changed = False
        for producer_id in producer_ids:
            peer = self._peer_of(producer_id)
            if peer is None:
                continue
            peer.unsaid += 1
            if peer.unsaid == ACK_EVERY:
                peer.ack_due = changed = True
            elif peer.ack_by_s is None:
                peer.ack_by_s = now_s + ACK_DELAY_S
                changed = True
        return changed

    def _refuse(self, peer_id: bytes, session: int, code: ErrorCode, text: str) -> None:
        self._out.append((peer_id, Error(session, code, text)))
