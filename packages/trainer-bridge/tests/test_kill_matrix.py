"""kill -9 of either end, at steps of the protocol that a seed chooses, again and again."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from trainer_bridge.commands.audit import audit
from trainer_bridge.commands.balance import balance_of
from trainer_bridge.commands.books import read_books

SAMPLES = 5_000
GROUPED = 2_000
"""Rollouts, in two parts each."""
GROUP = 4
LIVES = 16
"""Of each end; after so many deaths it is spared."""
LONGEST = {"mortal_sender.py": 200, "mortal_trainer.py": 300}
"""Steps of a life. Short and long ones are as likely (by the logarithm), so that many end in greetings, in
restarts and in the first acknowledgements."""


class Mortal:
    """One end, over all its lives."""

    def __init__(self, program: Path, lines: Path, rng: np.random.Generator) -> None:
        self._program = program
        self._lines = lines
        self._rng = rng
        self._argv: tuple[object, ...] = ()
        self.deaths = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self, *argv: object) -> None:
        longest = LONGEST[self._program.name]
        steps = int(math.exp(self._rng.uniform(0.0, math.log(longest)))) if self.deaths < LIVES else 0
        self._argv = argv
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

    def start_again(self) -> None:
        """As before, but for a sender, which goes on after the last rollout of which it is sure."""
        argv, said = [*self._argv], self.said()
        if self._program.name == "mortal_sender.py" and said:
            argv[2] = int(said[-1]) + int(str(argv[4]))
        self.start(*argv)

    def said(self) -> list[str]:
        return self._lines.read_text().splitlines()


def run(trainer: Mortal, senders: Sequence[Mortal]) -> None:
    """Until all senders are done; whoever dies is started again."""
    pause = threading.Event()
    try:
        while not all("done" in sender.said() for sender in senders):
            for end in (trainer, *senders):
                if end.has_died():
                    end.start_again()
            pause.wait(0.02)
        while trainer.has_died():
            trainer.start_again()
        assert trainer.process is not None
        trainer.process.send_signal(signal.SIGTERM)
        assert trainer.process.wait(40.0) == 0
    finally:
        for end in (trainer, *senders):
            if end.process is not None and end.process.poll() is None:
                end.process.kill()
                end.process.wait()


def weights(folder: Path) -> list[int]:
    """What the last checkpoint was trained on."""
    return json.loads((folder / "checkpoint.json").read_text())["weights"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "keep"), [(1, "all"), (2, "checkpoint")])
def test_kill_9_of_either_end_at_random_steps(seed: int, keep: str, programs: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    sender = Mortal(programs / "mortal_sender.py", tmp_path / "sender.txt", rng)
    trainer = Mortal(programs / "mortal_trainer.py", tmp_path / "trainer.txt", rng)
    folder = tmp_path / "trainer"
    folder.mkdir()
    bind = "ipc://" + str(tmp_path / "socket")
    trainer.start(bind, folder, keep)
    sender.start(bind, tmp_path / "spool", 0, SAMPLES - 1, 1, 0)
    run(trainer, [sender])
    assert sender.deaths >= 10
    assert trainer.deaths >= 10
    assert Counter(weights(folder)) == Counter(range(SAMPLES))
    books = read_books(tmp_path)
    assert {book.kind for book in books} == {"spool", "store"}
    balance = balance_of(books)
    assert balance.adds_up, balance
    assert (sum(book.trimmed for book in books) > 0) == (keep == "checkpoint")
    assert balance.committed == SAMPLES
    assert set(balance.dropped) <= {"duplicate"}
    assert audit(tmp_path, as_json=True) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_9_without_a_store_and_with_groups_of_two_senders(programs: Path, tmp_path: Path) -> None:
    """The spools alone bring everything back, and each group comes whole, once."""
    rng = np.random.default_rng(3)
    trainer = Mortal(programs / "mortal_trainer.py", tmp_path / "trainer.txt", rng)
    folder = tmp_path / "trainer"
    folder.mkdir()
    bind = "ipc://" + str(tmp_path / "socket")
    trainer.start(bind, folder, "nothing")
    senders: list[Mortal] = []
    for which in (0, 1):
        sender = Mortal(programs / "mortal_sender.py", tmp_path / f"sender-{which}.txt", rng)
        sender.start(bind, tmp_path / f"spool-{which}", which, GROUPED - 1, 2, GROUP)
        senders.append(sender)
    run(trainer, senders)
    assert trainer.deaths >= 10
    assert all(sender.deaths >= 10 for sender in senders)
    trained = weights(folder)
    assert Counter(trained) == Counter(range(GROUPED))
    groups = [{n // GROUP for n in trained[at : at + GROUP]} for at in range(0, GROUPED, GROUP)]
    assert all(len(group) == 1 for group in groups), "a step was cut in two"
    balance = balance_of(read_books(tmp_path))
    assert balance.adds_up, balance
    assert balance.committed == GROUPED + balance.repeated
    assert audit(tmp_path, as_json=True) == 0
