"""The README's examples run as they stand, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trainer_bridge

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[number], f"README, example {number}", "exec"), {"__name__": "__main__"})
    if number == 0:
        assert capsys.readouterr().out == "[64, 64]\n1\n"


def test_an_example_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXAMPLES[0]], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[64, 64]\n1\n"


def test_import_lines_in_the_text_work() -> None:
    lines = re.findall(r"`(from trainer_bridge[\w.]* import [\w, ]+)`", README)
    assert len(lines) >= 2
    for line in lines:
        exec(line, {})


def test_extras_that_are_named_exist() -> None:
    """`TorchMissingError` named an extra that the README did not know of."""
    extras = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text() for path in Path(trainer_bridge.__file__).parent.rglob("*.py")]
    named = {name for text in (README, *sources) for name in re.findall(r"trainer-bridge\[(\w+)\]", text)}
    assert named == extras.keys() == set(re.findall(r"trainer-bridge\[(\w+)\]", README))
    for example in PACKAGE.parents[1].glob("examples/connect_your_trainer/README.md"):
        assert f'"{extras["torch"][0]}"    # the extra trainer-bridge[torch]' in example.read_text()
