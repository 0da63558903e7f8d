"""Shared by this package's tests: the quickstart example of the repository and ways to run the command."""

import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import tomli_w
from agent_flow.cli import main
from agent_flow.environments.repository import build_repository
from token_tracking import load_tokenizer

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


@pytest.fixture(scope="session")
def qwen_tokenizer():
    """The real one, loaded once per process: it takes longer than all else of a small run."""
    return load_tokenizer("qwen-tokenizer:qwen3")


class OwnAgent:
    """A copy of examples/own-agent that can be changed and run in this process."""

    def __init__(self, folder, capfd):
        self.folder = folder
        self.module = f"own_{folder.parent.name}".replace("-", "_")  # one interpreter runs many of them
        self._capfd = capfd

    def source(self, text):
        """Replace my_flow.py; an empty one is kept."""
        (self.folder / f"{self.module}.py").write_text(text)
        sys.modules.pop(self.module, None)
        shutil.rmtree(self.folder / "__pycache__", ignore_errors=True)

    def config(self, *edits, name="run.toml"):
        """Replace texts in the configuration; `my_flow` means the copy's module."""
        text = (self.folder / name).read_text()
        for old, new in edits:
            assert old.replace("my_flow", self.module) in text
            text = text.replace(old.replace("my_flow", self.module), new.replace("my_flow", self.module))
        (self.folder / name).write_text(text)

    def turns(self, *rollouts, task="guess-37"):
        """Replace what is recorded of a task: a list of turns for each rollout."""
        path = self.folder / "recordings" / f"{task}.json"
        recording = json.loads(path.read_text())
        recording["rollouts"] = [{"turns": turns} for turns in rollouts]
        path.write_text(json.dumps(recording))

    def call(self, *arguments) -> Finished:
        """Call `agent-flow` in this process."""
        code = main([str(argument) for argument in arguments])
        said = self._capfd.readouterr()
        lines = said.out.splitlines() if "--json" in arguments else []
        return Finished(code, said.out, said.err, [json.loads(line) for line in lines])

    def run(self, *options) -> Finished:
        """`agent-flow run run.toml --json`."""
        return self.call("run", "run.toml", "--json", *options)


