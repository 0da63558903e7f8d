"""The files of the tests that a task names, as far as the names of tests say them.

Without a test patch the tests that judge lie in the repository, and with one those of `PASS_TO_PASS` may lie
in files that it does not bring: an agent must not be graded by what it wrote there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

_LOOKS_LIKE_TESTS = re.compile(
    r"(?:^|/)(?:tests?|__tests__|specs?)/|(?:^|/)(?:test_[^/]*|tests)\.py$|_test\.(?:py|go|rb|exs|rs)$"
    r"|[._](?:test|spec)\.[cm]?[jt]sx?$|_spec\.rb$|(?:Test|Tests|TestCase|IT)\.(?:java|kt|php|cs|scala)$"
)
_NAMED_AS_TESTS = re.compile(
    r"(?:^|/)(?:test_[^/]*|tests)\.py$|_test\.(?:py|go|rb|exs|rs)$|[._](?:test|spec)\.[cm]?[jt]sx?$"
    r"|_spec\.rb$|(?:Test|Tests|TestCase|IT)\.(?:java|kt|php|cs|scala)$"
)
_UNITTEST = re.compile(r"(?P<test>\w+) \((?P<way>[\w.]+)\)")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*){2,}")


def judging_files(named: Iterable[str], changed: Iterable[str], *, has_test_patch: bool) -> set[str]:
    """The files of a task's tests: those that their names say; without a test patch, every test by its name.

    A file that does not look like a test is left alone although tests of it are named: it is the code, too.
    Of files in test folders that the tests only read, nothing is said. Of a module of Python, every file that
    its name may mean is taken, since nobody knows from which folder the tests are run.

    Args:
        named: The tests, as pytest (`tests/test_a.py::test_b`), unittest (`tests.test_a.A.test_b`,
            `test_b (tests.test_a.A)`) or others print them. Of Go and Jest they name no files.
        changed: The paths of the patch.
        has_test_patch: The task brings tests of its own.
    """
    found: set[str] = set()
    modules: set[str] = set()
    paths = [path for path in changed if _LOOKS_LIKE_TESTS.search(path)]
    for test in named:
        modules.update(_modules(test))
        path, parted, _ = test.partition("::")
        if parted and _LOOKS_LIKE_TESTS.search(path):
            found.add(path)
        found.update(path for path in paths if _begins_with(test, path))
    files = (f"{module.replace('.', '/')}.py" for module in modules)
    found.update(file for file in files if _LOOKS_LIKE_TESTS.search(file))
    for path in paths:
        dotted = str(PurePosixPath(path).with_suffix("")).replace("/", ".")
        if path.endswith(".py") and any(f".{dotted}".endswith(f".{module}") for module in modules):
            found.add(path)
        if not has_test_patch and _NAMED_AS_TESTS.search(path):
            found.add(path)
    return found


def _modules(test: str) -> Iterator[str]:
    """The module of a test of unittest, whether or not `test_b (tests.test_a.A)` says the method again."""
    told = _UNITTEST.match(test)
    way = told["way"] if told else test
    if told and not way.endswith(f".{told['test']}"):
        way = f"{way}.{told['test']}"
    if _DOTTED.fullmatch(way):
        yield way.rsplit(".", 2)[0]


def _begins_with(test: str, path: str) -> bool:
    rest = test.removeprefix(path)
    return rest != test and not re.match(r"[\w./-]", rest)
