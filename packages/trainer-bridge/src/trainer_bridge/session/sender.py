"""`SenderSession`: what a producer must send, and what it may forget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from trainer_bridge.config import SettleLevel, Timing
from trainer_bridge.control import ControlView
from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.messages import (
    MINOR,
    Ack,
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
from trainer_bridge.session.handshake import FEATURES, SCHEMAS

State = Literal["down", "greeting", "open", "refused", "finished"]

REFUSALS_BEFORE_DROP = 3
"""A message that the receiver calls malformed is sent again so often (a bit may have flipped on the way)."""
GREETINGS_BEFORE_REFUSAL = 8
"""So many greetings in a row that are not understood, or whose answer is not, and the peer speaks something
else; fewer may be damage on the way."""
_SESSION_ERRORS = 32
"""Error codes from here on end the session."""


class Stream(NamedTuple):
    """One epoch of a producer's sequence: it begins at `first` and ends where the next epoch begins."""

    epoch: int
    first: int


class _Flight(NamedTuple):
    """A message on the wire that is not acknowledged as received."""

    nbytes: int
    sent_s: float


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
        self._streams = list(streams)
        self._firsts = [stream.first for stream in streams]
        self._own_window = window
        self._settle: SettleLevel = settle
        self._timing = timing
        self.last = last
        self.settled = settled
        """Everything that needs no further care: acknowledged at the level asked for, or dropped."""
        self.received = SeqSet(streams[0].first - 1)
        """What the receiver of this connection holds."""
        self.dropped: dict[int, int] = {}
        """Messages given up because the receiver calls them invalid: error code -> count."""
        self.resent = 0
        self.control = ControlView()
        self.state: State = "down"
        self.refusal: Error | None = None
        """The peer's answer, if the state is `refused`."""
        self.welcome: Welcome | None = None
        self.session = 0
        self._out: deque[Message] = deque()
        self._flight: dict[int, _Flight] = {}
        self._flight_bytes = 0
        self._again: deque[int] = deque()
        self._refusals: dict[int, int] = {}
        self._given_up: dict[int, int] = {}
        """Dropped message -> error code, in case that a copy of it arrived after all."""
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
        if isinstance(message, Hello | Report | DataHead):
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
            self._out.append(self._report())
            self._find_overdue(now_s)
        silent = self.state in ("greeting", "open") and now_s - self._heard_s > self._timing.peer_timeout_s
        return not silent

    # -- the caller asks

    def take_messages(self) -> list[Message]:
        """Everything but DATA that is to be sent now."""
        out = list(self._out)
        self._out.clear()
        return out

    def next_to_send(self) -> int | None:
        """The sequence number to send now; None if nothing may be sent. Follow it with `mark_sent`."""
        if self.state != "open":
            return None
        while self._again:
            if self._again[0] in self._flight:
                return self._again[0]
            self._again.popleft()
        welcome = self.welcome
        if welcome is None or len(self._flight) >= min(self._own_window, welcome.window):
            return None
        if self._flight_bytes >= self._byte_limit:
            return None
        while self._next <= self.last and (self._next in self.settled or self._next in self.received):
            self._next += 1
        return self._next if self._next <= min(self.last, self._sequence_limit) else None

    def mark_sent(self, seq: int, nbytes: int, now_s: float) -> None:
        """The message was given to the transport."""
        if self._again and self._again[0] == seq:
            self._again.popleft()
            self.resent += 1
        else:
            self._next = seq + 1
            self._flight_bytes += nbytes
        self._flight[seq] = _Flight(nbytes, now_s)

    def drop(self, seq: int, code: int) -> None:
        """Give a message up for a counted reason."""
        self.dropped[code] = self.dropped.get(code, 0) + 1
        self._given_up[seq] = code
        self.settled.add(seq)
        self._land(seq)

    def say_bye(self, reason: str) -> None:
        """End the session in order; the state becomes `finished` when the receiver answers."""
        if self.state == "open" and not self._said_bye:
            self._said_bye = True
            self._out.append(Bye(self.session, reason))

    @property
    def in_flight(self) -> int:
        """Messages on the wire that are not acknowledged as received."""
        return len(self._flight)

    @property
    def unsettled(self) -> int:
        """Messages that must not be forgotten yet."""
        first = self._firsts[0]
        return self.last - first + 1 - self.settled.count(first, self.last)

    # -- inside

    def _greet(self, now_s: float) -> None:
        self.state = "greeting"
        self._spoke_s = now_s
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
                epoch=self._streams[-1].epoch,
                streams=tuple((s.epoch, self._lowest_unsettled(s)) for s in self._streams),
            )
        )

    def _on_welcome(self, message: Welcome) -> None:
        if self.state != "greeting":
            return
        self.state = "open"
        self._greetings_lost = 0
        self.welcome = message
        # A restarted receiver may hold less than its predecessor: only what this WELCOME names is there.
        self.received = SeqSet(self._firsts[0] - 1)
        self._flight.clear()
        self._flight_bytes = 0
        self._again.clear()
        self._next = self.settled.upto + 1
        self._sequence_limit = message.sequence_limit
        self._byte_limit = message.byte_limit
        self._absorb(message.acks)

    def _absorb(self, levels: Sequence[Levels]) -> None:
        for entry in levels:
            span = self._span(entry.epoch)
            if span is None:
                continue
            self.received.merge(entry.received, *span)
            done = {"received": entry.received, "stored": entry.stored, "committed": entry.committed}
            self.settled.merge(done[self._settle], *span)
        for seq in [seq for seq in self._given_up if seq in self.received]:
            self.dropped[self._given_up.pop(seq)] -= 1
        highest = max(self.received.highest, self.settled.highest)
        landed: list[int] = []
        for seq in self._flight:  # rising, so that one acknowledgement costs what it acknowledges
            if seq > highest:
                break
            if seq in self.received or seq in self.settled:
                landed.append(seq)
        for seq in landed:
            self._land(seq)

    def _land(self, seq: int) -> None:
        flight = self._flight.pop(seq, None)
        if flight is not None:
            self._flight_bytes -= flight.nbytes
        self._refusals.pop(seq, None)

    def _on_error(self, message: Error, now_s: float) -> None:
        if message.code == ErrorCode.NO_SESSION:
            # The receiver restarted and has not met us; zmq reconnected before we noticed.
            if self.state == "open":
                self.connected(now_s)
        elif message.session not in (0, self.session):
            return
        elif message.code >= _SESSION_ERRORS:
            self.state = "refused"
            self.refusal = message
        elif self.state == "greeting":
            self._greet_again(message)
        elif message.sequence in self._flight and self._span(message.epoch):
            seq = message.sequence
            if seq in self._again:
                return  # the same refusal twice, or one of an earlier sending
            self._refusals[seq] = self._refusals.get(seq, 0) + 1
            if self._refusals[seq] >= REFUSALS_BEFORE_DROP:
                self.drop(seq, message.code)
            else:
                self._again.append(seq)

    def _greet_again(self, refusal: Error) -> None:
        self._greetings_lost += 1
        if self._greetings_lost >= GREETINGS_BEFORE_REFUSAL:
            self.state = "refused"
            self.refusal = refusal
        else:
            self._spoke_s = -math.inf  # at the next tick

    def _find_overdue(self, now_s: float) -> None:
        for seq, flight in self._flight.items():
            if now_s - flight.sent_s >= self._timing.resend_s and seq not in self._again:
                self._again.append(seq)

    def _report(self) -> Report:
        return Report(
            session=self.session,
            generation=self.control.state.generation,
            last_sequence=self.last,
            unsettled=self.unsettled,
        )

    def _span(self, epoch: int) -> tuple[int, int] | None:
        for at, stream in enumerate(self._streams):
            if stream.epoch == epoch:
                last = self._streams[at + 1].first - 1 if at + 1 < len(self._streams) else self.last
                return stream.first, last
        return None

    def _lowest_unsettled(self, stream: Stream) -> int:
        first, last = self._span(stream.epoch) or (stream.first, self.last)
        for low, _ in self.settled.missing(first, last):
            return low
        return max(last + 1, first)
