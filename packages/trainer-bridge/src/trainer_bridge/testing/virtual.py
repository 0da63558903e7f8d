"""`VirtualNetwork`: real senders and receivers, joined inside one process, under a clock moved by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from trainer_bridge.errors import BridgeError
from trainer_bridge.memory_transport import MemoryClient, MemoryServer
from trainer_bridge.payload import Buffer
from trainer_bridge.testing.faults import FaultCounts, FaultLine, Faults
from trainer_bridge.transport import Event

START_NS = 1_800_000_000_000_000_000
RECONNECT_S = 0.05
PATIENCE_S = 30.0
"""Of real time: a loop that does not come back for so long has hung."""
RELEASED_S = 0.002
"""After `close`, loops run by themselves, and look up this often."""


class _Turn:
    """Where a loop's thread stops in `wait`, until the network gives it its turn."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._go = threading.Lock()
        self._go.acquire()
        self._back = threading.Lock()
        self._back.acquire()
        self.woken = False
        self.due_s = 0.0
        self.over = False
        self.released = False
        self.crashing = False

    def park(self, timeout_s: float) -> None:
        """Called by the loop."""
        if self.released:
            self._go.acquire(timeout=min(max(timeout_s, 0.0), RELEASED_S))
            return
        self.due_s = self._now_s() + timeout_s
        self._back.release()
        self._go.acquire()
        if self.crashing:
            raise BridgeError("this end was made to crash")

    def take(self) -> None:
        """Called by the network: let the loop make one step, and wait until it is done."""
        self._await()
        self.woken = False
        self._go.release()
        if not self.released:
            self._await()
            self._back.release()

    def end(self) -> None:
        """Called by the loop as the last thing."""
        self.over = True
        if self._back.locked():
            self._back.release()

    def free(self) -> None:
        """From now on the loop runs by itself."""
        if not self.released and not self.over:
            self._await()
            self.released = True
            self._go.release()

    def _await(self) -> None:
        if not self._back.acquire(timeout=PATIENCE_S):
            raise BridgeError(f"a loop has not come back for {PATIENCE_S} s")


