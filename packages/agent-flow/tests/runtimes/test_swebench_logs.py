"""Logs that real runners wrote (`make_logs.py` says how): our verdict, and swebench's own on the same log.

Twelve runners, eleven of swebench's parsers, six languages.
"""

import pytest
from agent_flow.errors import GraderError
from agent_flow.runtimes.build_log import build_failed
from agent_flow.runtimes.swebench import judge

RUNNERS = (
    "cargo",
    "django",
    "go",
    "jest",
    "mocha",
    "mocha_spec",
    "phpunit",
    "pytest",
    "pytest_verbose",
    "rspec",
    "unittest",
    "vitest",
)


@pytest.fixture
def read(swebench, runner_row):
    """Our observation of a log of a runner."""

    def call(name, log, **columns):
        spec = swebench.spec({**runner_row(name), **columns})
        return judge(swebench.read(spec, log), log)

    return call


@pytest.fixture
def their_verdict(swebench, runner_row, tmp_path):
    """`get_eval_report`, as swebench's own harness calls it."""
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    def call(name, log):
        path = tmp_path / "test_output.txt"
        path.write_text(log)
        row = runner_row(name)
        prediction = {"instance_id": row["instance_id"], "model_name_or_path": "m", "model_patch": "diff"}
        return get_eval_report(make_test_spec(row), prediction, path, True)[row["instance_id"]]["resolved"]

    return call


@pytest.mark.original("A-swebench")
@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("state", ["base", "solved"])
def test_the_verdict_is_swebench_s_own(name, state, read, runner_log, runner_row, their_verdict):
    log = runner_log(name, state)
    verdict = read(name, log).verdict()
    assert verdict.reward == (1.0 if state == "solved" else 0.0)
    assert their_verdict(name, log) is (state == "solved")
    row = runner_row(name)
    for test in row["FAIL_TO_PASS"]:
        assert verdict.tests[test] == ("passed" if state == "solved" else "failed")
    for test in row["PASS_TO_PASS"]:
        assert verdict.tests[test] == "passed"


@pytest.mark.parametrize("name", [name for name in RUNNERS if name != "rspec"])
def test_a_patch_that_cannot_be_built_or_loaded_is_wrong(name, read, runner_log, their_verdict):
    """swebench says unresolved, and so do we: such a log is readable, although no test is in it."""
    log = runner_log(name, "broken")
    verdict = read(name, log).verdict()
    assert verdict.reward == 0.0
    assert set(verdict.tests.values()) == {"failed"}
    assert their_verdict(name, log) is False


def test_what_is_not_in_the_log_is_not_guessed(read, runner_log):
    """RSpec's error went into the JSON that the row's command throws away: no verdict, out of the loss."""
    seen = read("rspec", runner_log("rspec", "broken"))
    assert seen.problem is not None
    assert (seen.problem.cause, seen.problem.fault) == ("unreadable", "agent")
    with pytest.raises(GraderError):
        seen.verdict()


@pytest.mark.original("A-reward-infrastructure")
def test_a_log_that_was_cut_is_an_infrastructure_failure(read, runner_log, their_verdict):
    """swebench scores it as unresolved; a pod that was killed says nothing about the patch."""
    log = runner_log("pytest", "solved").partition("+ SWEBENCH_TEST_EXIT_CODE")[0]
    problem = read("pytest", log).problem
    assert problem is not None
    assert (problem.fault, problem.retryable) == ("infra", True)
    assert "the eval script did not come to its end" in problem.message
    assert their_verdict("pytest", log) is False


def test_a_log_without_markers_is_an_infrastructure_failure(read):
    problem = read("pytest", "bash: /testbed: No such file or directory\n").problem
    assert problem is not None
    assert problem.fault == "infra"
    assert "did not come to its tests" in problem.message


@pytest.mark.parametrize("name", RUNNERS)
def test_expected_tests_that_are_not_in_the_log_are_an_infrastructure_failure(name, read, runner_log):
    log = runner_log(name, "solved")
    seen = read(name, log, FAIL_TO_PASS=["nowhere::test_renamed"])
    assert seen.problem is not None
    assert seen.problem.fault == "infra"
    assert "nowhere::test_renamed" in seen.problem.message
    assert seen.states["nowhere::test_renamed"] == "missing"


