"""Verdicts per test from the report that `python3 -m unittest -v` writes to stderr."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Literal

import msgspec

TestState = Literal["passed", "failed", "missing"]

_RULED_SUMMARY = re.compile(r"^-{70}\nRan (\d+) tests? in ", re.MULTILINE)
_SUMMARY = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
_RESULTS_END = re.compile(
    r"^(?:={70}\n(?:ERROR|FAIL|UNEXPECTED SUCCESS): |-{70}\nRan \d+ tests? in |Ran \d+ tests? in )",
    re.MULTILINE,
)
_HEAD = re.compile(
    r"^(?P<name>\S+) \((?P<where>[^)\s]+)\)"
    r"(?:\n(?!\S+ \([^)\s]+\)).*?)??"  # the first line of a docstring stands on a line of its own
    r" \.\.\. ",
    re.MULTILINE,
)
_MIDLINE_HEAD = re.compile(r" \((?P<where>(?:[^)\s]+\.)(?P<name>test[^)\s.]*))\) \.\.\. ")
_STATES = r"(?P<state>ok|FAIL|ERROR|skipped ['\"].*['\"]|expected failure|unexpected success)$"
_STATE = re.compile(r"^" + _STATES, re.MULTILINE)
_STATE_AFTER_OUTPUT = re.compile(r"^.*?" + _STATES, re.MULTILINE)
_ERROR_BLOCK = re.compile(r"^={70}\n(?:ERROR|FAIL): .*\n(?:.*\n)?-{70}\n", re.MULTILINE)
_BLOCK_END = re.compile(r"^(?:={70}\n(?:ERROR|FAIL|UNEXPECTED SUCCESS): |-{70}\nRan )", re.MULTILINE)
_FAILED = re.compile(r"^={70}\n(?:FAIL|ERROR): (?P<name>\S+) \((?P<where>[^)\s]+)\)", re.MULTILINE)
_LOADER = re.compile(r'^  File ".*[/\\]unittest[/\\]loader\.py", line \d+, in ')
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_BROKEN_LOAD = "unittest.loader._FailedTest."
_OF_MACHINE = r"(?:OSError: \[Errno (?:5|11|12|23|24|28|122)\]|BlockingIOError\b)"
"""What a traceback ends with when the machine failed: I/O error, no memory, files, space or processes. A
MemoryError is none of it: code can ask for any amount, and a sandbox without memory kills."""
_MACHINE = re.compile(_OF_MACHINE)
_MACHINE_TRACEBACK = re.compile(r"^ .*\n" + _OF_MACHINE, re.MULTILINE)
_UNKNOWN = re.compile(
    r"^ERROR: \S+ \(unittest\.loader\._FailedTest\.(?P<name>[^)\s]+)\)\n-+\n"
    r"AttributeError: (?:type object|module) '[^']+' has no attribute '[^']+'$",
    re.MULTILINE,
)
_FIXTURES = ("setUpClass", "setUpModule")
_PLACELESS = (*_FIXTURES, "tearDownClass", "tearDownModule")


class _Result(msgspec.Struct, frozen=True):
    name: str
    where: str
    state: str
    """Empty: the report does not say."""

    @property
    def test(self) -> str:
        return _full_name(self.name, self.where)


def read_report(report: str, expected: Sequence[str]) -> dict[str, TestState] | None:
    """The state of each expected test, given as `package.module.Class.test_name`.

    A module that cannot be loaded, or a class whose fixture fails, fails its tests. A test that was skipped
    is not passed. None: the report has no summary line, so the run did not come to its end and nothing can be
    said.
    """
    if machine_failed(report):
        return None
    if not finished(report):
        return dict.fromkeys(expected, "failed") if _broke_the_loader(report) else None
    return read_cut_report(report, expected)


def read_cut_report(report: str, expected: Sequence[str]) -> dict[str, TestState]:
    """The state of each expected test as far as the report goes; it may have been cut at a time-out."""
    passed: set[str] = set()
    failed: set[str] = set()
    broken: list[str] = []
    for result in _results(report):
        if result.where.startswith(_BROKEN_LOAD):
            broken.append(result.where.removeprefix(_BROKEN_LOAD))
        elif result.name in _FIXTURES:
            broken.append(result.where)
        elif result.state:
            (passed if result.state in ("ok", "expected failure") else failed).add(result.test)
    failed.update(_full_name(match["name"], match["where"]) for match in _FAILED.finditer(report))
    return {test: _state(test, passed, failed, broken) for test in expected}


def finished(report: str) -> bool:
    """Whether the run came to its summary."""
    return bool(_summaries(report))


def contradiction(report: str, expected: Sequence[str], exit_code: int | None) -> str:
    """What of a report that has an end cannot be true of one run of unittest, in words. Empty: nothing.

    Code under test can write to the same stream and leave with any exit code.
    """
    if not finished(report):
        return "exit code 0 without a summary" if exit_code == 0 and _broke_the_loader(report) else ""
    counts = _summaries(report)
    if len(counts) > 1:
        return f"{len(counts)} summaries of one run"
    results = [result for result in _results(report) if result.name not in _PLACELESS]
    named = {result.test for result in results}
    told = sum(1 for test in dict.fromkeys(expected) if test in named)
    if not told <= counts[0] <= len(results):
        return f"a summary of {counts[0]} tests under results of {max(told, len(results))}"
    wrong = any(result.state in ("FAIL", "ERROR", "unexpected success") for result in _results(report))
    wrong = wrong or _FAILED.search(report) is not None
    if wrong and exit_code == 0:
        return "exit code 0 and tests that failed"
    if not wrong and exit_code != 0:
        return f"exit code {exit_code} and no test that failed"
    return ""


def unknown_tests(report: str, expected: Sequence[str]) -> list[str]:
    """Expected tests that the loader says do not exist: a class or method that its module does not have."""
    gone = {match["name"] for match in _UNKNOWN.finditer(report)}
    return [test for test in expected if any(_lies_in(test, name) for name in gone)]


def machine_failed(report: str) -> bool:
    """Whether the machine, not the code, ended a test: no space, no descriptors, no processes.

    Only a traceback of what did not pass counts: any code may write of such an error.
    """
    if not finished(report) and _ended_in_the_loader(report):
        return _MACHINE.match(report.rstrip().splitlines()[-1]) is not None
    return any(_MACHINE_TRACEBACK.search(block) for block in _error_blocks(report))


def _results(report: str) -> Generator[_Result]:
    """Every line that names a test and what it says of it.

    What a test writes to stderr stands between its name and its result. A result on a line of its own, the
    last one, goes before one at the end of other output.
    """
    end = _RESULTS_END.search(report)
    text = report[: end.start()] if end else report
    heads = _heads(text)
    for index, (name, where, _, begin) in enumerate(heads):
        last = index + 1 == len(heads)
        part = text[begin : len(text) if last else heads[index + 1][2]]
        found = list(_STATE.finditer(part))
        if not found and (end or not last):  # of a test that is still running, output is no result
            found = list(_STATE_AFTER_OUTPUT.finditer(part))
        yield _Result(name, where, found[-1]["state"] if found else "")


def _heads(text: str) -> list[tuple[str, str, int, int]]:
    """Name, place, begin and end of what comes before each result, in order.

    Behind output without a line's end, such as a fixture's, a head is known by the whole id of Python 3.11.
    """
    heads = {
        head.end(): (head["name"], head["where"], head.start(), head.end())
        for head in _HEAD.finditer(text)
        if "." in head["where"] or head["name"] in _PLACELESS
    }
    for head in _MIDLINE_HEAD.finditer(text):
        name = head["name"]
        if text.endswith(name, 0, head.start()):
            heads[head.end()] = (name, head["where"], head.start() - len(name), head.end())
    return [heads[end] for end in sorted(heads)]


def _error_blocks(report: str) -> Generator[str]:
    """The tracebacks below the results."""
    for block in _ERROR_BLOCK.finditer(report):
        end = _BLOCK_END.search(report, block.end())
        yield report[block.end() : end.start() if end else len(report)]


def _summaries(report: str) -> list[int]:
    """How many tests each summary says were run; those below a rule, as unittest writes them, if any is."""
    return [int(count) for count in _RULED_SUMMARY.findall(report) or _SUMMARY.findall(report)]


def _ended_in_the_loader(report: str) -> bool:
    lines = report.rstrip().splitlines()
    if not lines or not any(_LOADER.search(line) for line in lines):
        return False
    return _RAISED.match(lines[-1]) is not None


def _broke_the_loader(report: str) -> bool:
    """Whether the code under test could not even be loaded (a syntax error, an exception at import).

    unittest turns an ImportError into a failed test, and lets everything else end the run with a traceback.
    An error of the machine (no disk) is not the code's.
    """
    return _ended_in_the_loader(report) and not machine_failed(report)


def _full_name(name: str, where: str) -> str:
    """Python 3.11 prints the whole id in parentheses, earlier versions only the class."""
    return where if where.endswith(f".{name}") else f"{where}.{name}"


def _state(test: str, passed: set[str], failed: set[str], broken: list[str]) -> TestState:
    if test in failed or any(_lies_in(test, part) for part in broken):
        return "failed"
    return "passed" if test in passed else "missing"


def _lies_in(test: str, part: str) -> bool:
    """Whether a test id contains a dotted part as whole components."""
    return f".{part}." in f".{test}."
