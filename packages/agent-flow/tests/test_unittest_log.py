"""The unittest report reader against reports that `python3 -m unittest -v` really writes."""

import subprocess
import sys
import textwrap

import pytest
from agent_flow.runtimes.unittest_log import contradiction, machine_failed, read_cut_report, read_report

SUITE = '''
import sys
import unittest


class Plain(unittest.TestCase):
    def test_good(self):
        """A docstring, printed on a line of its own."""

    def test_noisy(self):
        print("test_bad (tests.test_it.Plain.test_bad) ... ok")

    def test_bad(self):
        self.assertEqual(1, 2)

    def test_error(self):
        raise ValueError("Ran 1 test in 0.1s")

    @unittest.skip("not today")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()

    def test_subtests(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)

    def test_good_subtests(self):
        for i in range(3):
            with self.subTest(i=i):
                pass


class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise OSError("no fixture")

    def test_inside(self):
        pass
'''


def run_suite(tmp_path, suite, names):
    package = tmp_path / "tests"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "test_it.py").write_text(textwrap.dedent(suite))
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "-v", *names],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr


def test_each_kind_of_result(tmp_path):
    want = {
        "tests.test_it.Plain.test_good": "passed",
        "tests.test_it.Plain.test_noisy": "passed",
        "tests.test_it.Plain.test_bad": "failed",
        "tests.test_it.Plain.test_error": "failed",
        "tests.test_it.Plain.test_skipped": "failed",
        "tests.test_it.Plain.test_expected": "passed",
        "tests.test_it.Plain.test_subtests": "failed",
        "tests.test_it.Plain.test_good_subtests": "passed",
        "tests.test_it.Broken.test_inside": "failed",
    }
    report = run_suite(tmp_path, SUITE, list(want))
    assert read_report(report, list(want)) == want


@pytest.mark.parametrize(
    "suite", ["def broken(:\n", "import nowhere\n", "undefined_name\n", "1 / 0\n", "raise MemoryError\n"]
)
def test_a_module_that_cannot_be_loaded_fails_its_tests(tmp_path, suite):
    names = ["tests.test_it.Plain.test_good", "tests.test_it.Plain.test_other"]
    report = run_suite(tmp_path, suite, names)
    assert read_report(report, names) == dict.fromkeys(names, "failed")


def test_a_test_that_does_not_exist_is_failed(tmp_path):
    names = ["tests.test_it.Plain.test_good", "tests.test_it.Plain.test_gone"]
    report = run_suite(tmp_path, SUITE, names)
    assert read_report(report, names) == {names[0]: "passed", names[1]: "failed"}


@pytest.mark.parametrize(
    "ending",
    [
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "raise OSError(28, 'No space left on device')",
    ],
)
def test_a_run_that_does_not_come_to_its_end_says_nothing(tmp_path, ending):
    names = ["tests.test_it.Plain.test_good"]
    report = run_suite(tmp_path, f"{ending}\n", names)
    assert read_report(report, names) is None


def test_a_test_that_was_not_run_is_missing(tmp_path):
    report = run_suite(tmp_path, SUITE, ["tests.test_it.Plain.test_good"])
    assert read_report(report, ["tests.test_it.Plain.test_noisy"]) == {
        "tests.test_it.Plain.test_noisy": "missing"
    }


MACHINE = """
import unittest


class Plain(unittest.TestCase):
    def test_full_disk(self):
        raise OSError(28, "No space left on device")

    def test_memory(self):
        raise MemoryError

    def test_missing_file(self):
        open("/nowhere/at/all")
"""


def test_a_test_that_the_machine_ended_has_no_verdict(tmp_path):
    """An infrastructure failure is not a failed test, so never a reward of 0."""
    names = ["tests.test_it.Plain.test_full_disk"]
    report = run_suite(tmp_path, MACHINE, names)
    assert read_report(report, names) is None
    assert machine_failed(report)


@pytest.mark.parametrize("name", ["test_missing_file", "test_memory"])
def test_what_any_code_can_raise_is_the_codes_failure(tmp_path, name):
    """A MemoryError too: where memory really runs out, a sandbox kills, which its counter tells."""
    names = [f"tests.test_it.Plain.{name}"]
    report = run_suite(tmp_path, MACHINE, names)
    assert read_report(report, names) == {names[0]: "failed"}


