"""A shell that remembers, and comes back."""

import asyncio

import anyio
import anyio.lowlevel
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox_k8s import ClientConfig, Sandbox, SandboxClient, SandboxSpec, SessionError

from .conftest import client_of

pytestmark = pytest.mark.anyio


async def test_folder_variables_functions_and_status_persist(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    first = await session.run("mkdir -p d; cd d; export A=1; f() { echo f$A; }; false")
    assert (first.exit_code, first.session_alive) == (1, True)
    second = await session.run("echo $?; pwd; f; env | grep ^A=")
    assert second.stdout == f"1\n{sandbox.workdir}/d\nf1\nA=1\n".encode()


async def test_sessions_are_apart_and_found_by_name(sandbox: Sandbox) -> None:
    one, other = await sandbox.session("one"), await sandbox.session("other")
    await one.run("X=1")
    assert (await other.run("echo [$X]")).stdout == b"[]\n"
    assert (await (await sandbox.session("one")).run("echo [$X]")).stdout == b"[1]\n"


async def test_output_comes_apart_or_merged_as_bytes(sandbox: Sandbox) -> None:
    """UKGovernmentBEIS/inspect_k8s_sandbox#206: a byte that is not UTF-8 ended the call."""
    session = await sandbox.session()
    apart = await session.run(r"printf '\xff'; echo e >&2")
    assert (apart.stdout, apart.stderr) == (b"\xff", b"e\n")
    assert (await session.run("echo 1; echo 2 >&2; echo 3", merge_stderr=True)).stdout == b"1\n2\n3\n"


async def test_multi_line_commands_quotes_and_here_documents(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    result = await session.run(
        "cat <<'END'\nit's \"quoted\" $HOME !! \\\nEND\nfor i in 1 2\ndo echo $i\ndone # end"
    )
    assert result.stdout == b'it\'s "quoted" $HOME !! \\\n1\n2\n'


async def test_standard_input_is_empty_and_commands_cannot_eat_the_next(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    assert (await session.run("cat; read x; echo [$x]", timeout_s=5)).stdout == b"[]\n"


async def test_as_a_block_it_is_closed_at_its_end_whatever_happened_there(
    sandbox: Sandbox, nobody_left
) -> None:
    async def block() -> None:
        async with await sandbox.session(env={"OF_THE_BLOCK": "1"}) as session:
            await session.run("X=1; sleep 600 &")
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        await block()
    await nobody_left(sandbox, "OF_THE_BLOCK")
    assert (await sandbox.info())["sessions"] == {}
    async with await sandbox.session() as session:
        assert (await session.run("echo [$X]")).stdout == b"[]\n"
        await session.run("exit 3")
    async with await sandbox.session() as session:
        await session.close()
    with anyio.CancelScope() as scope:
        async with await sandbox.session():
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert (await sandbox.info())["sessions"] == {}


async def test_a_block_does_not_close_what_was_left_to_the_next_owner(client: SandboxClient) -> None:
    sandbox = await client.start()
    async with await sandbox.session() as session:
        await session.run("X=kept")
        handle = await sandbox.detach()
    taken = await client.attach(handle)
    async with await taken.session() as session:
        assert (await session.run("echo $X")).stdout == b"kept\n"
        await client.attach(handle)
    last = await client.attach(handle)
    assert (await last.info())["sessions"] == {"default": True}
    async with await last.session():
        await last.stop()


@pytest.mark.parametrize(
    "command",
    [
        "echo partial; while true; do sleep 1; done",
        "echo partial; while :; do :; done",
        "echo partial; sleep 60",
        "echo partial; (trap '' INT TERM; while :; do sleep 60; done)",
        "echo partial; trap 'echo caught' INT; sleep 60",
        "echo partial; sleep 60 | cat",
        "echo partial; bash -c 'sleep 60; echo no'",
    ],
)
async def test_after_a_time_out_the_session_is_usable(sandbox: Sandbox, command: str, nobody_left) -> None:
    session = await sandbox.session()
    await session.run("export PROBE=1 KEPT=yes; cd /")
    result = await session.run(command, timeout_s=0.15)
    assert (result.exit_code, result.timed_out, result.session_alive) == (None, True, True)
    assert result.stdout.startswith(b"partial\n")
    assert (await session.run("trap - INT; echo $KEPT $PWD", timeout_s=5)).stdout == b"yes /\n"
    await session.close()
    await nobody_left(sandbox, "PROBE")


@pytest.mark.parametrize("place", ["process"], indirect=True)
async def test_a_shell_that_ignores_interrupts_is_ended_and_says_so(sandbox: Sandbox, nobody_left) -> None:
    session = await sandbox.session()
    result = await session.run(
        "export PROBE=1; trap '' INT; while :; do read -t 0.01 <> <(:); done", timeout_s=0.2
    )
    assert (result.timed_out, result.session_alive) == (True, False)
    with pytest.raises(SessionError, match="has ended"):
        await session.run("echo no")
    again = await sandbox.session()
    assert (await again.run("echo $PROBE.")).stdout == b".\n"
    await nobody_left(sandbox, "PROBE")


async def test_late_output_does_not_turn_up_in_the_next_answer(sandbox: Sandbox) -> None:
    """swe-rex 1.4.0 answers ``late`` and ``next`` to ``echo next``."""
    session = await sandbox.session()
    await session.run("mkfifo go; (cat go >/dev/null; echo late; echo said > go) & true")
    result = await session.run("echo > go; cat go; echo next", timeout_s=5)
    assert result.stdout == b"said\nnext\n"


async def test_background_jobs_survive_time_outs_and_write_on(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    await session.run("mkfifo go; (cat go; echo still here; echo alive > proof; echo x > go) & true")
    assert (await session.run("sleep 60", timeout_s=0.2)).timed_out
    assert (await session.run("echo > go; cat go >/dev/null; cat proof", timeout_s=5)).stdout == b"alive\n"


async def test_a_function_of_a_command_does_not_speak_for_the_shell(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    assert (await session.run("echo() { printf 'mine: %s' \"$*\"; }", timeout_s=5)).exit_code == 0
    assert (await session.run("echo a; (exit 3)", timeout_s=5)).stdout == b"mine: a"
    assert (await session.run("builtin echo $?", timeout_s=5)).stdout == b"3\n"


async def test_exit_ends_the_session_with_its_code(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    result = await session.run("echo bye; exit 3")
    assert (result.exit_code, result.session_alive, result.stdout) == (3, False, b"bye\n")
    with pytest.raises(SessionError):
        await session.run("true")


async def test_a_prompt_of_the_users_own_changes_nothing(client: SandboxClient) -> None:
    """SWE-agent/SWE-agent#1084: the start-up file reset PS1, and the session was never ready."""
    sandbox = await client.start()
    await sandbox.execute("echo \"PS1='(testbed) \\u@\\h# '; PROMPT_COMMAND='echo prompt'\" > ~/.bashrc")
    session = await sandbox.session()
    assert (await session.run("echo SHELLPS1PREFIX; PS1=x")).stdout == b"SHELLPS1PREFIX\n"
    assert (await session.run("echo ok")).stdout == b"ok\n"


async def test_whoever_asks_for_one_session_at_once_gets_it(sandbox: Sandbox) -> None:
    sessions = await asyncio.gather(*(sandbox.session("one") for _ in range(4)))
    await sessions[0].run("X=1")
    assert (await sessions[3].run("echo $X")).stdout == b"1\n"


async def test_start_up_files_that_end_or_hold_the_shell_are_an_error(
    client: SandboxClient, config: ClientConfig
) -> None:
    """The session was handed out as if it had read them: without the settings of the image, or dead."""
    sandbox = await client.start()
    home = (await sandbox.execute("echo $HOME")).stdout_text.strip()
    await sandbox.write(f"{home}/.bashrc", b"echo before; exit 3\n")
    with pytest.raises(SessionError, match="with exit code 3") as ended:
        await sandbox.session("ended")
    assert ended.value.evidence == "before\n"
    await sandbox.write(f"{home}/.bashrc", b"echo before; sleep 600\n")
    async with client_of(msgspec.structs.replace(config, start_timeout_s=0.5)) as impatient:
        guest = await impatient.attach(sandbox.handle, take_ownership=False)
        with pytest.raises(SessionError, match=r"more than 0\.5 s") as held:
            await guest.session("held")
    assert held.value.evidence == "before\n"
    assert (await sandbox.info())["sessions"] == {}
    await sandbox.write(f"{home}/.bashrc", b"")
    assert (await (await sandbox.session("ended")).run("echo on")).stdout == b"on\n"


@pytest.mark.parametrize("guard", ["", '[ -z "$PS1" ] && return\n'])
async def test_both_ways_of_running_read_the_same_start_up_file(client: SandboxClient, guard: str) -> None:
    """SWE-agent/mini-swe-agent#773: ``bash -c`` missed ~/.bashrc, ``bash -lc`` destroyed the image's PATH."""
    sandbox = await client.start(SandboxSpec(env={"PATH": "/opt/tool/bin:/usr/bin:/bin"}))
    await sandbox.execute(["sh", "-c", f"printf '%s' '{guard}PATH=/opt/env/bin:$PATH' > ~/.bashrc"])
    wanted = b"/opt/env/bin:/opt/tool/bin:/usr/bin:/bin\n"
    assert (await sandbox.execute("echo $PATH")).stdout == wanted
    assert (await sandbox.execute("bash -c 'echo $PATH'")).stdout == wanted
    assert (await (await sandbox.session()).run("echo $PATH")).stdout == wanted


async def test_the_path_of_the_place_itself_holds_in_every_way_of_running(client: SandboxClient) -> None:
    """SWE-agent/mini-swe-agent#773, #858: an image's own PATH, and what ``~/.bashrc`` adds to it."""
    sandbox = await client.start()
    variables = (await sandbox.execute(["env"])).stdout.splitlines()
    own = next(line for line in variables if line.startswith(b"PATH=")).removeprefix(b"PATH=") + b"\n"
    assert (await sandbox.execute("echo $PATH")).stdout == own
    assert (await (await sandbox.session()).run("echo $PATH")).stdout == own
    await sandbox.execute(["sh", "-c", "echo 'PATH=/opt/env/bin:$PATH' > ~/.bashrc"])
    assert (await sandbox.execute("echo $PATH")).stdout == b"/opt/env/bin:" + own
    assert (await (await sandbox.session("later")).run("echo $PATH")).stdout == b"/opt/env/bin:" + own


async def test_one_command_at_a_time_and_interrupt_from_another_task(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    results = []
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            results.append(await session.run("touch begun; sleep 60; echo no"))

        tasks.start_soon(run)
        await sandbox.execute("until [ -e begun ]; do sleep 0.01; done", timeout_s=5)
        with pytest.raises(SessionError, match="another command"):
            await session.run("echo no")
        assert await session.interrupt()
    assert (results[0].cancelled, results[0].exit_code, results[0].stdout) == ("interrupted", None, b"")
    assert not await session.interrupt()
    assert (await session.run("echo yes")).stdout == b"yes\n"


async def test_cancelling_the_task_interrupts_the_command(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run, "touch begun; sleep 60")
        await sandbox.execute("until [ -e begun ]; do sleep 0.01; done", timeout_s=5)
        tasks.cancel_scope.cancel()
    with anyio.fail_after(5):
        while True:
            try:
                result = await session.run("echo back")
                break
            except SessionError:
                continue  # the interrupt is under way
    assert result.stdout == b"back\n"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60))
async def test_any_text_reaches_the_command_unchanged(sandbox: Sandbox, text: str) -> None:
    session = await sandbox.session("text")
    quoted = text.replace("'", "'\\''")
    result = await session.run(f"printf %s '{quoted}'", timeout_s=10)
    assert (result.exit_code, result.stdout) == (0, text.encode())


async def test_a_large_command(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    result = await session.run("cat <<'END' | wc -c\n" + "x" * 200_000 + "\nEND", timeout_s=20)
    assert result.stdout.strip() == b"200001"
