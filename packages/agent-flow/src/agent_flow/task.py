"""Tasks: SWE-bench-shaped rows of a JSON Lines file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, cast

import msgspec

from agent_flow.errors import TaskRowError

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
InstanceId = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")]
Commit = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{7,40}\Z")]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task. Columns that are not named here are ignored, as rows of public data sets carry many."""

    instance_id: InstanceId
    """Names the task in tables, recordings and rewards."""
    repo: NonEmpty
    """Repository: a folder name below the runtime's `repos`."""
    base_commit: Commit
    """The commit that the agent starts from."""
    problem_statement: NonEmpty
    """What the agent is asked to do."""
    FAIL_TO_PASS: tuple[NonEmpty, ...]
    """Tests that fail at the base and must pass after the agent's patch."""
    PASS_TO_PASS: tuple[NonEmpty, ...] = ()
    """Tests that pass at the base and must go on passing."""
    patch: str = ""
    """The reference solution as a git diff; never shown to the agent."""
    test_patch: str = ""
    """Applied before grading only: brings the tests that judge."""
    chat_template_kwargs: Mapping[str, bool | str | int | float] = {}
    """Passed to the chat template for this task's rollouts, such as `{"enable_thinking": false}`."""


_TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


def load_tasks(path: Path) -> tuple[Task, ...]:
    """Read every row of a JSON Lines file.

    Raises:
        TaskRowError: the file cannot be read, or a row is malformed, empty, or named twice; says file and
        line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskRowError(
            f"cannot read the task file: {error.strerror}",
            where=str(path),
            fix="set tasks.path to a .jsonl file",
        ) from error
    except UnicodeDecodeError as error:
        raise TaskRowError(f"the task file is not UTF-8: {error}", where=str(path)) from error
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold a bare U+2028
        if not line.strip():
            continue
        task = _decode_row(line, where=f"{path}:{number}")
        if task.instance_id in seen:
            raise TaskRowError(
                f"instance_id {task.instance_id!r} was already used in line {seen[task.instance_id]}",
                where=f"{path}:{number}",
                fix="give every row its own instance_id",
            )
        seen[task.instance_id] = number
        tasks.append(task)
    if not tasks:
        raise TaskRowError("the task file holds no rows", where=str(path))
    return tuple(tasks)


def _decode_row(line: str, *, where: str) -> Task:
    try:
        row: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskRowError(
            f"not JSON: {error.msg} at column {error.colno}",
            where=where,
            fix="write one JSON object per line",
        ) from error
    if not isinstance(row, dict):
        raise TaskRowError(f"a row must be a JSON object, got {type(row).__name__}", where=where)
    fields = cast("dict[str, object]", row)
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise TaskRowError(
            "the row holds half of a surrogate pair (\\ud800 to \\udfff), which is no text", where=where
        ) from error
    for name in _TEST_LISTS:
        value = fields.get(name)
        if isinstance(value, str):  # SWE-bench's own data set holds these lists as JSON text inside the JSON
            try:
                fields[name] = json.loads(value)
            except json.JSONDecodeError as error:
                raise TaskRowError(
                    f"{name} is neither a list nor a JSON list in a string", where=where
                ) from error
    try:
        task = msgspec.convert(fields, Task)
    except msgspec.ValidationError as error:
        name = fields.get("instance_id")
        raise TaskRowError(
            str(error),
            where=f"{where} ({name})" if isinstance(name, str) else where,
            fix="a row needs instance_id, repo, base_commit, problem_statement and FAIL_TO_PASS",
        ) from error
    if not task.FAIL_TO_PASS:
        raise TaskRowError(
            "FAIL_TO_PASS is empty: nothing would tell a right patch from none",
            where=f"{where} ({task.instance_id})",
            fix="name at least one test that fails at base_commit",
        )
    return task
