"""`ConversationReport`: the held tokens of a conversation, checked prompt by prompt against full renders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from token_tracking.branch import Branch, Message
from token_tracking.errors import TemplateError
from token_tracking.verify import Rewrite, TurnText, Verdict


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


class BranchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One branch and why it began."""

    branch: int
    parent: int | None
    why: str
    turns: int
    """Turns of its own."""
    shared_turns: int
    shared_tokens: int
    tokens: int


class ConversationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the tokens of a conversation."""

    prompts: tuple[PromptCheck, ...]
    """One check per recorded turn: its prompt, when it was sent."""
    final: tuple[PromptCheck, ...]
    """One per branch with turns: the render of all messages up to its last turn, without generation
    prompt."""
    branches: tuple[BranchInfo, ...]
    cross_stops: int
    """Turns that ended with another stop token than the template prints there."""
    cut_off: int
    """Turns that ended without a stop token."""
    prompts_by: dict[str, int]
    """How prompts were made: `render` (the whole text), `program` (a compiled delta), `marker` (two
    renders)."""

    @property
    def equal(self) -> int:
        """Prompts equal to their render."""
        return sum(check.verdict == "equal" for check in self.prompts)

    @property
    def rewritten(self) -> int:
        """Prompts equal but for named rewrites of template tokens."""
        return sum(check.verdict == "rewritten" for check in self.prompts)

    @property
    def broken(self) -> int:
        """Prompts that differ from their render."""
        return sum(check.verdict == "broken" for check in self.prompts)

    @property
    def rewrites(self) -> dict[str, int]:
        """Rewrites by name: how many turns each was seen in, the final renders included."""
        seen = {
            (check.branch, rewrite.turn, rewrite.name)
            for check in (*self.prompts, *self.final)
            for rewrite in check.rewrites
        }
        return dict(sorted(Counter(name for _, _, name in seen).items()))

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        counts = {"equal": self.equal, "rewritten": self.rewritten, "broken": self.broken}
        return {**counts, "rewrites": self.rewrites, **values}

    def lines(self) -> list[str]:
        """The findings, one line each, for people."""
        total = len(self.prompts)
        lines = [f"{self.equal} of {total} prompts equal to their full render"]
        if self.rewritten:
            lines.append(f"{self.rewritten} of {total} prompts equal but for rewrites of template tokens")
        lines += [
            f"branch {c.branch}, prompt of turn {c.turn}: broken: {c.problem}"
            for c in self.prompts
            if c.problem
        ]
        lines += [f"{name}: {counted(count, 'turn')}" for name, count in self.rewrites.items()]
        lines += [f"branch {c.branch}, final render: {c.problem}" for c in self.final if c.problem]
        lines += [
            f"branch {b.branch} began from branch {b.parent}, {_sharing(b.shared_tokens)}: {b.why}"
            for b in self.branches
            if b.parent is not None
        ]
        if self.cut_off:
            lines.append(f"{counted(self.cut_off, 'turn')} cut off before a stop token")
        if self.cross_stops:
            lines.append(
                f"{counted(self.cross_stops, 'turn')} with another stop token than the template prints"
            )
        return lines


def _sharing(tokens: int) -> str:
    return f"sharing {counted(tokens, 'token')}" if tokens else "sharing no turn"


def counted(count: int, noun: str) -> str:
    """`1 turn`, `2,000 turns`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def build(branches: Sequence[Branch]) -> ConversationReport:
    """Check all branches; see `Conversation.report`."""
    prompts: list[PromptCheck] = []
    final: list[PromptCheck] = []
    infos: list[BranchInfo] = []
    own = [turn for branch in branches for turn in branch.turns[branch.inherited :]]
    for index, branch in enumerate(branches):
        own_turns = range(branch.inherited, len(branch.turns))
        if own_turns:
            marked = [branch.control.mark_message(message) for message in branch.messages]
            texts = branch.turn_texts(len(branch.turns))
            prompts += [_check_prompt(branch, index, turn, marked, texts) for turn in own_turns]
            final.append(_check_final(branch, index, marked, texts))
        infos.append(
            BranchInfo(
                branch=index,
                parent=branch.parent,
                why=branch.why,
                turns=len(branch.turns) - branch.inherited,
                shared_turns=branch.inherited,
                shared_tokens=branch.turns[branch.inherited - 1].end if branch.inherited else 0,
                tokens=len(branch.ledger),
            )
        )
    return ConversationReport(
        prompts=tuple(prompts),
        final=tuple(final),
        branches=tuple(infos),
        cross_stops=sum(turn.cross_stop for turn in own),
        cut_off=sum(turn.last.stop_id is None for turn in own),
        prompts_by=dict(sorted(Counter(turn.found_by for turn in own).items())),
    )


def _check_prompt(
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
    stop = before.last.stop_id
    if stop is None:
        ids = branch.control.tokenizer.encode_plain(before.repair) + ids
    elif ids[:1] != [stop]:
        ids = [stop, *ids]
    start = before.end if stop is None else before.end - 1
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
    end_text = branch.template.facts.end_text
    aligned = branch.align(text, texts, end_text)
    problem = aligned.broken or ""
    if not problem and end_text is not None and text[aligned.end :] != end_text:
        problem = "text follows the end of the last turn"
    end = branch.turns[turn].end
    stop = branch.turns[turn].last.stop_id
    if not problem and stop not in (None, int(branch.ledger.slice_ids(end - 1, end)[0])):
        problem = f"the last turn does not end with its stop token {stop}"
    return _verdict(index, turn, aligned.rewrites, problem)


def _verdict(branch: int, turn: int, rewrites: tuple[Rewrite, ...], problem: str) -> PromptCheck:
    verdict: Verdict = "broken" if problem else "rewritten" if rewrites else "equal"
    return PromptCheck(branch=branch, turn=turn, verdict=verdict, rewrites=rewrites, problem=problem)
