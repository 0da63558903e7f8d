"""What is of E2B alone: keys, leases, handles, refusals of the service, sandboxes that vanish."""

import contextlib
import json
import os
import sys
from importlib.metadata import version

import anyio
import anyio.to_thread
import msgspec
import pytest
from agent_flow.agents.shell import Shell
from agent_flow.environments.e2b import E2bEnvironments, E2bHandle
from agent_flow.errors import ConfigError, EnvCreateError, EnvError
from agent_flow.outcome import outcome_of_error
from agent_flow.protocols import EnvironmentSpec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]
CREATE, LIST = "POST /v2/sandboxes", "GET /v2/sandboxes"
IN_TEMPLATE = EnvironmentSpec(image="testbed", workdir="/testbed")
AT_ONCE = {"Should-Retry": "false"}


@pytest.fixture
def place(e2b_place):
    return e2b_place


async def run(environment, script, **more):
    return await environment.execute(["bash", "-c", script], **{"timeout_s": 60} | more)


def check_infra(error, cause, retryable):
    assert (error.boundary, error.cause, error.fault, error.retryable) == (
        "environment", cause, "infra", retryable,
    )  # fmt: skip
    assert error.evidence
    row = outcome_of_error(error)
    assert (row.sample, row.reward, row.retry) == (False, None, True), "never a reward of 0"


# Starting


@pytest.mark.parametrize(
    ("status", "message", "cause", "fault", "retryable"),
    [
        (401, "Invalid API key", "auth", "infra", False),
        (403, "you don't have access to template 'x'", "image_auth", "image", False),
        (404, "tag 'v2' does not exist for template 'x'", "image_not_found", "image", False),
        (403, "Team is blocked: billing", "auth", "infra", False),
        (404, "page not found", "service", "infra", True),
        (400, "Invalid template reference: x y", "image_name_invalid", "image", False),
        (400, "Timeout cannot be greater than 1 hours", "start", "infra", False),
        (429, "you have reached the maximum number of concurrent sandboxes", "rate_limit", "infra", True),
        (500, "error resolving template 'x'", "service", "infra", True),
        (502, "bad gateway", "service", "infra", True),
        (503, "no nodes available", "no_capacity", "infra", True),
        (507, "no space", "service", "infra", True),
    ],
)
async def test_a_refused_start_says_why(server, place, status, message, cause, fault, retryable):
    server.tell("refuse", call=CREATE, status=status, message=message, headers=AT_ONCE)
    with pytest.raises(EnvCreateError) as caught:
        async with place.environments.open(IN_TEMPLATE):
            pass
    error = caught.value
    assert (error.cause, error.fault, error.retryable) == (cause, fault, retryable), error
    assert error.evidence
    if status != 401:
        assert message in error.evidence
    row = outcome_of_error(error)
    assert (row.sample, row.reward) == (False, None)
    assert (place.environments.stops.done, place.environments.stops.failed) == (0, 0), "none came up"


async def test_a_service_that_was_asked_too_often_is_asked_again_when_it_says(server, place):
    before = server.tell("look")["calls"].get(CREATE, 0)
    server.tell("refuse", call=CREATE, status=429, times=3, headers={"Retry-After": "0"})
    async with place.environments.open(IN_TEMPLATE) as environment:
        assert (await run(environment, "true")).exit_code == 0
    assert server.tell("look")["calls"][CREATE] == before + 4


async def test_a_wait_that_is_longer_than_a_start_may_take_is_not_waited_for(server, make_place):
    made = make_place("e2b", start_timeout_s=60.0)
    server.tell("refuse", call=CREATE, status=429, headers={"Retry-After": "3600"})
    async with made.environments.session():
        with anyio.fail_after(50), pytest.raises(EnvCreateError) as caught:
            async with made.environments.open(IN_TEMPLATE):
                pass
    check_infra(caught.value, "rate_limit", retryable=True)


async def test_a_start_whose_answer_was_lost_is_asked_for_again_and_is_one_sandbox(server, place):
    server.tell("refuse", call=CREATE, status=503, done=True, headers={"Retry-After": "0"})
    async with place.environments.open(IN_TEMPLATE):
        assert len(place.left()) == 1


