"""Classic SWE-bench rows into the form of swebench 5.x."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from agent_flow.errors import ProviderError, TaskRowError
from agent_flow.runtimes import swebench_specs
from agent_flow.runtimes.swebench import CLASSIC_LACKS
from agent_flow.task import Task, load_tasks

SPECS = "swebench==4.1.0"
"""The last release that ships specs."""


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rows of a file."""

    rows: tuple[Mapping[str, object], ...]
    """In swebench 5.x form; those that had it already are as they were."""
    left_out: Mapping[str, str]
    """Rows for which there are no specs: instance_id to the reason."""


def convert(path: Path, *, python: str = "") -> Converted:
    """Fill in the columns that swebench 5.x wants.

    Args:
        path: JSON Lines or Parquet.
        python: Interpreter of an environment with swebench 4.1. Empty: `uv` makes one.

    Raises:
        TaskRowError: the file cannot be read, or a row lacks what the specs are made from.
        ProviderError: there is no such environment.
    """
    tasks = load_tasks(path)
    classic = [task for task in tasks if any(not task.row.get(name) for name in CLASSIC_LACKS)]
    answers = _ask(classic, python) if classic else []
    found = {task.instance_id: answer for task, answer in zip(classic, answers, strict=True)}
    left_out = {name: str(answer["error"]) for name, answer in found.items() if "error" in answer}
    rows = tuple(
        {**task.row, **found.get(task.instance_id, {})} for task in tasks if task.instance_id not in left_out
    )
    return Converted(rows=rows, left_out=left_out)


def _ask(tasks: Sequence[Task], python: str) -> list[dict[str, object]]:
    for task in tasks:
        absent = [name for name in ("repo", "version", "base_commit", "test_patch") if name not in task.row]
        if absent:
            raise TaskRowError(
                f"the row has no {', '.join(absent)}", where=f"{task.where} ({task.instance_id})"
            )
    lines = b"".join(msgspec.json.encode(task.row, enc_hook=str) + b"\n" for task in tasks)
    command = [*_interpreter(python), str(Path(swebench_specs.__file__))]
    fix = f"python3 -m venv DIR && DIR/bin/pip install {SPECS}, then --python DIR/bin/python"
    try:
        done = subprocess.run(command, input=lines, capture_output=True, check=False)
    except OSError as error:
        raise ProviderError(f"{command[0]} cannot be started: {error.strerror}", fix=fix) from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ProviderError(f"the specs of {SPECS} cannot be read: {said[-1] if said else ''}", fix=fix)
    return [cast("dict[str, object]", json.loads(line)) for line in done.stdout.splitlines()]


def _interpreter(python: str) -> list[str]:
    if python:
        return [python, "-I"]
    uv = shutil.which("uv")
    if uv is None:
        raise ProviderError(
            f"the specs come from {SPECS}, in an environment of its own, and there is no uv to make it",
            fix=f"python3 -m venv DIR && DIR/bin/pip install {SPECS}, then --python DIR/bin/python",
        )
    return [uv, "run", "--quiet", "--no-project", "--isolated", "--with", SPECS, "python", "-I"]
