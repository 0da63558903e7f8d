"""A sandbox that never came up is told apart from one that failed later, and neither is a reward of 0."""

import json
import os

import pytest
from agent_flow.environments.creation import creating
from agent_flow.environments.docker import DockerEnvironments
from agent_flow.errors import EnvCreateError, EnvError
from agent_flow.outcome import ERRORS, outcome_of_error
from agent_flow.protocols import EnvironmentSpec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]
ABSENT = EnvironmentSpec(image="localhost/agent-flow-no-such-image:1", workdir="/")


def check(error, cause, fault, retryable):
    assert (error.boundary, error.cause, error.fault, error.retryable) == (
        "environment", cause, fault, retryable,
    )  # fmt: skip
    row = outcome_of_error(error)
    assert (row.sample, row.reward, row.in_loss, row.in_baseline) == (False, None, False, False)
    later = EnvError(error.cause, error.message, fault=error.fault, retryable=error.retryable)
    assert outcome_of_error(later) is row, "the same row of the table as of any failure of a sandbox"
    assert error.reason == later.reason


async def fails_to_open(environments, spec):
    with pytest.raises(EnvCreateError) as caught:
        async with environments.open(spec):
            pass
    return caught.value


@pytest.mark.original("A-generate-start-error")
@pytest.mark.parametrize("fault", ["infra", "image", "task", "agent"])
@pytest.mark.parametrize("retryable", [True, False])
def test_nothing_but_the_class_changes(fault, retryable):
    error = EnvError("start", "no room", fault=fault, retryable=retryable, evidence="what was seen")
    with pytest.raises(EnvCreateError) as caught, creating():
        raise error
    made = caught.value
    assert (made.message, made.evidence, made.__cause__) == ("no room", "what was seen", error)
    check(made, "start", fault, retryable)
    assert any(row.ends == "environment" and row.retry for row in ERRORS)
    with pytest.raises(ZeroDivisionError), creating():
        1 / 0  # noqa: B018


async def test_local(make_place, repository):
    made = make_place("local")
    check(await fails_to_open(made.environments, repository), "client", "infra", False)
    async with made.environments.session():
        check(await fails_to_open(made.environments, ABSENT), "image", "task", False)
        absent = EnvironmentSpec(repository=repository.repository / "nowhere", base_commit="")
        check(await fails_to_open(made.environments, absent), "files", "infra", True)
    assert made.left() == []


PROGRAM = """#!/usr/bin/env python3
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
said = json.loads((folder / "said.json").read_text()).get(sys.argv[1])
if said is not None:
    print(said["text"], file=sys.stderr)
    sys.exit(said["code"])
print("28.1" if sys.argv[1] == "version" else "")
"""


@pytest.fixture
def docker(context, monkeypatch, tmp_path):
    """A command line that answers as it is told, and what it was called with."""

    def make(**said):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "docker").write_text(PROGRAM)
        (folder / "docker").chmod(0o755)
        (folder / "said.json").write_text(json.dumps(said))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return DockerEnvironments(DockerEnvironments.Config(program="docker"), context), folder / "calls"

    return make


@pytest.mark.parametrize(
    ("said", "cause", "fault", "retryable"),
    [
        (
            "docker: Error response from daemon: manifest for localhost/agent-flow-no-such-image:1 not "
            "found: manifest unknown",
            "image_not_found", "image", False,
        ),
        ("write /var/lib/docker/tmp/x: no space left on device", "no_space", "infra", True),
        ("Error response from daemon: context deadline exceeded", "start", "infra", True),
    ],
)  # fmt: skip
async def test_docker(docker, said, cause, fault, retryable):
    environments, calls = docker(run={"code": 125, "text": said})
    async with environments.session():
        error = await fails_to_open(environments, ABSENT)
    check(error, cause, fault, retryable)
    assert error.evidence == said
    called = [json.loads(line)[0] for line in calls.read_text().splitlines()]
    assert called == ["ps", "version", "run", "rm", "ps"], "removed once, though it may never have been"


async def test_docker_a_container_that_dies_before_the_task_is_a_failed_start(docker):
    environments, _ = docker(exec={"code": 1, "text": "Error: container is not running"})
    async with environments.session():
        error = await fails_to_open(environments, ABSENT)
    check(error, "execute", "infra", True)
    assert "is not running" in error.evidence


@pytest.mark.original("A-generate-start-error")
async def test_k8s(why_not, request, make_place, repository):
    if why := why_not("fake"):
        pytest.skip(why)
    made = make_place("fake")
    check(await fails_to_open(made.environments, repository), "client", "infra", False)
    async with made.environments.session():
        request.getfixturevalue("fake").doom("image-not-found")
        error = await fails_to_open(made.environments, repository)
        check(error, "image_not_found", "image", False)
        assert error.evidence
    assert made.left() == []


async def test_e2b(why_not, make_place, repository):
    if why := why_not("e2b"):
        pytest.skip(why)
    made = make_place("e2b")
    check(await fails_to_open(made.environments, repository), "client", "infra", False)
    async with made.environments.session():
        error = await fails_to_open(made.environments, ABSENT)
        check(error, "image_not_found", "image", False)
        assert "template 'localhost/agent-flow-no-such-image:1' not found" in error.evidence
    assert made.left() == []


@pytest.mark.parametrize("place_of", ["local", "e2b"])
async def test_what_fails_in_a_sandbox_that_came_up_is_no_failed_start(
    why_not, make_place, repository, place_of
):
    if why := why_not(place_of):
        pytest.skip(why)
    made = make_place(place_of)
    async with made.environments.session(), made.environments.open(repository) as environment:
        with pytest.raises(EnvError) as caught:
            await environment.execute(["pwd"], timeout_s=30, cwd="/nowhere")
    assert not isinstance(caught.value, EnvCreateError)
