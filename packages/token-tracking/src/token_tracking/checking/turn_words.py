"""What the ids of a turn say, beside what the template prints for its message: fine, or a named warning."""

from __future__ import annotations

from collections.abc import Callable

from token_tracking.checking.difference import Kind, agreeing, short
from token_tracking.checking.verify import TurnText, TurnView, compare_turn
from token_tracking.template import ChatTemplate


def compare_words(
    turn: int,
    ours: str,
    theirs: str,
    template: ChatTemplate,
    said: Callable[[int], TurnView | None] | None,
) -> tuple[Kind, str]:
    """Name a turn that is printed otherwise than its ids say.

    Args:
        turn: its number.
        ours: text of the ids.
        theirs: what the template prints.
        template: parses both.
        said: as in `drift`. None: the ids are the record, whatever is printed.
    """
    prefill = template.facts.prefill if ours.startswith(template.facts.prefill) else ""
    text = TurnText(frame="", prefill=prefill, sampled=ours.removeprefix(prefill))
    rewrite = compare_turn(turn, text, theirs, template, said or _unknown)
    name = "blanks" if rewrite is None else rewrite.name
    fine = f"{name}: the render prints this turn otherwise; the ids that were sent and sampled are the record"
    if said is None or rewrite is None:
        return "sampled_text", fine
    have, print_ = _from_first_word(ours, theirs)
    if rewrite.touches_sampled and (name == "thinking stripped" or _was_printed(turn, text, template, said)):
        what = f"{name}: the template would have printed {short(print_)} here, the ids keep {short(have)}; a "
        what += "model that is served by chat completions never sees this prompt"
        return "history_kept", what
    if rewrite.touches_sampled or name == "message differs from its tokens":
        what = f"the ids say {short(have)}, the message says {short(print_)}: if the ids are what the engine "
        what += "sampled, the message is at fault; if not, the ids are"
        return "message_differs", what
    return "sampled_text", fine


def _was_printed(
    turn: int, text: TurnText, template: ChatTemplate, said: Callable[[int], TurnView | None]
) -> bool:
    """Whether the template printed the turn as held while it was the last one."""
    view = said(turn)
    if view is None or view.first_print is None:
        return False
    first = compare_turn(turn, text, view.first_print, template, _unknown)
    return first is None or not first.touches_sampled


def _unknown(_: int) -> TurnView | None:
    return None


def _from_first_word(ours: str, theirs: str) -> tuple[str, str]:
    same = agreeing(ours, theirs)
    start = ours.rfind(" ", 0, same) + 1
    return ours[start:], theirs[start:]
