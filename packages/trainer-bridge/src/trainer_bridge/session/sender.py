"""`SenderSession`: what a producer must send, and what it may forget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

from trainer_bridge.config import SettleLevel, Timing
from trainer_bridge.control import ControlView
from trainer_bridge.errors import ErrorCode, ProtocolError, reason_of
from trainer_bridge.messages import (
    MINOR,
    Ack,
    Bundle,
    Bye,
    Control,
    Credit,
    DataHead,
    Error,
    Hello,
    Levels,
    Message,
    Report,
    Welcome,
)
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session.flight import Flights
from trainer_bridge.session.handshake import FEATURES, GREETINGS_BEFORE_REFUSAL, SCHEMAS
from trainer_bridge.session.holes import Holes
from trainer_bridge.session.refusal_kinds import kind_of_refusal
from trainer_bridge.session.streams import Stream, Streams

DOUBT_HEARTBEATS = 2
"""A message that was refused and given up is in doubt for so long: each heartbeat brings an ACK."""

State = Literal["down", "greeting", "open", "refused", "finished"]


class SenderSession:
    """Window, acknowledgements, resending and dropping of one producer, across any number of connections.

    Sequence numbers rise over all epochs of a producer; the messages themselves live in an outbox elsewhere.

    Args:
        producer: 16 bytes.
        name: for people.
        streams: epochs that may still have unsettled messages, rising; the last is the one being written.
        last: the highest sequence number that exists.
        settled: what earlier processes saw settled; everything below the first stream is.
        window: messages on the wire without a RECEIVED.
        settle: the acknowledgement after which a message is done with.
    """

    def __init__(
        self,
        *,
        producer: bytes,
        name: str,
        streams: Sequence[Stream],
        last: int,
        settled: SeqSet,
        window: int,
        settle: SettleLevel,
        timing: Timing,
    ) -> None:
        self._producer = producer
        self._name = name
        self._streams = Streams(streams)
        self._own_window = window
        self._settle: SettleLevel = settle
        self._timing = timing
        self.last = last
        self.crowded = 0
        """Callers that wait for room: so many more messages there would be."""
        self.settled = settled
        """Everything that needs no further care: acknowledged at the level asked for, or dropped."""
        self.received = SeqSet(streams[0].first - 1)
        """What the receiver of this connection holds."""
        self.dropped: dict[int, int] = {}
        """Messages given up because the receiver calls them invalid: error code -> count."""
        self.damaged = 0
        """Messages that arrived damaged, as the receiver says."""
        self.damage = ""
        """Which one did last, for people."""
        self.farewell = ""
        """What the receiver said last at the end of a session."""
        self.control = ControlView()
        self.state: State = "down"
        self.refusal: Error | None = None
        """The peer's answer, if the state is `refused`."""
        self.welcome: Welcome | None = None
        self.session = 0
        self._out: deque[Message] = deque()
        self._flights = Flights(timing)
        self._holes = Holes(self._streams, DOUBT_HEARTBEATS * timing.heartbeat_s)
        self._greetings_lost = 0
        self._next = self.settled.upto + 1
        self._sequence_limit = 0
        self._byte_limit = 0
        self._heard_s = 0.0
        self._spoke_s = 0.0
        self._said_bye = False

    # -- the transport says

    def connected(self, now_s: float) -> None:
        """A fresh connection stands: greet."""
        if self.state in ("refused", "finished"):
            return
        self.session += 1
        self._heard_s = now_s
        self._greet(now_s)

    def disconnected(self) -> None:
        """The connection is gone; whatever was on it will be sent again unless the next WELCOME names it."""
        if self.state in ("refused", "finished"):
            return
        self.state = "down"
        self.welcome = None
        self._out.clear()

    def on_message(self, message: Message, now_s: float) -> None:
        """Take in a message. Messages of an earlier connection are ignored."""
        if isinstance(message, Hello | Report | DataHead | Bundle):
            return
        if isinstance(message, Error):
            self._on_error(message, now_s)
            return
        if message.session != self.session:
            return
        self._heard_s = now_s
        if isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Ack):
            self._absorb(message.levels)
        elif isinstance(message, Credit):
            self._sequence_limit = message.sequence_limit
            self._byte_limit = message.byte_limit
        elif isinstance(message, Control):
            self.control.apply(message)
        elif isinstance(message, Bye) and self.state != "finished":
            self.state = "finished" if self._said_bye else "down"
            self.farewell = message.reason

    def on_garbage(self, error: ProtocolError) -> None:
        """The peer sent bytes that are no message. In answer to HELLO: it speaks something else."""
        if self.state == "greeting":
            text = f"the peer's answer to HELLO cannot be read: {error.detail}"
            self._greet_again(Error(self.session, error.code, text))

    def tick(self, now_s: float) -> bool:
        """Let time pass. False: the peer was silent for too long, the connection should be opened anew."""
        if self.state == "greeting" and now_s - self._spoke_s >= self._timing.greet_again_s:
            self._greet(now_s)
        elif self.state == "open" and now_s - self._spoke_s >= self._timing.heartbeat_s:
            self._spoke_s = now_s
            self._holes.tick(now_s)
            self._out.append(self._report())
            self._flights.find_overdue(now_s)
        silent = self.state in ("greeting", "open") and now_s - self._heard_s > self._timing.peer_timeout_s
        return not silent

    # -- the caller asks

    def take_messages(self) -> list[Message]:
        """Everything but DATA that is to be sent now."""
        if self.state == "open" and self._holes.are_news(self.settled, self.received, self._next - 1):
            self._out.append(self._report())
        out = list(self._out)
        self._out.clear()
        return out

    def next_to_send(self) -> int | None:
        """The sequence number to send now; None if nothing may be sent. Follow it with `mark_sent`."""
        if self.state != "open":
            return None
        while self._next <= self.last and (self._next in self.settled or self._next in self.received):
            self._next += 1
        again = self._flights.next_again()
        if again is not None:
            return again
        welcome = self.welcome
        if welcome is None or len(self._flights) >= min(self._own_window, welcome.window):
            return None
        if self._flights.nbytes >= self._byte_limit:
            return None
        return self._next if self._next <= min(self.last, self._sequence_limit) else None

    def mark_sent(self, seq: int, nbytes: int, now_s: float) -> None:
        """The message was given to the transport."""
        if self._flights.mark_sent(seq, nbytes, now_s):
            self._next = seq + 1

    def not_sent(self, seqs: Sequence[int]) -> None:
        """The transport did not take these after all: they come next."""
        self._flights.not_sent(seqs)

    def drop(self, seq: int, code: int) -> None:
        """Give a message up for a counted reason."""
        self.dropped[code] = self.dropped.get(code, 0) + 1
        self.lose(seq)

    def lose(self, seq: int) -> None:
        """Nobody has the message any more: go on without it."""
        self.settled.add(seq)
        self._flights.land(seq)

    def say_bye(self, reason: str) -> None:
        """End the session in order; the state becomes `finished` when the receiver answers."""
        if self.state == "open" and not self._said_bye:
            self._said_bye = True
            # The last word on what is not settled: with none after it, an earlier one would stand for ever.
            self._out += [self._report(), Bye(self.session, reason)]

    @property
    def features(self) -> tuple[str, ...]:
        """What both ends have, as WELCOME says; none without a session."""
        return self.welcome.features if self.welcome is not None else ()

    @property
    def max_payload(self) -> int | None:
        """Bytes of arrays in one message that the receiver takes. None: there is no session."""
        return self.welcome.max_payload if self.welcome is not None else None

    @property
    def in_flight(self) -> int:
        """Messages on the wire that are not acknowledged as received."""
        return len(self._flights)

    @property
    def resent(self) -> int:
        """Messages that were sent again on the connection on which they had been sent."""
        return self._flights.resent

    @property
    def unsettled(self) -> int:
        """Messages that must not be forgotten yet."""
        first = self._streams.first
        return self.last - first + 1 - self.settled.count(first, self.last)

    # -- inside

    def _greet(self, now_s: float) -> None:
        self.state = "greeting"
        self._spoke_s = now_s
        self._holes.on_greeting()
        self._out.append(
            Hello(
                session=self.session,
                role="producer",
                peer=self._producer,
                name=self._name,
                minor_min=MINOR,
                minor_max=MINOR,
                schemas=SCHEMAS,
                features=FEATURES,
                epoch=self._streams.epoch,
                streams=self._streams.unsettled(self.settled, self.last),
                starts=self._streams.starts,
            )
        )

    def _on_welcome(self, message: Welcome) -> None:
        if self.state != "greeting":
            return
        self.state = "open"
        self._greetings_lost = 0
        self.welcome = message
        self.control.meet(message.receiver)
        # A restarted receiver may hold less than its predecessor: only what this WELCOME names is there.
        self.received = SeqSet(self._streams.first - 1)
        self._flights.clear()
        self._next = self.settled.upto + 1
        self._sequence_limit = message.sequence_limit
        self._byte_limit = message.byte_limit
        self._absorb(message.acks)

    def _absorb(self, levels: Sequence[Levels]) -> None:
        for entry in levels:
            span = self._streams.span(entry.epoch, self.last)
            if span is None:
                continue
            done = {"received": entry.received, "stored": entry.stored, "committed": entry.committed}
            self.received.merge(entry.received, *span)
            self.received.merge(done[self._settle], *span)  # its ranges may come in another ACK's turn
            self.settled.merge(done[self._settle], *span)
        for code in self._holes.take_arrived(self.received):
            self.dropped[code] -= 1
        self._flights.land_all(self.received, self.settled)

    def _on_error(self, message: Error, now_s: float) -> None:
        if message.code == ErrorCode.NO_SESSION:
            # The receiver restarted and has not met us; zmq reconnected before we noticed.
            if self.state == "open":
                self.connected(now_s)
        elif message.session not in (0, self.session):
            return
        elif message.code == ErrorCode.QUARANTINED:
            # It ends, and what was malformed may have been damaged on the way: everything is sent again.
            self.damage = message.text
        elif kind_of_refusal(message.code) == "session":
            self.state = "refused"
            self.refusal = message
        elif self.state == "greeting":
            self._greet_again(message)
        else:
            self._on_refusal(message, now_s)

    def _on_refusal(self, message: Error, now_s: float) -> None:
        """One message was refused: for good if it is what was sent, for now if it was damaged on the way."""
        seq = message.sequence
        known = seq in self._flights and self._streams.span(message.epoch, self.last) is not None
        if kind_of_refusal(message.code) == "damage":
            self.damaged += 1
            which = "a message"  # what is not known is sent again when it is overdue
            if known:
                which = f"message {seq} ({self._flights.damage(seq, now_s)} copies of it so far)"
            self.damage = f"{which} arrived damaged, {reason_of(message.code)}: {message.text}"
        elif known and self._flights.refuse(seq):
            self.drop(seq, message.code)
            self._holes.doubt(seq, message.code, now_s)

    def _greet_again(self, refusal: Error) -> None:
        self._greetings_lost += 1
        if self._greetings_lost >= GREETINGS_BEFORE_REFUSAL:
            self.state = "refused"
            self.refusal = refusal
        else:
            self._spoke_s = -math.inf  # at the next tick

    def _report(self) -> Report:
        last = self.last
        while last in self.settled and last not in self.received:  # dropped, or lost: it never comes
            last -= 1
        return Report(
            session=self.session,
            generation=self.control.state.generation,
            last_sequence=last + (self.crowded > 0),
            unsettled=self.unsettled,
            holes=self._holes.tell(self.settled, self.received, self._next - 1),
        )
