"""`Ends`: rollouts that were trained on or dropped, until their senders may forget them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.config import CommitOn
from trainer_bridge.member import Member
from trainer_bridge.session import Identity
from trainer_bridge.session.ledger import Ledger

BEFORE_CHECKPOINT = "before_checkpoint"
"""Why a rollout was dropped of which a loaded checkpoint says that it was, and not why."""


class Resolved(NamedTuple):
    """A message that came to its end, with what its commit needs."""

    identity: Identity
    position: int
    dropped: str = ""
    """Why. Empty: it was trained on."""

    @property
    def trained(self) -> bool:
        """False: dropped."""
        return not self.dropped


class Ends:
    """Holds what came to its end back until a checkpoint is saved, if so configured.

    What ends together stays together: a step that is half committed on the disk would be handed out again
    as a group that lacks members.

    Args:
        ledger: is told of each end at once; its `done` is what the next checkpoint holds.
        commit_on: see `ReceiverConfig`.
    """

    def __init__(self, ledger: Ledger, *, commit_on: CommitOn) -> None:
        self._ledger = ledger
        self._commit_on: CommitOn = commit_on
        self._unsaved: dict[Identity, Resolved] = {}
        self._finished: list[list[Resolved]] = []
        self.trained = 0
        """Rollouts that the trainer committed and that no saved checkpoint holds yet."""
        self.committed = 0
        """Rollouts that the trainer committed for good."""

    def resolve(self, members: Sequence[Member], *, dropped: str = "") -> None:
        """Rollouts came to their end together: trained on, or dropped for the reason given."""
        ended: list[Resolved] = []
        for member in members:
            self._ledger.resolve(member.identity, member.rollout_id, member.attempt, trained=not dropped)
            ended.append(Resolved(member.identity, member.position, dropped))
        if self._commit_on == "checkpoint":
            self._unsaved.update((resolved.identity, resolved) for resolved in ended)
            self.trained += sum(resolved.trained for resolved in ended)
        else:
            self._finish(ended)

    def known(self, member: Member, *, dropped: str) -> None:
        """A rollout came that a loaded checkpoint holds: trained on, or dropped for the reason given."""
        self._finish([Resolved(member.identity, member.position, dropped)])

    def saved(self, state: ReceiverState) -> None:
        """A checkpoint that holds this state is saved: what it knows of is committed, and nothing else."""
        done = state.watermark()
        ended = [resolved for identity, resolved in self._unsaved.items() if identity in done]
        for resolved in ended:
            del self._unsaved[resolved.identity]
        self.trained -= sum(resolved.trained for resolved in ended)
        self._finish(ended)

    def take_finished(self) -> list[list[Resolved]]:
        """What is to be committed to the store, and told to the senders, since the last call.

        Each list is to be committed whole, or not at all: a step, or all that a checkpoint holds.
        """
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, ended: list[Resolved]) -> None:
        if ended:
            self.committed += sum(resolved.trained for resolved in ended)
            self._finished.append(ended)
