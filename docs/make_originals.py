"""Writes docs/originals.md: what the two documents that this project began with ask for, and the tests of it.

usage: uv run python docs/make_originals.py [--check]

The behaviours stand in docs/originals.toml. A test says which of them it shows with the marker
`original("A-some-behaviour", ...)`; markers are read from the files, nothing is imported. With `--check`
nothing is written: exit code 1, and what is wrong, if the page is not what would be written, a behaviour has
neither a test nor a reason, or a marker names a behaviour that there is not.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/originals.md"
TABLE = "docs/originals.toml"
KEYS = {"of": str, "says": str, "later": str, "dropped": str, "adr": int}
INTRODUCTION = (
    "The design of this repository began with two documents that describe how others ran rollouts. Each",
    "behaviour that they describe, and each fault that was seen in it, is a row here, told as it is in this",
    "repository. `uv run python docs/make_originals.py` makes this page of `docs/originals.toml` and of the",
    "tests' marker `original`; a test compares it. `later`: the tests that there are show a part.",
)
HEAD = ("| id | of | behaviour | tests | state |", "|---|---|---|---|---|")

Rows = dict[str, dict[str, Any]]
Tests = dict[str, list[str]]


def read_rows(root: Path) -> tuple[dict[str, str], Rows, list[str]]:
    """Titles of the documents by letter, the behaviours by id, and what is wrong with the file."""
    values = tomllib.loads((root / TABLE).read_text(encoding="utf-8"))
    documents, wrong = values.pop("documents"), []
    for name, row in values.items():
        bad = [key for key, value in row.items() if type(value) is not KEYS.get(key)]
        wrong += [f"{TABLE}: {name}: no such key, or not of its type: {key}" for key in bad]
        wrong += [f"{TABLE}: {name}: `{key}` is missing" for key in ("of", "says") if not row.get(key)]
        if name.partition("-")[0] not in documents:
            letters = ", ".join(documents)
            wrong.append(f"{TABLE}: {name}: an id begins with a document's letter: {letters}")
        if "later" in row and "dropped" in row:
            wrong.append(f"{TABLE}: {name}: it comes later or is dropped, not both")
        if "dropped" in row and not list(root.glob(f"docs/adr/{row.get('adr', 0):04}-*.md")):
            wrong.append(f"{TABLE}: {name}: `adr` names no file of docs/adr that says why it is dropped")
    return documents, values, wrong


def read_tests(root: Path) -> tuple[Tests, list[str]]:
    """Tests as `file::name` by the behaviour that they are marked with, and what is wrong with markers."""
    tests: Tests = {}
    wrong: list[str] = []
    files = [*root.glob("packages/*/tests/**/*.py"), *root.glob("tests/**/*.py")]
    for path in sorted(files):
        text = path.read_text(encoding="utf-8")
        if "mark.original(" not in text:
            continue
        file, tree = path.relative_to(root).as_posix(), ast.parse(text)
        seen: set[ast.AST] = set()
        for name, call in _marked(tree):
            seen.add(call)
            for argument in call.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    wrong.append(f"{file}:{argument.lineno}: a marker names behaviours by plain texts")
                    continue
                tests.setdefault(argument.value, []).append(f"{file}::{name}")
        calls = (node for node in ast.walk(tree) if _is_marker(node) and node not in seen)
        wrong += [f"{file}:{call.lineno}: a marker stands above a test function" for call in calls]
    return tests, wrong


def _marked(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and _is_marker(call):
                    yield node.name, call


def _is_marker(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.original"


def find_faults(rows: Rows, tests: Tests) -> list[str]:
    """What table and markers say of each other that cannot be."""
    unknown = [
        f"{where}: no behaviour {name!r} in {TABLE}"
        for name, places in tests.items()
        if name not in rows
        for where in places
    ]
    bare = [
        f"{TABLE}: {name}: neither a test nor a reason why there is none"
        for name, row in rows.items()
        if not (name in tests or row.get("later") or row.get("dropped"))
    ]
    return unknown + bare


def page_of(root: Path, documents: dict[str, str], rows: Rows, tests: Tests) -> str:
    """The page as Markdown."""
    states = {name: _state(row) for name, row in rows.items()}
    shown, later, dropped = (list(states.values()).count(state) for state in ("shown", "later", "dropped"))
    counted = (
        f"{len(rows)} behaviours: {shown} shown by a test, {later} to come, {dropped} dropped with a reason."
    )
    lines = ["# What the originals did, and where it is shown", "", *INTRODUCTION, "", counted]
    for letter, title in documents.items():
        lines += ["", f"## {letter}: {title}", "", *HEAD]
        for name, row in rows.items():
            if name.partition("-")[0] == letter:
                links = "<br>".join(_link(test) for test in sorted({*tests.get(name, ())}))
                state = states[name] + _reason(root, row)
                lines.append(f"| {name} | {row['of']} | {row['says']} | {links} | {state} |")
    return "\n".join(lines) + "\n"


def _state(row: dict[str, Any]) -> str:
    return next((state for state in ("later", "dropped") if state in row), "shown")


def _reason(root: Path, row: dict[str, Any]) -> str:
    if "later" in row:
        return f": {row['later']}"
    if "dropped" in row:
        (file,) = root.glob(f"docs/adr/{row['adr']:04}-*.md")
        return f": {row['dropped']} ([ADR {row['adr']}](adr/{file.name}))"
    return ""


def _link(test: str) -> str:
    return f"[{test}](../{test.partition('::')[0]})"


def make(root: Path, *, check: bool) -> list[str]:
    """Write the page, or with `check` compare it. Returns what is wrong; nothing is written then."""
    documents, rows, wrong = read_rows(root)
    tests, of_markers = read_tests(root)
    wrong += of_markers + find_faults(rows, tests)
    if wrong:
        return wrong
    page, path = page_of(root, documents, rows, tests), root / PAGE
    if not check:
        path.write_text(page, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != page:
        return [f"{PAGE} is not what would be made: uv run python docs/make_originals.py"]
    return []


if __name__ == "__main__":
    faults = make(ROOT, check=sys.argv[1:] == ["--check"])
    sys.exit("\n".join(faults) or 0)
