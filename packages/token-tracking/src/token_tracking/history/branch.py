"""`Branch`: one line of a conversation, its messages, its turns and its ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from token_tracking.answers.experts import ExpertRows
from token_tracking.checking.verify import Alignment, TurnText, align
from token_tracking.compiler.delta import Delta
from token_tracking.control import ControlTokens
from token_tracking.errors import ConversationError, TemplateError
from token_tracking.history.causes import Cause, CrossStop
from token_tracking.ledger import TokenLedger
from token_tracking.record import GenerationRecord
from token_tracking.sample import FinishReason, LogprobKind
from token_tracking.template import ChatTemplate

Message = Mapping[str, Any]


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What one generation call sampled: a whole turn, or a piece of one that was aborted and continued."""

    start: int
    end: int
    finish_reason: FinishReason
    stop_id: int | None
    weight_version: int
    logprob_kind: LogprobKind
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    routed: bool = False
    """Whether the call came with routed experts."""
    media: tuple[int, ...] = ()
    """Media placeholder ids among what was sampled; no image stands behind them."""
    repairs: tuple[str, ...] = ()
    """Repairs of the record, by name."""


class HeldTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn in a branch, with the prompt text before it."""

    frame: str
    prefill: str
    message_index: int
    """Index of its message."""
    segments: tuple[Segment, ...]
    repair: str = ""
    cross_stop: bool = False
    """The turn ended with another stop token than the one the template prints there; both are held."""
    found_by: str
    """How the prompt before the turn was made: `render`, `program` or `marker`."""
    number: int
    """Position among all turns of the conversation, in the order they were recorded."""

    @property
    def start(self) -> int:
        """First sampled token."""
        return self.segments[0].start

    @property
    def end(self) -> int:
        """One past the last sampled token."""
        return self.segments[-1].end

    @property
    def last(self) -> Segment:
        """The segment that ended the turn, or was aborted."""
        return self.segments[-1]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A generation prompt that is written to the ledger and waits for its completion."""

    frame: str
    prefill: str
    found_by: str


