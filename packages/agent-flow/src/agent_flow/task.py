"""Tasks: rows of a JSON Lines or Parquet file.

What a row holds beside its name and its problem is for the runtime.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeVar, cast

import msgspec

from agent_flow.errors import TaskRowError

T = TypeVar("T")

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
InstanceId = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task."""

    instance_id: InstanceId
    """Names the task in tables, recordings and rewards."""
    problem_statement: NonEmpty
    """What the agent is asked to do."""
    chat_template_kwargs: Mapping[str, bool | str | int | float] = {}
    """Passed to the chat template for this task's rollouts, such as `{"enable_thinking": false}`."""
    row: Mapping[str, object] = {}
    """Every column as it was read."""
    where: str = ""
    """File and line, for errors."""
    time_limit_s: float | None = None
    """The agent's work is cut after so long, with the exit status `TimeExceeded`. None: by its own limits and
    the worker's alone."""

    def fresh(self) -> Task:
        """A copy for one user: what it does to its row, nobody else sees."""
        return msgspec.structs.replace(
            self, row=copied(self.row), chat_template_kwargs=copied(self.chat_template_kwargs)
        )

    def columns(self, kind: type[T], *, needs: str) -> T:
        """What a runtime wants of the row, checked. Columns that `kind` does not name are ignored.

        Args:
            kind: A msgspec Struct.
            needs: The columns that must be there, for the error.

        Raises:
            TaskRowError: a column is missing or has the wrong type.
        """
        try:
            return msgspec.convert(self.row, kind)
        except msgspec.ValidationError as error:
            raise TaskRowError(
                str(error), where=f"{self.where} ({self.instance_id})", fix=f"a row needs {needs}"
            ) from error


def copied(value: T) -> T:
    """Dicts, lists, tuples and sets anew, at every depth; anything else, such as a handle, stays the same."""
    found: object = value
    if type(value) is dict:
        found = {key: copied(inner) for key, inner in cast("dict[object, object]", value).items()}
    elif type(value) in (list, tuple, set):
        kind = cast("type[list[object]]", type(value))
        found = kind(copied(inner) for inner in cast("list[object]", value))
    return cast("T", found)


def load_tasks(path: Path, *, inner: str = "") -> tuple[Task, ...]:
    """Read every row of a file: Parquet if its name ends in `.parquet`, else JSON Lines.

    Args:
        path: The file.
        inner: A column with a table of more columns, which win; rows may do without it. Empty: none.

    Raises:
        TaskRowError: the file cannot be read, or a row is malformed, empty, or named twice; says file and
        line or row.
    """
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for where, columns in rows:
        more = columns.get(inner)
        if isinstance(more, dict):
            columns = {**columns, **cast("dict[str, object]", more)}
        task = _decode_row(columns, where=where)
        place = where.removeprefix(f"{path}:").strip()
        if task.instance_id in seen:
            raise TaskRowError(
                f"instance_id {task.instance_id!r} was already used in {seen[task.instance_id]}",
                where=where,
                fix="give every row its own instance_id",
            )
        seen[task.instance_id] = place if place.startswith("row") else f"line {place}"
        tasks.append(task)
    if not tasks:
        raise TaskRowError("the task file holds no rows", where=str(path))
    return tuple(tasks)


_Rows = Iterator[tuple[str, dict[str, object]]]
"""Where a row stands, and its columns."""


def _json_rows(path: Path) -> _Rows:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise TaskRowError(f"the task file is not UTF-8: {error}", where=str(path)) from error
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold a bare U+2028
        if line.strip():
            yield f"{path}:{number}", _json_row(line, where=f"{path}:{number}")


def _unreadable(path: Path, error: OSError) -> TaskRowError:
    return TaskRowError(
        f"cannot read the task file: {error.strerror or error}",
        where=str(path),
        fix="set tasks.path to a .jsonl or .parquet file",
    )


def _json_row(line: str, *, where: str) -> dict[str, object]:
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
    columns = cast("dict[str, object]", row)
    try:
        json.dumps(columns, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise TaskRowError(
            "the row holds half of a surrogate pair (\\ud800 to \\udfff), which is no text", where=where
        ) from error
    return columns


def _parquet_rows(path: Path) -> _Rows:
    """Rows of a Parquet file, which has every column in every row: null means that there is none."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise TaskRowError(
            "a Parquet file needs the package 'pyarrow', which is not installed",
            where=str(path),
            fix="pip install 'agent-flow[parquet]'",
        ) from error
    try:
        rows = cast("list[dict[str, object]]", parquet.read_table(path).to_pylist())
    except OSError as error:
        raise _unreadable(path, error) from error
    except pyarrow.ArrowException as error:
        raise TaskRowError(f"not a Parquet file: {error}", where=str(path)) from error
    for number, row in enumerate(rows, 1):
        plain = msgspec.to_builtins(row, enc_hook=str)  # dates become text, as in the JSON form of a data set
        yield f"{path}: row {number}", _without_nulls(plain)


def _without_nulls(row: Mapping[str, object]) -> dict[str, object]:
    return {
        key: _without_nulls(cast("Mapping[str, object]", value)) if isinstance(value, dict) else value
        for key, value in row.items()
        if value is not None
    }


def _decode_row(columns: dict[str, object], *, where: str) -> Task:
    named = {key: columns[key] for key in _NAMED if key in columns}
    name = columns.get("instance_id")
    said = f"{where} ({name})" if isinstance(name, str) else where
    _refuse_images(columns, said)
    try:
        return msgspec.convert({**named, "row": columns, "where": where}, Task)
    except msgspec.ValidationError as error:
        fix = "a row needs instance_id and problem_statement, and what its runtime reads"
        raise TaskRowError(str(error), where=said, fix=fix) from error


def _refuse_images(columns: Mapping[str, object], where: str) -> None:
    """What a model would have to see: parts of a message, and SWE-bench Multimodal's `image_assets`."""
    statement, assets = columns.get("problem_statement"), columns.get(_IMAGES)
    if isinstance(statement, list):
        parts = cast("list[object]", statement)
        kinds = [cast("dict[str, object]", part).get("type") for part in parts if isinstance(part, dict)]
        seen = next((str(kind) for kind in kinds if kind != "text"), "")
        what = f"images or sound ({seen})" if seen else "a list of content parts"
        fix = "leave the row out" if seen else "write problem_statement as one text"
        raise TaskRowError(f"the problem statement holds {what}, need text", where=where, fix=fix)
    if isinstance(assets, str) and assets:
        try:
            assets = cast("object", json.loads(assets))
        except json.JSONDecodeError as error:
            raise TaskRowError(f"{_IMAGES} is not JSON", where=where) from error
    if isinstance(assets, dict):
        assets = [asset for asset in cast("dict[str, object]", assets).values() if asset]
    if assets:
        raise TaskRowError(
            f"the task comes with images ({_IMAGES}), which this version does not handle",
            where=where,
            fix="leave the row out",
        )


_IMAGES = "image_assets"
_NAMED = ("instance_id", "problem_statement", "chat_template_kwargs")
