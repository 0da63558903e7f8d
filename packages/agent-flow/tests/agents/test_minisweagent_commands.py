"""Commands that no argument vector can hold, as mini-swe-agent's environment runs them."""

from contextlib import AsyncExitStack

import anyio.to_thread
import pytest
from agent_flow.agents.minisweagent import _ScaffoldEnvironment

pytestmark = pytest.mark.anyio


@pytest.fixture
def run(bench):
    """Runs commands one after the other in one sandbox, from a thread as the scaffold does."""
    made = bench('provider = "minisweagent"', [])

    async def execute(*commands):
        async with AsyncExitStack() as stack:
            _, environment = await made.sandbox(stack)
            scaffold = _ScaffoldEnvironment(environment, {}, 20.0)
            return [
                await anyio.to_thread.run_sync(scaffold.execute, {"command": command}) for command in commands
            ]

    return execute


@pytest.mark.parametrize("size", [90_000, 140_000, 1_000_000])
async def test_a_long_command_is_run(run, size):
    command = f"cat > long <<'X'\n{'é' * (size // 2)}\nX\nwc -c < long; pwd; no-such; (exit 5)"
    (done,) = await run(command)
    assert done["returncode"] == 5, done
    lines = done["output"].splitlines()
    assert int(lines[0]) == size + 1
    assert "no-such: command not found" in lines[2]


class _WithoutPath:
    """A sandbox in which bash finds no bash."""

    def __init__(self, environment):
        self._environment = environment
        self.workdir = environment.workdir

    async def execute(self, command, *, timeout_s, cwd=None):
        command = ["/usr/bin/env", "PATH=/nowhere", "/bin/bash", *command[1:]]
        return await self._environment.execute(command, timeout_s=timeout_s, cwd=cwd)


async def test_what_bash_itself_says_is_shown(bench):
    made = bench('provider = "minisweagent"', [])
    async with AsyncExitStack() as stack:
        _, environment = await made.sandbox(stack)
        scaffold = _ScaffoldEnvironment(_WithoutPath(environment), {}, 20.0)
        done = await anyio.to_thread.run_sync(scaffold.execute, {"command": "true"})
    assert done["returncode"] == 127
    assert "bash: not found" in done["output"]


@pytest.mark.parametrize(("command", "why"), [("echo a\0b", "NUL"), ("echo \ud800", "surrogate")])
async def test_what_no_process_can_be_given_is_said_in_plain_words(run, command, why):
    first, second = await run(command, command)
    assert first == second
    assert first["returncode"] == -1
    assert why in first["exception_info"]
