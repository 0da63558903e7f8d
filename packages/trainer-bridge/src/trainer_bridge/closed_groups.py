"""`ClosedGroups`: which groups are over, so that what comes of them later is late; also after a restart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

REMEMBER_CLOSED = 1 << 17
"""Groups that ended, kept to recognise late members; the oldest are forgotten first."""
CLOSED_ON_DISK = 1 << 14
"""Of these a checkpoint names, latest last, and a store that has deleted their records."""
CLOSING = frozenset({"late", "group_deadline", "group_broken"})
"""Reasons of drops that say that the whole group is over."""


class ClosedGroups:
    """Group ids, latest last.

    What a store tells is kept apart until the consumer has asked for groups: one that takes single rollouts
    closes no group, so that members of a group that has trained ones are as good as any.
    """

    def __init__(self) -> None:
        self._closed: dict[bytes, None] = {}
        self._restored: dict[bytes, None] = {}

    def __contains__(self, group_id: bytes) -> bool:
        return group_id in self._closed

    def add(self, group_id: bytes) -> None:
        """The group is over."""
        self._closed.pop(group_id, None)
        self._closed[group_id] = None
        if len(self._closed) > REMEMBER_CLOSED:
            del self._closed[next(iter(self._closed))]

    def reopen(self, group_id: bytes) -> None:
        """It was handed out, and comes again."""
        self._closed.pop(group_id, None)

    def restored(self, group_ids: Iterable[bytes]) -> None:
        """Groups that are over if the consumer takes groups; replaces what was said before."""
        self._restored = dict.fromkeys(group_ids)

    def take_restored(self, *, by_group: bool) -> bool:
        """The consumer has asked, for groups or for single rollouts. True: more groups are over now."""
        restored, self._restored = self._restored, {}
        if by_group:
            for group_id in restored:
                self.add(group_id)
        return by_group and bool(restored)

    def latest(self, *, without: frozenset[bytes]) -> list[bytes]:
        """As a checkpoint names them, but for those given."""
        return latest_groups([group_id for group_id in self._closed if group_id not in without])


def latest_groups(group_ids: Sequence[bytes]) -> list[bytes]:
    """As many of these as are written down, each once, where it stands last."""
    return list(dict.fromkeys(reversed(group_ids)))[:CLOSED_ON_DISK][::-1]


class EndedGroups:
    """Which groups are over, told from the records of a store; they come in their order."""

    def __init__(self) -> None:
        self._ended: dict[bytes, bool] = {}
        """Group -> a record of it says that all of it is over."""
        self._live: set[bytes] = set()

    def note_live(self, group_id: bytes) -> None:
        """A rollout of it waits."""
        self._live.add(group_id)

    def note_ended(self, group_id: bytes, *, dropped: str | None) -> None:
        """A rollout of it was dropped, or trained on: then all of it was, since groups are handed out whole.

        Args:
            group_id: its group.
            dropped: why. Empty: it was trained on. None: that is not known.
        """
        self._note(group_id, sure=dropped is not None and (not dropped or dropped in CLOSING))

    def note_trimmed(self, group_ids: Iterable[bytes]) -> None:
        """A rollout of each has ended, and its record was deleted; comes first."""
        for group_id in group_ids:
            self._note(group_id, sure=False)

    def over(self) -> list[bytes]:
        """The groups that are over: nothing of them waits, or something says so."""
        return [group_id for group_id, sure in self._ended.items() if sure or group_id not in self._live]

    def _note(self, group_id: bytes, *, sure: bool) -> None:
        self._ended[group_id] = self._ended.pop(group_id, False) or sure
        if len(self._ended) > REMEMBER_CLOSED:
            del self._ended[next(iter(self._ended))]
