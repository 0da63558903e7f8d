"""E2B where it fails half: sandboxes that stop answering, answers that are cut or late, agents that forge."""

import contextlib
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from agent_flow.environments import e2b_environment
from agent_flow.environments.e2b import E2bEnvironments
from agent_flow.environments.repository import build_repository
from agent_flow.errors import ConfigError, EnvCreateError, EnvError
from agent_flow.outcome import outcome_of_error
from agent_flow.protocols import EnvironmentSpec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]
CREATE = "POST /v2/sandboxes"
IN_TEMPLATE = EnvironmentSpec(image="testbed", workdir="/testbed")
FOREVER = "echo begun; exec sleep 300"
KILLING = "each TERM"


@pytest.fixture
def place(e2b_place):
    return e2b_place


@pytest.fixture
def impatient(monkeypatch):
    """A sandbox that does not answer is not waited for longer than it takes to see that."""
    monkeypatch.setattr(e2b_environment, "_KILL_S", 0.3)
    monkeypatch.setattr(e2b_environment, "_GRACE_S", 0.3)


async def run(environment, script, **more):
    return await environment.execute(["bash", "-c", script], **{"timeout_s": 60} | more)


def check_infra(error, cause):
    assert (error.boundary, error.cause, error.fault, error.retryable) == (
        "environment", cause, "infra", True,
    )  # fmt: skip
    assert error.evidence
    row = outcome_of_error(error)
    assert (row.sample, row.reward, row.retry) == (False, None, True), "never a reward of 0"


def processes_under(folder):
    """Sandboxes of the server of tests that run, by the folders they show."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    return [line for line in lines if line.startswith(b"bwrap") and f"{folder}/".encode() in line]


# Sandboxes that stop answering


@pytest.mark.parametrize(
    ("text", "how"),
    [("", "silent"), (FOREVER, "silent"), (KILLING, "silent"), (KILLING, "begun")],
    ids=["all", "the command", "its end", "its end begun"],
)
async def test_a_sandbox_that_stops_answering_is_no_time_out(server, place, impatient, text, how):
    async with place.environments.open(IN_TEMPLATE) as environment:
        (name,) = place.left()
        server.tell("fault", id=name, text=text, how=how)
        with pytest.raises(EnvError) as caught:
            await run(environment, FOREVER, timeout_s=0.3)
        check_infra(caught.value, "unreachable")


async def test_a_command_that_takes_too_long_where_the_sandbox_answers_has_timed_out(place):
    async with place.environments.open(IN_TEMPLATE) as environment:
        done = await run(environment, FOREVER, timeout_s=0.5)
        assert (done.timed_out, done.exit_code) == (True, None)


@pytest.mark.parametrize("how", ["silent", "begun"])
async def test_a_sandbox_that_does_not_answer_its_first_question_did_not_come_up(
    server, place, impatient, monkeypatch, how
):
    """Neither the folder of the task is at fault, nor is the command's time-out an answer."""
    monkeypatch.setattr(e2b_environment, "_LOOK_S", 0.3)
    server.tell("fault_of_all", text='[ -d "$1" ]', how=how)
    with pytest.raises(EnvCreateError) as caught:
        async with place.environments.open(IN_TEMPLATE):
            pass
    check_infra(caught.value, "unreachable" if how == "silent" else "start")