@pytest.fixture
def own_agent(tmp_path, monkeypatch, capfd, qwen_tokenizer):
    """The example of a flow for other tasks, with the first of its tasks alone."""
    folder = tmp_path / "own"
    shutil.copytree(
        EXAMPLE.parent / "own-agent", folder, ignore=shutil.ignore_patterns("__pycache__", "runs")
    )
    (folder / "tasks.jsonl").write_text((folder / "tasks.jsonl").read_text().splitlines()[0] + "\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("agent_flow.run.tokenizer_of", lambda file: qwen_tokenizer)
    copy = OwnAgent(folder, capfd)
    shutil.move(folder / "my_flow.py", folder / f"{copy.module}.py")
    text = (folder / "run.toml").read_text().replace("my_flow", copy.module).partition("\n[eval]")[0]
    (folder / "run.toml").write_text(text.replace("reward_timeout_s = 10", "reward_wait_s = 0.001"))
    yield copy
    sys.modules.pop(copy.module, None)


DEMO_TESTS = """import unittest

import answer


class AnswerTests(unittest.TestCase):
    def test_it(self):
        self.assertEqual(answer.ANSWER, 42)
"""
DEMO_TEST_PATCH = f"""diff --git a/test_answer.py b/test_answer.py
new file mode 100644
--- /dev/null
+++ b/test_answer.py
@@ -0,0 +1,{DEMO_TESTS.count(chr(10))} @@
""" + "".join(f"+{line}\n" for line in DEMO_TESTS.splitlines())


class ScriptedRun:
    """One run of small tasks about a small repository, each with turns of its own; see `scripted.py`.

    `answer.py` of the repository says `ANSWER = 41`, and the test wants 42.
    """

    def __init__(self, folder: Path, capfd) -> None:
        self.folder = folder
        self._capfd = capfd
        self._commits = {}
        self.config = {
            "name": "scripted",
            "run_dir": str(folder / "runs"),
            "python_path": [str(Path(__file__).parent)],
            "tasks": {"path": "tasks.jsonl"},
            "model": {"tokenizer": "qwen-tokenizer:qwen3", "chat_template": str(EXAMPLE / "qwen3.jinja")},
            "engine": {"provider": "scripted:Scripted", "recordings": "recordings"},
            "agent": {"provider": "minisweagent", "step_limit": 4},
            "environment": {"provider": "local"},
            "runtime": {
                "provider": "command",
                "repos": "repos",
                "test_command": "python3 -m unittest -v {tests}",
            },
            "worker": {"max_rollouts": 3},
        }

    def task(self, name: str, turns, *, repo: str = "demo", **columns) -> None:
        """Add a task; a turn is text or what else a recording may hold. Columns as of a row."""
        row = {
            "instance_id": name,
            "repo": repo,
            "base_commit": self._commit(repo),
            "problem_statement": "It is 42, not 41.",
            "FAIL_TO_PASS": ["test_answer.AnswerTests.test_it"],
            "test_patch": DEMO_TEST_PATCH,
            **columns,
        }
        with (self.folder / "tasks.jsonl").open("a") as tasks:
            tasks.write(json.dumps(row) + "\n")
        recording = {
            "kind": "agent-flow-recording",
            "version": 1,
            "source": "written for this test",
            "instance_id": name,
            "rollouts": [{"turns": [turn if isinstance(turn, dict) else {"text": turn} for turn in turns]}],
        }
        (self.folder / "recordings").mkdir(exist_ok=True)
        (self.folder / "recordings" / f"{name}.json").write_text(json.dumps(recording))

    def _commit(self, repo: str) -> str:
        if repo not in self._commits:
            source = self.folder / "repos" / repo
            source.mkdir(parents=True)
            (source / "answer.py").write_text("ANSWER = 41\n")
            self._commits[repo] = build_repository(source, self.folder / f"built-{repo}", repo)
        return self._commits[repo]

    def file(self, **sections) -> Path:
        """The configuration, with sections replaced."""
        path = self.folder / "run.toml"
        path.write_text(tomli_w.dumps(self.config | sections))
        return path

    def run(self, command: str = "run", env=None, **sections) -> Finished:
        """Call `agent-flow run` (or `eval`): in this process, or with `env` in one of its own."""
        path = self.file(**sections)
        if env is not None:
            return agent_flow(command, path, "--json", cwd=self.folder, timeout=280, env=env)
        code = main([command, str(path), "--json"])
        said = self._capfd.readouterr()
        return Finished(code, said.out, said.err, [json.loads(line) for line in said.out.splitlines()])


@pytest.fixture
def scripted_run(tmp_path, monkeypatch, capfd, qwen_tokenizer):
    """A `ScriptedRun` without tasks."""
    monkeypatch.setattr("agent_flow.run.tokenizer_of", lambda file: qwen_tokenizer)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    folder = tmp_path / "scripted"
    folder.mkdir()
    run = ScriptedRun(folder, capfd)
    run.providers = importlib.import_module("scripted")
    yield run
    sys.modules.pop("scripted")


NUMBERED = '''
from contextlib import asynccontextmanager
from agent_flow.environments.local import LocalEnvironments


class Numbered(LocalEnvironments):
    """Puts the number of the sandbox beside its repository."""

    opened = 0

    @asynccontextmanager
    async def open(self, spec):
        Numbered.opened += 1
        number = str(Numbered.opened)
        async with super().open(spec) as environment:
            await environment.write(f"{environment.workdir}/../run-number", number.encode())
            yield environment
'''


@pytest.fixture(scope="session")
def numbered_environments() -> str:
    """A module with the environments `Numbered`: as `local`, and each sandbox knows its number."""
    return NUMBERED
