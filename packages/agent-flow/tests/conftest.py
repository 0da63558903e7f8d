"""Shared by this package's tests: the quickstart example of the repository and ways to run the command."""

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart"


@dataclass
class Finished:
    """What one `agent-flow` call gave."""

    code: int
    stdout: str
    stderr: str
    events: list[dict] = field(default_factory=list)

    @property
    def summary(self) -> dict:
        return self.events[-1]

    @property
    def folder(self) -> Path:
        (started,) = [event for event in self.events if event.get("event") == "run_started"]
        return Path(started["values"]["folder"])


def agent_flow(*arguments, cwd, timeout=120, env=None) -> Finished:
    done = subprocess.run(
        [sys.executable, "-m", "agent_flow", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
        check=False,
    )
    lines = done.stdout.splitlines() if "--json" in arguments else []
    return Finished(done.returncode, done.stdout, done.stderr, [json.loads(line) for line in lines])


@pytest.fixture(scope="session")
def cli():
    """Calls `agent-flow` in a process of its own."""
    return agent_flow


@pytest.fixture(scope="session")
def example() -> Path:
    return EXAMPLE


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Calls `agent-flow` once for all processes of a test run; gives what it gave, and where."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def call(name, *arguments, env=None):
        cwd, record = folder / name, folder / f"{name}.json"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not record.exists():
                cwd.mkdir()
                record.write_text(json.dumps(asdict(agent_flow(*arguments, cwd=cwd, env=env))))
        return Finished(**json.loads(record.read_text())), cwd

    return call


@pytest.fixture(scope="session")
def quickstart(once) -> Finished:
    """The quickstart, run once for all tests that look at what it left behind."""
    return once("once-quickstart", "run", EXAMPLE / "run.toml", "--json")[0]


@pytest.fixture(scope="session")
def quickstart_text(once) -> Finished:
    """The same in mini-swe-agent's text format."""
    return once("once-quickstart-text", "run", EXAMPLE / "text.toml", "--json")[0]
