"""An agent is not graded by what it wrote into the tests that its task names, test patch or none."""

import json

import pytest
from agent_flow.environments.named_tests import judging_files
from agent_flow.environments.test_surface import changed_paths
from agent_flow.runtimes.grader import Grader, task_surface
from agent_flow.task import Task

CHANGED = [
    "pkg/core.py", "pkg/tests/test_core.py", "tests/admin/tests.py", "tests/data/in.json",
    "tests/test_core.py", "tests/test_more.py", "web/cart.test.ts", "src/add.go", "src/add_test.go",
    "spec/cart_spec.rb", "numpy/testing/utils.py", "django/test/client.py",
]  # fmt: skip


@pytest.mark.parametrize(
    ("test", "files"),
    [
        ("tests/test_core.py::test_a[x-1]", {"tests/test_core.py"}),
        ("tests/test_core.py::TestA::test_a", {"tests/test_core.py"}),
        ("tests.test_core.A.test_a", {"tests/test_core.py", "pkg/tests/test_core.py"}),
        ("pkg.tests.test_core.A.test_a", {"pkg/tests/test_core.py"}),
        ("test_a (tests.test_core.A)", {"tests/test_core.py", "pkg/tests/test_core.py"}),
        ("test_a (tests.test_core.A.test_a)", {"tests/test_core.py", "pkg/tests/test_core.py"}),
        ("test_a (admin.tests.A)", {"tests/admin/tests.py"}),
        ("web/cart.test.ts | cart > adds", {"web/cart.test.ts"}),
        ("spec/cart_spec.rb[1:2]", {"spec/cart_spec.rb"}),
        ("tests/test_core.pyx::test_a", {"tests/test_core.pyx"}),
        ("TestAdd/small", set()),
        ("adds two numbers", set()),
        ("core.A.test_a", set()),
        ("pkg/core.py::pkg.core.add", set()),
    ],
)
def test_the_files_that_names_of_tests_say(test, files):
    found = judging_files([test], CHANGED, has_test_patch=True)
    assert found & {*CHANGED, "tests/test_core.pyx"} == files


def test_without_a_test_patch_whatever_is_a_test_by_its_name_judges():
    found = judging_files(["TestAdd"], CHANGED, has_test_patch=False)
    assert found == {
        "pkg/tests/test_core.py", "tests/admin/tests.py", "tests/test_core.py", "tests/test_more.py",
        "web/cart.test.ts", "src/add_test.go", "spec/cart_spec.rb",
    }  # fmt: skip


def part(path, text="x"):
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{text}\n+y\n".encode()


def task(**row):
    return Task(instance_id="t-1", problem_statement="p", row={"repo": "r", "base_commit": "0" * 40, **row})


def graded(task, patch):
    grader = Grader(object(), None, test_files="reset", test_configuration="flag")
    return grader.graded_part(task, patch)


PATCH = part("pkg/core.py") + part("tests/test_core.py") + part("tests/test_more.py")


@pytest.mark.parametrize("as_text", [False, True])
def test_tests_that_are_rewritten_are_put_back_without_a_test_patch(as_text):
    named = ["tests.test_core.A.test_a"]
    row = {"FAIL_TO_PASS": json.dumps(named) if as_text else named, "PASS_TO_PASS": []}
    assert graded(task(**row), PATCH) == (part("pkg/core.py"), 2)
    assert task_surface(task(**row), PATCH).tests == ("tests/test_core.py", "tests/test_more.py")


def test_and_those_of_files_that_the_test_patch_does_not_bring():
    row = {
        "FAIL_TO_PASS": ("tests/test_new.py::test_a",),
        "PASS_TO_PASS": ("tests/test_core.py::test_b",),
        "test_patch": part("tests/test_new.py").decode(),
    }
    left, count = graded(task(**row), PATCH)
    assert (changed_paths(left), count) == (("pkg/core.py", "tests/test_more.py"), 1)
    shadow = part("tests/test_core/__init__.py")
    assert graded(task(**row), shadow) == (b"", 1), "Python would import it instead"


@pytest.mark.parametrize("row", [{}, {"FAIL_TO_PASS": "not a list"}, {"FAIL_TO_PASS": 3}])
def test_a_row_that_names_no_tests_leaves_the_patch_as_it_is(row):
    assert graded(task(**row), PATCH) == (PATCH, 0)


def test_a_task_about_no_repository_may_be_about_tests():
    row = Task(instance_id="t", problem_statement="p", row={"FAIL_TO_PASS": ("reward",)})
    assert graded(row, PATCH) == (PATCH, 0)
