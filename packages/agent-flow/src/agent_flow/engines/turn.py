"""One turn under way: what was asked for, what there is of it, and what is left of its budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import anyio
import msgspec
import numpy as np
import numpy.typing as npt
from token_tracking import GenerationRecord
from token_tracking.sample import UNKNOWN_VERSION

from agent_flow.engines.slots import Call
from agent_flow.errors import EngineError
from agent_flow.protocols import GenerateRequest


class Turn:
    """A turn in pieces: records that go on where the one before them ended, each with its prompt in front.

    All but the last have the finish reason `abort`, as `Engine.generate` says; records without tokens are
    left out, unless there is nothing else.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.records: list[GenerationRecord] = []
        self.tokens = 0
        """Sampled so far."""
        self.empty_calls = 0
        """Calls in a row that brought no token."""
        self.calls = 0
        self.call: Call | None = None
        """The one that runs."""
        self.policy_run = ""
        """The current one when its last call was sent."""
        self.failed_at = ""
        """Address of the replica where its last call failed; empty: it did not."""
        self.failure = ""
        """How it failed."""
        self.ordered = anyio.Event()
        """Set: it shall end with what it has."""

    @property
    def session(self) -> str:
        """The same for all turns of one attempt of a rollout."""
        return f"{self.request.rollout_id}-{self.request.attempt}"

    @property
    def over(self) -> bool:
        """Whether it has ended: by a stop or a limit."""
        return bool(self.records) and self.records[-1].finish_reason != "abort"

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was sampled."""
        return len(self.request.prompt_ids) + self.tokens

    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """What the model is to see next: the prompt and everything that was sampled."""
        if not self.records:
            return self.request.prompt_ids
        return np.concatenate([self.request.prompt_ids, *(record.output_ids for record in self.records)])

    def room(self, context_length: int) -> int:
        """Tokens that may still be sampled: what earlier calls gave counts against budget and context.

        (verl#7207, slime#2003, slime#2260: each call with the whole budget, or beyond the context.)
        """
        return min(self.request.max_new_tokens - self.tokens, context_length - self.length)

    def take(self, records: Sequence[GenerationRecord]) -> None:
        """Append what a call gave: at least one record.

        An abort that came with a stop token has ended the turn. An empty record is of no use but for its
        finish reason.
        """
        for record in records:
            if len(record.output_ids):
                self.records.append(record)
                self.tokens += len(record.output_ids)
        last = records[-1]
        if self.records and self.records[-1] is last:
            self.records[-1] = last.ended_by(self.request.stop_ids)
        elif last.finish_reason == "length":
            self.end("length")
        elif last.finish_reason == "stop":
            self.records.append(last)

    def end(self, reason: Literal["length", "abort"]) -> None:
        """End it with what it has, under this finish reason."""
        if self.records:
            self.records[-1] = msgspec.structs.replace(self.records[-1], finish_reason=reason)
            return
        self.records.append(
            GenerationRecord(
                prompt_ids=self.request.prompt_ids,
                output_ids=np.empty(0, dtype=np.int32),
                finish_reason=reason,
                weight_version=UNKNOWN_VERSION,
            )
        )

    def no_progress(self) -> EngineError:
        """Why it fails after many calls that brought nothing."""
        times = f"{self.empty_calls} calls in a row of one turn brought no token"
        if self.failed_at:
            return EngineError("keeps_failing", f"{times}; the last: {self.failure}", retryable=True)
        return EngineError("keeps_aborting", f"the engine keeps aborting: {times}", retryable=True)