class Branch:
    """Messages and the tokens held for them. Only its last turn and what follows can still change."""

    def __init__(
        self,
        template: ChatTemplate,
        control: ControlTokens,
        *,
        why: str = "start",
        cause: Cause = "start",
        parent: int | None = None,
        cross_stop: CrossStop = "keep",
    ):
        self.template = template
        self.control = control
        self.why = why
        self.cause: Cause = cause
        self.parent = parent
        self.cross_stop: CrossStop = cross_stop
        self.inherited = 0
        self.messages: list[dict[str, Any]] = []
        self.turns: list[HeldTurn] = []
        self.ledger = TokenLedger()
        self.experts = ExpertRows()
        self.prompt: Prompt | None = None
        self._by_program = False

    @property
    def open_turn(self) -> bool:
        """Whether the last turn was aborted and can be continued."""
        return bool(self.turns) and self.turns[-1].last.finish_reason == "abort" and not self.closed_open_turn

    @property
    def closed_open_turn(self) -> bool:
        """Whether the aborted last turn has its message already."""
        return self.turns[-1].message_index < len(self.messages)

    @property
    def held_end(self) -> int:
        """Tokens up to the end of the last turn."""
        return self.turns[-1].end if self.turns else 0

    def turn_text(self, index: int) -> TurnText:
        """The text of a held turn."""
        turn = self.turns[index]
        ids = self.ledger.slice_ids(turn.start, turn.end)
        if turn.last.stop_id is not None:
            ids = ids[:-1]
        sampled = self.template.tokenizer.decode(ids.tolist())
        return TurnText(frame=turn.frame, prefill=turn.prefill, sampled=sampled, repair=turn.repair)

    def turn_texts(self, turns: int) -> list[TurnText]:
        """The text of the first `turns` held turns."""
        return [self.turn_text(index) for index in range(turns)]

    def align(self, text: str, texts: Sequence[TurnText], following: str | None) -> Alignment:
        """Lay a marked render along held turns, the first ones of this branch."""
        return align(text, texts, self.template, self.control, following, self._first_print)

    def _first_print(self, index: int) -> str | None:
        """What the template printed for a turn's message while it was the last; None if it refuses."""
        turn = self.turns[index]
        try:
            shown = self.messages[: turn.message_index + 1]
            text = self.template.render_marked(shown, self.control, generate=False)
        except TemplateError:
            return None
        at, end_text = text.rfind(turn.frame), self.template.facts.end_of(shown[-1])
        if at < 0 or end_text is None:
            return None
        return self.control.unmark(text[at + len(turn.frame) :].removesuffix(end_text))

    def go_on(self, keep: int, new: Sequence[Message], *, by_program: bool) -> None:
        """Keep the first `keep` messages, all of the last turn among them, and append new ones.

        `by_program`: the template's program covers all that follows the last turn.
        """
        if new or keep < len(self.messages):
            self.unwind_prompt()
            self.messages[keep:] = [dict(message) for message in new]
            self._by_program = by_program

    def unwind_prompt(self) -> None:
        """Take back a prompt that nothing was sampled after."""
        if self.prompt is None:
            return
        self.prompt = None
        self.ledger = self.ledger.fork(self.held_end)
        self._reopen_end()

    def _reopen_end(self) -> None:
        if self.turns:
            self.turns[-1] = msgspec.structs.replace(self.turns[-1], repair="", cross_stop=False)

    def build_prompt(self) -> None:
        """Write what follows the last turn, up to the next generation prompt, to the ledger."""
        if not self.messages or self.messages[-1]["role"] == "assistant":
            raise ConversationError("no message waits for an answer: add a user or tool message first")
        delta, found_by = self._next_text()
        prefill = self.template.facts.prefill
        if not (prefill and delta.text.endswith(prefill)):
            prefill = ""
        self._write(delta)
        frame = delta.text.removesuffix(prefill) if prefill else delta.text
        self.prompt = Prompt(frame=frame, prefill=prefill, found_by=found_by)

    def _next_text(self) -> tuple[Delta, str]:
        if len(self.turns) == self.inherited:
            text = self.template.render_marked(self.messages, self.control, generate=True)
            aligned = self.align(text, self.turn_texts(self.inherited), None)
            if aligned.broken is not None:
                raise ConversationError(
                    f"internal: turns were shared that the render lacks: {aligned.broken}"
                )
            text = text[aligned.end :]
            return Delta(text, self.control.encode_array(text)), "render"
        split = self.turns[-1].message_index + 1
        if self.control.policy == "error":
            self.control.mark_messages(self.messages[split:], split)  # a delta does not know their indices
        program = self.template.program
        if self._by_program and program is not None:
            # Not asked again: the plan has just seen these messages.
            return program.run(self.messages[split - 1], self.messages[split:], self.control), "program"
        found = self.template.delta(self.messages[:split], self.messages[split:], self.control)
        if found is None:
            raise ConversationError("internal: a prompt without a delta was planned as an append")
        return found

    def _write(self, delta: Delta) -> None:
        ids = delta.ids
        if not self.turns:
            self.ledger.append_encoded(ids)
            return
        turn = self.turns[-1]
        stop = turn.last.stop_id
        if stop is None:
            repair = self._repair(turn)
            self.ledger.append_repair([*self.control.tokenizer.encode(repair), *ids[:1]])
            ids = ids[1:]
            self.turns[-1] = msgspec.structs.replace(turn, repair=repair)
        elif len(ids) and ids[0] == stop:
            ids = ids[1:]
        else:
            self.turns[-1] = msgspec.structs.replace(turn, cross_stop=True)
        self.ledger.append_encoded(ids)

    def _repair(self, turn: HeldTurn) -> str:
        """What closes the reasoning of a turn that was cut off inside it."""
        ids = self.ledger.slice_ids(turn.start, turn.end).tolist()
        if not self.template.in_reasoning(ids):
            return ""
        return self.template.facts.markers.reasoning_closing_text

    def append_sampled(self, record: GenerationRecord, number: int) -> None:
        """Append a completion to the open turn, or as a new one after the waiting prompt."""
        start, end = self.ledger.append_sampled(
            record.output_ids, record.logprobs, record.weight_version, record.kept
        )
        if record.routed_experts is not None:
            self.experts.join(record.routed_start, record.routed_experts)
        segment = Segment(
            start=start,
            end=end,
            finish_reason=record.finish_reason,
            stop_id=record.stop_id,
            weight_version=record.weight_version,
            logprob_kind=record.logprob_kind,
            temperature=record.temperature,
            top_p=record.top_p,
            top_k=record.top_k,
            min_p=record.min_p,
            routed=record.routed_experts is not None,
            media=self.template.media.among(record.output_ids),
            repairs=record.repairs,
        )
        if self.prompt is None:
            turn = self.turns[-1]
            self.turns[-1] = msgspec.structs.replace(turn, segments=(*turn.segments, segment))
            return
        prompt = self.prompt
        self.turns.append(
            HeldTurn(
                frame=prompt.frame,
                prefill=prompt.prefill,
                message_index=len(self.messages),
                segments=(segment,),
                found_by=prompt.found_by,
                number=number,
            )
        )
        self.prompt = None

    def share(self, turns: int, other: Branch) -> None:
        """Begin with the first `turns` turns of another branch, whose tokens are kept but trained there."""
        self.turns = list(other.turns[:turns])
        self.inherited = turns
        self.ledger = other.ledger.fork(self.held_end)
        self.experts = other.experts.cut(self.held_end)
        self._reopen_end()

    def sampled_before(self, messages: int) -> dict[int, bytes]:
        """The sampled ids (int32) of the turns among the first `messages` messages, by message index."""
        return {
            turn.message_index: self.ledger.slice_ids(turn.start, turn.end).tobytes()
            for turn in self.turns
            if turn.message_index < messages
        }


def sampled_count(turns: Sequence[HeldTurn]) -> int:
    """Sampled tokens of some turns."""
    return int(np.sum([turn.end - turn.start for turn in turns], dtype=np.int64))
