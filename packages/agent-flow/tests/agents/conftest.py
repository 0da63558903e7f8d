"""The bench of the agents' tests: see `drive.py`.

SWE-agent is the checkout that SWE_AGENT_SRC names, else the small scaffold of `scaffold/`, which has the same
seams.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import anyio
import pytest

HERE = Path(__file__).parent
REAL = os.environ.get("SWE_AGENT_SRC", "")
SCAFFOLD = Path(REAL) if REAL else HERE / "scaffold"

os.environ.setdefault("SWE_AGENT_CONFIG_DIR", str(SCAFFOLD / "config"))
os.environ.setdefault("SWE_AGENT_TOOLS_DIR", str(SCAFFOLD / "tools"))
sys.path.insert(0, str(SCAFFOLD))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("sweagent") and not REAL:
            item.add_marker(pytest.mark.skip(reason="needs a checkout of SWE-agent 1.1: set SWE_AGENT_SRC"))


def _load():
    spec = importlib.util.spec_from_file_location("agents_drive", HERE / "drive.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["agents_drive"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def drive():
    return _load()


@pytest.fixture
def bench(drive, tmp_path):
    """Makes a bench: `bench(agent section, turns)`."""
    roots = []

    def make(agent, turns):
        roots.append(Path(tempfile.mkdtemp(prefix="af")))  # short, as a unix socket lies below it
        return drive.Bench.prepare(tmp_path / f"bench{len(roots)}", roots[-1], agent, turns)

    yield make
    for root in roots:
        anyio.run(drive.end_sandboxes, root)
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def process(tmp_path):
    """Runs a leg in a process of its own; gives the leg as it ended, and the exit code."""

    def run(bench, leg):
        given, out = tmp_path / "given.json", tmp_path / "out.json"
        given.write_text(json.dumps(asdict(leg)))
        out.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, str(HERE / "drive.py"), str(bench.folder), str(given), str(out)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert out.exists(), done.stderr[-3000:]
        return type(leg)(**json.loads(out.read_text())), done.returncode

    return run
