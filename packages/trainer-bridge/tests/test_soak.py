"""Memory over a long stream. `TRAINER_BRIDGE_SOAK=1000000` sends a million samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = int(os.environ.get("TRAINER_BRIDGE_SOAK", "50000"))
GROWTH = 1.05
"""Of the most memory in the second quarter: allocator noise. One object of each sample that stays would be
far more over a million."""


@pytest.mark.slow
@pytest.mark.timeout(60 + SAMPLES // 500)
@pytest.mark.parametrize("on_disk", [False, True])
def test_memory_of_both_ends_stays_flat_over_many_samples(
    tmp_path: Path, programs: Path, on_disk: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """zeromq/pyzmq#1582, #898: frames or futures that are kept alive make the process grow."""
    program = [sys.executable, str(programs / "soak.py"), "receive", str(SAMPLES)]
    done = subprocess.run(
        [*program, *([str(tmp_path)] if on_disk else [])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    sender, receiver = got["sender"], got["receiver"]
    with capsys.disabled():
        where = "spool and store" if on_disk else "memory"
        print(f"\n{SAMPLES} samples, {where}: {got['per_s']} per s")
        for name, end in got.items():
            if name != "per_s":
                print(f"  {name}: {', '.join(f'{most / 1e6:.1f}' for most in end['rss'])} MB by quarters")
    assert (sender["acknowledged"], sender["pending"]) == (SAMPLES, 0)
    assert (receiver["committed"], receiver["unaccounted"]) == (SAMPLES, 0)
    for end in (sender, receiver):
        _, second, _, last = end["rss"]
        assert last <= GROWTH * second, got
    if on_disk:
        assert receiver["trimmed"] > 0
        for folder in ("spool", "store"):
            assert sum(f.stat().st_size for f in (tmp_path / folder / "samples").iterdir()) < 8 << 20
