"""kill -9 of either end, at steps of the protocol that a seed chooses, again and again."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from trainer_bridge.commands.audit import audit
from trainer_bridge.commands.balance import balance_of
from trainer_bridge.commands.books import read_books

SAMPLES = 5_000
LIVES = 16
"""Of each end; after so many deaths it is spared."""
LONGEST = {"mortal_sender.py": 4_000, "mortal_trainer.py": 1_000}
"""Steps of a life. Short and long ones are as likely (by the logarithm), so that many end in greetings, in
restarts and in the first acknowledgements."""


class Mortal:
    """One end, over all its lives."""

    def __init__(self, program: Path, lines: Path, rng: np.random.Generator) -> None:
        self._program = program
        self._lines = lines
        self._rng = rng
        self.deaths = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self, *argv: object) -> None:
        longest = LONGEST[self._program.name]
        steps = int(math.exp(self._rng.uniform(0.0, math.log(longest)))) if self.deaths < LIVES else 0
        with self._lines.open("a") as out:
            command = [sys.executable, self._program, *argv, steps]
            self.process = subprocess.Popen([*map(str, command)], stdout=out)

    def has_died(self) -> bool:
        """True: killed, and counted; an end in order is none."""
        assert self.process is not None
        code = self.process.poll()
        if code is None or code == 0:
            return False
        assert code == -signal.SIGKILL, f"{self._program.name} ended with {code}"
        self.deaths += 1
        return True

    def said(self) -> list[str]:
        return self._lines.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_of_either_end_at_random_steps(seed: int, programs: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    sender = Mortal(programs / "mortal_sender.py", tmp_path / "sender.txt", rng)
    trainer = Mortal(programs / "mortal_trainer.py", tmp_path / "trainer.txt", rng)
    pause = threading.Event()
    spool, folder = tmp_path / "spool", tmp_path / "trainer"
    folder.mkdir()
    bind = "ipc://" + str(tmp_path / "socket")
    trainer.start(bind, folder)
    sender.start(bind, spool, 0, SAMPLES - 1)
    try:
        while "done" not in sender.said():
            if trainer.has_died():
                trainer.start(bind, folder)
            if sender.has_died():
                said = sender.said()
                sender.start(bind, spool, int(said[-1]) + 1 if said else 0, SAMPLES - 1)
            pause.wait(0.02)
        while trainer.has_died():
            trainer.start(bind, folder)
        assert trainer.process is not None
        trainer.process.send_signal(signal.SIGTERM)
        assert trainer.process.wait(20) == 0
    finally:
        for end in (sender, trainer):
            if end.process is not None and end.process.poll() is None:
                end.process.kill()
                end.process.wait()
    assert sender.deaths >= 10
    assert trainer.deaths >= 10
    weights = json.loads((folder / "checkpoint.json").read_text())["weights"]
    assert Counter(weights) == Counter(range(SAMPLES))
    books = read_books(tmp_path)
    assert {book.kind for book in books} == {"spool", "store"}
    balance = balance_of(books)
    assert balance.adds_up, balance
    assert balance.committed == SAMPLES
    assert set(balance.dropped) <= {"duplicate"}
    assert audit(tmp_path, as_json=True) == 0
