"""`Branch`: one line of a conversation, its messages, its turns and its ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from token_tracking.answers.experts import ExpertRows
from token_tracking.checking.verify import Alignment, TurnText, TurnView, align
from token_tracking.compiler.delta import Delta
from token_tracking.control import ControlTokens
from token_tracking.errors import ConversationError, TemplateError
from token_tracking.history.causes import Cause, CrossStop
from token_tracking.history.turn import HeldTurn, Prompt, Segment
from token_tracking.ledger import TokenLedger
from token_tracking.messages import own_assistant
from token_tracking.record import GenerationRecord
from token_tracking.same_messages import Numbered, common_prefix
from token_tracking.template import ChatTemplate

Message = Mapping[str, Any]
_ASKS_NOTHING = frozenset({"system", "developer", "assistant"})


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
        self.numbered = Numbered()
        self.turns: list[HeldTurn] = []
        self.ledger = TokenLedger()
        self.experts = ExpertRows()
        self.prompt: Prompt | None = None
        self._by_program = False
        self._checked: tuple[Delta, str] | None = None
        self._proven_from: int | None = None
        self._unproven = 0
        self._first_prints: dict[int, str | None] = {}

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
        ids = self.ledger.slice_ids(turn.start, turn.end - self.closing(index))
        sampled = self.template.tokenizer.decode(ids.tolist())
        return TurnText(frame=turn.frame, prefill=turn.prefill, sampled=sampled, repair=turn.repair)

    def closing(self, index: int) -> int:
        """Tokens at the end of a held turn that the model sampled to close it."""
        turn = self.turns[index]
        return self.template.closings.sampled(self._end(turn), stopped=turn.last.stop_id is not None)

    def overlap(self, index: int, delta: Sequence[int]) -> int:
        """How many of these tokens a delta after the turn begins with; see `Closings.overlap`."""
        turn = self.turns[index]
        stopped = turn.last.stop_id is not None
        return self.template.closings.overlap(self._end(turn), delta, stopped=stopped)

    def _end(self, turn: HeldTurn) -> list[int]:
        start = max(turn.start, turn.end - self.template.closings.longest)
        return self.ledger.slice_ids(start, turn.end).tolist()

    def turn_texts(self, turns: int) -> list[TurnText]:
        """The text of the first `turns` held turns."""
        return [self.turn_text(index) for index in range(turns)]

    def align(self, text: str, texts: Sequence[TurnText], following: str | None) -> Alignment:
        """Lay a marked render along held turns, the first ones of this branch."""
        return align(text, texts, self.template, self.control, following, self._view)

    def _view(self, index: int) -> TurnView:
        turn = self.turns[index]
        if index not in self._first_prints:
            # Neither the message of a turn nor one before it changes in a branch.
            self._first_prints[index] = self._first_print(turn)
        return TurnView(message=self.messages[turn.message_index], first_print=self._first_prints[index])

    def _first_print(self, turn: HeldTurn) -> str | None:
        try:
            shown = self.messages[: turn.message_index + 1]
            text = self.template.render_marked(shown, self.control, generate=False)
        except TemplateError:
            return None
        at, end_text = text.rfind(turn.frame), self.template.facts.end_of(shown[-1])
        if at < 0 or end_text is None:
            return None
        return self.control.unmark(text[at + len(turn.frame) :].removesuffix(end_text))

    def proven(self, answered: int, new: Sequence[Message]) -> bool:
        """Whether the template's program says, without a render, what follows an assistant message.

        Args:
            answered: index of that message.
            new: the messages after it.
        """
        program, message = self.template.program, self.messages[answered]
        if program is None or not (program.covers(message, new) and program.is_stable(message, new)):
            return False
        if self._proven_from is not None:
            return self._proven_from <= answered
        for turn in self.turns[self._unproven :]:
            if turn.message_index > answered:
                break
            if self.template.proven_after(self.messages[: turn.message_index]):
                self._proven_from = turn.message_index
                return True
            self._unproven += 1
        return False

    def shared_messages(self, messages: Sequence[Message]) -> int:
        """How many messages at the start of a harness's history are held."""
        return common_prefix(self.messages, messages, self.numbered)

    def passed_by(self, messages: Sequence[Message]) -> bool:
        """Whether a history goes on after the open turn."""
        held = self.messages
        return self.open_turn and len(messages) > len(held) and self.shared_messages(messages) == len(held)

    def closed(self) -> Branch:
        """A copy with the message of the open turn; this branch stays as it is."""
        return self._with([*self.messages, own_assistant(self.said(), len(self.messages))])

    def _with(self, messages: list[dict[str, Any]]) -> Branch:
        """A copy to look at, with other messages after the last turn."""
        # copy.copy would read __dict__, which makes every attribute of this branch slower from then on.
        shown = Branch(self.template, self.control, cause=self.cause, cross_stop=self.cross_stop)
        shown.messages, shown.turns, shown.inherited = messages, [*self.turns], self.inherited
        shown.ledger, shown.prompt = self.ledger, self.prompt
        shown._first_prints = dict(self._first_prints)
        shown._proven_from, shown._unproven = self._proven_from, self._unproven
        return shown

    def said(self, record: GenerationRecord | None = None) -> dict[str, Any]:
        """The message of the open turn, or of what a record adds to it or begins; nothing is changed."""
        if self.prompt is not None and record is not None and not len(record.output_ids):
            return {"role": "assistant", "content": ""}
        ids: list[int] = []
        if self.prompt is None:
            ids = self.ledger.slice_ids(self.turns[-1].start, self.held_end).tolist()
        if record is not None and len(record.output_ids):
            ids += record.output_ids.tolist()
            ids = ids if record.stop_id is None else ids[:-1]
        return self.template.parse(ids).message()

    def go_on(self, keep: int, new: Sequence[dict[str, Any]], *, by_program: bool) -> None:
        """Keep the first `keep` messages, all of the last turn among them, and append new ones.

        Args:
            keep: how many messages stay.
            new: the messages after them, which nobody else changes.
            by_program: the template's program covers all that follows the last turn.

        Raises:
            ControlTokenError: the policy is `error` and a new message spells a control token.
            TemplateError: the template refuses the messages, or leaves one out. Nothing was changed.
        """
        if new or keep < len(self.messages):
            # Nothing can refuse what a proof covers: that is most calls, and they should cost nothing here.
            free = by_program and len(self.turns) > self.inherited and self.control.policy != "error"
            checked = None if free else self.check(keep, new, by_program=by_program)
            if self.prompt is not None:
                self._unwind_prompt()
            self.messages[keep:] = new
            self._by_program, self._checked = by_program, checked

    def check(
        self, keep: int, new: Sequence[dict[str, Any]], *, by_program: bool
    ) -> tuple[Delta, str] | None:
        """As `go_on`, without doing it; what the next prompt adds, if a render was needed to know that."""
        if self.control.policy == "error":
            self.control.mark_messages(new, keep)
        last = new[-1] if new else self.messages[keep - 1] if keep else None
        by_program = by_program and len(self.turns) > self.inherited
        if by_program or last is None or last["role"] in _ASKS_NOTHING:
            return None
        trial = self._with([*self.messages[:keep], *new])
        trial._reopen_end()
        return trial._next_text()

    def _unwind_prompt(self) -> None:
        """Take back a prompt that nothing was sampled after."""
        self.prompt = None
        self.ledger = self.ledger.cut_back(self.held_end)
        self._reopen_end()

    def _reopen_end(self) -> None:
        if self.turns:
            self.turns[-1] = msgspec.structs.replace(self.turns[-1], repair="", cross_stop=False)

    def build_prompt(self) -> None:
        """Write what follows the last turn, up to the next generation prompt, to the ledger."""
        if not self.messages or self.messages[-1]["role"] == "assistant":
            raise ConversationError("no message waits for an answer: add a user or tool message first")
        delta, found_by = self._checked or self._next_text()
        self._checked = None
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
            self._check_printed(text)
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
        self._check_printed(found[0].text)
        return found

    def _check_printed(self, text: str) -> None:
        """Check that a prompt without a proof shows every message that waits for its answer."""
        said = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        marked = self.control.mark_messages(self.messages)
        self.template.check_printed(marked, said[-1] + 1 if said else 0, text)

    def _write(self, delta: Delta) -> None:
        ids = delta.ids
        if not self.turns:
            self.ledger.append_encoded(ids)
            return
        turn = self.turns[-1]
        closings, stop = self.template.closings, turn.last.stop_id
        if stop is not None and closings.longest == 1:
            sampled = int(len(ids) > 0 and ids[0] == stop)
        else:
            sampled = self.overlap(-1, ids[: closings.longest].tolist())
        if stop is None:
            # What the model wrote of its close stays; what it was cut off before is repaired.
            close = max(sampled, closings.printed(ids.tolist()))
            repair = "" if sampled else self.repair(turn)
            self.ledger.append_repair([*self.control.tokenizer.encode(repair), *ids[sampled:close].tolist()])
            self.turns[-1] = msgspec.structs.replace(turn, repair=repair)
            sampled = close
        elif not sampled:
            self.turns[-1] = msgspec.structs.replace(turn, cross_stop=True)
        self.ledger.append_encoded(ids[sampled:])

    def repair(self, turn: HeldTurn) -> str:
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
        self._first_prints = {at: text for at, text in other._first_prints.items() if at < turns}
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
