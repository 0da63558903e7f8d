"""`PromptCheck`: the prompts of one branch, each checked against its full render, by a render or by proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from token_tracking.checking.verify import Rewrite, TurnText, Verdict
from token_tracking.errors import TemplateError
from token_tracking.history.branch import Branch, Message

RENDERED_ANYWAY = 4
"""Prompts of a branch, evenly spread, that are rendered although a proof would do."""
CheckedBy = Literal["render", "proof"]


class PromptCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, or one whole branch, against the render of its messages."""

    branch: int
    turn: int
    """The turn that answered the prompt, counted in its branch. For a final check: the last turn."""
    verdict: Verdict
    """`equal`: the held ids are those of the render, outside the sampled spans, and each sampled span is
    printed as it was sampled. `rewritten`: equal but for the named rewrites, which touch no sampled token.
    `broken`: not."""
    rewrites: tuple[Rewrite, ...] = ()
    problem: str = ""
    """What is broken. Empty: nothing."""
    by: CheckedBy = "render"
    """`render`: the prompt was rendered and compared. `proof`: the render of a later prompt was, which begins
    with this one's render because the template's program appends what follows and rewrites nothing; the ids
    of what the prompt added were compared."""


def check_branch(
    branch: Branch, index: int, *, render_all: bool = False
) -> tuple[list[PromptCheck], PromptCheck]:
    """One check per turn of its own, and one of the whole branch up to its last turn.

    A render costs as much as the conversation is long, so that one per prompt is quadratic. Where the program
    is proven to append the messages after turn k and to leave what was rendered before as it is, the render
    of prompt k + 1 begins with that of prompt k. Going from the last prompt backwards, such a prompt is
    checked by the render after it.
    """
    marked = [branch.control.mark_message(message) for message in branch.messages]
    texts = branch.turn_texts(len(branch.turns))
    first, last = branch.inherited, len(branch.turns) - 1
    step = max((last - first) / RENDERED_ANYWAY, 1)
    spread = {last - round(step * n) for n in range(RENDERED_ANYWAY + 1)}
    checks: list[PromptCheck] = []
    for turn in range(last, first - 1, -1):
        later = checks[-1] if checks else None
        if later is None or render_all or turn in spread or later.problem or not _appends(branch, turn):
            checks.append(_rendered(branch, index, turn, marked, texts))
            continue
        held = branch.turns[turn]
        same = _same_ids(branch, turn, held.frame + held.prefill)
        problem = "" if same else "the text after the last turn is the same, its ids differ"
        rewrites = tuple(rewrite for rewrite in later.rewrites if rewrite.turn < turn)
        checks.append(_verdict(index, turn, rewrites, problem, "proof"))
    return checks[::-1], _check_final(branch, index, marked, texts)


def _appends(branch: Branch, turn: int) -> bool:
    """Whether the render of the next turn's prompt is proven to begin with that of this turn's."""
    at, end = branch.turns[turn].message_index, branch.turns[turn + 1].message_index
    return branch.proven(at, branch.messages[at + 1 : end])


def _rendered(
    branch: Branch, index: int, turn: int, marked: Sequence[Message], texts: Sequence[TurnText]
) -> PromptCheck:
    held = branch.turns[turn]
    try:
        text = branch.template.render(marked[: held.message_index], add_generation_prompt=True)
    except TemplateError as error:
        return PromptCheck(branch=index, turn=turn, verdict="broken", problem=str(error))
    following = held.frame + held.prefill
    aligned = branch.align(text, texts[:turn], following)
    problem = aligned.broken or ""
    if not problem and text[aligned.end :] != following:
        problem = "the text after the last turn differs"
    if not problem and not _same_ids(branch, turn, following):
        problem = "the text after the last turn is the same, its ids differ"
    return _verdict(index, turn, aligned.rewrites, problem)


def _same_ids(branch: Branch, turn: int, following: str) -> bool:
    held = branch.turns[turn]
    ids = branch.control.encode(following)
    if turn == 0:
        return ids == branch.ledger.slice_ids(0, held.start).tolist()
    before = branch.turns[turn - 1]
    start, stop = before.end - branch.overlap(turn - 1, ids), before.last.stop_id
    if stop is None:
        ids = branch.control.tokenizer.encode_plain(before.repair) + ids
    elif start == before.end:
        start, ids = start - 1, [stop, *ids]
    return ids == branch.ledger.slice_ids(start, held.start).tolist()


def _check_final(
    branch: Branch, index: int, marked: Sequence[Message], texts: Sequence[TurnText]
) -> PromptCheck:
    turn = len(branch.turns) - 1
    count = branch.turns[-1].message_index + 1
    if count > len(branch.messages):
        return PromptCheck(branch=index, turn=turn, verdict="broken", problem="the last turn is still open")
    try:
        text = branch.template.render(marked[:count], add_generation_prompt=False)
    except TemplateError as error:
        return PromptCheck(branch=index, turn=turn, verdict="broken", problem=str(error))
    end_text = branch.template.facts.end_of(branch.messages[count - 1])
    aligned = branch.align(text, texts, end_text)
    problem = aligned.broken or ""
    if not problem and end_text is not None and text[aligned.end :] != end_text:
        problem = "text follows the end of the last turn"
    end = branch.turns[turn].end
    stop = branch.turns[turn].last.stop_id
    if not problem and stop not in (None, int(branch.ledger.slice_ids(end - 1, end)[0])):
        problem = f"the last turn does not end with its stop token {stop}"
    return _verdict(index, turn, aligned.rewrites, problem)


def _verdict(
    branch: int, turn: int, rewrites: tuple[Rewrite, ...], problem: str, by: CheckedBy = "render"
) -> PromptCheck:
    verdict: Verdict = "broken" if problem else "rewritten" if rewrites else "equal"
    return PromptCheck(branch=branch, turn=turn, verdict=verdict, rewrites=rewrites, problem=problem, by=by)
