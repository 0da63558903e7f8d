"""The prompt that an engine says it read, compared with the ids that were sent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from token_tracking.answers.stops import Decode
from token_tracking.errors import RecordError

Ids = npt.NDArray[np.int32]
_COMPARED_BY_VALUE = 16384
"""Ids up to which comparing values is cheaper than asking NumPy where two arrays lie."""


def check_read(read: Ids, sent: Ids, decode: Decode | None) -> None:
    """Check that an engine read what was sent.

    Args:
        read: the prompt as the engine says it read it.
        sent: the ids that were sent.
        decode: ids to text, to tell a prompt that was tokenized again from another one. None: not told.

    Raises:
        RecordError: `prompt_doubled` (twice, or a second BOS), `prompt_truncated` (its head, its tail or its
            middle is missing), `prompt_retokenized` (other ids of the same text, sglang#26555), or `prompt`
            (anything else).
    """
    if len(read) == len(sent) and (_same_memory(read, sent) or np.array_equal(read, sent)):
        return
    message = f"the engine read a prompt of {len(read)} ids, {len(sent)} were sent"
    if len(read) == 2 * len(sent) and np.array_equal(read, np.concatenate([sent, sent])):
        raise RecordError(f"{message}: it read the prompt twice", code="prompt_doubled")
    if len(sent) and len(read) == len(sent) + 1 and np.array_equal(read[1:], sent):
        raise RecordError(f"{message}: it put id {int(read[0])} in front (add_bos?)", code="prompt_doubled")
    head = _common(read, sent)
    if len(read) < len(sent) and head + _common(read[::-1], sent[::-1]) >= len(read):
        raise RecordError(
            f"{message}: it cut the prompt, from id {head} on (a context limit, truncate_prompt_tokens); "
            "shorten the history, or end the rollout as truncated",
            code="prompt_truncated",
        )
    where = f"{message}; they differ from position {head} on"
    if head < min(len(read), len(sent)):
        where = f"the engine read id {read[head]} at {head}, id {sent[head]} was sent"
    if decode is not None and decode(read.tolist()) == decode(sent.tolist()):
        raise RecordError(
            f"{where}: the text is the same, so it decoded the ids and tokenized again; send ids to a route "
            "that takes ids",
            code="prompt_retokenized",
        )
    raise RecordError(f"{where}: it tokenized again, or answered another request", code="prompt")


def _common(left: Ids, right: Ids) -> int:
    """How many ids two prompts have in common at the start."""
    count = min(len(left), len(right))
    differ = np.flatnonzero(left[:count] != right[:count])
    return int(differ[0]) if differ.size else count


def _same_memory(left: Ids, right: Ids) -> bool:
    """Whether two equally long arrays are one: a client that got no echo hands back what it was given."""
    if left is right:
        return True
    if len(left) < _COMPARED_BY_VALUE or left.strides != right.strides:
        return False
    return left.__array_interface__["data"] == right.__array_interface__["data"]
