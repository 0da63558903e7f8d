"""`Ends`: rollouts that were trained on or dropped, until their senders may forget them."""

from __future__ import annotations

from typing import NamedTuple

from trainer_bridge.checkpoint import ReceiverState
from trainer_bridge.config import CommitOn
from trainer_bridge.member import Member
from trainer_bridge.session import Identity
from trainer_bridge.session.ledger import Ledger


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

    Args:
        ledger: is told of each end at once; its `done` is what the next checkpoint holds.
        commit_on: see `ReceiverConfig`.
    """

    def __init__(self, ledger: Ledger, *, commit_on: CommitOn) -> None:
        self._ledger = ledger
        self._commit_on: CommitOn = commit_on
        self._unsaved: dict[Identity, Resolved] = {}
        self._finished: list[Resolved] = []
        self.trained = 0
        """Rollouts that the trainer committed and that no saved checkpoint holds yet."""
        self.committed = 0
        """Rollouts that the trainer committed for good."""

    def resolve(self, member: Member, *, dropped: str = "") -> None:
        """A rollout came to its end: trained on, or dropped for the reason given."""
        self._ledger.resolve(member.identity, member.rollout_id, member.attempt)
        resolved = Resolved(member.identity, member.position, dropped)
        if self._commit_on == "checkpoint":
            self._unsaved[member.identity] = resolved
            self.trained += resolved.trained
        else:
            self._finish(resolved)

    def known(self, member: Member) -> None:
        """A rollout came that a loaded checkpoint holds."""
        self._finish(Resolved(member.identity, member.position))

    def saved(self, state: ReceiverState) -> None:
        """A checkpoint that holds this state is saved: what it knows of is committed, and nothing else."""
        done = state.watermark()
        for identity in [identity for identity in self._unsaved if identity in done]:
            resolved = self._unsaved.pop(identity)
            self.trained -= resolved.trained
            self._finish(resolved)

    def take_finished(self) -> list[Resolved]:
        """What is to be committed to the store, and told to the senders, since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, resolved: Resolved) -> None:
        self.committed += resolved.trained
        self._finished.append(resolved)