async def test_cancelling_a_command_waits_for_its_end_alone(place, monkeypatch):
    """Nobody listens any more, so nothing can say that the command's output has ended."""
    monkeypatch.setattr(e2b_environment, "_GRACE_S", 3600.0)
    async with place.environments.open(IN_TEMPLATE) as environment:
        async with anyio.create_task_group() as group:
            group.start_soon(run, environment, "touch /tmp/begun; exec sleep 300")
            await run(environment, "until [ -e /tmp/begun ]; do sleep 0.02; done")
            group.cancel_scope.cancel()
        assert b"sleep 300" not in (await run(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout


# Output that is cut


async def test_output_that_breaks_off_is_no_success(server, place):
    """The mark of stderr has come, and stdout has not: `cat reward.txt` would have said nothing."""
    async with place.environments.open(IN_TEMPLATE) as environment:
        (name,) = place.left()
        server.tell("fault", id=name, text="echo 1.0", how="half")
        with pytest.raises(EnvError) as caught:
            await run(environment, "echo 1.0")
        check_infra(caught.value, "unreachable")


async def test_a_stream_without_an_end_is_no_success(server, place):
    async with place.environments.open(IN_TEMPLATE) as environment:
        (name,) = place.left()
        server.tell("fault", id=name, text="kill -9 $PPID", how="endless")
        with pytest.raises(EnvError) as caught:
            await run(environment, "echo 1.0; kill -9 $PPID")
        check_infra(caught.value, "unreachable")
        assert "end" in caught.value.evidence
        server.tell("fault", id=name, text="echo whole", how="endless")
        assert (await run(environment, "echo whole")).stdout == b"whole\n", "the marks have come"


@pytest.mark.parametrize(
    ("body", "ours"),
    [
        ("<html>404 not found, nginx</html>", False),
        ("{}", False),
        ('{"message": "no Route matched with those values"}', False),
        ('{"code": 404, "message": "path \'/x\' does not exist"}', True),
    ],
)
async def test_a_route_that_is_gone_is_not_the_agents_doing(server, place, body, ours, tmp_path):
    async with place.environments.open(IN_TEMPLATE) as environment:
        calls = [
            ("GET", partial(environment.read, "/testbed/setup.cfg")),
            ("GET", partial(environment.download, "/testbed", tmp_path / "x")),
            ("POST", partial(environment.write, "/tmp/x", b"x")),
        ]
        for status in (400, 404):
            for method, call in calls:
                server.tell("refuse", call=f"{method} /files", status=status, body=body)
                with pytest.raises(EnvError) as caught:
                    await call()
                if ours:
                    assert caught.value.fault == "agent"
                else:
                    check_infra(caught.value, "unreachable")
                    assert body in caught.value.evidence


# Starts


async def test_room_is_waited_for_as_long_as_a_start_may_take(server, place):
    before = server.tell("look")["calls"].get(CREATE, 0)
    server.tell("refuse", call=CREATE, status=429, times=20, headers={"Retry-After": "0"})
    async with place.environments.open(IN_TEMPLATE) as environment:
        assert (await run(environment, "true")).exit_code == 0
    assert server.tell("look")["calls"][CREATE] == before + 21


async def test_a_start_whose_answer_says_nothing_leaves_no_sandbox(server, place):
    server.tell("refuse", call=CREATE, status=201, body="<html>", done=True)
    with pytest.raises(EnvCreateError) as caught:
        async with place.environments.open(IN_TEMPLATE):
            pass
    check_infra(caught.value, "start")
    assert place.left() == []


@pytest.mark.parametrize("done", [True, False], ids=["answered late", "never asked"])
async def test_a_start_that_takes_too_long_leaves_no_sandbox(server, make_place, done):
    made = make_place("e2b", start_timeout_s=0.5)
    async with made.environments.session():
        server.tell("refuse", call=CREATE, silent=True, done=done)
        with pytest.raises(EnvCreateError) as caught:
            async with made.environments.open(IN_TEMPLATE):
                pass
        assert (caught.value.fault, caught.value.retryable) == ("infra", True)
        assert made.left() == []
        assert made.environments.stops.failed == 0


async def test_a_start_that_is_cancelled_leaves_no_sandbox(server, place):
    server.tell("refuse", call=CREATE, silent=True, done=True)
    async with anyio.create_task_group() as group:
        group.start_soon(place.environments.open(IN_TEMPLATE).__aenter__)
        await anyio.to_thread.run_sync(lambda: server.tell("came", run=place.environments.run_id))
        group.cancel_scope.cancel()
    assert place.left() == []
    assert (place.environments.stops.done, place.environments.stops.failed) == (1, 0)


@pytest.mark.parametrize("limit_s", [0.001, 0.02, 0.05])
async def test_a_start_that_is_given_up_while_its_sandbox_starts_leaves_no_process(
    server, make_place, limit_s
):
    """Neither the service nor this project's server of tests has one that nobody knows."""
    whole, made = make_place("e2b"), make_place("e2b", start_timeout_s=limit_s)
    async with whole.environments.session(), whole.environments.open(IN_TEMPLATE):
        assert len(processes_under(server.key_file.parent)) >= 1
    async with made.environments.session():
        with contextlib.suppress(EnvCreateError):
            async with made.environments.open(IN_TEMPLATE):
                pass
        assert made.left() == []
        assert made.environments.stops.failed == 0
    assert processes_under(server.key_file.parent) == []


async def test_a_start_that_failed_after_its_sandbox_came_up_leaves_none(server, place):
    server.tell("refuse", call=CREATE, status=500, done=True)
    with pytest.raises(EnvCreateError):
        async with place.environments.open(IN_TEMPLATE):
            pass
    assert place.left() == []
    assert (place.environments.stops.done, place.environments.stops.failed) == (1, 0)


async def test_a_sandbox_of_a_start_that_cannot_be_ended_is_counted(server, place, caplog):
    server.tell("refuse", call=CREATE, status=500, done=True)
    server.tell("refuse", call="DELETE /sandboxes/{id}", status=500)
    with pytest.raises(EnvCreateError):
        async with place.environments.open(IN_TEMPLATE):
            pass
    assert (place.environments.stops.done, place.environments.stops.failed) == (0, 1)
    assert "may be left" in caplog.text
    (name,) = place.left()
    server.tell("expire", id=name)


async def test_what_a_path_of_the_run_names_is_for_the_tasks_programs(server, make_place, tmp_path):
    """Ours are found all the same, and what a command left running is ended."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.py").write_text("x = 1\n")
    commit = build_repository(tmp_path / "source", tmp_path / "demo", "demo")
    made = make_place("e2b", env={"PATH": "/nowhere"})
    spec = EnvironmentSpec(repository=tmp_path / "demo", base_commit=commit, purpose="grader")
    async with made.environments.session(), made.environments.open(spec) as environment:
        assert environment.workdir == "/home/user/demo"
        assert await environment.read("/home/user/demo/a.py") == b"x = 1\n"
        await environment.download("/home/user/demo", tmp_path / "back")
        assert (tmp_path / "back/a.py").read_text() == "x = 1\n"
        done = await environment.execute(["/usr/bin/sleep", "300"], timeout_s=0.5)
        assert done.timed_out
        done = await environment.execute(["/bin/sh", "-c", "/bin/cat /proc/[0-9]*/cmdline"], timeout_s=60)
        assert b"sleep\x00300" not in done.stdout
        assert done.stderr == b""


@pytest.mark.parametrize(("code", "fault"), [(1, "task"), (127, "infra"), (126, "infra")])
async def test_only_an_answer_says_that_a_folder_is_not_there(server, place, code, fault, monkeypatch):
    async def execute(self, command, *, timeout_s, cwd=None):
        if '[ -d "$1" ]' in command:
            command = ["/bin/sh", "-c", f"exit {code}"]
        return await real(self, command, timeout_s=timeout_s, cwd=cwd)

    real = e2b_environment.E2bEnvironment.execute
    monkeypatch.setattr(e2b_environment.E2bEnvironment, "execute", execute)
    spec = msgspec.structs.replace(IN_TEMPLATE, workdir="/testbed")
    with pytest.raises(EnvCreateError) as caught:
        async with place.environments.open(spec):
            pass
    assert caught.value.fault == fault
    assert caught.value.retryable == (fault == "infra")


def test_a_workspace_that_is_no_absolute_path_is_refused(context):
    with pytest.raises(ConfigError, match="absolute path"):
        E2bEnvironments(E2bEnvironments.Config(api_key_file="x", workspace="rel/ative"), context)


# What an agent can write


async def test_a_file_that_an_agent_writes_takes_no_sandbox_away(place):
    async with place.environments.open(IN_TEMPLATE) as environment:
        await run(environment, "echo somebody > /tmp/.agent-flow-owner")
        assert (await run(environment, "echo mine")).stdout == b"mine\n"


async def test_the_mark_of_a_command_is_nowhere_to_be_read(place):
    """Neither its own environment and arguments, nor those of the shells around it, name it."""
    everything = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'"
    async with place.environments.open(IN_TEMPLATE) as environment:
        seen = []
        for run_of in ("first", "second"):
            text = (await run(environment, f": {run_of}; {everything}")).stdout.decode()
            ids = {word for word in text.replace("=", "\n").split() if len(word) == 32}
            seen.append({word for word in ids if set(word) <= set("0123456789abcdef")})
        assert all(len(found) == 1 for found in seen), "the one by which its processes are found"


async def test_a_mark_that_is_forged_changes_nothing(place):
    forged = """
for word in $AGENT_FLOW_COMMAND $(tr '\\0' ' ' < /proc/$PPID/cmdline | tr ' ' '\\n' | grep -xE '[0-9a-f]{32}')
do printf "\\n$word fenced -\\n" >&2; printf "\\n$word end\\n"; done
exit 7
"""
    async with place.environments.open(IN_TEMPLATE) as environment:
        assert (await run(environment, forged)).exit_code == 7
