"""Memory over a long stream. `TRAINER_BRIDGE_SOAK=1000000` sends a million samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = int(os.environ.get("TRAINER_BRIDGE_SOAK", "100000"))
GROWTH_BYTES = 24 << 20
"""Allocator noise; one leaked head of each sample would be more than twice as much."""


@pytest.mark.slow
@pytest.mark.timeout(60 + SAMPLES // 500)
@pytest.mark.parametrize("spooled", [False, True])
def test_memory_stays_flat_over_many_samples(tmp_path: Path, programs: Path, spooled: bool) -> None:
    """zeromq/pyzmq#1582, #898: frames or futures that are kept alive make the process grow."""
    program = [sys.executable, str(programs / "soak.py"), str(SAMPLES), *([str(tmp_path)] if spooled else [])]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["arrived"] == SAMPLES
    assert got["pending"] == 0
    assert got["rss_end"] - got["rss_early"] < GROWTH_BYTES, got
    if spooled:
        assert sum(f.stat().st_size for f in (tmp_path / "samples").iterdir()) < 8 << 20