def replaced(log, code, *pairs):
    for old, new in (("SWEBENCH_TEST_EXIT_CODE=0", f"SWEBENCH_TEST_EXIT_CODE={code}"), *pairs):
        assert old in log
        log = log.replace(old, new)
    return log.replace(">>>>> Test Exit Code: 0", f">>>>> Test Exit Code: {code}")


@pytest.mark.parametrize(
    ("code", "end", "fault"),
    [
        (137, "Killed", "infra"),
        (127, "bash: line 7: python: command not found", "infra"),
        (1, "OSError: [Errno 28] No space left on device", "infra"),
        (1, "fatal: unable to access: Could not resolve host: example.org", "infra"),
        (1, "ModuleNotFoundError: No module named 'numpy'", "agent"),
        (0, "no tests ran in 0.01s", "infra"),
    ],
)
def test_how_a_test_command_ended_that_left_no_results(code, end, fault, read, runner_log):
    """Never a reward of 0: another try, or evidence that is out of loss and baseline."""
    head, _, tail = runner_log("pytest", "solved").partition("test session starts")
    log = replaced(head + end + "\n+ SWEBENCH" + tail.partition("+ SWEBENCH")[2], code)
    problem = read("pytest", log).problem
    assert problem is not None
    assert problem.fault == fault


def test_a_failure_of_the_machine_in_the_middle_of_the_tests(read, runner_log, their_verdict):
    """Some tests failed and others are not there, and memory had run out: not the patch's doing."""
    log = runner_log("go", "base").replace("=== RUN   TestSkipped", "fatal: Cannot allocate memory")
    log = log.replace("--- SKIP: TestSkipped (0.00s)\n", "")
    problem = read("go", log).problem
    assert problem is not None
    assert problem.fault == "infra"
    assert their_verdict("go", log) is False


def test_results_that_contradict_the_exit_code_are_no_verdict(read, runner_log, their_verdict):
    """A patch can print its own PASSED lines; the exit code tells (swebench: invalid)."""
    log = replaced(runner_log("pytest", "solved"), 1)
    problem = read("pytest", log).problem
    assert problem is not None
    assert problem.fault == "agent"
    assert their_verdict("pytest", log) is False


def test_a_name_that_the_row_cut_short_is_found(read, runner_log):
    """676 ids of SWE-bench Verified end in the middle of a parameter (SWE-bench#290)."""
    cut = {"FAIL_TO_PASS": ["test_calc.py::test_more["]}
    assert read("pytest", runner_log("pytest", "solved"), **cut).verdict().reward == 1.0
    assert read("pytest", runner_log("pytest", "base"), **cut).states == {
        "test_calc.py::test_more[": "failed",
        "test_calc.py::test_two": "passed",
    }


def test_a_cut_log_says_as_much_as_it_holds(swebench, runner_row, runner_log):
    spec = swebench.spec(runner_row("go"))
    log = runner_log("go", "solved").partition("=== RUN   TestSkipped")[0]
    assert swebench.read_cut(spec, log) == {
        "TestDouble/five": "passed",
        "TestDouble": "passed",
        "TestTwo": "passed",
        "TestSkipped": "missing",
    }


@pytest.mark.parametrize("name", ["cargo", "go", "jest", "mocha", "phpunit", "unittest", "vitest"])
def test_lines_of_a_failed_build_are_known(name, runner_log):
    """Runs without swebench."""
    assert build_failed(runner_log(name, "broken"))
    assert not build_failed(runner_log(name, "base"))
    assert not build_failed(runner_log(name, "broken") + "write /tmp/x: No space left on device\n")


def test_a_log_of_a_million_blank_lines_is_searched_at_once():
    """Runs without swebench."""
    assert not build_failed("\n" * 1_000_000 + "FAIL" + " " * 1_000_000)