class VirtualServer(MemoryServer):
    """The receiver's end: `SampleReceiver(transport=network.server(), clock=network)`."""

    def __init__(self, turn: _Turn) -> None:
        super().__init__("memory://virtual")
        self.turn = turn

    def wait(self, timeout_s: float) -> None:
        """Stop until it is this end's turn."""
        self.turn.park(timeout_s)

    def wake(self) -> None:
        """Its turn comes at once."""
        self.turn.woken = True

    def arrive(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Put a message into the inbox."""
        super().arrive(peer, frames)
        self.turn.woken = True

    def close(self) -> None:
        """Every client loses its connection."""
        super().close()
        self.turn.end()


class VirtualClient(MemoryClient):
    """A sender's end: `SampleSender("memory://", transport=network.client(), clock=network, spool=...)`."""

    def __init__(
        self,
        turn: _Turn,
        server: Callable[[], VirtualServer | None],
        lines: tuple[FaultLine, FaultLine],
        now_s: Callable[[], float],
    ) -> None:
        self.turn = turn
        self.lines = self._out_line, self._in_line = lines
        self._servers = server
        self._now_s = now_s
        self._reconnect_s: float | None = None
        super().__init__(server() or MemoryServer("memory://nobody"))

    def wait(self, timeout_s: float) -> None:
        """Stop until it is this end's turn."""
        self.turn.park(timeout_s)

    def wake(self) -> None:
        """Its turn comes at once."""
        self.turn.woken = True

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Give a message to the network."""
        if self._peer is None:
            return False
        if self._out_line.take(frames, self._now_s()) == "cut":
            self.cut()
            return True
        self.pump()
        return True

    def arrive(self, frames: Sequence[Buffer]) -> None:
        """A message from the server enters the network."""
        if self._in_line.take(frames, self._now_s()) == "cut":
            self.cut()
            return
        self.pump()

    def pump(self) -> None:
        """Move what is due, and connect anew if that is."""
        now_s = self._now_s()
        if self._reconnect_s is not None and self._reconnect_s <= now_s:
            self.reopen()
        for frames in self._out_line.due(now_s):
            if self._peer is not None:
                self._server.arrive(self._peer, frames)
        found = self._in_line.due(now_s)
        if found:
            self._events.extend(Event("message", frames) for frames in found)
            self.turn.woken = True

    @property
    def next_due_s(self) -> float | None:
        """When `pump` has something to do. None: nothing is on the way."""
        times = (self._out_line.next_due_s, self._in_line.next_due_s, self._reconnect_s)
        return min((time_s for time_s in times if time_s is not None), default=None)

    def cut(self) -> None:
        """The connection breaks, and what was on it is lost; another one is tried for soon."""
        super().cut()
        for line in self.lines:
            line.clear()
        self._reconnect_s = self._now_s() + RECONNECT_S
        self.turn.woken = True

    def reopen(self, server: MemoryServer | None = None) -> None:
        """Connect anew, if a receiver is there."""
        if self._peer is not None:
            super().cut()
        found = server or self._servers()
        if found is None:
            self._reconnect_s = self._now_s() + RECONNECT_S
            return
        self._reconnect_s = None
        super().reopen(found)
        self.turn.woken = True

    def close(self) -> None:
        """Disconnect."""
        super().close()
        self._reconnect_s = None
        self.turn.end()


class VirtualNetwork:
    """Connects senders to one receiver, and is their `Clock`; nothing happens but in `run`.

    Their own threads run, one at a time and in a fixed order, so that a seed repeats a run. Calls that wait
    (`next` and `send` with a timeout, `wait_settled`) would wait in real time: pass 0 and call `run`. Give
    senders a spool, with durability "none": without one the constructor waits for its connection. Before the
    ends are closed, `release` lets them run by themselves.

    Args:
        faults: what happens to messages; may be replaced with `set_faults`.
        seed: of the faults.
    """

    def __init__(self, faults: Faults | None = None, *, seed: int = 0) -> None:
        self.now_s = 0.0
        self.wall_offset_s = 0.0
        """Added to the wall clock: what happens when somebody sets it."""
        self.counts = FaultCounts()
        self._faults = faults or Faults()
        self._rng = np.random.default_rng(seed)
        self._server: VirtualServer | None = None
        self._clients: list[VirtualClient] = []
        self._turns: list[_Turn] = []

    # -- Clock

    def now_ns(self) -> int:
        """Wall clock, Unix nanoseconds."""
        return START_NS + int((self.now_s + self.wall_offset_s) * 1e9)

    def monotonic_s(self) -> float:
        """Virtual seconds since the network was made."""
        return self.now_s

    def new_id(self) -> str:
        """32 hex characters, by the seed."""
        return self._rng.bytes(16).hex()

    # -- ends

    def server(self) -> VirtualServer:
        """A transport for a receiver; the one before must be closed or crashed."""
        self._server = VirtualServer(self._turn())
        return self._server

    def client(self) -> VirtualClient:
        """A transport for one sender or observer."""
        lines = tuple(
            FaultLine(self._faults, np.random.default_rng(self._rng.integers(2**63)), self.counts)
            for _ in range(2)
        )
        client = VirtualClient(self._turn(), self._alive, (lines[0], lines[1]), self.monotonic_s)
        self._clients.append(client)
        return client

    def crash(self, end: VirtualServer | VirtualClient) -> None:
        """An end dies without a word: its thread stops where it is, its connections break."""
        end.turn.crashing = True
        end.turn.take()

    def set_faults(self, faults: Faults) -> None:
        """From now on other faults; what is on its way already keeps its fate."""
        self._faults = faults
        for client in self._clients:
            for line in client.lines:
                line.faults = faults

    # -- time

    def run(self, seconds: float, until: Callable[[], object] | None = None) -> bool:
        """Let time pass.

        Args:
            seconds: at most so many.
            until: stop as soon as this holds; asked after every round of turns. None: run to the end.

        Returns:
            Whether `until` held.
        """
        end_s = self.now_s + seconds
        while True:
            self._round()
            if until is not None and until():
                return True
            times = [client.next_due_s for client in self._clients if not client.turn.over]
            times += [turn.due_s for turn in self._turns if not turn.over]
            next_s = min((time_s for time_s in times if time_s is not None), default=end_s)
            if next_s >= end_s:
                self.now_s = end_s
                self._round()
                return until is not None and bool(until())
            self.now_s = max(next_s, self.now_s)

    def release(self) -> None:
        """Loops run by themselves from now on, so that both ends can be closed; time stands still.

        The network harms nothing any more, and what it held back is lost.
        """
        self.set_faults(Faults())
        for client in self._clients:
            for line in client.lines:
                line.clear()
        for turn in self._turns:
            turn.free()

    # -- inside

    def _round(self) -> None:
        """Turns for everyone who has something to do at this instant, until nobody has."""
        while True:
            for client in self._clients:
                if not client.turn.over:
                    client.pump()
            ready = [t for t in self._turns if not t.over and (t.woken or t.due_s <= self.now_s)]
            if not ready:
                return
            for turn in ready:
                turn.take()
            self._turns = [turn for turn in self._turns if not turn.over]

    def _turn(self) -> _Turn:
        turn = _Turn(self.monotonic_s)
        self._turns.append(turn)
        return turn

    def _alive(self) -> VirtualServer | None:
        server = self._server
        return None if server is None or server.turn.over else server
