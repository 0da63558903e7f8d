"""`Difference`: one place where token ids are not those of a template's render, with a name."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal[
    "retokenized",
    "sampled_text",
    "unclosed_end",
    "control_token_in_text",
    "stop_untrained",
    "missing_newline",
    "special_tokens",
    "template_text",
    "template_ids",
    "cut_short",
    "mask_on_template",
]
"""`retokenized`: what the model wrote, in other ids. `sampled_text`: what it wrote is printed otherwise.
`unclosed_end`: the last turn lacks its close. `control_token_in_text`: message text became a control token.
`stop_untrained`: a turn is trained without its stop token. `missing_newline`: blanks after a stop token are
not there. `special_tokens`: a control token is missing, added or another one. `template_text`,
`template_ids`: text that the template or a message wrote differs, or has other ids. `cut_short`: the ids end
too early. `mask_on_template`: tokens that no model sampled have loss mask 1."""
Weight = Literal["fine", "warning", "error"]
_WEIGHTS: dict[Kind, Weight] = {
    "retokenized": "fine",
    "sampled_text": "fine",
    "unclosed_end": "fine",
    "control_token_in_text": "warning",
    "stop_untrained": "warning",
}


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One place where the ids are not those of the render."""

    kind: Kind
    what: str
    turn: int
    """The assistant turn it lies in, or that follows; the number of turns: after the last."""
    in_turn: bool
    ids: tuple[int, int]
    """First token and end, in the ids that were given."""
    template: tuple[int, int]
    """The same in the ids of the render."""

    @property
    def weight(self) -> Weight:
        """`error`: the structure differs. `warning`: it trains otherwise than meant. `fine`: sampled text."""
        return _WEIGHTS.get(self.kind, "error")


def short(text: str) -> str:
    """A text as a sentence quotes it."""
    return repr(text if len(text) <= 60 else f"{text[:40]}…{text[-16:]}") if text else "nothing"
