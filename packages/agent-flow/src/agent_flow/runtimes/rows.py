"""Rows of tasks about a repository, in SWE-bench's columns."""

from __future__ import annotations

import json
from typing import Annotated, TypeVar

import msgspec

from agent_flow.errors import TaskRowError
from agent_flow.task import NonEmpty, Task

Commit = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{7,40}\Z")]
_TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_NEEDS = "instance_id, repo, base_commit, problem_statement and FAIL_TO_PASS"


class TestedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a row says of its tests."""

    __test__ = False  # for pytest, which collects classes whose name begins so

    FAIL_TO_PASS: tuple[NonEmpty, ...]
    """Tests that fail at the base and must pass after the agent's patch."""
    PASS_TO_PASS: tuple[NonEmpty, ...] = ()
    """Tests that pass at the base and must go on passing."""
    patch: str = ""
    """The reference solution as a git diff; never shown to the agent."""
    test_patch: str = ""
    """Applied before grading only: brings the tests that judge."""


class RepositoryRow(TestedRow, frozen=True, kw_only=True):
    """What a row says of its repository and its tests."""

    repo: NonEmpty
    """Repository: for `command`, a folder name below the runtime's `repos`."""
    base_commit: Commit
    """The commit that the agent starts from."""


R = TypeVar("R", bound=TestedRow)


def repository_row(task: Task) -> RepositoryRow:
    """A task's row, checked.

    Raises:
        TaskRowError: a column is missing or malformed, or nothing would tell a right patch from none.
    """
    return _row(task, RepositoryRow)


def tested_row(task: Task) -> TestedRow:
    """The part of a task's row that is about its tests; raises as `repository_row` does."""
    return _row(task, TestedRow)


def _row(task: Task, kind: type[R]) -> R:
    columns = dict(task.row)
    where = f"{task.where} ({task.instance_id})"
    for name in _TEST_LISTS:
        value = columns.get(name)
        if isinstance(value, str):  # SWE-bench's own data set holds these lists as JSON text inside the JSON
            try:
                columns[name] = json.loads(value)
            except json.JSONDecodeError as error:
                raise TaskRowError(
                    f"{name} is neither a list nor a JSON list in a string", where=where
                ) from error
    row = msgspec.structs.replace(task, row=columns).columns(kind, needs=_NEEDS)
    if not row.FAIL_TO_PASS:
        raise TaskRowError(
            "FAIL_TO_PASS is empty: nothing would tell a right patch from none",
            where=where,
            fix="name at least one test that fails at base_commit",
        )
    return row
