"""Stored patches of a run, graded again: after a grader, an image or a task was mended."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import msgspec

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile, load_config
from agent_flow.errors import ConfigError, EnvError, GraderError, TaskRowError, UsageError, unwrapped
from agent_flow.flow import PATCH
from agent_flow.lone_grader import LoneGrader, open_grader
from agent_flow.outcome import outcome_of
from agent_flow.reward_thread import contained, described
from agent_flow.rollout import Mode, TestState
from agent_flow.task import Task

logger = logging.getLogger(__name__)

State = Literal["graded", "ungraded", "error", "skipped"]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout's `provenance.json` says, as far as grading goes."""

    rollout_id: str
    task_id: str
    mode: Mode
    exit_status: str
    reward: float | None


class Regraded(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a run, graded again: a line of `regraded.jsonl`."""

    rollout_id: str
    task_id: str
    state: State
    """`ungraded`: the patch itself cannot be judged. `error`: infrastructure or the task; never a reward of
    0. `skipped`: nothing to grade."""
    old: float | None
    """The reward that is in the run. None: there is none."""
    new: float | None = None
    """None: not `graded`."""
    why: str = ""
    """Unless it is `graded`."""
    tests: Mapping[str, TestState] = {}
    grader: str = ""

    @property
    def changed(self) -> bool:
        """Whether training would see another reward; an error says nothing of that."""
        return self.state in ("graded", "ungraded") and self.old != self.new


Listener = Callable[[Regraded], None]


async def regrade(
    run: Path, file: ConfigFile, *, tasks: Sequence[str], clock: Clock, listener: Listener
) -> tuple[tuple[Regraded, ...], Path]:
    """Grade the stored patches of a run. Nothing that is in the run's folder is changed.

    Args:
        run: The run's folder.
        file: Which runtime and sandboxes to use: the run's own `run.toml`, or another.
        tasks: These only. Empty: all.
        clock: Wall clock and ids.
        listener: Told of each as it is done.

    Returns:
        A row per rollout, and the new file in the run's folder that has them as JSON lines, each written as
        it is done.

    Raises:
        UsageError: it is no run or keeps no patches, it has no such task, or the configuration cannot work.
    """
    stored = _read_run(run)
    _require_patches(run, file)
    known = {rollout.task_id for rollout in stored}
    unknown = [name for name in tasks if name not in known]
    if unknown:
        raise UsageError(
            f"the run has no rollout of {unknown[0]!r}",
            where=str(run),
            fix=f"one of {', '.join(sorted(known)[:10])}",
        )
    chosen = [rollout for rollout in stored if not tasks or rollout.task_id in tasks]
    rows: dict[str, Regraded] = {}
    lines = _Lines(run)
    slots = anyio.CapacityLimiter(file.run.worker.max_rollouts)
    async with open_grader(file, clock) as grader:
        by_name = {task.instance_id: task for task in grader.tasks}

        async def one(rollout: Stored) -> None:
            async with slots:
                row = await _row_of(run, rollout, by_name.get(rollout.task_id), grader)
            rows[rollout.rollout_id] = row
            lines.write(row)
            listener(row)

        with unwrapped():
            async with anyio.create_task_group() as group:
                for rollout in chosen:
                    group.start_soon(one, rollout)
    return tuple(rows[rollout.rollout_id] for rollout in chosen), lines.path


async def _row_of(run: Path, rollout: Stored, task: Task | None, grader: LoneGrader) -> Regraded:
    try:
        row = await contained(_regrade_one(run, rollout, task, grader))
        msgspec.json.encode(row)  # a verdict of a runtime of one's own may be anything
        return row
    except TaskRowError as error:
        return _row(rollout, "error", str(error))
    except UsageError:
        raise
    except Exception as error:
        # As in the worker: a rollout that meets a fault is a row with the reason, the others go on.
        logger.exception("rollout %s could not be graded", rollout.rollout_id)
        frames = traceback.extract_tb(error.__traceback__)
        if error.__cause__ is not None:
            frames += traceback.extract_tb(error.__cause__.__traceback__)
        at = frames[-1]
        return _row(rollout, "error", f"{described(error)} ({Path(at.filename).name}:{at.lineno})")


def _row(rollout: Stored, state: State, why: str) -> Regraded:
    return Regraded(
        rollout_id=rollout.rollout_id,
        task_id=rollout.task_id,
        state=state,
        old=rollout.reward,
        why=why.encode(errors="backslashreplace").decode(),
    )


async def _regrade_one(run: Path, rollout: Stored, task: Task | None, grader: LoneGrader) -> Regraded:
    row = partial(_row, rollout)
    if not outcome_of(rollout.exit_status, rollout.mode).evaluate:
        return row("skipped", f"{rollout.exit_status} is not graded")
    if task is None:
        return row("error", "the configuration has no such task")
    path = anyio.Path(run / "rollouts" / rollout.rollout_id / PATCH)
    if not await path.exists():
        return row("skipped", "no patch was stored")
    try:
        verdict = await grader.grade(task.fresh(), await path.read_bytes())
    except (EnvError, GraderError) as error:
        of_patch = isinstance(error, GraderError) and error.fault == "agent"
        return row("ungraded" if of_patch else "error", str(error))
    return msgspec.structs.replace(
        row("graded", ""),
        new=verdict.reward,
        tests=verdict.tests,
        grader=str(grader.runtime.describe().get("grader", "")),
    )


def require_run(run: Path) -> None:
    """Raises: UsageError: the folder is not that of a run."""
    if not (run / "journal").is_dir():
        raise UsageError(
            "no run folder: it has no journal",
            where=str(run),
            fix="agent-flow regrade runs/NAME, the folder that `agent-flow run` names at its end",
        )


def _require_patches(run: Path, file: ConfigFile) -> None:
    """A run of the flow `swe` may have come to no patch; a run of another flow may never have one."""
    own = run / "run.toml"
    flow = (load_config(own) if own.is_file() else file).run.flow.get("provider")
    if flow != "swe" and next((run / "rollouts").glob(f"*/{PATCH}"), None) is None:
        raise UsageError(
            f"this run keeps no patches (its flow is {flow!r}); nothing to grade again",
            where=str(run),
            fix="`agent-flow run --replay RUN` of a run with --dump asks the reward function again",
        )


def _read_run(run: Path) -> list[Stored]:
    require_run(run)
    folder = run / "rollouts"
    stored: list[Stored] = []
    for path in sorted(folder.glob("*/provenance.json")):
        try:
            stored.append(msgspec.json.decode(path.read_bytes(), type=Stored))
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError(f"cannot be read: {error}", where=str(path)) from error
    if not stored:
        raise UsageError("no rollout of this run left a provenance.json", where=str(folder))
    return stored


class _Lines:
    """`regraded.jsonl`, or the first of `regraded-2.jsonl` and so on that is not there yet."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.path = run
        """The file, once it has a line."""

    def write(self, row: Regraded) -> None:
        """Add a line.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            if self.path == self._run:
                self.path = self._new()
            with self.path.open("ab") as out:
                out.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write: {error.strerror}", where=str(self.path)) from error

    def _new(self) -> Path:
        for number in itertools.count(1):
            path = self._run / ("regraded.jsonl" if number == 1 else f"regraded-{number}.jsonl")
            with suppress(FileExistsError):
                path.touch(exist_ok=False)
                return path
        raise AssertionError("itertools.count does not end")