NOISY = '''
import logging
import sys
import unittest
import warnings


class Noisy(unittest.TestCase):
    def test_warning(self):
        warnings.warn("old", DeprecationWarning)

    def test_logging(self):
        """A docstring ... with dots."""
        logging.error("retrying (db.main) ... FAIL")

    def test_no_line_end(self):
        sys.stderr.write("x")

    def test_log_line(self):
        sys.stderr.write("ERROR: connect (db.main)\\nskipped 3 files\\n")

    def test_full_disk_logged(self):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            logging.exception("cannot write cache")

    def test_bad(self):
        sys.stderr.write("all is\\nok\\n")
        self.fail()

    def test_skipped(self):
        sys.stderr.write("not today: ")
        self.skipTest("it's")

    @unittest.expectedFailure
    def test_expected(self):
        sys.stderr.write("failing\\n")
        self.fail()

    @unittest.expectedFailure
    def test_unexpected(self):
        sys.stderr.write("not failing\\n")

    def test_subtests(self):
        """Subtests."""
        for i in range(3):
            with self.subTest(i=i):
                sys.stderr.write(f"{i}\\nok\\n")
                self.assertNotEqual(i, 1)

    def test_good_subtests(self):
        for i in range(3):
            with self.subTest(i=i):
                sys.stderr.write(f"{i} ERROR\\n")


class Zoned(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        sys.stderr.write("starting")

    @classmethod
    def tearDownClass(cls):
        sys.stderr.write("stopped: ok\\n")

    def test_after(self):
        self.skipTest("behind a fixture's output")


class Zbroken(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        sys.stderr.write("starting\\n")
        raise ValueError

    def test_inside(self):
        pass
'''
STATES = {
    "test_it.Noisy.test_warning": "passed",
    "test_it.Noisy.test_logging": "passed",
    "test_it.Noisy.test_no_line_end": "passed",
    "test_it.Noisy.test_log_line": "passed",
    "test_it.Noisy.test_full_disk_logged": "passed",
    "test_it.Noisy.test_bad": "failed",
    "test_it.Noisy.test_skipped": "failed",
    "test_it.Noisy.test_expected": "passed",
    "test_it.Noisy.test_unexpected": "failed",
    "test_it.Noisy.test_subtests": "failed",
    "test_it.Noisy.test_good_subtests": "passed",
    "test_it.Zoned.test_after": "failed",
    "test_it.Zbroken.test_inside": "failed",
}


def run_unittest(folder, names, suite=NOISY):
    (folder / "test_it.py").write_text(suite)
    command = [sys.executable, "-m", "unittest", "-v", *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr, done.returncode


def test_what_a_test_writes_to_stderr_does_not_cost_its_verdict(tmp_path):
    report, code = run_unittest(tmp_path, STATES)
    assert read_report(report, list(STATES)) == STATES
    assert contradiction(report, list(STATES), code) == ""


@pytest.mark.parametrize("test", STATES)
def test_a_noisy_test_alone(test, tmp_path):
    """Nothing comes before it or after it."""
    report, code = run_unittest(tmp_path, [test])
    assert read_report(report, [test]) == {test: STATES[test]}
    assert contradiction(report, [test], code) == ""


def test_what_a_running_test_writes_is_no_result(tmp_path):
    test = "test_it.Noisy.test_no_line_end"
    report, _ = run_unittest(tmp_path, [test])
    cut = report.partition("xok")[0]
    assert read_cut_report(f"{cut}connection is ok\n", [test]) == {test: "missing"}
    assert read_cut_report(f"{cut}ok\n", [test]) == {test: "passed"}


def test_a_million_letters_of_noise_are_read_at_once(tmp_path):
    names = ["test_it.Noisy.test_no_line_end"]
    report, _ = run_unittest(tmp_path, names, NOISY.replace('write("x")', 'write("x" * 1_000_000)'))
    assert read_report(report, names) == {names[0]: "passed"}


@pytest.mark.parametrize("where", ["a test", "an import"])
def test_a_memory_error_is_the_codes_own(where, tmp_path):
    names = ["test_it.Noisy.test_warning"]
    suite = (
        NOISY.replace("warnings.warn(", "raise MemoryError(") if where == "a test" else "raise MemoryError"
    )
    report, code = run_unittest(tmp_path, names, suite)
    assert not machine_failed(report)
    assert read_report(report, names) == {names[0]: "failed"}
    assert contradiction(report, names, code) == ""


def test_reports_that_no_single_run_of_unittest_writes(tmp_path):
    good, bad = "test_it.Noisy.test_warning", "test_it.Noisy.test_bad"
    passing, code = run_unittest(tmp_path, [good])
    assert code == 0
    failing, failed = run_unittest(tmp_path, [bad])
    assert failed == 1
    head = f"test_warning ({good}) ... ok\n"
    assert "exit code 1 and no test" in contradiction(passing, [good], 1)
    assert "exit code 0 and tests that failed" in contradiction(failing, [bad], 0)
    assert "2 summaries" in contradiction(passing + failing, [good, bad], 1)
    assert "a summary of 1 tests under results of 2" in contradiction(
        head.replace("warning", "logging") + passing, [good, "test_it.Noisy.test_logging"], 0
    )
    assert "a summary of 9 tests" in contradiction(passing.replace("Ran 1 test", "Ran 9 tests"), [good], 0)
