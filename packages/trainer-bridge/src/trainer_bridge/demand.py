"""`Demand`: what the consumer asks for, and what it must be told about that."""

from __future__ import annotations


class Demand:
    """The step that the consumer waits for, the one it asked for last, and news for people, told once."""

    def __init__(self) -> None:
        self.groups = 0
        """Groups that the consumer waits for at this moment. 0: for none."""
        self.step_rollouts = 0
        """Rollouts of the step that was asked for last. 0: none was, or nobody knows how large a group is."""
        self._news: list[str] = []
        self._told: dict[str, str] = {}

    def ask(self, groups: int, group_size: int) -> None:
        """The consumer waits for a step.

        Args:
            groups: how many.
            group_size: rollouts of the largest group that was here. 0: not known.
        """
        self.groups = groups
        self.step_rollouts = groups * group_size or self.step_rollouts

    def withdraw(self) -> None:
        """It does not wait any more: it has its step, or has given up."""
        self.groups = 0

    def tell(self, subject: str, text: str, *, about: str = "") -> None:
        """Say something to people, once; again only if it is `about` something else than the last time."""
        if self._told.get(subject) != about:
            self._told[subject] = about
            self._news.append(text)

    def take_news(self) -> list[str]:
        """What is to be told since the last call."""
        news, self._news = self._news, []
        return news
