"""The text that an engine gave for its output, compared with the text of the ids."""

from __future__ import annotations

from collections.abc import Collection

from token_tracking.answers.stops import Decode
from token_tracking.errors import RecordError

_LEFT_OUT = " \ufffd"
"""Characters at the start that an engine's text may lack."""
_SHOWN = 24
"""Characters shown on either side of a difference."""


def check_text(
    said: str,
    ids: list[int],
    *,
    stop_id: int | None,
    stop_string: str | None,
    special_ids: Collection[int],
    decode: Decode,
) -> None:
    """Compare an engine's own text with the text of its ids.

    Engines leave out control tokens, the stop token, the stop string, blanks at the start and the bytes of a
    character that is not complete, at the end or (after an abort inside it) at the start, where the whole
    character may stand instead; any of these may be missing. Anything else means that ids and text are not
    of one answer: a stream that lost tokens (vllm#27482), or ids past a stop (vllm#47616).

    Raises:
        RecordError: they differ (`text`); says where.
    """
    body = ids[:-1] if stop_id is not None and ids and ids[-1] == stop_id else ids
    shown = [i for i in body if i not in special_ids]
    forms = [decode(ids)]
    forms += [decode(other) for other in (body, shown) if len(other) != len(ids)]
    if any(_fits(said, form, stop_string) for form in forms):
        return
    common, nearest = max((_common(_plain(said), _plain(form)), form) for form in forms)
    low = max(common - _SHOWN, 0)
    raise RecordError(
        f"the engine's text and the text of its {len(ids)} output ids differ from character {common} on: "
        f"{_plain(said)[low : common + _SHOWN]!r} and {_plain(nearest)[low : common + _SHOWN]!r}; tokens "
        "were lost or added on the way. Pass the text of the whole output, not what a tool parser left of it",
        code="text",
    )


def _fits(said: str, form: str, stop_string: str | None) -> bool:
    left, right = _plain(said), _plain(form)
    if _ends_alike(left, right, stop_string):
        return True
    # An engine that continues a turn may know the first bytes of a character whose last ones are here.
    return form.lstrip(" ").startswith("\ufffd") and _ends_alike(_plain(left[1:]), right, stop_string)


def _ends_alike(left: str, right: str, stop_string: str | None) -> bool:
    if left == right:
        return True
    if stop_string is None or not right.startswith(left):
        return False
    # What follows the stop string in its last token is no part of the text; check_stop saw where it ends.
    return right[len(left) :].startswith(stop_string) or left.endswith(stop_string)


def _plain(text: str) -> str:
    return text.lstrip(_LEFT_OUT).rstrip("\ufffd")


def _common(left: str, right: str) -> int:
    count = min(len(left), len(right))
    return next((at for at in range(count) if left[at] != right[at]), count)
