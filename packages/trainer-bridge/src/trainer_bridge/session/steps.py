"""`StepTable`: one training step over several data-parallel ranks: all of them get it, or none.

Two phases. First every rank gets its share and says that it has it in hand; only then are all told to go. A
rank that dies before that costs nothing: the step is made anew. One that dies later ends the step: its groups
return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from trainer_bridge.errors import BridgeError, StepAbortedError
from trainer_bridge.member import Member
from trainer_bridge.messages import Message
from trainer_bridge.rank_messages import Ask, Done, Ready, Share, Verdict, VerdictKind
from trainer_bridge.wire_types import MAX_TEXT

REMEMBER_BROKEN = 16
"""Steps that were aborted after they were handed out, latest last, for ranks that have not heard of it."""


class Rank(msgspec.Struct, eq=False):
    """A rank other than 0, as it last asked."""

    peer: bytes
    """Routing id of its connection."""
    process: bytes
    """Its peer id: fresh for each process."""
    session: int
    ask: Ask | None = None
    """What it waits for. None: it is at work."""


class Step(msgspec.Struct, eq=False):
    """A step that ranks hold, or are about to."""

    number: int
    lease: int
    wanted: tuple[int, int]
    """Groups, and ranks, as rank 0 counts them."""
    shares: Mapping[int, tuple[Share, Sequence[Member]]]
    """Rank -> what it gets; of all ranks but 0."""
    ready: set[int] = msgspec.field(default_factory=set[int])
    done: set[int] = msgspec.field(default_factory=set[int])
    out: bool = False
    """Everyone was told to go."""
    taken: bool = False
    """Rank 0 has it."""


class Abandoned(msgspec.Struct, frozen=True):
    """A lease that must go back to the pool."""

    lease: int
    reason: str
    nacked: bool
    """A rank gave it back; False: a rank was lost, which is not the rollouts' fault."""


