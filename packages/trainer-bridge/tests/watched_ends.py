"""Both ends and the network between them, as `test_conservation.py` watches and moves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
from trainer_bridge import ReceiverConfig
from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.control import ControlBoard
from trainer_bridge.ends import BEFORE_CHECKPOINT
from trainer_bridge.member import Member
from trainer_bridge.memory_transport import MemoryServer
from trainer_bridge.messages import Credit, Message, Welcome
from trainer_bridge.payload import Buffer
from trainer_bridge.pool import Pool
from trainer_bridge.pool_state import load_state, state_of
from trainer_bridge.seqset import SeqSet
from trainer_bridge.transport import Event

from .sessions import SessionReceiver, SessionSender

Way = Literal["there", "back"]


class Line:
    """One connection: what is on it, each way, until somebody moves it."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.there: list[Sequence[Buffer]] = []
        self.back: list[Sequence[Buffer]] = []
        self.peer = server.attach(self)  # type: ignore[arg-type]

    def arrive(self, frames: Sequence[Buffer]) -> None:
        self.back.append(frames)

    def cut(self) -> None:
        self.server.detach(self.peer)


class Wire:
    """A client's connections, one after the other; what an older one still holds may yet arrive."""

    def __init__(self, server: MemoryServer) -> None:
        self.happened: list[Event] = [Event("up")]
        self.line = Line(server)
        self.older: list[Line] = []

    def events(self, limit: int) -> list[Event]:
        found, self.happened = self.happened[:limit], self.happened[limit:]
        return found

    def send(self, frames: Sequence[Buffer]) -> bool:
        self.line.there.append(frames)
        return True

    def reopen(self, server: MemoryServer | None = None, *, half_open: bool = False) -> None:
        """A new connection. Half open: the old one stands for the server, which hears nothing of its end."""
        if not half_open:
            self.line.cut()
        self.older.append(self.line)
        self.line = Line(server or self.line.server)
        self.happened = [Event("down"), Event("up")]

    def carry(self, way: Way, count: int, line: Line | None = None) -> None:
        """The first messages arrive."""
        line = line or self.line
        for _ in range(count):
            if way == "there" and line.there:
                line.server.arrive(line.peer, line.there.pop(0))
            elif way == "back" and line.back:
                self.happened.append(Event("message", line.back.pop(0)))


class Worker(SessionSender[Wire]):
    """A sender that is watched: it sends in order, leaves nothing out, and never more than it was allowed."""

    def __init__(self, number: int, server: MemoryServer, window: int) -> None:
        self.limit = 0
        self.said: dict[int, set[int]] = {}
        super().__init__(Wire(server), producer=bytes([number]) * 16, window=window)

    def hear(self, message: Message, now_s: float) -> None:
        greeting = self.session.state == "greeting"
        generation = self.session.control.state.generation
        super().hear(message, now_s)
        told = self.session.control.state.generation
        assert told >= generation or isinstance(message, Welcome), "it went back to older control"
        news = isinstance(message, Credit) or (isinstance(message, Welcome) and greeting)
        if news and message.session == self.session.session:
            self.limit = message.sequence_limit

    def give(self, seq: int) -> None:
        session = self.session
        said = self.said.setdefault(session.session, set())
        assert seq in said or seq <= self.limit, "more than the receiver allowed"
        assert session.in_flight <= self.window, "more than the window on the wire"
        before = (n for n in range(1, seq) if n not in said)
        assert all(n in session.settled or n in session.received for n in before), "it left one out"
        said.add(seq)
        super().give(seq)

    def restart(self, settled: SeqSet) -> None:
        self.said.clear()
        self.open(settled)
        self.client.reopen()

    def epoch_of(self, seq: int) -> int:
        return next(stream.epoch for stream in reversed(self.streams) if stream.first <= seq)


class Checkpoint(NamedTuple):
    weights: list[int]
    dropped: int
    version: int
    state: ReceiverState | None


class Trainer(SessionReceiver):
    """A receiver without a store, and the weights: a list of the rollouts that went into them."""

    def __init__(self, number: int, server: MemoryServer, config: ReceiverConfig, now_s: float) -> None:
        board = ControlBoard(base=number << 20)
        super().__init__(server, config=config, receiver=bytes([number]) * 16, board=board)
        self.receiver = bytes([number]) * 16
        self.weights: list[int] = []
        self.dropped_before = 0
        self.places: int | None = None
        self.pool = Pool(
            session=self.session,
            config=config,
            board=board,
            read=lambda _: (_ for _ in ()).throw(AssertionError("there is no store")),
            bury=lambda *_: None,
            now_s=now_s,
        )

    @property
    def dropped(self) -> int:
        """In all its lives. Those that came again, ahead of the checkpoint, were counted then."""
        again = self.pool.meter.dropped.get(BEFORE_CHECKPOINT, 0)
        return self.dropped_before + sum(self.pool.meter.dropped.values()) - again

    def load(self, checkpoint: Checkpoint, now_s: float) -> None:
        self.weights = list(checkpoint.weights)
        self.dropped_before = checkpoint.dropped
        self.board.set(policy_run="run-1", weights_version=checkpoint.version)
        if checkpoint.state is not None:
            load_state(self.pool, checkpoint.state, [], now_s)
        self.settle(now_s)

    def save(self) -> Checkpoint:
        state = msgspec.json.decode(msgspec.json.encode(state_of(self.pool)), type=ReceiverState)
        return Checkpoint(list(self.weights), self.dropped, self.board.state.weights_version, state)

    def step(self, now_s: float) -> None:
        for accepted, frames in self.take_in(now_s):
            self.pool.meter.arrive(1, 8)
            self.pool.offer(Member.arrived(accepted, frames, 0), now_s)
        self.pool.expire(now_s)
        self.settle(now_s)
        self.answer(now_s)

    def settle(self, now_s: float) -> None:
        for ended in self.pool.ends.take_finished():
            for resolved in ended:
                self.session.mark_committed(resolved.identity, now_s)
        bounds = [bound for bound in (self.pool.allowance, self.places) if bound is not None]
        self.session.limit(min(bounds, default=None), starved=self.pool.starved)
