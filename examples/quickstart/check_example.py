"""Checks this example without agent-flow: plain git, unittest, and the real mini-swe-agent.

    uv run python examples/quickstart/check_example.py             # check everything, print a table
    uv run python examples/quickstart/check_example.py --sha NAME  # the base_commit of repos/NAME

For every row of tasks.jsonl: the repository gives base_commit; FAIL_TO_PASS fails and PASS_TO_PASS passes at
the base; both pass with the reference patch. For every recording: mini-swe-agent, unmodified, plays its turns
in a working copy and must end as expected.json says, the reward included.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Json = dict[str, Any]

HERE = Path(__file__).resolve().parent
STEP_LIMIT = 8
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
AUTHOR = {
    "NAME": "agent-flow examples",
    "EMAIL": "examples@agent-flow.invalid",
    "DATE": "2026-01-01T00:00:00+00:00",
}
IDENTITY = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in AUTHOR.items()}


class CheckError(Exception):
    """The example does not keep what it promises."""


def clean_environment(home: Path) -> dict[str, str]:
    """An environment in which neither the user's git settings nor a bytecode cache can change a result."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def git(repo: Path, *args: str, stdin: bytes | None = None, env: dict[str, str] | None = None) -> bytes:
    """Run git in ``repo`` and return what it prints."""
    command = ["git", "-c", "core.autocrlf=false", *args]
    done = subprocess.run(
        command,
        cwd=repo,
        input=stdin,
        capture_output=True,
        check=False,
        env=clean_environment(repo) | IDENTITY | (env or {}),
    )
    if done.returncode:
        raise CheckError(f"{' '.join(command)} in {repo}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def build_repository(source: Path, target: Path, name: str) -> str:
    """Commit the plain files of ``source`` in ``target``; the same files always give the same sha."""
    files = [p for p in sorted(source.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
    for path in files:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    git(target, "init", "--quiet", "--initial-branch=main", "--object-format=sha1", "--template=")
    git(target, "config", "core.autocrlf", "false")
    names = "\0".join(str(path.relative_to(source)) for path in files).encode()
    git(target, "add", "--force", "--pathspec-from-file=-", "--pathspec-file-nul", stdin=names)
    git(target, "commit", "--quiet", "--no-gpg-sign", "--message", f"{name}: initial import")
    return git(target, "rev-parse", "HEAD").decode().strip()


def run_tests(repo: Path, ids: Iterable[str]) -> dict[str, bool]:
    """Run unittest tests by id; a test that cannot be loaded counts as failed."""
    wanted = list(ids)
    done = subprocess.run(
        ["python3", "-m", "unittest", "-v", *wanted],
        cwd=repo,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=clean_environment(repo),
    )
    passed = set(re.findall(r"^\w+ \(([\w.]+)\) \.\.\. ok$", done.stderr, re.MULTILINE))
    return {test: test in passed for test in wanted}


class Workspace:
    """Hands out fresh working copies of the example's repositories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0

    def copy_of(self, row: Json) -> Path:
        """A new working copy at the base commit of ``row``."""
        self.count += 1
        target = self.root / f"copy{self.count}"
        sha = build_repository(HERE / "repos" / row["repo"], target, row["repo"])
        if sha != row["base_commit"]:
            raise CheckError(
                f"{row['instance_id']}: base_commit is {row['base_commit']}, but the files give {sha}"
            )
        return target

    def grade(self, row: Json, patch: bytes) -> dict[str, bool]:
        """Test results of base + ``patch`` + the row's test patch."""
        repo = self.copy_of(row)
        for diff in (patch, row["test_patch"].encode()):
            if diff:
                git(repo, "apply", "--whitespace=nowarn", "-", stdin=diff)
        results = run_tests(repo, row["FAIL_TO_PASS"] + row["PASS_TO_PASS"])
        shutil.rmtree(repo)
        return results


def check_row(row: Json, workspace: Workspace) -> None:
    """Before the reference patch FAIL_TO_PASS fails, after it nothing does."""
    base = workspace.copy_of(row)
    existing = run_tests(base, row["PASS_TO_PASS"])
    before = workspace.grade(row, b"")
    after = workspace.grade(row, row["patch"].encode())
    wrong = [
        *(f"{test} passes without the patch" for test in row["FAIL_TO_PASS"] if before[test]),
        *(
            f"{test} fails at the base"
            for test in row["PASS_TO_PASS"]
            if not (existing[test] and before[test])
        ),
        *(f"{test} fails with the reference patch" for test, passed in after.items() if not passed),
    ]
    if wrong:
        raise CheckError(f"{row['instance_id']}: " + "; ".join(wrong))


def capture_patch(repo: Path, base: str) -> bytes:
    """Everything that changed since ``base``: committed, staged, unstaged and new files."""
    index = {"GIT_INDEX_FILE": str(repo / ".git" / "capture-index")}
    git(repo, "read-tree", "HEAD", env=index)
    git(repo, "add", "--all", env=index)
    return git(repo, "diff", "--binary", "--cached", base, env=index)


TOOL_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def tool_calls_of(text: str) -> list[SimpleNamespace]:
    """The tool calls of a completion, as the objects that an OpenAI client would return."""
    calls = [json.loads(body) for body in TOOL_CALL.findall(text)]
    return [
        SimpleNamespace(
            id=f"call_{index}",
            function=SimpleNamespace(name=call["name"], arguments=json.dumps(call["arguments"])),
        )
        for index, call in enumerate(calls)
    ]


def load_mini() -> SimpleNamespace:
    """Import mini-swe-agent with its settings in a temporary folder; its start-up message stays away."""
    settings = tempfile.mkdtemp(prefix="mini-settings-")
    os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": settings}
    try:
        import yaml
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.config import builtin_config_dir
        from minisweagent.exceptions import Submitted
        from minisweagent.models.utils import actions_text, actions_toolcall
    finally:
        shutil.rmtree(settings)

    def config(name: str) -> Json:
        return yaml.safe_load((Path(builtin_config_dir) / name).read_text())

    return SimpleNamespace(
        agent=DefaultAgent,
        submitted=Submitted,
        text=actions_text,
        tools=actions_toolcall,
        version=distribution("mini-swe-agent").version,
        config={"tool_calls": config("mini.yaml"), "text": config("mini_textbased.yaml")},
    )


class ReplayModel:
    """mini-swe-agent's Model: answers with recorded turns."""

    def __init__(self, mini: SimpleNamespace, recording: Json) -> None:
        self.mini = mini
        self.action_format = recording["action_format"]
        self.turns = iter(recording["rollouts"][0]["turns"])
        self.config = mini.config[self.action_format]["model"]

    def query(self, messages: list[Json]) -> Json:
        turn = next(self.turns, None)
        if turn is None:
            raise CheckError("the agent asked for more turns than were recorded")
        kwargs = {
            "format_error_template": self.config["format_error_template"],
            "template_kwargs": {"finish_reason": turn["finish_reason"]},
        }
        if self.action_format == "tool_calls":
            actions = self.mini.tools.parse_toolcall_actions(tool_calls_of(turn["text"]), **kwargs)
        else:
            regex = r"```mswea_bash_command\s*\n(.*?)\n```"
            actions = self.mini.text.parse_regex_actions(turn["text"], action_regex=regex, **kwargs)
        return {"role": "assistant", "content": turn["text"], "extra": {"actions": actions}}

    def format_message(self, **message: Any) -> Json:
        return message

    def format_observation_messages(
        self, message: Json, outputs: list[Json], template_vars: Json
    ) -> list[Json]:
        kwargs = {"observation_template": self.config["observation_template"], "template_vars": template_vars}
        if self.action_format == "tool_calls":
            actions = message["extra"]["actions"]
            return self.mini.tools.format_toolcall_observation_messages(
                actions=actions, outputs=outputs, **kwargs
            )
        return self.mini.text.format_observation_messages(outputs, **kwargs)

    def get_template_vars(self) -> Json:
        return {}

    def serialize(self) -> Json:
        return {}


class ShellEnvironment:
    """mini-swe-agent's Environment: ``bash -c`` in a working copy."""

    def __init__(self, mini: SimpleNamespace, repo: Path) -> None:
        self.mini = mini
        self.repo = repo
        self.log: list[str] = []

    def execute(self, action: Json) -> Json:
        done = subprocess.run(
            ["bash", "-c", action["command"]],
            cwd=self.repo,
            env=clean_environment(self.repo),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        output = done.stdout.decode(errors="replace")
        self.log.append(f"$ {action['command']}\n{output}[exit {done.returncode}]\n")
        first, _, rest = output.lstrip().partition("\n")
        if first.strip() == SUBMIT and done.returncode == 0:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise self.mini.submitted({"role": "exit", "content": rest, "extra": extra})
        return {"output": output, "returncode": done.returncode, "exception_info": ""}

    def get_template_vars(self) -> Json:
        return platform.uname()._asdict()

    def serialize(self) -> Json:
        return {}


def play(mini: SimpleNamespace, row: Json, recording: Json, workspace: Workspace, verbose: bool) -> Json:
    """Let mini-swe-agent play a recording; return what expected.json says about it."""
    repo = workspace.copy_of(row)
    model, environment = ReplayModel(mini, recording), ShellEnvironment(mini, repo)
    config = mini.config[recording["action_format"]]["agent"]
    templates = {key: config[key] for key in ("system_template", "instance_template")}
    agent = mini.agent(model, environment, **templates, step_limit=STEP_LIMIT, cost_limit=0.0)
    exit_status = agent.run(row["problem_statement"])["exit_status"]
    if verbose:
        print("\n".join(environment.log))
    reward = 0.0
    if exit_status == "Submitted":
        reward = float(all(workspace.grade(row, capture_patch(repo, row["base_commit"])).values()))
    return {"exit_status": exit_status, "model_calls": agent.n_calls, "reward": reward}


def check_recording(row: Json, recording: Json, where: str) -> None:
    """The parts of a recording that playing it would not notice."""
    turns = recording["rollouts"][0]["turns"]
    thinks = row.get("chat_template_kwargs", {}).get("enable_thinking", True)
    thinks = thinks and recording["action_format"] == "tool_calls"  # text.toml turns thinking off
    if recording["instance_id"] != row["instance_id"]:
        raise CheckError(f"{where}: it is the recording of {recording['instance_id']}")
    for number, turn in enumerate(turns, 1):
        if turn["text"].startswith("<think>\n") is not thinks or "<|im_" in turn["text"]:
            raise CheckError(f"{where}: turn {number} is not what the model would sample after this prompt")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sha", metavar="NAME", help="print the base_commit of repos/NAME and stop")
    parser.add_argument("--only", metavar="INSTANCE", help="check one task")
    parser.add_argument("--verbose", action="store_true", help="print every command and its output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="check-example-") as root:
        if options.sha:
            print(build_repository(HERE / "repos" / options.sha, Path(root) / "repo", options.sha))
        else:
            check_all(Workspace(Path(root)), load_mini(), options.only, options.verbose)
    return 0


def check_all(workspace: Workspace, mini: SimpleNamespace, only: str | None, verbose: bool) -> None:
    """Check all tasks or one, and print a line per recording."""
    rows = [json.loads(line) for line in (HERE / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
    print(f"mini-swe-agent {mini.version}, step_limit {STEP_LIMIT}")
    print(f"{'task':<18}{'recording':<17}{'exit status':<22}{'calls':>5}{'reward':>8}")
    for row in rows:
        name = row["instance_id"]
        if only not in (None, name):
            continue
        check_row(row, workspace)
        for folder, promises in expected.items():
            where = f"{folder}/{name}.json"
            recording = json.loads((HERE / where).read_text(encoding="utf-8"))
            check_recording(row, recording, where)
            found = play(mini, row, recording, workspace, verbose)
            facts = f"{found['exit_status']:<22}{found['model_calls']:>5}{found['reward']:>8.1f}"
            print(f"{name:<18}{folder:<17}{facts}")
            if found != promises[name]:
                raise CheckError(f"{where}: expected {promises[name]}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(f"check_example: {error}")