class StepTable:
    """Rank 0's side. It is asked and told by the owner of the pool, and by the ranks' messages."""

    def __init__(self) -> None:
        self.ranks: dict[int, Rank] = {}
        self.step: Step | None = None
        self._wanted: tuple[int, int] | None = None
        self._number = 0
        self._broken: dict[int, str] = {}
        self._abandoned: list[Abandoned] = []
        self._out: dict[bytes, deque[Message | Member]] = {}

    # -- rank 0 says

    def open(self, groups: int, world: int) -> None:
        """Rank 0 waits for a step of `groups` groups for `world` ranks.

        Raises:
            BridgeError: the last step is neither committed nor given back.
        """
        if self.step is not None and self.step.out:
            raise BridgeError(
                f"step {self.step.number} is still out: commit it or give it back before the next one"
            )
        self._wanted = (groups, world)
        for number, rank in self.ranks.items():
            self._check_ask(number, rank)

    @contextmanager
    def alone(self) -> Generator[None]:
        """Rank 0 waits for a step of its own: other ranks that ask meanwhile are told that they have none."""
        self._wanted = (0, 1)
        for number, rank in self.ranks.items():
            self._check_ask(number, rank)
        try:
            yield
        finally:
            self._wanted = None

    def missing(self) -> list[int]:
        """Ranks that a step waits for: not here, or still at work."""
        world = self._wanted[1] if self._wanted is not None else 1
        return [n for n in range(1, world) if n not in self.ranks or self.ranks[n].ask is None]

    def start(self, lease: int, shares: Mapping[int, tuple[Share, Sequence[Member]]]) -> int:
        """Hand the shares of a lease out; returns the step's number."""
        self._number += 1
        self.step = Step(self._number, lease, self._wanted or (0, 0), shares)
        for number in shares:
            self._send_share(number)
        self._go_if_ready()
        return self._number

    def take(self) -> Step | None:
        """The step that everyone was told to go with, which rank 0 holds from now on; None: not yet."""
        if self.step is None or not self.step.out:
            return None
        self.step.taken = True
        return self.step

    def give_up(self) -> None:
        """Rank 0 does not wait any longer: nobody gets the step."""
        if self.step is not None and self.step.out:
            self._break(f"rank 0 was interrupted in step {self.step.number}", nacked=False)
        elif self.step is not None:
            self._abandoned.append(Abandoned(self.step.lease, "rank 0's deadline passed", nacked=False))
            self.step = None
        self._wanted = None
        for rank in self.ranks.values():
            if rank.ask is not None:
                self._tell(rank, "none", 0, "rank 0's deadline passed")

    def commit(self, number: int) -> bool:
        """Rank 0 is done with a step. True: so are all others, and it is over.

        Raises:
            StepAbortedError: the step was aborted.
            BridgeError: it is over.
        """
        self._check_broken(number)
        if self.step is None or self.step.number != number:
            raise BridgeError(f"step {number} is over")
        self.step.done.add(0)
        if len(self.step.done) <= len(self.step.shares):
            return False
        self.step = None
        return True

    def nack(self, number: int, reason: str) -> None:
        """Rank 0 gives a step back, for all ranks.

        Raises:
            StepAbortedError: the step was aborted.
        """
        self._check_broken(number)
        self._break(f"rank 0 gave step {number} back: {reason}", nacked=True)

    def not_done(self) -> list[int]:
        """Ranks that hold the step that is out."""
        return [] if self.step is None else [n for n in self.step.shares if n not in self.step.done]

    def take_abandoned(self) -> list[Abandoned]:
        """Leases that must go back to the pool, since the last call."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    # -- ranks say

    def on_hello(self, peer: bytes, process: bytes, session: int) -> None:
        """A rank's process greets, maybe anew: what it asked, and was to be told, before that is void."""
        for rank in self.ranks.values():
            if rank.process == process and session > rank.session:
                self._out.pop(rank.peer, None)
                rank.peer, rank.session, rank.ask = peer, session, None

    def on_message(self, peer: bytes, process: bytes, message: Ask | Ready | Done) -> None:
        """Take in what a rank said on its connection."""
        if isinstance(message, Ask):
            self._on_ask(peer, process, message)
            return
        number = next((n for n, rank in self.ranks.items() if rank.peer == peer), None)
        step = self.step
        if number is None or step is None or step.number != message.step or number not in step.shares:
            self._on_past(peer, message)
        elif isinstance(message, Ready):
            self._on_ready(step, number)
        elif message.committed:
            step.done.add(number)
        else:
            self._break(f"rank {number} gave step {step.number} back: {message.reason}", nacked=True)

    def on_lost(self, peer: bytes) -> None:
        """A connection is gone for good."""
        self._out.pop(peer, None)
        for number, rank in list(self.ranks.items()):
            if rank.peer == peer:
                del self.ranks[number]
                if self.step is not None and number in self.step.shares and number not in self.step.done:
                    self._break(f"rank {number} was lost in step {self.step.number}", nacked=False)

    # -- to be sent

    def next_out(self, peer: bytes) -> Message | Member | None:
        """What this rank must be sent next; follow it with `mark_sent`."""
        queue = self._out.get(peer)
        return queue[0] if queue else None

    def mark_sent(self, peer: bytes) -> None:
        """The transport took it."""
        self._out[peer].popleft()

    @property
    def waiting_peers(self) -> list[bytes]:
        """Connections that something must be sent on."""
        return [peer for peer, queue in self._out.items() if queue]

    # -- inside

    def _on_ask(self, peer: bytes, process: bytes, ask: Ask) -> None:
        if not 1 <= ask.rank < ask.world:
            return
        if ask.last in self._broken:  # it must know that before it gets another step
            self._on_past(peer, Done(ask.session, ask.last, True))
            return
        self._void(peer)
        for number, rank in list(self.ranks.items()):
            if rank.process == process and number != ask.rank:
                self.on_lost(rank.peer)  # it was another rank before
        known = self.ranks.get(ask.rank)
        if known is not None and known.process != process:
            self.on_lost(known.peer)
        self._check_count(ask)
        rank = self.ranks[ask.rank] = Rank(peer, process, ask.session, ask)
        step = self.step
        if step is not None and step.out and ask.rank in step.shares and ask.last == step.number:
            step.done.add(ask.rank)  # it said so, and that was lost or overtaken
        if step is not None and ask.rank in step.shares and ask.rank not in step.done:
            step.ready.discard(ask.rank)
            self._send_share(ask.rank)  # it has lost what was sent on its last connection
        elif self._wanted is not None:
            self._check_ask(ask.rank, rank)

    def _check_count(self, ask: Ask) -> None:
        """A rank that never heard of its step, and now asks for another number of groups, must not get it."""
        step = self.step
        if step is None or ask.rank not in step.shares or ask.rank in step.done or ask.last == step.number:
            return
        if (ask.groups, ask.world) != step.wanted:
            groups, world = step.wanted
            self._break(
                f"rank {ask.rank} asks for {ask.groups} groups in all and counts {ask.world} ranks, step "
                f"{step.number} has {groups} groups for {world} ranks",
                nacked=False,
            )

    def _on_ready(self, step: Step, number: int) -> None:
        if number in step.done:
            return
        step.ready.add(number)
        if step.out:  # it did not hear it when the others were told
            self._tell(self.ranks[number], "go", step.number)
        self._go_if_ready()

    def _on_past(self, peer: bytes, message: Ready | Done) -> None:
        """The step is over, and this rank may have missed it; it asks again as long as it is not answered."""
        if self._out.get(peer):
            return
        reason = self._broken.get(message.step)
        if isinstance(message, Ready):
            self._say(peer, Verdict(message.session, message.step, "again", reason or "the step is over"))
        elif reason is not None:
            self._say(peer, Verdict(message.session, message.step, "aborted", reason))

    def _check_ask(self, number: int, rank: Rank) -> None:
        if rank.ask is None or self._wanted is None:
            return
        groups, world = self._wanted
        if rank.ask.world != world or number >= world:
            self._tell(rank, "none", 0, f"rank 0 counts {world} ranks, rank {number} counts {rank.ask.world}")
        elif rank.ask.groups != groups:
            reason = f"rank 0 asks for {groups} groups in all, rank {number} for {rank.ask.groups}"
            self._tell(rank, "aborted", 0, reason)

    def _send_share(self, number: int) -> None:
        if self.step is None:
            return
        share, members = self.step.shares[number]
        rank = self.ranks[number]
        queue = self._void(rank.peer)
        queue.append(msgspec.structs.replace(share, session=rank.session, step=self.step.number))
        queue.extend(members)

    def _go_if_ready(self) -> None:
        step = self.step
        if step is None or step.out or len(step.ready) < len(step.shares):
            return
        step.out = True
        self._wanted = None
        for number in step.shares:
            self._tell(self.ranks[number], "go", step.number)

    def _void(self, peer: bytes) -> deque[Message | Member]:
        """Take back earlier shares and answers, so that one who asks and never reads costs no more memory."""
        waiting = self._out.get(peer, ())
        queue = self._out[peer] = deque(m for m in waiting if isinstance(m, Verdict) and m.step)
        return queue

    def _break(self, reason: str, *, nacked: bool) -> None:
        step = self.step
        if step is None:
            return
        self.step = None
        self._abandoned.append(Abandoned(step.lease, reason, nacked))
        if step.out and not step.taken:
            self._wanted = step.wanted  # rank 0 still waits, for the step that takes its place
        if step.out:
            self._broken[step.number] = reason[:MAX_TEXT]
            if len(self._broken) > REMEMBER_BROKEN:
                del self._broken[next(iter(self._broken))]
        for number in step.shares:
            rank = self.ranks.get(number)
            if rank is not None and step.out:
                self._tell(rank, "aborted", step.number, reason)
            elif rank is not None:
                # Those that were not told to go keep waiting, for the step that takes its place.
                self._queue(rank, "again", step.number, reason)

    def _tell(self, rank: Rank, kind: VerdictKind, step: int, reason: str = "") -> None:
        rank.ask = None
        self._queue(rank, kind, step, reason)

    def _queue(self, rank: Rank, kind: VerdictKind, step: int, reason: str) -> None:
        self._say(rank.peer, Verdict(rank.session, step, kind, reason[:MAX_TEXT]))

    def _say(self, peer: bytes, verdict: Verdict) -> None:
        queue = self._out.setdefault(peer, deque())
        if not queue or queue[-1] != verdict:
            queue.append(verdict)

    def _check_broken(self, number: int) -> None:
        if number in self._broken:
            raise StepAbortedError(f"{self._broken[number]}; its rollouts come again: call next_batch again")
