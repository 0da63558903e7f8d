"""`Conversation`: messages, template and ledger of one rollout, kept in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from token_tracking.answers.admission import admit
from token_tracking.control import ControlPolicy
from token_tracking.errors import AmbiguousHistoryError, ConversationError
from token_tracking.history.branch import Branch, Message
from token_tracking.history.causes import CrossStop
from token_tracking.history.plan import Decision, Plan, decide, decide_added
from token_tracking.history.transcript import Transcript
from token_tracking.messages import own_assistant
from token_tracking.record import GenerationRecord
from token_tracking.template import ChatTemplate


class Conversation(Transcript):
    """Which tokens the model saw and which it sampled, over all turns and branches of one rollout.

    Each turn: `advance(messages)` with the harness's whole message list (or `add` with the new ones), then
    `prompt_ids()` to the engine, then `record(...)` with its answer. Not for use from several threads at
    once.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        control_tokens: ControlPolicy = "escape",
        cross_stop: CrossStop = "keep",
    ):
        """Start an empty conversation.

        Args:
            template: a compiled chat template.
            control_tokens: what control tokens in message text become. `escape`: ordinary text; `keep`:
                control ids; `error`: `ControlTokenError` from the call that brings the message.
            cross_stop: what becomes of a turn whose stop token is not the one that the template prints there
                (GLM samples `<|observation|>`, then a user speaks). `keep`: both tokens are held. `branch`:
                the turn ends its branch, and the next prompt is rendered whole. Either is counted in
                `findings()`.

        Raises:
            ControlTokenError: `escape`, and the tokenizer cannot encode text piece by piece.
            ConversationError: a choice is none of those.
        """
        for name, value, choices in (
            ("control_tokens", control_tokens, get_args(ControlPolicy)),
            ("cross_stop", cross_stop, get_args(CrossStop)),
        ):
            if value not in choices:
                raise ConversationError(f"{name} is {value!r:.80}: need one of {', '.join(choices)}")
        control = template.control(control_tokens)
        super().__init__(Branch(template, control, cross_stop=cross_stop), control_tokens)

    def plan(self, messages: Sequence[Message], *, template: ChatTemplate | None = None) -> Plan:
        """Say how `messages`, the whole history as the harness holds it, continues this conversation.

        The history that an aborted turn answers, sent again, continues that turn.

        Args:
            messages: all messages, the model's own among them.
            template: the template to go on with, if the harness changed its tools. None: the current one.

        Raises:
            TemplateError: a message is not plain JSON-like text, or the template refuses the messages.
            UnsupportedContentError: a message carries something other than text.
            ControlTokenError: the policy is `error` and a new message spells a control token.
            ConversationError: the other template has another tokenizer.
        """
        decision = self._decide(messages, template)
        if decision.keep is not None:
            keep, new = _continuation(decision)
            self._branches[decision.branch].check(keep, new, by_program=decision.by_program)
        elif decision.plan.kind != "ambiguous":
            self._begin(decision, template)
        return decision.plan

    def add(self, messages: Sequence[Message]) -> None:
        """Append new messages to the current branch. An error leaves the conversation as it was.

        Messages that ask for no answer yet (a system message alone) are shown to the template with those that
        follow.

        Raises:
            ConversationError: they cannot be appended (an aborted turn is open, or the template rewrites
                sampled tokens); `advance` with the whole history then begins a branch.
            TemplateError: a message is not plain JSON-like text, or the template refuses the messages, or
                does not print one of them.
            UnsupportedContentError: a message carries something other than text.
            ControlTokenError: the policy is `error` and a message spells a control token.
        """
        if self._branch.open_turn:
            raise ConversationError("the last turn was aborted: continue it, or call close_turn()")
        decision = decide_added(self._branches, self._current, messages)
        if decision.plan.kind != "append" or decision.branch != self._current:
            raise ConversationError(
                f"cannot append: {decision.plan.why}; call advance with the whole history"
            )
        new = [dict(message) for message in decision.plan.new]
        self._branch.go_on(len(self._branch.messages), new, by_program=decision.by_program)

    def advance(self, messages: Sequence[Message], *, template: ChatTemplate | None = None) -> Plan:
        """Continue with the harness's whole message list: plan, and do what the plan says.

        An aborted turn that the list goes past, in whichever branch, is closed first, as cut off; the history
        that it answers, sent again, continues it; other lists leave it open. An error leaves the conversation
        as it was. A list that ends with a system or assistant message asks for no answer: the template sees
        it with the messages that follow.

        Raises:
            AmbiguousHistoryError: two branches with different tokens could be meant.
            TemplateError: a message is not plain JSON-like text, or the template refuses the messages, or
                does not print one of the new ones.
            UnsupportedContentError: a message carries something other than text.
            ControlTokenError: the policy is `error` and a new message spells a control token.
            ConversationError: the other template has another tokenizer.
        """
        decision = self._decide(messages, template)
        plan = decision.plan
        if plan.kind == "ambiguous":
            raise AmbiguousHistoryError(plan.why)
        before = self._branch
        if decision.keep is not None:
            keep, new = _continuation(decision)
            self._branches[decision.branch].go_on(keep, new, by_program=decision.by_program)
            self._current = decision.branch
        else:
            self._fork(decision, self._begin(decision, template))
        if self._branch is not before:
            before.ledger.release()
        return plan

    def _decide(self, messages: Sequence[Message], template: ChatTemplate | None) -> Decision:
        tokenizer = self._control.tokenizer
        if template is not None and template.tokenizer.fingerprint != tokenizer.fingerprint:
            names = f"{template.tokenizer.name}, not {tokenizer.name}"
            raise ConversationError(f"the new template has tokenizer {names}: give it the same tokenizer")
        return decide(self._branches, self._current, messages, template)

    def _begin(self, decision: Decision, template: ChatTemplate | None) -> Branch:
        """A new branch as decided, which is not held yet."""
        parent = self._branches[decision.branch]
        plan = decision.plan
        branch = Branch(
            template or parent.template,
            self._control,
            why=plan.why,
            cause=plan.cause,
            parent=None if plan.cause == "sub_agent" else decision.branch,
            cross_stop=self.cross_stop,
        )
        branch.share(decision.shared, parent)
        shared = len(decision.history) - len(plan.new)
        branch.go_on(0, [*decision.history[:shared], *map(dict, plan.new)], by_program=False)
        return branch

    def _fork(self, decision: Decision, branch: Branch) -> None:
        parent = self._branches[decision.branch]
        plan = decision.plan
        if decision.closing is not None:
            parent.messages.append(decision.closing)
        if len(parent.turns) == parent.inherited and decision.branch == self._current:
            # Nothing was sampled in it, so no sample needs it: the new branch takes its place.
            branch.parent = None if plan.cause == "sub_agent" else parent.parent
            if not parent.turns:
                branch.why, branch.cause = parent.why, parent.cause
            self._branches[self._current] = branch
        else:
            self._branches.append(branch)
            self._current = len(self._branches) - 1

    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """The ids to send to the engine now, generation prompt included; read-only.

        After an aborted turn they end with what was sampled of it.

        Raises:
            ConversationError: no message waits for an answer.
            TemplateError: the template refuses the messages, or does not print one of the new ones.
        """
        branch = self._branch
        if not branch.open_turn and branch.prompt is None:
            branch.build_prompt()
        return branch.ledger.ids

    def record(self, record: GenerationRecord, message: Message | None = None) -> Message:
        """Append what the engine sampled after `prompt_ids()`.

        Args:
            record: the engine's answer. A finish reason of `abort` leaves the turn open: `prompt_ids()` then
                continues it, with other weights if need be. Where the last id is one of the template's stop
                tokens the turn has ended, whatever the finish reason says.
            message: the assistant message for the history. None: `template.parse` of the turn. It is not used
                for an aborted turn.

        Returns:
            The assistant message; of an aborted turn what there is so far, which is not in `messages` yet
            (`waiting` says so): ask again with `prompt_ids()`, do not append it.

        Raises:
            RecordError: the answer contradicts the prompt that was sent, the tokenizer, its own finish
                reason or earlier answers; its `code` says what is wrong.
            ConversationError: no prompt is waiting, or `message` is not an assistant message.
            TemplateError: `message` is not plain JSON-like text. After any error, nothing was appended.
        """
        branch = self._branch
        record = admit(record, branch, self.prompt_ids())
        index = len(branch.messages)
        aborted = record.finish_reason == "abort"
        reply = None if message is None else own_assistant(message, index)
        if reply is None or aborted:
            reply = branch.said(record)
        held = own_assistant(reply, index)  # the harness may change its copy
        if len(record.output_ids):
            new = branch.prompt is not None
            branch.append_sampled(record, self._turns if new else self._turns - 1)
            self._turns += new
        if not aborted:
            branch.messages.append(held)
        return reply

    def close_turn(self, message: Message | None = None) -> Message:
        """End the open turn: its message joins the history. After an abort, the turn counts as cut off.

        Raises:
            ConversationError: no turn is open, or `message` is not an assistant message.
            TemplateError: `message` is not plain JSON-like text.
        """
        if not self._branch.open_turn:
            raise ConversationError("no turn is open: close_turn() ends a turn that was aborted")
        branch = self._branch
        held = own_assistant(branch.said() if message is None else message, len(branch.messages))
        branch.messages.append(held)
        return own_assistant(held, len(branch.messages) - 1)  # the harness may change its copy

    def to_bytes(self) -> bytes:
        """A snapshot: every token, message and open turn, byte for byte the same after `from_bytes`."""
        from token_tracking import snapshot

        return snapshot.dump(self)

    @classmethod
    def from_bytes(cls, data: bytes, template: ChatTemplate, *others: ChatTemplate) -> Conversation:
        """Restore a snapshot.

        Args:
            data: from `to_bytes`.
            template: compiled from the same source, tokenizer, tools and variables.
            others: further templates, if branches were made with other tools.

        Raises:
            SnapshotError: the bytes are damaged, of another version, or made with another template.
        """
        from token_tracking import snapshot

        return snapshot.load(data, (template, *others))

    def restore(self, branches: Sequence[Branch], current: int, turns: int) -> None:
        """Take over restored branches; for `token_tracking.snapshot`."""
        self._branches, self._current, self._turns = list(branches), current, turns


def _continuation(decision: Decision) -> tuple[int, list[dict[str, Any]]]:
    """Messages of the chosen branch that stay when it goes on, and copies of those that follow them."""
    keep, new = decision.keep or 0, [*map(dict, decision.plan.new)]
    # The message of a turn that was open counts as kept in the plan; the branch does not hold it yet.
    return (keep, new) if decision.closing is None else (keep - 1, [decision.closing, *new])
