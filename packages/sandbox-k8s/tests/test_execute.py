"""Commands on their own: what they give, what kills them, what they cannot hurt."""

import anyio
import pytest
from sandbox_k8s import CommandRefusedError, Sandbox, SandboxClient, SandboxSpec

pytestmark = pytest.mark.anyio


async def test_streams_are_apart_and_the_exit_code_is_the_commands(sandbox: Sandbox) -> None:
    result = await sandbox.execute("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert (result.timed_out, result.infra_failed, result.truncated) == (False, False, False)


async def test_argv_is_not_a_shell(sandbox: Sandbox) -> None:
    result = await sandbox.execute(["printf", "%s|", "a b", "$HOME", "'"])
    assert result.stdout == b"a b|$HOME|'|"


async def test_merged_streams_keep_their_order(sandbox: Sandbox) -> None:
    result = await sandbox.execute("echo 1; echo 2 >&2; echo 3", merge_stderr=True)
    assert (result.stdout, result.stderr) == (b"1\n2\n3\n", b"")


async def test_stdin_cwd_and_env(sandbox: Sandbox) -> None:
    await sandbox.execute("mkdir -p a/b")
    result = await sandbox.execute("cat; pwd; echo $X", stdin=b"\x00\xff\n", cwd="a/b", env={"X": "y z"})
    assert result.stdout == b"\x00\xff\n" + f"{sandbox.workdir}/a/b\ny z\n".encode()


async def test_stdin_that_is_too_large_is_refused_before_it_is_sent(sandbox: Sandbox) -> None:
    """The command got the first 256 MiB, and ended well."""
    with pytest.raises(CommandRefusedError, match=r"a request of 2684\d+ bytes"):
        await sandbox.execute(["wc", "-c"], stdin=bytes(256 << 20))


async def test_large_stdin_to_a_command_that_does_not_read_it(sandbox: Sandbox) -> None:
    assert (await sandbox.execute("exit 3", stdin=b"x" * 3_000_000)).exit_code == 3


async def test_large_stdin_comes_back_whole(sandbox: Sandbox) -> None:
    """kubernetes-client/python#1866: a broken pipe; kubernetes/kubernetes#89899: input that could not end."""
    data = bytes(range(256)) * 20_000
    assert (await sandbox.execute(["cat"], stdin=data)).stdout == data


async def test_output_that_is_not_utf8_is_bytes(sandbox: Sandbox) -> None:
    """UKGovernmentBEIS/inspect_k8s_sandbox#206: one such byte must not end the call."""
    result = await sandbox.execute(r"printf 'a\xff\xfeb'")
    assert result.stdout == b"a\xff\xfeb"
    assert result.stdout_text == "a\\xff\\xfeb"


async def test_a_program_that_cannot_be_run_has_the_shells_codes(sandbox: Sandbox) -> None:
    assert (await sandbox.execute(["no-such-program"])).exit_code == 127
    await sandbox.write("script", b"#!/bin/sh\n", mode=0o644)
    refused = await sandbox.execute([f"{sandbox.workdir}/script"])
    assert (refused.exit_code, refused.infra_failed) == (126, False)
    assert b"Permission denied" in refused.stderr


@pytest.mark.parametrize(("number", "code"), [("KILL", 137), ("TERM", 143), ("SEGV", 139)])
async def test_death_by_signal(sandbox: Sandbox, number: str, code: int) -> None:
    result = await sandbox.execute(f"kill -{number} $$")
    assert (result.exit_code, result.signal, result.timed_out) == (code, code - 128, False)


async def test_a_missing_folder_or_a_nul_byte_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(CommandRefusedError, match="not a folder") as refused:
        await sandbox.execute("true", cwd="nowhere")
    assert (refused.value.fault, refused.value.retryable) == ("agent", False)
    with pytest.raises(CommandRefusedError):
        await sandbox.execute(["echo", "a\0b"])


async def test_output_beyond_the_limit_keeps_head_and_tail(sandbox: Sandbox) -> None:
    result = await sandbox.execute("echo head; seq 1 100000; echo tail", output_limit=1000)
    total = len("head\ntail\n") + sum(len(f"{n}\n") for n in range(1, 100001))
    assert (result.exit_code, result.stdout_total, result.truncated) == (0, total, True)
    assert result.stdout.startswith(b"head\n1\n2\n")
    assert result.stdout.endswith(b"\n100000\ntail\n")
    assert f"[... {total - 1000} bytes left out ...]".encode() in result.stdout


async def test_a_background_child_that_holds_the_pipe_does_not_hold_the_call(sandbox: Sandbox) -> None:
    with anyio.fail_after(5):
        result = await sandbox.execute("sleep 60 & echo done")
    assert (result.exit_code, result.stdout) == (0, b"done\n")


async def test_a_background_child_is_not_killed_by_its_pipe(sandbox: Sandbox) -> None:
    """It writes after the call: unless the pipe is still read, SIGPIPE ends a server that was started."""
    await sandbox.execute("mkfifo go; (cat go; echo late; echo alive > proof; echo x > go) & true")
    result = await sandbox.execute("echo > go; cat go; cat proof", timeout_s=5)
    assert result.stdout.endswith(b"alive\n")


async def test_time_out_kills_grandchildren_that_ignore_sigterm(sandbox: Sandbox, nobody_left) -> None:
    """SWE-agent/SWE-ReX#151, #189: output was lost, and the process lived on. Our time-out comes first."""
    stubborn = "trap '' TERM; (trap '' TERM; while :; do sleep 60; done)"
    command = f"{stubborn} & echo partial; echo why >&2; wait; sleep 60"
    result = await sandbox.execute(command, timeout_s=0.3, env={"PROBE": "1"})
    assert (result.exit_code, result.timed_out, result.infra_failed) == (None, True, False)
    assert (result.stdout, result.stderr) == (b"partial\n", b"why\n")
    await nobody_left(sandbox, "PROBE")


async def test_time_out_reaches_children_in_other_sessions(sandbox: Sandbox, nobody_left) -> None:
    result = await sandbox.execute("setsid sleep 60 & sleep 60", timeout_s=0.3, env={"PROBE": "1"})
    assert result.timed_out
    await nobody_left(sandbox, "PROBE")


async def test_sigterm_comes_first_so_that_a_command_can_tidy_up(sandbox: Sandbox) -> None:
    result = await sandbox.execute(
        "trap 'echo tidy; exit 0' TERM; while :; do sleep 0.01; done", timeout_s=0.2
    )
    assert (result.timed_out, result.exit_code, result.stdout) == (True, None, b"tidy\n")


async def test_cancelling_the_task_kills_the_command(sandbox: Sandbox, nobody_left) -> None:
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await sandbox.execute("touch begun; sleep 60", env={"PROBE": "1"})

        tasks.start_soon(run)
        await sandbox.execute("until [ -e begun ]; do sleep 0.01; done", timeout_s=5)
        tasks.cancel_scope.cancel()
    await nobody_left(sandbox, "PROBE")


async def test_commands_run_side_by_side_and_the_launcher_answers_meanwhile(sandbox: Sandbox) -> None:
    """swe-rex 1.4.0: three ``sleep 2`` took 6 s, and is_alive did not answer."""
    ended: list[int | None] = []

    async def wait() -> None:
        done = await sandbox.execute("touch $$; until [ -e go ]; do sleep 0.01; done", timeout_s=20)
        ended.append(done.exit_code)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(wait)
        await sandbox.execute("until [ $(ls | wc -l) = 3 ]; do sleep 0.01; done", timeout_s=20)
        assert (await sandbox.info())["running"] == 3
        await sandbox.write("go", b"")
    assert ended == [0, 0, 0]


async def test_signals_to_its_own_group_end_the_command_and_nothing_else(client: SandboxClient) -> None:
    """NVIDIA-NeMo/Gym#2262: a ``kill`` of the agent reached the server, and the rollout scored 0."""
    first, second = await client.start(), await client.start()
    result = await first.execute("kill -TERM 0; echo not reached")
    assert (result.exit_code, result.signal, result.infra_failed) == (143, 15, False)
    assert (await first.execute("echo yes")).stdout == b"yes\n"
    assert (await second.execute("echo yes")).stdout == b"yes\n"


@pytest.mark.parametrize("place", ["bubblewrap"], indirect=True)
@pytest.mark.parametrize("killer", ["pkill -f python; pkill -f serve", "kill -TERM -1", "kill -9 -1"])
async def test_signals_to_everybody_stay_inside(client: SandboxClient, killer: str) -> None:
    """NVIDIA-NeMo/Gym#2262, wider aims; the launcher is process 1, which the kernel shields."""
    first, second = await client.start(), await client.start()
    session = await second.session()
    result = await first.execute(killer)
    assert not result.infra_failed
    assert (await first.execute("echo yes")).stdout == b"yes\n"
    assert (await session.run("echo yes")).stdout == b"yes\n"


async def test_memory_limit(local_client: SandboxClient) -> None:
    """Of each process; a pod's is of the whole container."""
    limited = await local_client.start(SandboxSpec(memory_bytes=200 << 20))
    hungry = "dd if=/dev/zero of=/dev/null bs=300M count=1"
    assert (await limited.execute(hungry)).exit_code != 0
    session = await limited.session()
    assert (await session.run(f"( {hungry} )")).exit_code != 0
    assert (await limited.execute(["no-such-program"])).exit_code == 127
    assert (await limited.execute(["printf", "%s", "a b"])).stdout == b"a b"


async def test_a_command_may_run_longer_than_the_lease(make_client) -> None:
    """decocms/studio#5966: a fixed time to live killed live runs. Here the open client renews."""
    async with make_client() as client:
        sandbox = await client.start(SandboxSpec(lease_s=1.0))
        result = await sandbox.execute("sleep 1.3; echo lived")
    assert result.stdout == b"lived\n"
