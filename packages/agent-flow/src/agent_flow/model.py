"""The model as an agent sees it: messages in, a message out, and every token kept exact in between."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import anyio.to_thread
from token_tracking import GenerationRecord
from token_tracking.errors import TokenTrackingError

from agent_flow.config import SamplingConfig
from agent_flow.engine_calls import CallLog
from agent_flow.errors import AgentError, ContextFullError, EngineError, GenerationAborted, TokenError
from agent_flow.protocols import Engine, GenerateRequest
from agent_flow.rollout import POLICY_RUN, Message, Rollout
from agent_flow.stage import waiting_for


class ConversationModel:
    """One rollout's conversation and the engine that continues it; see `Model`."""

    def __init__(
        self,
        rollout: Rollout,
        engine: Engine,
        sampling: SamplingConfig,
        *,
        on_turn: Callable[[], None],
        log: CallLog | None = None,
    ) -> None:
        self._rollout = rollout
        self._conversation = rollout.conversation
        self._engine = engine
        self._sampling = sampling
        self._on_turn = on_turn
        self._log = log
        self._busy = False

    def prepare(self, messages: Sequence[Message]) -> GenerateRequest:
        """Bring the conversation up to the history and ask for the next turn; see `Model`."""
        with self._alone():
            return self._prepare(messages)

    async def sample(self, request: GenerateRequest) -> tuple[Message, str]:
        """Sample the turn and record it; see `Model`."""
        with self._alone():
            return await self._sample(request)

    async def ask(self, messages: Sequence[Message]) -> Message:
        """`prepare` in a thread, then `sample`; see `Model`."""
        with self._alone():
            request = await anyio.to_thread.run_sync(self._prepare, messages)
            try:
                message, _ = await self._sample(request)
            except GenerationAborted as aborted:
                # An agent on the event loop has no thread to leave, and nothing may end its task group.
                error = EngineError("aborted", "the turn was cut from outside", retryable=True)
                error.partial = aborted.records
                raise error from aborted
        return message

    @contextmanager
    def _alone(self) -> Generator[None]:
        """A conversation has one turn at a time: of two, neither would be the answer to its prompt.

        Raises:
            AgentError: another turn of the rollout is being asked for.
        """
        if self._busy:
            raise AgentError(
                "two_turns", "a turn was asked for while another of the rollout was under way", fault="agent"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _prepare(self, messages: Sequence[Message]) -> GenerateRequest:
        try:
            self._conversation.advance(messages)
            return self._request()
        except TokenTrackingError as error:
            raise TokenError("prompt", str(error), fault="agent") from error

    async def _sample(self, request: GenerateRequest) -> tuple[Message, str]:
        if request.max_new_tokens < 1 and self._conversation.open_turn:
            message = dict(self._conversation.close_turn())
            self._on_turn()
            return message, "length"
        records = await self._generate(request)
        last = records[-1]
        if last.finish_reason == "length" and not sum(len(record.output_ids) for record in records):
            raise ContextFullError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room for an answer"
            )
        message: Message = {}
        for record in records:
            message = self._record(record)
        if last.finish_reason == "abort" and self._conversation.waiting:
            raise GenerationAborted(records)
        self._on_turn()
        return message, last.finish_reason

    async def _generate(self, request: GenerateRequest) -> tuple[GenerationRecord, ...]:
        before = self._policy_run()
        try:
            with waiting_for("the model"):
                records = await self._engine.generate(request)
        except TokenTrackingError as error:
            raise EngineError("record", f"the engine's answer cannot be true: {error}") from error
        except EngineError as error:
            if self._log is not None:
                self._log.failed(request.prompt_ids, error)
            raise
        if self._log is not None:
            self._log.answered(request.prompt_ids, records)
        if any(len(record.output_ids) for record in records):
            self._sampled_under(before, self._policy_run())
        return records

    def _policy_run(self) -> str:
        return str(self._engine.describe().get(POLICY_RUN, ""))

    def _sampled_under(self, *policy_runs: str) -> None:
        """Asked before and after a turn, since they may change within it."""
        runs = self._rollout.policy_runs
        self._rollout.policy_runs = list(dict.fromkeys([*runs, *filter(None, policy_runs)]))

    def _request(self) -> GenerateRequest:
        return GenerateRequest(
            rollout_id=self._rollout.rollout_id,
            attempt=self._rollout.attempt,
            task_id=self._rollout.task.instance_id,
            member=self._rollout.member,
            turn=self._conversation.turns - self._conversation.open_turn,
            prompt_ids=self._conversation.prompt_ids(),
            stop_ids=self._conversation.template.stop_ids,
            sampling=self._sampling,
            max_new_tokens=max(0, self._sampling.max_new_tokens - self._open_tokens()),
        )

    def _open_tokens(self) -> int:
        """How much of the turn's budget was used before it was aborted."""
        if not self._conversation.open_turn:
            return 0
        turn = self._conversation.branches[self._conversation.current].turns[-1]
        return turn.end - turn.start

    def _record(self, record: GenerationRecord) -> Message:
        try:
            return dict(self._conversation.record(record))
        except TokenTrackingError as error:
            raise TokenError("record", str(error), fault="infra") from error
