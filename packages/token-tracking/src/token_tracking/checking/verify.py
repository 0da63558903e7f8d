"""Held tokens against full renders: what is equal, what the template rewrote, and what is broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from token_tracking.control import ControlTokens
from token_tracking.messages import Message, texts
from token_tracking.parsing.parse import ParsedCompletion
from token_tracking.template import ChatTemplate

Verdict = Literal["equal", "rewritten", "broken"]


class TurnText(msgspec.Struct, frozen=True, kw_only=True):
    """Text around and in one assistant turn, as held."""

    frame: str
    """Rendered text from the end of the turn before (its close included) to where the template starts a
    finished turn's text; control tokens of messages are marked."""
    prefill: str
    """The rest of the generation prompt, which finished turns need not begin with."""
    sampled: str
    """What the model wrote, without its stop token; None of it is marked."""
    repair: str = ""
    """Written by us after a cut-off turn, before its close."""


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a turn."""

    message: Message
    first_print: str | None
    """What the template printed for it while it was the last one. None: it refused."""


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between what is held of a turn and what the template prints for it now."""

    name: str
    """`empty think pair dropped` (it was prefilled), `sampled empty think pair dropped`, `empty think pair
    added`, `prefill dropped`, `printed differently` (the same reasoning, content and calls in other blanks or
    JSON spelling), `message differs from its tokens` (from the start on, and it lacks what is not printed:
    ids are the record, messages are a view of them), `thinking stripped`, `turn rewritten` (the template
    leaves out what the message has)."""
    turn: int
    """Index of the turn in its branch."""
    touches_sampled: bool
    """What the model said is gone: the branch cannot go on."""


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """A render laid along held turns."""

    shared: int
    """Turns at the start that the render still holds, rewrites of template tokens aside."""
    end: int
    """Where the last of them ends in the render."""
    rewrites: tuple[Rewrite, ...]
    """Differences in the shared turns, and the one that ended the walk if it did."""
    broken: str | None
    """Why the walk ended before the last turn. None: all turns are shared."""


def align(
    text: str,
    turns: Sequence[TurnText],
    template: ChatTemplate,
    control: ControlTokens,
    following: str | None,
    view: Callable[[int], TurnView | None],
) -> Alignment:
    """Walk a render along held turns.

    Args:
        text: a render of a whole conversation, marked.
        turns: the held turns.
        template: parses both sides of a turn that is printed differently.
        control: the marking of `text`.
        following: text that must come right after the last turn. Empty: the last turn ends the text. None:
            not known; the last turn ends at the first stop token.
        view: the message of a turn. None: it is not known.
    """
    at = 0
    rewrites: list[Rewrite] = []
    for index, turn in enumerate(turns):
        if not text.startswith(turn.frame, at):
            where = "before the first turn" if index == 0 else f"between turns {index - 1} and {index}"
            return Alignment(shared=index, end=at, rewrites=tuple(rewrites), broken=f"text {where} changed")
        start = at + len(turn.frame)
        after = turns[index + 1].frame if index + 1 < len(turns) else following
        end = _turn_end(text, start, after, template, control)
        if end is None:
            why = f"the text that follows turn {index} is gone"
            return Alignment(shared=index, end=at, rewrites=tuple(rewrites), broken=why)
        rewrite = compare_turn(index, turn, control.unmark(text[start:end]), template, view)
        if rewrite is not None:
            rewrites.append(rewrite)
            if rewrite.touches_sampled:
                why = f"{rewrite.name} (turn {index})"
                return Alignment(shared=index, end=at, rewrites=tuple(rewrites), broken=why)
        at = end
    return Alignment(shared=len(turns), end=at, rewrites=tuple(rewrites), broken=None)


def _turn_end(
    text: str, start: int, after: str | None, template: ChatTemplate, control: ControlTokens
) -> int | None:
    if after is not None:
        found = text.find(after, start) if after else len(text)
        return None if found < 0 else found
    for token_start, token_end in control.find(text, start):
        if template.tokenizer.token_to_id(text[token_start:token_end]) in template.closings.close_ids:
            return token_start
    return None


def compare_turn(
    index: int,
    turn: TurnText,
    printed: str,
    template: ChatTemplate,
    view: Callable[[int], TurnView | None],
) -> Rewrite | None:
    """Name the difference between a held turn and its print; None if they are equal."""
    held = turn.prefill + turn.sampled + turn.repair
    if printed == held:
        return None

    def rewrite(name: str, *, touches_sampled: bool = False) -> Rewrite:
        return Rewrite(name=name, turn=index, touches_sampled=touches_sampled)

    if turn.prefill and printed == turn.sampled + turn.repair:
        empty = _is_empty_pair(turn.prefill, template)
        return rewrite("empty think pair dropped" if empty else "prefill dropped")
    if printed.endswith(held) and _is_empty_pair(printed.removesuffix(held), template):
        return rewrite("empty think pair added")
    if held.endswith(printed) and _is_empty_pair(held.removesuffix(printed), template):
        return rewrite("sampled empty think pair dropped")
    ours, theirs = template.parse_printed(held), template.parse_printed(printed)
    if _said(ours) == _said(theirs):
        return rewrite("printed differently")
    seen = view(index)
    if seen is not None and seen.first_print is not None:
        first = template.parse_printed(seen.first_print)
        if _said(first) == _said(theirs) and not _leaves_out(held, printed, seen.message, template):
            return rewrite("message differs from its tokens")
    stripped = ours.reasoning and not theirs.reasoning and _said(ours)[1:] == _said(theirs)[1:]
    if stripped or _cut_at_marker(held, printed, template):
        return rewrite("thinking stripped", touches_sampled=True)
    return rewrite("turn rewritten", touches_sampled=True)


def _leaves_out(held: str, printed: str, message: Message, template: ChatTemplate) -> bool:
    """Whether a sampled line stands in what the template reads of the message, and is not printed."""
    field = template.facts.reasoning_field
    shown = [*texts(message), str(message.get(field) or "") if field else ""]
    lines = {line.strip() for line in held.splitlines()} - {"", *template.tokenizer.added_tokens}
    return any(line not in printed and any(line in text for text in shown) for line in lines)


def _cut_at_marker(held: str, printed: str, template: ChatTemplate) -> bool:
    """Whether what is printed is what was held after an added token (DeepSeek cuts at `</think>`)."""
    end = printed.strip()
    cut = held.rstrip().removesuffix(end).rstrip()
    return held.rstrip().endswith(end) and cut.endswith(tuple(template.tokenizer.added_tokens))


def _is_empty_pair(text: str, template: ChatTemplate) -> bool:
    markers = template.facts.markers
    if markers.reasoning_open is None or markers.reasoning_close is None:
        return False
    pair = template.tokenizer.decode([markers.reasoning_open, markers.reasoning_close])
    return "".join(text.split()) == "".join(pair.split())


def _said(parsed: ParsedCompletion) -> tuple[Any, ...]:
    calls = tuple(
        (call.name, _json(call.arguments) if call.error is None else call.arguments.strip())
        for call in parsed.tool_calls
    )
    return ((parsed.reasoning or "").strip(), parsed.content.strip(), calls)


def _json(text: str) -> str:
    # One spelling per value, so that 1, 1.0 and true stay apart (they are equal in Python).
    return json.dumps(json.loads(text), sort_keys=True)
