"""Rules: which tests of a task count, as `agent-flow check-tasks` found out, and how a run reads them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from token_tracking.sample import Scalar

from agent_flow.config import ConfigFile
from agent_flow.errors import TaskRowError
from agent_flow.task import Task, load_tasks

logger = logging.getLogger(__name__)

LEFT_OUT = "LEFT_OUT"
"""Column that a rule adds: tests that hang, which a runtime that can do so does not even start."""


class TaskRule(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about one task."""

    verdict: Literal["accepted", "rejected", "undecided"]
    """`undecided`: the infrastructure failed, so nothing is known. A run takes accepted tasks only."""
    reason: str = ""
    """Why it is not accepted."""
    row: str
    """SHA-256 of the row that was checked."""
    FAIL_TO_PASS: tuple[str, ...] = ()
    """Tests that failed in every run without a patch and passed in every run with the reference patch."""
    PASS_TO_PASS: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    """Tests that passed in some runs and not in others: left out of the verdict."""
    hanging: tuple[str, ...] = ()
    """Tests that were under way when time was up: left out of the verdict."""


class Rules(msgspec.Struct, frozen=True, kw_only=True, tag="agent-flow-rules", tag_field="kind"):
    """The file that `agent-flow check-tasks --out FILE` writes."""

    version: Literal[1] = 1
    runs: int
    """Runs without a patch, and as many with the reference patch."""
    grader: Mapping[str, Scalar]
    tasks: Mapping[str, TaskRule]
    """By instance_id."""


def row_digest(task: Task) -> str:
    """SHA-256 of a row, whatever the order of its columns and of their keys."""
    return hashlib.sha256(msgspec.json.encode(task.row, order="sorted", enc_hook=str)).hexdigest()


def write_rules(path: Path, rules: Rules) -> None:
    """Write the file in one step, so that no reader sees half of it."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_bytes(msgspec.json.format(msgspec.json.encode(rules), indent=1) + b"\n")
    half.replace(path)


def read_rules(path: Path) -> Rules:
    """Raises: TaskRowError: the file is missing or is not one of `check-tasks`."""
    fix = "agent-flow check-tasks CONFIG --out FILE"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rules)
    except OSError as error:
        raise TaskRowError(f"cannot read the rules: {error.strerror}", where=str(path), fix=fix) from error
    except msgspec.MsgspecError as error:
        raise TaskRowError(f"not a rules file: {error}", where=str(path), fix=fix) from error


def ruled_tasks(file: ConfigFile, read: tuple[Task, ...] | None = None) -> tuple[Task, ...]:
    """The tasks of a configuration; with `tasks.rules`, the accepted ones with the tests that count.

    `read`: what the runtime made of `tasks.path`. None: its rows as they are.

    Raises:
        TaskRowError: a row is malformed, or the rules do not fit it.
    """
    tasks = load_tasks(file.resolve(file.run.tasks.path)) if read is None else read
    if not file.run.tasks.rules:
        return tasks
    path = file.resolve(file.run.tasks.rules)
    rules = read_rules(path)
    kept = tuple(task for task in (_apply(task, rules, path) for task in tasks) if task is not None)
    left_out = Counter(
        rule.reason or rule.verdict
        for rule in (rules.tasks[task.instance_id] for task in tasks)
        if rule.verdict != "accepted"
    )
    if left_out:
        why = "; ".join(f"{count}x {reason}" for reason, count in left_out.most_common(5))
        logger.warning("%d of %d tasks are left out by %s: %s", left_out.total(), len(tasks), path.name, why)
    if not kept:
        raise TaskRowError("no task is accepted by the rules", where=str(path))
    return kept


def _apply(task: Task, rules: Rules, path: Path) -> Task | None:
    rule = rules.tasks.get(task.instance_id)
    where = f"{task.where} ({task.instance_id})"
    again = f"agent-flow check-tasks CONFIG --out {path.name}"
    if rule is None:
        raise TaskRowError(f"{path} has no rule for this task", where=where, fix=again)
    if rule.row != row_digest(task):
        raise TaskRowError(f"the row is not the one that {path} was made from", where=where, fix=again)
    return (
        with_tests(task, rule.FAIL_TO_PASS, rule.PASS_TO_PASS, rule.hanging)
        if rule.verdict == "accepted"
        else None
    )


def with_tests(
    task: Task, fail_to_pass: tuple[str, ...], pass_to_pass: tuple[str, ...], left_out: tuple[str, ...]
) -> Task:
    """The task with other tests."""
    columns = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass, LEFT_OUT: left_out}
    return msgspec.structs.replace(task, row={**task.row, **columns})
