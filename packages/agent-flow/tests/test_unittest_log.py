"""The unittest report reader against reports that `python3 -m unittest -v` really writes."""

import subprocess
import sys
import textwrap

import pytest
from agent_flow.runtimes.unittest_log import machine_failed, read_report

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


@pytest.mark.parametrize("suite", ["def broken(:\n", "import nowhere\n", "undefined_name\n", "1 / 0\n"])
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
        "raise MemoryError",
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


@pytest.mark.parametrize("name", ["test_full_disk", "test_memory"])
def test_a_test_that_the_machine_ended_has_no_verdict(tmp_path, name):
    """An infrastructure failure is not a failed test, so never a reward of 0."""
    names = [f"tests.test_it.Plain.{name}"]
    report = run_suite(tmp_path, MACHINE, names)
    assert read_report(report, names) is None
    assert machine_failed(report)


def test_a_file_that_the_code_does_not_find_is_the_codes_failure(tmp_path):
    names = ["tests.test_it.Plain.test_missing_file"]
    report = run_suite(tmp_path, MACHINE, names)
    assert read_report(report, names) == {names[0]: "failed"}