async def test_what_the_service_is_asked_for(server, make_place):
    made = make_place("e2b", env={"COLOUR": "blue"}, lease_s=77, network=True)
    async with made.environments.session(), made.environments.open(IN_TEMPLATE) as environment:
        (name,) = made.left()
        asked = server.tell("look")["sandboxes"][name]["body"]
        assert (asked["templateID"], asked["timeout"]) == ("testbed", 77)
        assert asked["autoPause"] is False, "a sandbox whose lease is over ends, and is not kept"
        assert asked["allow_internet_access"] is True
        assert len(asked["metadata"].pop("agent-flow.start")) == 32
        assert asked["metadata"] == {
            "agent-flow.run": made.environments.run_id,
            "agent-flow.purpose": "agent",
        }
        assert (await run(environment, "echo $COLOUR $GIT_AUTHOR_NAME")).stdout == b"blue agent\n"
        described = environment.describe()
        assert described["environment_backend"] == f"e2b {version('e2b')}, envd 0.6.13"
        assert described["environment_template"] == "tid-0001"
    assert not E2bEnvironments.Config(api_key_file="x").network


async def test_without_a_template_the_task_is_at_fault(make_place, place):
    made = make_place("e2b", template="")
    async with made.environments.session():
        with pytest.raises(EnvCreateError, match=r"environment\.template") as caught:
            async with made.environments.open(EnvironmentSpec(workdir="/testbed")):
                pass
    assert caught.value.fault == "task"


# Keys and addresses


async def session(environments):
    with pytest.raises(ConfigError) as caught:
        async with environments.session():
            pass
    assert caught.value.where.endswith("[environment]")
    return str(caught.value)


async def test_a_key_that_the_service_does_not_take_is_said_before_the_run(make_place, server, tmp_path):
    (tmp_path / "key").write_text("e2b_wrong_0123456789\n")
    said = await session(make_place("e2b", api_key_file=str(tmp_path / "key")).environments)
    assert "the API key was refused" in said
    assert "e2b_wrong" not in said


async def test_a_key_file_that_is_missing_or_holds_no_key(make_place, server, tmp_path):
    said = await session(make_place("e2b", api_key_file=str(tmp_path / "nowhere")).environments)
    assert "cannot read" in said
    assert "nowhere" in said
    (tmp_path / "empty").write_text("\n")
    said = await session(make_place("e2b", api_key_file=str(tmp_path / "empty")).environments)
    assert "one API key" in said


async def test_a_service_that_does_not_answer_is_said_before_the_run(make_place, server):
    said = await session(make_place("e2b", api_url="http://127.0.0.1:9").environments)
    assert "no sandboxes can be started" in said


