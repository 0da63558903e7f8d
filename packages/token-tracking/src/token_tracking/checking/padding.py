"""`Padding`: one token over and over around a conversation, which a batch's collator wrote."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.checking.difference import Difference
from token_tracking.template import ChatTemplate


class Padding(msgspec.Struct, frozen=True):
    """Where the conversation lies in a padded sequence."""

    start: int
    end: int

    @classmethod
    def of(
        cls,
        ids: npt.NDArray[np.int32],
        mask: npt.NDArray[np.uint8] | None,
        template: ChatTemplate,
        first: int,
    ) -> Padding:
        """Find it: the tokenizer's padding token, or another control token many times, untrained.

        `first`: the id that the conversation begins with. Twice at the start, it is a fault (two BOS).
        """
        left = _run(ids, mask, template, {first})
        right = _run(ids[::-1], None if mask is None else mask[::-1], template, template.stop_ids)
        return cls(left, len(ids) - right) if left + right < len(ids) else cls(0, len(ids))

    def differences(self, ids: npt.NDArray[np.int32], template: ChatTemplate, turns: int) -> list[Difference]:
        """It as differences."""
        places = ((0, self.start, 0, "before"), (self.end, len(ids), turns, "after"))
        return [
            Difference(
                kind="padding",
                what=f"{high - low} tokens of padding ({template.tokenizer.decode([int(ids[low])])}) "
                f"{side} the conversation: left out of the comparison",
                turn=turn,
                in_turn=False,
                ids=(low, high),
                template=(0, 0),
            )
            for low, high, turn, side in places
            if low < high
        ]


def _run(
    ids: npt.NDArray[np.int32],
    mask: npt.NDArray[np.uint8] | None,
    template: ChatTemplate,
    meant: Collection[int],
) -> int:
    """Padding at the start of `ids`; the last one of a token that is `meant` there is no padding."""
    token = int(ids[0])
    named = template.tokenizer.named_tokens.get("pad_token")
    pad = None if named is None else template.tokenizer.token_to_id(named)
    if token not in template.tokenizer.special_ids or (pad is not None and token != pad):
        return 0
    other = np.flatnonzero(ids != token)
    count = int(other[0]) if len(other) else len(ids)
    trained = None if mask is None else np.flatnonzero(mask[:count])
    if trained is not None and len(trained):
        count = int(trained[0])
    elif token in meant:
        count -= 1
    # One or two say too little: an engine may have stopped at one, a BOS may be doubled.
    known = token == pad and mask is not None
    return count if count > 2 or known else 0
