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
        gone = await shell.run("touch ran", timeout_s=10)
        assert (gone.ended, gone.exit_code) == (True, 137)
        assert "was not run" in gone.output
        assert (await shell.run("pwd; echo $A; ls ran", timeout_s=10)).output.startswith("/usr\n1\nls: ")


@pytest.mark.parametrize("command", ['kill -9 $(cat "$__af/keeper") $$', 'rm -rf "$__af"'])
async def test_a_command_that_ends_all_of_it_is_not_waited_for(bench, drive, command):
    made = bench('provider = "minisweagent"', [])
    async with AsyncExitStack() as stack:
        _, environment = await made.sandbox(stack)
        shell = await Shell.start(environment)
        lost = await shell.run(command, timeout_s=3600)
        assert (lost.ended, lost.exit_code) == (True, 137)
        assert "lost while the command ran" in lost.output
        assert (await shell.run("echo on", timeout_s=10)).output == "on\n"


async def test_a_shell_whose_folder_was_removed_is_started_again(bench, drive):
    made = bench('provider = "minisweagent"', [])
    async with AsyncExitStack() as stack:
        sandbox, environment = await made.sandbox(stack)
        shell = await Shell.start(environment)
        folder = shell.folder
        assert folder.rpartition("/")[2].startswith(".")  # `rm -rf /tmp/*` leaves it alone
        await environment.execute(["rm", "-rf", folder], timeout_s=10)
        assert (await shell.run("true", timeout_s=10)).ended
        assert (await shell.run("echo on", timeout_s=10)).output == "on\n"
        assert shell.folder == folder
        await sandbox.stop()
        with pytest.raises(EnvError):
            await shell.run("true", timeout_s=10)


@pytest.mark.parametrize(
    "command",
    [
        "break",
        "continue",
        "for i in 1; do break 9; done",
        "IFS=0123456789",
        "umask 777",
        "set -C",
        "set -a",
        "set -- a b c",
        "echo() { :; }; pwd() { :; }; rm() { :; }; printf() { :; }; declare() { :; }; source() { :; }",
        "shopt -s expand_aliases; alias builtin=false printf=false source=false declare=false",
        "export PATH=/nonexistent",
        "export IFS=ab12",
    ],
)
async def test_a_command_changes_the_shell_and_not_what_keeps_it(bench, drive, command):
    made = bench('provider = "minisweagent"', [])
    async with AsyncExitStack() as stack:
        _, environment = await made.sandbox(stack)
        shell = await Shell.start(environment)
        await shell.run("mark=here; \\cd /usr", timeout_s=10)
        assert not (await shell.run(command, timeout_s=10)).ended
        test = await shell.run("[[ $mark = here && $PWD = /usr ]] && (exit 13)", timeout_s=10)
        assert (test.exit_code, test.ended) == (13, False)
        assert (await shell.run("exit 7", timeout_s=10)).ended
        assert (await shell.run("[[ $PWD = /usr && -z $mark ]]", timeout_s=10)).exit_code == 0


async def test_every_interrupt_is_heard(bench, drive):
    made = bench('provider = "minisweagent"', [])
    async with AsyncExitStack() as stack:
        _, environment = await made.sandbox(stack)
        shell = await Shell.start(environment)
        await shell.run("mark=here", timeout_s=10)
        for command in ("while :; do :; done", "sleep 60", "while :; do :; done"):
            done = await shell.run(command, timeout_s=0.2)
            assert (done.timed_out, done.ended) == (True, False)
        assert (await shell.run("echo $mark", timeout_s=10)).output == "here\n"
