"""`Pieces`: the text of a run of ids, with the place of every id in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from token_tracking.tokenizer import Tokenizer

MAX_PENDING = 16
"""Ids that are taken together at most, until their bytes make whole characters."""


class Pieces:
    """Decoded text and the ids that wrote its characters, in two short decodes per id.

    Ids that write one character together stand or fall together.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]):
        self._firsts: list[int] = []
        """Index of the first id of each group."""
        self._ends: list[int] = []
        """Where each group's text ends."""
        self._count = len(ids)
        texts: list[str] = []
        before: list[int] = []
        group: list[int] = []
        end = 0
        for index, number in enumerate(ids):
            group.append(number)
            # Some tokenizers write a blank before a word unless it is the first: decode after what precedes.
            text = tokenizer.decode([*before, *group])[len(tokenizer.decode(before)) if before else 0 :]
            whole = not text.endswith("\ufffd") or len(group) == MAX_PENDING
            if whole or index == len(ids) - 1:
                texts.append(text)
                end += len(text)
                self._firsts.append(index + 1 - len(group))
                self._ends.append(end)
                before, group = group, []
        self.text = "".join(texts)

    def id_at(self, char: int) -> int:
        """Index of the first id that writes the character at `char`; the number of ids at the text's end."""
        group = bisect_right(self._ends, char)
        return self._firsts[group] if group < len(self._firsts) else self._count

    def id_after(self, char: int) -> int:
        """Index one past the last id that writes the character before `char`; 0 at the text's start."""
        group = bisect_right(self._ends, char - 1) + 1 if char > 0 else 0
        return self._firsts[group] if group < len(self._firsts) else self._count
