"""docs/originals.md says of every behaviour of the originals which test shows it, or why none does."""

import shutil
import subprocess
import sys

import pytest

TOML = """
[documents]
A = "the one"
[A-shown]
of = "`run`"
says = "It is true."
[A-later]
of = "`run`"
says = "It is not yet true."
later = "comes with the next part"
[A-dropped]
of = "`run`"
says = "It is otherwise."
dropped = "it was wrong"
adr = 1
"""
TEST = """
import pytest

@pytest.mark.original("A-shown", "A-dropped")
async def test_it(): ...
"""


def make(folder, *arguments):
    script = folder / "docs" / "make_originals.py"
    return subprocess.run(
        [sys.executable, str(script), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_page_is_what_would_be_made(root):
    done = make(root, "--check")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def small(root, tmp_path):
    """A repository of one test. Called with texts of it that are replaced."""
    (tmp_path / "docs" / "adr").mkdir(parents=True)
    (tmp_path / "packages" / "one" / "tests" / "deep").mkdir(parents=True)
    shutil.copy(root / "docs" / "make_originals.py", tmp_path / "docs")
    (tmp_path / "docs" / "adr" / "0001-why.md").write_text("# Why\n")

    def write(old="", new="", end=""):
        assert old in TOML + TEST
        (tmp_path / "docs" / "originals.toml").write_text(TOML.replace(old, new) + end)
        test = tmp_path / "packages" / "one" / "tests" / "deep" / "test_one.py"
        test.write_text(TEST.replace(old, new))
        return tmp_path

    return write


def test_a_page_names_tests_and_reasons(small):
    folder = small()
    assert make(folder).returncode == 0
    rows = [line for line in (folder / "docs/originals.md").read_text().splitlines() if "| A-" in line]
    link = "[packages/one/tests/deep/test_one.py::test_it](../packages/one/tests/deep/test_one.py)"
    assert rows == [
        f"| A-shown | `run` | It is true. | {link} | shown |",
        "| A-later | `run` | It is not yet true. |  | later: comes with the next part |",
        f"| A-dropped | `run` | It is otherwise. | {link} "
        "| dropped: it was wrong ([ADR 1](adr/0001-why.md)) |",
    ]
    assert make(folder, "--check").returncode == 0
    small("It is true.", "It is quite true.")
    done = make(folder, "--check")
    assert (done.returncode, done.stderr) == (
        1,
        "docs/originals.md is not what would be made: uv run python docs/make_originals.py\n",
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"A-shown", ', "", "A-shown: neither a test nor a reason why there is none"),
        ('"A-shown", ', '"A-shown", "A-shwon", ', "test_one.py::test_it: no behaviour 'A-shwon'"),
        ('"A-shown", ', '"A-" + "shown", ', "test_one.py:4: a marker names behaviours by plain texts"),
        ("async def test_it", "async def helper", "test_one.py:4: a marker stands above a test function"),
        ("adr = 1", "adr = 2", "A-dropped: `adr` names no file of docs/adr"),
        ("later =", "latter =", "A-later: no such key, or not of its type: latter"),
        ("adr = 1", 'adr = 1\nlater = "never"', "A-dropped: it comes later or is dropped, not both"),
        ("[A-later]", "[C-later]", "C-later: an id begins with a document's letter: A"),
        ('says = "It is true."', 'says = ""', "A-shown: `says` is missing"),
    ],
)
def test_what_is_wrong_is_said(small, old, new, said):
    folder = small(old, new)
    for arguments in ([], ["--check"]):
        done = make(folder, *arguments)
        assert done.returncode == 1
        assert said in done.stderr
    assert not (folder / "docs/originals.md").exists()
