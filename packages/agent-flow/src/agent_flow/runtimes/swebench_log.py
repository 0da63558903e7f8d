"""SWE-bench's own log parsers and report on a log that was made in a sandbox of ours.

The one file that loads `swebench` (5.x). Its grading functions want no docker, but importing them loads the
`docker`, `modal` and `datasets` packages, which takes seconds: call `load_swebench` once, before the run.
"""

from __future__ import annotations

import importlib
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import msgspec

from agent_flow.errors import ProviderError
from agent_flow.rollout import TestState

_PASS_AND_FAIL = "pass_and_fail"
_BROKEN = ("FAILED", "ERROR")


class TestSpec(Protocol):
    """`swebench.types.TestSpec`, as far as it is used here."""

    __test__ = False
    instance_id: str
    FAIL_TO_PASS: list[str]
    PASS_TO_PASS: list[str]
    eval_type: str

    @property
    def eval_script(self) -> str:
        """The script that runs the tests, its markers and exit code included."""
        ...


class LogReport(msgspec.Struct, frozen=True, kw_only=True):
    """What swebench says of a log."""

    found: bool
    """Whether it could read the log at all."""
    resolved: bool
    states: Mapping[str, TestState]
    """Every expected test. `missing`: the log says nothing of it, and of nothing that it lies in."""
    begun: bool
    """The marker before the tests is in the log."""
    ended: bool
    """The marker after the tests is in the log: the eval script came to its end."""
    forged: str
    """The marker that is in the log more often than in the eval script, or that is not there although the
    script's end is. Empty: none, so that all of them are the script's own."""
    exit_code: int | None
    """Of the test command. None: the log does not say."""
    signature: str
    """swebench's name for a failure of the environment that the log shows. Empty: none."""
    certain: bool
    """Whether that cannot come from a patch of the repository's source."""


class Swebench:
    """The functions of the installed swebench that grading needs."""

    def __init__(self) -> None:
        grading = importlib.import_module("swebench.harness.grading")
        utils = importlib.import_module("swebench.harness.utils")
        infra = importlib.import_module("swebench.harness.infra_failure")
        constants = importlib.import_module("swebench.harness.constants")
        self.version = cast("str", importlib.import_module("swebench").__version__)
        self.parsers = frozenset(cast("Mapping[str, object]", grading.PARSER_REGISTRY))
        self.eval_types = frozenset(kind.value for kind in constants.EvalType)
        self._start = cast("str", constants.START_TEST_OUTPUT)
        self._end = cast("str", constants.END_TEST_OUTPUT)
        self._exit_line = cast("str", constants.TEST_EXIT_CODE)
        self._certain = cast("str", infra.TIER_ENVIRONMENT)
        self._make_spec = cast("Callable[[Mapping[str, object]], TestSpec]", utils.make_test_spec)
        self._statuses = cast("Callable[[TestSpec, str], tuple[dict[str, str], bool]]", grading.get_logs_eval)
        self._report = cast("Callable[..., dict[str, dict[str, object]]]", grading.get_eval_report)
        self._exit_code = cast("Callable[[str], int | None]", grading.parse_test_exit_code)
        self._classify = cast("Callable[[str], tuple[str, str] | None]", infra.classify_text)

    def spec(self, row: Mapping[str, object]) -> TestSpec:
        """`make_test_spec`: the row must have its columns."""
        return self._make_spec(row)

    def read(self, spec: TestSpec, log: str) -> LogReport:
        """What swebench's parser and report say of a log. Slow on long logs: call it in a thread."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "test_output.txt"
            path.write_text(log, encoding="utf-8", errors="replace")
            prediction = {
                "instance_id": spec.instance_id,
                "model_name_or_path": "agent-flow",
                "model_patch": "",
            }
            report = self._report(spec, prediction, str(path), include_tests_status=True)[spec.instance_id]
            statuses, found = self._statuses(spec, str(path))
        signature, tier = self._classify(log) or ("", "")
        return LogReport(
            found=found,
            resolved=report["resolved"] is True,
            states=_states(spec, statuses, cast("_TestsStatus | None", report.get("tests_status"))),
            begun=self._start in log,
            ended=self._end in log,
            forged=self._forged(spec.eval_script, log),
            exit_code=self._exit_code(log),
            signature=signature,
            certain=tier == self._certain,
        )

    def record_exit_code(self, script: str, path: str) -> str:
        """An eval script that also writes the test command's exit code to a file, after the log."""
        code = re.compile(rf'^echo "{re.escape(self._exit_line)}: (\$\w+)"$', re.MULTILINE)
        return code.sub(lambda line: f'{line[0]}\nprintf %s "{line[1]}" > {shlex.quote(path)}', script)

    def _forged(self, script: str, log: str) -> str:
        for marker in (self._start, self._end, self._exit_line):
            own = [line for line in script.splitlines() if marker in line]
            spoken = sum(1 for line in own if not line.lstrip().startswith(":"))
            # `set -x` shows each command, and only what is not `:` says the marker itself too.
            traced = len(re.findall(rf"\+ (?::|echo) ['\"]?{re.escape(marker)}", log))
            said = log.count(marker) - traced
            if traced > max(1, len(own)) or said > (spoken or marker == self._exit_line):
                return marker
        return self._exit_line if self._end in log and self._exit_line not in log else ""

    def read_cut(self, spec: TestSpec, log: str) -> Mapping[str, TestState]:
        """The states of the expected tests as far as a log goes that was cut at a time-out."""
        return self.read(spec, log if self._end in log else f"{log}\n{self._end}\n").states


