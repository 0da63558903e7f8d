"""A container program that stops answering."""

import anyio
import pytest
from agent_flow.clock import Clock
from agent_flow.environments.container import ContainerEnvironment, ContainerProgram
from agent_flow.errors import EnvError

pytestmark = pytest.mark.anyio

PROGRAM = """#!/bin/sh
case "$*" in *"each TERM"*) {ending} ;; esac
shift 4
exec "$@"
"""
"""Runs on this machine what it is told to run in a container, but for what ends commands."""


@pytest.fixture
def environment(tmp_path):
    def make(ending):
        program = tmp_path / "docker"
        program.write_text(PROGRAM.format(ending=ending))
        program.chmod(0o755)
        return ContainerEnvironment(
            ContainerProgram(str(program)), "c", Clock(), workdir="/", described={}, watch_memory=False
        )

    return make


@pytest.mark.parametrize("ending", ["echo the daemon is gone >&2; exit 1", "exec sleep 300"])
async def test_a_command_that_could_not_be_ended_is_no_time_out(environment, ending, monkeypatch):
    monkeypatch.setattr("agent_flow.environments.container._KILL_S", 0.3)
    with pytest.raises(EnvError) as caught:
        await environment(ending).execute(["sleep", "20"], timeout_s=0.3)
    error = caught.value
    assert (error.cause, error.fault, error.retryable) == ("unreachable", "infra", True)
    assert "sleep 20" in error.evidence


async def test_a_command_that_was_ended_has_timed_out(environment):
    done = await environment("exit 0").execute(["sleep", "20"], timeout_s=0.3)
    assert (done.timed_out, done.exit_code) == (True, None)


async def test_a_command_that_is_cancelled_is_cancelled_whatever_its_end_says(environment):
    with anyio.move_on_after(0.3) as limit:
        await environment("exit 1").execute(["sleep", "20"], timeout_s=60)
    assert limit.cancelled_caught