async def test_a_proxy_is_used_where_it_is_asked_for(make_place, server, monkeypatch):
    """That it is not used elsewhere is seen in a process of its own, below: the SDK keeps its connections."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    said = await session(make_place("e2b", use_proxies=True).environments)
    assert "no sandboxes can be started" in said


@pytest.mark.parametrize("key", ["api_url", "sandbox_url"])
def test_an_address_with_credentials_is_refused(context, key):
    with pytest.raises(ConfigError, match="credentials") as caught:
        E2bEnvironments(
            E2bEnvironments.Config(api_key_file="x", **{key: "https://me:secret@e2b.dev"}), context
        )
    assert "secret" not in str(caught.value)


async def test_what_the_variables_of_the_sdk_say_changes_nothing(server, make_place, monkeypatch):
    monkeypatch.setenv("E2B_DEBUG", "true")  # the SDK would stop no sandbox
    monkeypatch.setenv("E2B_API_KEY", "e2b_another")
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    made = make_place("e2b")
    async with made.environments.session(), made.environments.open(IN_TEMPLATE):
        assert len(made.left()) == 1
    assert made.left() == []


# Sandboxes that vanish


@contextlib.asynccontextmanager
async def command_that_lasts(server, name, environment):
    """A command that has begun; the error that it ends with is put into the list."""
    ended = []

    async def command():
        try:
            await run(environment, "echo begun; touch /tmp/begun; sleep 300", timeout_s=200)
        except EnvError as error:
            ended.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(command)
        await run(environment, "until [ -e /tmp/begun ]; do sleep 0.02; done")
        yield ended


async def test_a_sandbox_whose_lease_ends_in_mid_command_is_lost(server, place, caplog):
    async with place.environments.open(IN_TEMPLATE) as environment:
        (name,) = place.left()
        async with command_that_lasts(server, name, environment) as ended:
            server.tell("expire", id=name)
        check_infra(ended[0], "lost", retryable=True)
        assert not isinstance(ended[0], EnvCreateError)
        for again in (
            run(environment, "true"),
            environment.read("/testbed/setup.cfg"),
            environment.write("/tmp/x", b"x"),
        ):
            with pytest.raises(EnvError) as caught:
                await again
            check_infra(caught.value, "lost", retryable=True)
    assert (place.environments.stops.done, place.environments.stops.failed) == (1, 0), "it is gone"


async def test_a_connection_that_breaks_in_mid_command_is_an_infrastructure_failure(server, place):
    async with place.environments.open(IN_TEMPLATE) as environment:
        (name,) = place.left()
        async with command_that_lasts(server, name, environment) as ended:
            server.tell("cut", id=name)
        check_infra(ended[0], "unreachable", retryable=True)
        server.tell("mend", id=name)
        assert (await run(environment, "echo here")).stdout == b"here\n"


async def test_a_sandbox_that_cannot_be_stopped_costs_no_rollout(server, place, caplog):
    async with place.environments.open(IN_TEMPLATE):
        (name,) = place.left()
        call = "DELETE /sandboxes/{id}"
        server.tell("refuse", call=call, status=500, message="internal error", headers=AT_ONCE)
    assert (place.environments.stops.done, place.environments.stops.failed) == (0, 1)
    assert "could not be stopped" in caplog.text
    server.tell("expire", id=name)


async def test_it_is_stopped_once(server, place):
    before = server.tell("look")["calls"].get("DELETE /sandboxes/{id}", 0)
    with pytest.raises(ZeroDivisionError):
        async with place.environments.open(IN_TEMPLATE):
            1 / 0  # noqa: B018
    assert server.tell("look")["calls"]["DELETE /sandboxes/{id}"] == before + 1


async def test_a_program_without_an_end_has_no_exit_code(place):
    """An agent may kill whatever it finds, the shell around its command too."""
    async with place.environments.open(IN_TEMPLATE) as environment:
        with pytest.raises(EnvError) as caught:
            await run(environment, "echo out; echo err >&2; kill -9 $PPID")
        assert (caught.value.cause, caught.value.retryable) == ("execute", True)
        assert caught.value.evidence == "err\n"


async def test_more_output_than_is_kept_is_cut_in_the_middle(place):
    async with place.environments.open(IN_TEMPLATE) as environment:
        done = await run(environment, "head -c 20000000 /dev/zero; printf '\\377end'; exit 3")
        assert done.exit_code == 3
        assert done.stdout.startswith(b"\0" * 1000)
        assert done.stdout.endswith(b"\xffend")
        assert b"bytes left out" in done.stdout
        assert len(done.stdout) < 9 << 20


# Memory


async def test_a_grader_whose_sandbox_runs_out_of_memory_gives_no_verdict(server, place):
    """What was killed before, as when the template was made, does not count."""
    for purpose in ("grader", "agent"):
        spec = msgspec.structs.replace(IN_TEMPLATE, purpose=purpose)
        async with place.environments.open(spec) as environment:
            (name,) = place.left()
            assert (await run(environment, "exit 1")).exit_code == 1
            server.tell("oom", id=name, count=8)
            if purpose == "agent":
                assert (await run(environment, "exit 1")).exit_code == 1
                continue
            with pytest.raises(EnvError, match="memory") as caught:
                await run(environment, "echo FAILED test_a; exit 1")
            assert (caught.value.cause, caught.value.fault) == ("oom", "task")
            assert "from 7 to 8" in caught.value.evidence


# Leases and handles


async def test_a_lease_is_extended_while_the_sandbox_is_in_use(server, make_place, caplog):
    made = make_place("e2b", lease_s=1)
    call = "POST /sandboxes/{id}/timeout"
    async with made.environments.session(), made.environments.open(IN_TEMPLATE):
        (name,) = made.left()
        server.tell("refuse", call=call, status=503, headers=AT_ONCE)
        seen = await anyio.to_thread.run_sync(lambda: server.tell("renewed", id=name, times=3))
        assert set(seen["sandboxes"][name]["timeouts"]) == {1}
    assert "was not extended" in caplog.text, "one that fails is said, and the next is tried"


@pytest.mark.original("A-e2b")
async def test_a_sandbox_that_was_left_lives_on_with_its_new_lease(server, place):
    async with place.environments.open(IN_TEMPLATE) as environment:
        handle = await environment.detach(1234)
        with pytest.raises(EnvError) as caught:
            await run(environment, "true")
        assert caught.value.cause == "detached"
        await environment.renew(300)
    assert (place.environments.stops.done, place.environments.stops.failed) == (0, 0)
    (name,) = place.left()
    seen = server.tell("look")["sandboxes"][name]
    assert seen["timeouts"] == [300, 1234]
    text = msgspec.json.encode(handle).decode()
    assert seen["token"] not in text
    assert place.environments._key_file.read_text().strip() not in text
    async with place.environments.attach(msgspec.json.decode(text, type=E2bHandle)) as attached:
        assert attached.workdir == "/testbed"
        assert attached.describe()["environment_image"] == "testbed"
        assert (await run(attached, "cat pkg/b.py", cwd="/testbed")).stdout == b"y = 1\n"
    assert (place.environments.stops.done, place.environments.stops.failed) == (1, 0)


async def test_a_handle_of_a_sandbox_that_is_gone_says_so(server, place):
    async with place.environments.open(IN_TEMPLATE) as environment:
        handle = await environment.detach(60)
    server.tell("expire", id=handle.sandbox_id)
    with pytest.raises(EnvError) as caught:
        async with place.environments.attach(handle):
            pass
    check_infra(caught.value, "lost", retryable=True)
    other = msgspec.structs.replace(handle, api_url="https://api.e2b.app")
    with pytest.raises(EnvError, match=r"api\.e2b\.app"):
        async with place.environments.attach(other):
            pass


async def test_a_lease_that_is_refused_leaves_the_sandbox_where_it_was(server, place):
    async with place.environments.open(IN_TEMPLATE) as environment:
        server.tell(
            "refuse",
            call="POST /sandboxes/{id}/timeout",
            status=400,
            message="Timeout cannot be greater than 24 hours",
        )
        with pytest.raises(EnvError):
            await environment.detach(10**6)
        assert (await run(environment, "echo mine")).stdout == b"mine\n"
    assert (place.environments.stops.done, place.environments.stops.failed) == (1, 0)


async def test_of_two_that_attach_the_last_one_has_it(place, caplog):
    async with place.environments.open(IN_TEMPLATE) as environment:
        handle = await environment.detach(600)
    taken = place.environments.attach(handle)
    async with place.environments.attach(handle) as first:
        assert (await run(first, "true")).exit_code == 0
        second = await taken.__aenter__()
        with pytest.raises(EnvError) as caught:
            await run(first, "touch /tmp/late")
        assert (caught.value.cause, caught.value.retryable) == ("fenced", False)
    assert (place.environments.stops.done, place.environments.stops.failed) == (0, 1), "not ours to stop"
    assert (await run(second, "[ ! -e /tmp/late ] && echo here")).stdout == b"here\n"
    await taken.__aexit__(None, None, None)
    assert (place.environments.stops.done, place.environments.stops.failed) == (1, 1)


ELSEWHERE = """
import sys
from pathlib import Path
import anyio, msgspec
from agent_flow.agents.shell import Shell
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.environments.e2b import E2bEnvironments, E2bHandle
from agent_flow.protocols import ProviderContext

