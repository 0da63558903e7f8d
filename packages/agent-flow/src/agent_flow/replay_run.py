"""A run again: the engine's calls are read from the dumps, everything else is done for real, and compared."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from token_tracking import GenerationRecord, Tokenizer
from token_tracking.sample import Sample, Scalar, Source

from agent_flow.dump import NAME, RolloutDump, SampleImage, read_dump
from agent_flow.engine_calls import CallReader, error_of, records_of, shared_length
from agent_flow.errors import EngineError, RecordingError
from agent_flow.journal import read_events
from agent_flow.protocols import GenerateRequest
from agent_flow.rollout import Rollout
from agent_flow.task import Task
from agent_flow.worker import Place

logger = logging.getLogger(__name__)

_TIMES = re.compile(
    r"\b\d+(?:\.\d+)?(?:e-?\d+)? ?(?:ns|us|µs|ms|s|secs?|seconds?|min|minutes?)\b"
    r"|\b\d{4}-\d\d-\d\d\b|\b\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?\b"
)
"""What clocks put into the output of commands: how long something took, dates, times of day."""
_AROUND = 12
"""Tokens that are shown before and after the first one that differs."""


class Replayed(msgspec.Struct, kw_only=True):
    """One rollout of the recorded run, and how its replay went."""

    dump: RolloutDump
    finished: bool = False
    """It came to its end."""
    calls: int = 0
    """Calls of the engine in its last attempt."""
    differs: list[str] = []
    """In the order in which it was found; empty and `finished`: everything is the same."""
    ended_same: bool = False
    """The same exit status, reward and number of calls, whatever the tokens."""
    more_than_times: bool = False
    """Something differs that is no time figure in a text that the model was shown."""


class Replay:
    """The delivered rollouts of a run that was made with `--dump`."""

    def __init__(self, rollouts: Sequence[Replayed], folder: Path, left_out: int) -> None:
        self.folder = folder
        self._tokenizer: Tokenizer | None = None
        self.left_out = left_out
        """Rollouts of the run that ended without samples."""
        self.rollouts = {item.dump.rollout_id: item for item in rollouts}
        """By rollout id, which a replay keeps."""

    @classmethod
    def read(cls, folder: Path) -> Replay:
        """Read a run's journal and dumps.

        Raises:
            RecordingError: there is no run, none of its rollouts was delivered, or a dump is missing or
                damaged; says which.
        """
        journal = folder / "journal"
        if not journal.is_dir():
            raise RecordingError(
                "no run folder: it has no journal", where=str(folder), fix="agent-flow run --replay runs/NAME"
            )
        ends = [event for event in read_events(journal) if event["event"] in ("delivered", "dropped")]
        kept = [str(event["rollout_id"]) for event in ends if event["event"] == "delivered"]
        if not kept:
            raise RecordingError("no rollout of this run was delivered", where=str(folder))
        dumps = [read_dump(folder / "rollouts" / rollout_id / NAME) for rollout_id in kept]
        if not any(dump.calls for dump in dumps):
            raise RecordingError(
                "no engine was asked in this run, so there is nothing to replay: the answers of a model that "
                "the agent brought are in messages.json of each rollout",
                where=str(folder),
            )
        sources = {dump.source for dump in dumps}
        if len(sources) > 1:
            raise RecordingError(f"rollouts of several sources: {', '.join(sources)}", where=str(folder))
        records = [record for dump in dumps for call in dump.calls for record in call.records]
        if any(record.routed_experts_left_out for record in records):
            logger.warning("a dump holds no routed experts, which the engine gave: they are not compared")
        return cls([Replayed(dump=dump) for dump in dumps], folder, len(ends) - len(kept))

    def engine(self, tokenizer: Tokenizer) -> RecordedEngine:
        """The engine that gives what was given."""
        self._tokenizer = tokenizer
        return RecordedEngine(self, tokenizer)

    def places(self, tasks: Sequence[Task]) -> tuple[Place, ...]:
        """Where the recorded rollouts stand, in their groups.

        Raises:
            RecordingError: a task is not there any more.
        """
        by_name = {task.instance_id: task for task in tasks}
        missing = sorted({item.dump.task_id for item in self.rollouts.values()} - set(by_name))
        if missing:
            raise RecordingError(
                f"the task file has no {missing[0]!r} any more ({len(missing)} of the run's tasks are gone)",
                where=str(self.folder),
            )
        return tuple(
            Place(
                task=by_name[item.dump.task_id],
                group_id=item.dump.group_id,
                member=item.dump.member,
                mode=item.dump.mode,
                rollout_id=item.dump.rollout_id,
                now=datetime.fromisoformat(item.dump.template_now),
            )
            for item in self.rollouts.values()
        )

    def finished(self, rollout: Rollout, samples: Sequence[Sample]) -> None:
        """Compare a replayed rollout with its record."""
        item = self.rollouts[rollout.rollout_id]
        item.finished = True
        ends = _ends_differ(item.dump, rollout)
        if item.calls != len(item.dump.calls):
            ends.insert(0, f"{item.calls} calls of the engine, {len(item.dump.calls)} were recorded")
        item.ended_same = not ends
        item.differs += ends
        found = _samples_differ(item.dump.samples, samples)
        item.differs += found
        if found and not (
            self._tokenizer and _same_but_for_times(item.dump.samples, samples, self._tokenizer)
        ):
            item.more_than_times = True

    @property
    def same(self) -> int:
        """Rollouts with the same ids, masks, log-probabilities, versions and rewards."""
        return sum(item.finished and not item.differs for item in self.rollouts.values())

    @property
    def ended_same(self) -> int:
        """Rollouts with the same exit status, reward and number of calls."""
        return sum(item.ended_same for item in self.rollouts.values())

    @property
    def same_but_for_times(self) -> int:
        """Rollouts that ended the same and whose tokens differ in time figures alone, or not at all."""
        return sum(item.ended_same and not item.more_than_times for item in self.rollouts.values())


class RecordedEngine:
    """Answers each call of a rollout with what its engine gave then, and says where the prompt differs."""

    def __init__(self, replay: Replay, tokenizer: Tokenizer) -> None:
        self._replay = replay
        self._tokenizer = tokenizer
        self._open: dict[tuple[str, int], CallReader] = {}
        self.source: Source = next(iter(replay.rollouts.values())).dump.source

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """Nothing to open."""
        yield

    def check(self, tasks: Sequence[Task]) -> None:
        """Every dump was read before."""

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"engine": "recorded", "engine_run": self._replay.folder.name}

    async def generate(self, request: GenerateRequest) -> tuple[GenerationRecord, ...]:
        """The next recorded call.

        A prompt that differs is noted and answered all the same, so that the rest can be compared.

        Raises:
            EngineError: as it was recorded; or the rollout asks for more than was recorded.
        """
        item = self._replay.rollouts[request.rollout_id]
        reader = self._open.get((request.rollout_id, request.attempt))
        if reader is None:
            reader = self._open[request.rollout_id, request.attempt] = CallReader(item.dump.calls)
            item.differs.clear()  # of an attempt that failed
            item.more_than_times = False
        if reader.given == reader.total:
            raise EngineError(
                "replay_exhausted",
                f"call {reader.total + 1} was asked for, {reader.total} were recorded",
                fault="task",
                evidence="\n".join(item.differs),
            )
        prompt, call = reader.read()
        item.calls = reader.given
        if not np.array_equal(prompt, request.prompt_ids):
            where = first_difference(prompt, request.prompt_ids, self._tokenizer)
            texts = [self._tokenizer.decode(ids.tolist()) for ids in (prompt, request.prompt_ids)]
            item.more_than_times |= _without_times(texts[0]) != _without_times(texts[1])
            item.differs.append(f"prompt of call {reader.given}, {where}")
        if call.error is not None:
            raise error_of(request.prompt_ids, call.error)
        return records_of(request.prompt_ids, call.records)


def first_difference(
    recorded: npt.NDArray[np.int32], now: npt.NDArray[np.int32], tokenizer: Tokenizer
) -> str:
    """Where two runs of ids part, with the text around it."""
    at = shared_length(recorded, now)
    texts = [tokenizer.decode(ids[max(at - _AROUND, 0) : at + _AROUND].tolist()) for ids in (recorded, now)]
    return f"token {at} of {len(recorded)}: recorded {texts[0]!r}, now {texts[1]!r}"


def _ends_differ(dump: RolloutDump, rollout: Rollout) -> list[str]:
    pairs = (
        ("exit status", dump.exit_status, rollout.exit_status),
        ("reward", dump.reward, rollout.reward),
        ("turn rewards", dump.turn_rewards, rollout.turn_rewards),
        ("status", dump.status, rollout.status),
        ("in_loss", dump.in_loss, rollout.in_loss),
        ("in_baseline", dump.in_baseline, rollout.in_baseline),
    )
    return [f"{name}: recorded {was}, now {now}" for name, was, now in pairs if was != now]


def _samples_differ(recorded: Sequence[SampleImage], samples: Sequence[Sample]) -> list[str]:
    """Byte for byte, so that NaN equals NaN."""
    if len(recorded) != len(samples):
        return [f"{len(samples)} samples, {len(recorded)} were recorded"]
    found: list[str] = []
    for part, (was, sample) in enumerate(zip(recorded, samples, strict=True)):
        now = SampleImage.of(sample)
        before, after = msgspec.structs.asdict(was), msgspec.structs.asdict(now)
        found += [
            f"sample {part}: {name} differ{_where(was, now) if name == 'token_ids' else ''}"
            for name, data in before.items()
            if after[name] != data
        ]
    return found


def _same_but_for_times(
    recorded: Sequence[SampleImage], samples: Sequence[Sample], tokenizer: Tokenizer
) -> bool:
    """Whether what was sampled is the same byte for byte, and the rest but for time figures."""
    if len(recorded) != len(samples):
        return False
    pairs = [(was, SampleImage.of(sample)) for was, sample in zip(recorded, samples, strict=True)]
    return all(
        was.sampled == now.sampled
        and _without_times(tokenizer.decode(was.ids.tolist()))
        == _without_times(tokenizer.decode(now.ids.tolist()))
        for was, now in pairs
    )


def _without_times(text: str) -> str:
    return _TIMES.sub("TIME", text)


def _where(was: SampleImage, now: SampleImage) -> str:
    return f" first at token {shared_length(was.ids, now.ids)} of {len(was.ids)}"
