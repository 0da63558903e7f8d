"""Shared by tests that cross packages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    """The folder that the quickstart leaves behind."""
    done = subprocess.run(
        [sys.executable, "-m", "agent_flow", "run", str(ROOT / "examples/quickstart/run.toml"), "--json"],
        cwd=tmp_path_factory.mktemp("run"),
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(json.loads(done.stdout.splitlines()[0])["values"]["folder"])