def load_swebench(where: str) -> Swebench:
    """Load the installed swebench.

    Raises:
        ProviderError: it is not installed, or is not a 5.x.
    """
    fix = "pip install 'agent-flow[swebench]'"
    try:
        return Swebench()
    except ModuleNotFoundError as error:
        raise ProviderError(
            f"runtime 'swebench' needs the package {error.name!r}, which is not installed",
            where=where,
            fix=fix,
        ) from error
    except AttributeError as error:
        raise ProviderError(f"the installed swebench is not a 5.x: {error}", where=where, fix=fix) from error


_TestsStatus = Mapping[str, Mapping[str, Sequence[str]]]


def _states(spec: TestSpec, statuses: Mapping[str, str], report: _TestsStatus | None) -> dict[str, TestState]:
    expected = (*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS)
    if report is None:
        return dict.fromkeys(expected, "missing")
    passed = {test for part in report.values() for test in part["success"]}
    broken = [name for name, status in statuses.items() if status in _BROKEN]
    states: dict[str, TestState] = {}
    for test in expected:
        if test in passed:
            states[test] = "passed"
        elif spec.eval_type != _PASS_AND_FAIL or _seen(test, statuses) or _in_broken(test, broken):
            states[test] = "failed"
        else:
            states[test] = "missing"
    return states


def _seen(test: str, statuses: Mapping[str, str]) -> bool:
    """As swebench looks it up: by name, or by the beginning of a parametrised name that the row cut."""
    cut = test.count("[") > test.count("]")
    return test in statuses or (cut and any(name.startswith(test) for name in statuses))


def _in_broken(test: str, broken: Sequence[str]) -> bool:
    """Whether a test lies in something that the log says could not be loaded or set up.

    pytest names the file (`ERROR tests/test_x.py - ImportError`), unittest and Django the module or class
    (`ERROR: app.tests (unittest.loader._FailedTest.app.tests)`, `setUpClass (app.tests.T) ... ERROR`).
    """
    place = f".{test.partition(' (')[2].rstrip(')')}."
    for name in broken:
        head, _, inner = name.split(" - ", 1)[0].partition(" (")
        if test.startswith(f"{head}::"):
            return True
        part = inner.rstrip(")") if head in ("setUpClass", "setUpModule") else head
        if part and f".{part}." in place:
            return True
    return False
