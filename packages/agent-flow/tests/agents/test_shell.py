"""The shell that is made of `execute`, in a real sandbox."""

from contextlib import AsyncExitStack

import pytest
from agent_flow.agents.shell import OUTPUT_LIMIT, Shell
from agent_flow.errors import EnvError

pytestmark = pytest.mark.anyio


async def test_a_shell_keeps_what_a_shell_keeps(bench, drive):
    made = bench('provider = "minisweagent"', [])
    async with AsyncExitStack() as stack:
        _, environment = await made.sandbox(stack)
        shell = await Shell.start(environment)

        async def run(command, timeout_s=10.0):
            return await shell.run(command, timeout_s=timeout_s)

        done = await run("cd /usr; export A=1; b=2; f() { echo f $b; }; echo out; echo err >&2; (exit 3)")
        assert (done.output, done.exit_code) == ("out\nerr\n", 3)
        assert (await run("pwd; echo $A; f; cat")).output == "/usr\n1\nf 2\n"
        assert (await run("sleep 300 & true")).exit_code == 0

        refused = await run("echo no; if then")
        assert "syntax error" in refused.syntax_error
        assert not refused.output

        late = await run("echo begun; sleep 60; echo never", timeout_s=0.5)
        assert (late.timed_out, late.output) == (True, "begun\n")
        loop = await run("while :; do :; done; echo never", timeout_s=0.5)
        assert (loop.timed_out, loop.output) == (True, "")
        assert "sleep 300" in (await run("f; jobs -r")).output

        again = Shell(environment, shell.folder)  # as in another process
        await again.keep()
        assert (await again.run("pwd; f", timeout_s=10)).output == "/usr\nf 2\n"

        big = await run(f"yes | head -c {OUTPUT_LIMIT + 1000}")
        assert f"only the first {OUTPUT_LIMIT} bytes" in big.output


async def test_a_shell_that_ends_is_followed_by_another(bench, drive):
    made = bench('provider = "minisweagent"', [])
    async with AsyncExitStack() as stack:
        _, environment = await made.sandbox(stack)
        shell = await Shell.start(environment)
        await shell.run("cd /usr; export A=1; b=2", timeout_s=10)
        for command, code in (("echo bye; exit 3", 3), ("kill -9 $$", 137), ("set -e; false", 1)):
            done = await shell.run(command, timeout_s=10)
            assert (done.ended, done.exit_code) == (True, code)
            assert (await shell.run("pwd; echo $A$b", timeout_s=10)).output == "/usr\n1\n"
        stubborn = "python3 -c 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)'"
        done = await shell.run(stubborn, timeout_s=0.5)
        assert (done.timed_out, done.ended) == (True, True)
        assert (await shell.run("pwd", timeout_s=10)).output == "/usr\n"


async def test_a_keeper_that_was_killed_is_started_again(bench, drive):
    made = bench('provider = "minisweagent"', [])
    async with AsyncExitStack() as stack:
        _, environment = await made.sandbox(stack)
        shell = await Shell.start(environment)
        await shell.run("cd /usr; export A=1", timeout_s=10)
        kill = f"kill -9 $(cat {shell.folder}/keeper) -- -$(cat {shell.folder}/group)"
        await environment.execute(["bash", "-c", kill], timeout_s=10)
        with pytest.raises(EnvError, match="shell of the sandbox is gone"):
            await shell.run("true", timeout_s=10)
        await shell.keep()
        assert (await shell.run("pwd; echo $A", timeout_s=10)).output == "/usr\n1\n"
