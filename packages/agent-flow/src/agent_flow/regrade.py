"""Stored patches of a run, graded again: after a grader, an image or a task was mended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

import anyio
import msgspec

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.errors import ConfigError, EnvError, GraderError, UsageError, unwrapped
from agent_flow.flow import PATCH
from agent_flow.outcome import outcome_of
from agent_flow.rollout import Mode, TestState
from agent_flow.runtimes.grader import Grader, open_grader
from agent_flow.task import Task

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
        A row per rollout, and the new file in the run's folder that has them as JSON lines.

    Raises:
        UsageError: it is no run, it has no such task, or the configuration cannot work.
    """
    stored = _read_run(run)
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
    slots = anyio.CapacityLimiter(file.run.worker.max_rollouts)
    async with open_grader(file, clock) as grader:
        by_name = {task.instance_id: task for task in grader.tasks}

        async def one(rollout: Stored) -> None:
            async with slots:
                row = await _regrade_one(run, rollout, by_name.get(rollout.task_id), grader)
            rows[rollout.rollout_id] = row
            listener(row)

        with unwrapped():
            async with anyio.create_task_group() as group:
                for rollout in chosen:
                    group.start_soon(one, rollout)
    ordered = tuple(rows[rollout.rollout_id] for rollout in chosen)
    return ordered, _write(run, ordered)


async def _regrade_one(run: Path, rollout: Stored, task: Task | None, grader: Grader) -> Regraded:
    def row(state: State, why: str) -> Regraded:
        return Regraded(
            rollout_id=rollout.rollout_id, task_id=rollout.task_id, state=state, old=rollout.reward, why=why
        )

    if not outcome_of(rollout.exit_status, rollout.mode).evaluate:
        return row("skipped", f"{rollout.exit_status} is not graded")
    if task is None:
        return row("error", "the configuration has no such task")
    path = anyio.Path(run / "rollouts" / rollout.rollout_id / PATCH)
    if not await path.exists():
        return row("skipped", "no patch was stored")
    try:
        verdict = await grader.grade(task, await path.read_bytes())
    except (EnvError, GraderError) as error:
        of_patch = isinstance(error, GraderError) and error.fault == "agent"
        return row("ungraded" if of_patch else "error", str(error))
    return msgspec.structs.replace(
        row("graded", ""),
        new=verdict.reward,
        tests=verdict.tests,
        grader=str(grader.runtime.describe().get("grader", "")),
    )


def _read_run(run: Path) -> list[Stored]:
    folder = run / "rollouts"
    if not folder.is_dir():
        raise UsageError(
            "not the folder of a run: it has no rollouts/", where=str(run), fix="agent-flow regrade runs/NAME"
        )
    stored: list[Stored] = []
    for path in sorted(folder.glob("*/provenance.json")):
        try:
            stored.append(msgspec.json.decode(path.read_bytes(), type=Stored))
        except msgspec.MsgspecError as error:
            raise UsageError(f"cannot be read: {error}", where=str(path)) from error
    if not stored:
        raise UsageError("no rollout of this run left a provenance.json", where=str(folder))
    return stored


def _write(run: Path, rows: Sequence[Regraded]) -> Path:
    """`regraded.jsonl`, or the first of `regraded-2.jsonl` and so on that is not there yet."""
    for number in itertools.count(1):
        path = run / ("regraded.jsonl" if number == 1 else f"regraded-{number}.jsonl")
        try:
            with path.open("xb") as out:
                _write_rows(out, rows)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot write: {error.strerror}", where=str(path)) from error
        return path
    raise AssertionError("itertools.count does not end")


def _write_rows(out: IO[bytes], rows: Sequence[Regraded]) -> None:
    for row in rows:
        out.write(msgspec.json.encode(row) + b"\n")