assert "e2b" not in sys.modules
keys, handle, folder, config = sys.argv[1:]
context = ProviderContext(
    file=load_config(Path(config)), clock=Clock(), tokenizer=None, scratch=Path("."))

async def main():
    environments = E2bEnvironments(msgspec.json.decode(keys, type=E2bEnvironments.Config), context)
    async with environments.session():
        async with environments.attach(msgspec.json.decode(handle, type=E2bHandle)) as environment:
            done = await Shell(environment, folder).run("pwd; echo $A; f; jobs -r", timeout_s=60)
            print(done.output)
    print(environments.stops.done, environments.stops.failed)

anyio.run(main)
"""


@pytest.mark.original("A-e2b")
async def test_another_process_goes_on_in_the_same_shell(server, place, repository, example):
    """And no proxy that the environment names is used there."""
    async with place.environments.open(repository) as environment:
        shell = await Shell.start(environment)
        await shell.run(f"cd {environment.workdir}; export A=1; f() {{ echo f; }}; sleep 300 &", timeout_s=60)
        handle = await environment.detach(600)
    words = [
        json.dumps(server.config),
        msgspec.json.encode(handle).decode(),
        shell.folder,
        str(example / "run.toml"),
    ]
    proxies = {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "NO_PROXY": ""}
    env = {key: value for key, value in os.environ.items() if key.lower() != "no_proxy"} | proxies
    done = await anyio.run_process(
        [sys.executable, "-W", "error", "-c", ELSEWHERE, *words], env=env, check=False
    )
    said = done.stdout.decode().splitlines()
    assert done.returncode == 0, done.stderr.decode()
    assert said[:3] == [handle.workdir, "1", "f"]
    assert "sleep 300" in said[3]
    assert said[-1] == "1 0"
