"""Shared by the tests of runtimes: the runners' repositories, their logs, and swebench itself."""

import runpy
import tomllib
from pathlib import Path

import pytest

RUNNERS = Path(__file__).parent / "runners"
MAKE_LOGS = Path(__file__).parent / "make_logs.py"


@pytest.fixture(scope="session")
def swebench():
    """The installed swebench 5, which the default environment has not."""
    pytest.importorskip("swebench", reason="swebench is not installed: pip install 'agent-flow[swebench]'")
    from agent_flow.runtimes.swebench_log import load_swebench

    return load_swebench("test")


@pytest.fixture(scope="session")
def runner_row():
    """The row of a runner's repository by the runner's name, in swebench 5.x form."""
    row_of = runpy.run_path(str(MAKE_LOGS))["row_of"]
    return lambda name: row_of(name, tomllib.loads((RUNNERS / f"{name}.toml").read_text()))


@pytest.fixture(scope="session")
def runner_log():
    """A log by runner and state: `base`, `solved` or `broken`."""
    return lambda name, state: (RUNNERS / f"{name}.{state}.log").read_text()


@pytest.fixture(scope="session")
def run_runner():
    """Runs a runner now: the log by name, state and a folder to be made."""
    return runpy.run_path(str(MAKE_LOGS))["log_of"]
