"""`Difference`: one place where token ids or a loss mask are not as the template has them, with a name."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal[
    "sampled_ids",
    "sampled_text",
    "unclosed_end",
    "padding",
    "message_differs",
    "history_kept",
    "turn_untrained",
    "mask_hole",
    "stop_untrained",
    "control_token_in_text",
    "missing_newline",
    "special_tokens",
    "template_text",
    "template_ids",
    "cut_short",
    "mask_on_template",
    "mask_shifted",
]
"""No fault: `sampled_ids`: what the model wrote, in other ids than the tokenizer gives. `sampled_text`: what
it wrote is printed otherwise. `unclosed_end`: the last turn lacks its close.

Warnings: `padding`: one token over and over before or after the conversation. `message_differs`: a turn's ids
say something else than its message. `history_kept`: an earlier turn as it was sampled, which the template
prints otherwise by now. `turn_untrained`, `mask_hole`, `stop_untrained`: a turn, a part of one or its stop
token has loss mask 0.

Errors: `control_token_in_text`: message text became a control token. `missing_newline`: blanks after a stop
token are not there. `special_tokens`: a control token is missing, added or another one. `template_text`,
`template_ids`: text that the template or a message wrote differs, or has other ids. `cut_short`: the ids end
too early. `mask_on_template`: tokens that no model sampled have loss mask 1. `mask_shifted`: the loss mask
fits the turns some tokens further on."""
Weight = Literal["fine", "warning", "error"]
_WEIGHTS: dict[Kind, Weight] = {
    "sampled_ids": "fine",
    "sampled_text": "fine",
    "unclosed_end": "fine",
    "padding": "warning",
    "message_differs": "warning",
    "history_kept": "warning",
    "turn_untrained": "warning",
    "mask_hole": "warning",
    "stop_untrained": "warning",
}


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One place where the ids are not those of the render, or the mask is not that of the turns."""

    kind: Kind
    what: str
    turn: int
    """The assistant turn it lies in, or that follows; the number of turns: after the last."""
    in_turn: bool
    ids: tuple[int, int]
    """First token and end, in the ids that were given."""
    template: tuple[int, int]
    """The same in the ids of the render. (0, 0): it is about the mask."""
    also: tuple[int, ...] = ()
    """Further turns that one finding is about (a mask that covers everything)."""

    @property
    def weight(self) -> Weight:
        """`error`: structure, or what is trained, is wrong. `warning`: perhaps not meant. `fine`: neither."""
        return _WEIGHTS.get(self.kind, "error")

    def concerns(self, turn: int) -> bool:
        """Whether it is about this turn, or the prompt that the turn answers."""
        return turn == self.turn or turn in self.also


def short(text: str) -> str:
    """A text as a sentence quotes it."""
    return repr(text if len(text) <= 60 else f"{text[:40]}…{text[-16:]}") if text else "nothing"


def agreeing(ours: str, theirs: str) -> int:
    """Characters at the start that are the same."""
    both = min(len(ours), len(theirs))
    return next((n for n in range(both) if ours[n] != theirs[n]), both)
