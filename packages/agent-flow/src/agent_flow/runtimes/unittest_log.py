"""Verdicts per test from the report that `python3 -m unittest -v` writes to stderr."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

TestState = Literal["passed", "failed", "missing"]

_SUMMARY = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
_RESULT = re.compile(
    r"^(?P<name>\S+) \((?P<where>[^)\s]+)\)"
    r"(?:\n(?!\S+ \([^)\s]+\)).*)??"  # the first line of a docstring stands on a line of its own
    r" \.\.\. (?P<state>ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$",
    re.MULTILINE,
)
_SUBTEST = re.compile(r"^\s*(?:FAIL|ERROR): (?P<name>\S+) \((?P<where>[^)\s]+)\)", re.MULTILINE)
_LOADER = re.compile(r'^  File ".*[/\\]unittest[/\\]loader\.py", line \d+, in ')
_RAISED = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?::|$)")
_BROKEN_LOAD = "unittest.loader._FailedTest."
_MACHINE = re.compile(
    r"^(?:MemoryError\b|OSError: \[Errno (?:5|11|12|23|24|28|122)\]|BlockingIOError\b)", re.MULTILINE
)
"""What a test's traceback ends with when the machine failed it: I/O error, no memory, files, space or
processes."""
_UNKNOWN = re.compile(
    r"^ERROR: \S+ \(unittest\.loader\._FailedTest\.(?P<name>[^)\s]+)\)\n-+\n"
    r"AttributeError: (?:type object|module) '[^']+' has no attribute '[^']+'$",
    re.MULTILINE,
)
_FIXTURES = ("setUpClass", "setUpModule")


def read_report(report: str, expected: Sequence[str]) -> dict[str, TestState] | None:
    """The state of each expected test, given as `package.module.Class.test_name`.

    A module that cannot be loaded, or a class whose fixture fails, fails its tests. A test that was skipped
    is not passed. None: the report has no summary line, so the run did not come to its end and nothing can be
    said.
    """
    if machine_failed(report):
        return None
    if not _SUMMARY.search(report):
        return dict.fromkeys(expected, "failed") if _broke_the_loader(report) else None
    return read_cut_report(report, expected)


def read_cut_report(report: str, expected: Sequence[str]) -> dict[str, TestState]:
    """The state of each expected test as far as the report goes; it may have been cut at a time-out."""
    passed: set[str] = set()
    failed: set[str] = set()
    broken: list[str] = []
    for match in _RESULT.finditer(report):
        name, where, state = match["name"], match["where"], match["state"]
        if where.startswith(_BROKEN_LOAD):
            broken.append(where.removeprefix(_BROKEN_LOAD))
        elif name in _FIXTURES:
            broken.append(where)
        else:
            # Python 3.11 prints the whole id in parentheses, earlier versions only the class
            full = where if where.endswith(f".{name}") else f"{where}.{name}"
            (passed if state in ("ok", "expected failure") else failed).add(full)
    for match in _SUBTEST.finditer(report):
        where, name = match["where"], match["name"]
        failed.add(where if where.endswith(f".{name}") else f"{where}.{name}")
    return {test: _state(test, passed, failed, broken) for test in expected}


def unknown_tests(report: str, expected: Sequence[str]) -> list[str]:
    """Expected tests that the loader says do not exist: a class or method that its module does not have."""
    gone = {match["name"] for match in _UNKNOWN.finditer(report)}
    return [test for test in expected if any(_lies_in(test, name) for name in gone)]


def machine_failed(report: str) -> bool:
    """Whether the machine, not the code, ended a test: no memory, no space, no descriptors."""
    return _MACHINE.search(report) is not None


def _broke_the_loader(report: str) -> bool:
    """Whether the code under test could not even be loaded (a syntax error, an exception at import).

    unittest turns an ImportError into a failed test, and lets everything else end the run with a traceback.
    An error of the machine (no memory, no disk) is not the code's.
    """
    lines = report.rstrip().splitlines()
    if not lines or not any(_LOADER.search(line) for line in lines):
        return False
    raised = _RAISED.match(lines[-1])
    return raised is not None and raised["name"].split(".")[-1] not in ("MemoryError", "OSError")


def _state(test: str, passed: set[str], failed: set[str], broken: list[str]) -> TestState:
    if test in failed or any(_lies_in(test, part) for part in broken):
        return "failed"
    return "passed" if test in passed else "missing"


def _lies_in(test: str, part: str) -> bool:
    """Whether a test id contains a dotted part as whole components."""
    return f".{part}." in f".{test}."
