"""The model as an agent sees it: messages in, a message out, and every token kept exact in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from token_tracking import Conversation, GenerationRecord
from token_tracking.errors import TokenTrackingError

from agent_flow.config import SamplingConfig
from agent_flow.errors import ContextFullError, EngineError, TokenError
from agent_flow.protocols import Engine, GenerateRequest, Message


class ConversationTurns:
    """One rollout's conversation and the engine that continues it."""

    def __init__(
        self,
        conversation: Conversation,
        engine: Engine,
        sampling: SamplingConfig,
        *,
        rollout_id: str,
        task_id: str,
        member: int,
        stop_ids: frozenset[int],
        on_turn: Callable[[], None],
    ) -> None:
        self._conversation = conversation
        self._engine = engine
        self._sampling = sampling
        self._rollout_id = rollout_id
        self._task_id = task_id
        self._member = member
        self._stop_ids = stop_ids
        self._on_turn = on_turn

    def prepare(self, messages: Sequence[Message]) -> GenerateRequest:
        """Bring the conversation up to the history and ask for the next turn; see `ModelTurns`."""
        try:
            self._conversation.advance(messages)
            return self._request()
        except TokenTrackingError as error:
            raise TokenError("prompt", str(error), fault="agent") from error

    async def sample(self, request: GenerateRequest) -> tuple[Message, str]:
        """Sample the turn and record it; see `ModelTurns`."""
        try:
            record = await self._engine.generate(request)
        except TokenTrackingError as error:
            raise EngineError("record", f"the engine's answer cannot be true: {error}") from error
        if record.finish_reason == "length" and not len(record.output_ids):
            raise ContextFullError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room for an answer"
            )
        message = self._record(record)
        self._on_turn()
        return message, record.finish_reason

    def _request(self) -> GenerateRequest:
        return GenerateRequest(
            rollout_id=self._rollout_id,
            task_id=self._task_id,
            member=self._member,
            turn=self._conversation.turns,
            prompt_ids=self._conversation.prompt_ids(),
            stop_ids=self._stop_ids,
            temperature=self._sampling.temperature,
            max_new_tokens=self._sampling.max_new_tokens,
        )

    def _record(self, record: GenerationRecord) -> Message:
        try:
            return dict(self._conversation.record(record))
        except TokenTrackingError as error:
            raise TokenError("record", str(error), fault="infra") from error
