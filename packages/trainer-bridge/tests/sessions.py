"""The state machines of both ends with what drives them, for tests: no thread, no socket, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from token_tracking.sample import Sample
from trainer_bridge.codec import Frames, decode_data, draft
from trainer_bridge.config import ReceiverConfig, Timing
from trainer_bridge.control import ControlBoard
from trainer_bridge.errors import ProtocolError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.memory_transport import MemoryServer
from trainer_bridge.messages import DataHead, Message
from trainer_bridge.payload import Buffer
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import ReceiverSession, SenderSession, Stream
from trainer_bridge.session.peers import Accepted
from trainer_bridge.transport import Event

TIMING = Timing(heartbeat_s=1.0, peer_timeout_s=30.0, greet_again_s=1.0, resend_s=3.0)
PRODUCER = b"p" * 16
NBYTES = 100
"""What a message counts, whatever its size."""


class Client(Protocol):
    """The part of a `ClientTransport` that a sender is driven by."""

    def events(self, limit: int) -> list[Event]: ...
    def send(self, frames: Sequence[Buffer]) -> bool: ...
    def reopen(self) -> None: ...


C = TypeVar("C", bound=Client)


class SessionSender(Generic[C]):
    """A `SenderSession`, its client, and a list for a spool; the session may die, the list does not."""

    def __init__(self, client: C, *, producer: bytes = PRODUCER, window: int = 8) -> None:
        self.client = client
        self.id = producer
        self.window = window
        self.messages: list[Frames] = []
        self.streams: list[Stream] = []
        self.open(SeqSet())

    def open(self, settled: SeqSet) -> None:
        """A new process opens the spool, which knows of so much that it is settled."""
        self.streams.append(Stream(len(self.streams) + 1, len(self.messages) + 1))
        self.session = SenderSession(
            producer=self.id,
            name="worker",
            streams=self.streams,
            last=len(self.messages),
            settled=settled,
            window=self.window,
            settle="committed",
            timing=TIMING,
        )

    def put(self, samples: Sequence[Sample], group_size: int = 0) -> None:
        """Send a rollout."""
        seq = len(self.messages) + 1
        made = draft(samples, group_size=group_size)
        self.messages.append(made.numbered(self.id, self.streams[-1].epoch, seq, 0))
        self.session.last = seq

    def hear(self, message: Message, now_s: float) -> None:
        """A message came."""
        self.session.on_message(message, now_s)

    def give(self, seq: int) -> None:
        """Give DATA to the network."""
        self.client.send(self.messages[seq - 1])

    def step(self, now_s: float) -> None:
        """Take in what came, and say what there is to say."""
        for event in self.client.events(100):
            if event.kind == "up":
                self.session.connected(now_s)
            elif event.kind == "down":
                self.session.disconnected()
            else:
                self.hear(decode_head(event.frames[0]), now_s)
        if not self.session.tick(now_s):
            self.session.disconnected()
            self.client.reopen()
        for message in self.session.take_messages():
            self.client.send((encode_head(message),))
        while (seq := self.session.next_to_send()) is not None:
            self.give(seq)
            self.session.mark_sent(seq, NBYTES, now_s)


class SessionReceiver:
    """A `ReceiverSession` and its server; what is done with the messages is another's business."""

    def __init__(
        self,
        server: MemoryServer,
        *,
        config: ReceiverConfig | None = None,
        receiver: bytes = b"r" * 16,
        board: ControlBoard | None = None,
    ) -> None:
        self.server = server
        self.config = config or ReceiverConfig(timing=TIMING)
        self.board = board or ControlBoard()
        self.session = ReceiverSession(receiver=receiver, config=self.config, board=self.board)

    def take_in(self, now_s: float) -> list[tuple[Accepted, Frames]]:
        """Read what came; the rollouts that are new."""
        found: list[tuple[Accepted, Frames]] = []
        for peer, frames, _ in self.server.receive(100):
            message = decode_head(frames[0])
            if not isinstance(message, DataHead):
                self.session.on_message(peer, message, now_s)
                continue
            try:
                if not self.session.on_data(peer, message, now_s):
                    continue
                accepted = self.session.accept(decode_data(message, frames[1]), NBYTES)
            except ProtocolError as error:
                self.session.reject(peer, message, error)
                continue
            if accepted is not None:
                found.append((accepted, Frames(bytes(frames[0]), frames[1])))
        return found

    def answer(self, now_s: float) -> None:
        """Say what there is to say."""
        self.session.tick(now_s)
        for peer, message in self.session.take_messages(now_s):
            if self.server.send(peer, (encode_head(message),)) == "gone":
                self.session.unreachable(peer)
