"""The example in `examples/connect_your_trainer`, as it stands: a trainer, a worker, a kill -9 between."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[4] / "examples" / "connect_your_trainer"


def start(out: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(FOLDER / "train.py"), "--bind", "tcp://127.0.0.1:0", "--out", str(out)]
    return subprocess.Popen([*command, "--steps", str(steps)], stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_the_example_is_short() -> None:
    assert len((FOLDER / "train.py").read_text().splitlines()) < 60


@pytest.mark.timeout(180)  # four processes, three of them load torch
def test_it_trains_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the example trainer is not run here")
    with start(tmp_path, 100) as trainer:
        try:
            listening = line(trainer)
            worker = [sys.executable, str(FOLDER / "worker.py"), "--to", listening["listening"]]
            done = subprocess.run([*worker, "--groups", "12"], capture_output=True, text=True, timeout=50)
            assert done.stdout == "48 rollouts stored by the trainer\n", done.stderr
            first = [line(trainer) for _ in range(2)]
        finally:
            trainer.kill()
    assert first[0]["ratio"] == pytest.approx(1.0, rel=1e-5)
    assert first[1]["ratio"] != pytest.approx(1.0, rel=1e-5)
    with start(tmp_path, 6) as trainer:
        begun = line(trainer)["step"]
        assert 2 <= begun <= 6
        rest = [line(trainer) for _ in range(6 - begun)]
        assert trainer.wait(30) == 0
    assert [each["step"] for each in rest] == list(range(begun + 1, 7)), "12 groups are 6 steps, none missing"
