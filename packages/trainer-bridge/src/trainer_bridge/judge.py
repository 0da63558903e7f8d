"""`Judge`: may this rollout be handed out now?"""

from __future__ import annotations

from collections.abc import Callable

from trainer_bridge.codec import Data
from trainer_bridge.control import ControlBoard
from trainer_bridge.errors import DamagedError
from trainer_bridge.member import Member
from trainer_bridge.staleness import StalenessRule, age_of


class Judge:
    """Reads what lies in the store only, and applies the staleness rule.

    Args:
        rule: what is too old.
        board: what the trainer published; staleness is measured against it.
        read: gets a rollout that lies in the store only; DamagedError if it is damaged.
        bury: takes a rollout that nobody can use: (member, reason, detail).
    """

    def __init__(
        self,
        *,
        rule: StalenessRule,
        board: ControlBoard,
        read: Callable[[int], Data],
        bury: Callable[[Member, str, str], None],
    ) -> None:
        self._rule = rule
        self._board = board
        self._read = read
        self._bury = bury

    def verdict(self, member: Member) -> str | None:
        """Why it must not be handed out, a reason to drop it. None: it may, and its data is there."""
        if member.data is None:
            try:
                member.data = self._read(member.position)
            except DamagedError as error:
                self._bury(member, "unreadable", str(error))
                return "unreadable"
        control = self._board.state
        if not self._rule.applies(control):
            return None
        if member.age is None:
            member.age = age_of(member.data.samples)
        return self._rule.judge(member.age, control)
