"""`replay`: turns that were recorded before, tokenised as they stand. Needs no model.

A recording is a JSON file per task::

    {"kind": "agent-flow-recording", "version": 1, "source": "who made it", "instance_id": "...",
     "action_format": "tool_calls", "rollouts": [{"turns": [{"text": "...", "finish_reason": "stop"}]}]}

`text` is the completion without its stop token. Rollout k of a task takes `rollouts[k % len(rollouts)]`. A
turn may hold `logprobs` (one number per token, stop token included); without them they are NaN and the turn
says `logprobs: none`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
import numpy as np
from token_tracking import GenerationRecord
from token_tracking.sample import UNKNOWN_VERSION, Scalar, Source

from agent_flow.errors import EngineError, RecordingError
from agent_flow.protocols import GenerateRequest, ProviderContext
from agent_flow.task import Task


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One completion."""

    text: str
    finish_reason: Literal["stop", "length"] = "stop"
    stop_token: str = ""
    """Which stop token ended it. Empty: the template's only one."""
    logprobs: tuple[float, ...] | None = None


class RecordedRollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The completions of one rollout in order."""

    turns: tuple[RecordedTurn, ...]


class Recording(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One recording file."""

    kind: Literal["agent-flow-recording"]
    version: Literal[1]
    source: str
    """Who or what made the turns; goes into the provenance."""
    instance_id: str
    action_format: str = ""
    rollouts: tuple[RecordedRollout, ...]


class ReplayEngine:
    """Answers every request with the next recorded turn of its task."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[engine]` with `provider = "replay"`."""

        recordings: str
        """Folder of recording files, `INSTANCE_ID.json`."""

    source: Source = "replayed"

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._tokenizer = context.tokenizer
        self._folder = context.file.resolve(config.recordings)
        if not self._folder.is_dir():
            raise RecordingError(
                "no such folder of recordings", where=str(self._folder), fix="set engine.recordings"
            )
        self._recordings: dict[str, Recording] = {}

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"engine": "replay", "engine_recordings": self._folder.name}

    def check(self, tasks: Sequence[Task]) -> None:
        """Read the recording of every task.

        Raises:
            RecordingError: one is missing or malformed; says which file.
        """
        self._recordings = {task.instance_id: self._read(task.instance_id) for task in tasks}

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """Nothing to open: the recordings are read by `check`."""
        yield

    async def generate(self, request: GenerateRequest) -> tuple[GenerationRecord, ...]:
        """The recorded turn as token ids, with the stop token that ended it.

        Raises:
            EngineError: the recording holds fewer turns than are asked for.
        """
        recording = self._recordings[request.task_id]
        turns = recording.rollouts[request.member % len(recording.rollouts)].turns
        if request.turn >= len(turns):
            raise EngineError(
                "recording_exhausted",
                f"{request.task_id}: turn {request.turn + 1} was asked for, the recording has {len(turns)}",
                fault="task",
                evidence="the agent went another way than when the turns were recorded",
            )
        turn = turns[request.turn]
        ids = self._tokenizer.encode(turn.text)
        stop_id = self._stop_id(turn, request) if turn.finish_reason == "stop" else None
        if stop_id is not None:
            ids = [*ids, stop_id]
        if turn.logprobs is not None and len(turn.logprobs) != len(ids):
            raise EngineError(
                "recording_logprobs",
                f"{request.task_id}: turn {request.turn + 1} has {len(turn.logprobs)} logprobs for "
                f"{len(ids)} tokens",
                fault="task",
            )
        record = GenerationRecord(
            prompt_ids=request.prompt_ids,
            output_ids=np.array(ids, dtype=np.int32),
            logprobs=None if turn.logprobs is None else np.array(turn.logprobs, dtype=np.float32),
            finish_reason=turn.finish_reason,
            stop_id=stop_id,
            weight_version=UNKNOWN_VERSION,
            logprob_kind="none" if turn.logprobs is None else "raw",
        )
        return (record,)

    def _read(self, task_id: str) -> Recording:
        path = self._folder / f"{task_id}.json"
        try:
            recording = msgspec.json.decode(path.read_bytes(), type=Recording)
        except OSError as error:
            raise RecordingError(
                f"no recording of task {task_id!r}: {error.strerror}",
                where=str(path),
                fix="record it, or take the task out of the task file",
            ) from error
        except msgspec.DecodeError as error:
            raise RecordingError(f"not a recording: {error}", where=str(path)) from error
        if not recording.rollouts or recording.instance_id != task_id:
            raise RecordingError(
                f"holds {len(recording.rollouts)} rollouts of {recording.instance_id!r}, not of {task_id!r}",
                where=str(path),
            )
        return recording

    def _stop_id(self, turn: RecordedTurn, request: GenerateRequest) -> int:
        if turn.stop_token:
            stop_id = self._tokenizer.token_to_id(turn.stop_token)
            if stop_id is None:
                raise EngineError(
                    "bad_recording", f"{request.task_id}: {turn.stop_token!r} is no token", fault="task"
                )
            return stop_id
        if len(request.stop_ids) != 1:
            raise EngineError(
                "bad_recording",
                f"{request.task_id}: turn {request.turn + 1} must name its stop_token: the template has "
                f"{len(request.stop_ids)} stop tokens",
                fault="task",
            )
        return next(iter(request.stop_ids))
