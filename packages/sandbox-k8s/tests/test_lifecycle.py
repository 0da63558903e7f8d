"""Beginnings and ends: leases, owners, crashes; nothing is ever left."""

import json
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import (
    ClientConfig,
    FencedError,
    SandboxClient,
    SandboxLostError,
    SandboxSpec,
)

pytestmark = pytest.mark.anyio


async def test_leaving_the_client_stops_what_it_started(make_client) -> None:
    async with make_client() as client:
        first = await client.start()
        await first.execute(
            "setsid sleep 600 & (setsid sh -c 'trap \"\" TERM HUP; sleep 600 & sleep 600' &) ; true"
        )
        await (await client.start()).session()
        assert len(await client.list()) == 2
    assert (client.stats.started, client.stats.stopped, client.stats.stop_failures) == (2, 2, 0)


async def test_stopping_twice_does_nothing_and_a_stopped_sandbox_says_so(client: SandboxClient) -> None:
    sandbox = await client.start()
    await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(SandboxLostError, match="stopped or detached by this client"):
        await sandbox.execute("true")
    assert await client.list() == ()


async def test_a_heartbeat_on_closed_connections_is_counted_and_spares_the_client(
    client: SandboxClient,
) -> None:
    """aiohttp's RuntimeError ended the client when a beat woke up just as its sandbox stopped."""
    beating = await client.start(SandboxSpec(lease_s=3.0))
    guest = await client.attach(beating.handle, take_ownership=False)
    await beating.launcher.close()
    assert (await guest.execute("sleep 1.2; echo still here")).stdout == b"still here\n"
    assert client.stats.renewal_failures >= 2, "what is not answered is said again at once"


async def test_a_sandbox_as_a_block_is_stopped_also_by_an_error(client: SandboxClient) -> None:
    async def use() -> None:
        async with await client.start() as sandbox:
            assert (await client.list())[0].handle == sandbox.handle
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()
    assert await client.list() == ()


async def test_the_users_error_comes_out_of_the_client_as_it_is(make_client) -> None:
    async def use() -> None:
        async with make_client() as client:
            await client.start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()


async def test_cancellation_in_the_middle_of_a_command_leaves_nothing(make_client) -> None:
    with anyio.CancelScope() as scope:
        async with make_client() as client:
            sandbox = await client.start()
            scope.deadline = anyio.current_time() + 0.3
            await sandbox.execute("sleep 600")
    assert scope.cancelled_caught
    assert client.stats.stopped == 1


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1])
async def test_cancellation_while_starting_leaves_nothing(make_client, after_s: float) -> None:
    async with make_client() as client:
        with anyio.move_on_after(after_s):
            await client.start()
        states = [info.state for info in await client.list()]
        assert states in ([], ["running"], ["dead"])  # a pod that is being deleted is still listed


@pytest.mark.original("A-resume-shell", "A-k8s-handle")
async def test_detach_and_attach_in_another_process_with_the_shell_intact(
    config: ClientConfig, make_client, script
) -> None:
    """The forerunner closed the shells when it detached, and then failed with SessionExistsError."""
    async with make_client() as client:
        sandbox = await client.start(SandboxSpec(labels={"task": "t1"}))
        session = await sandbox.session()
        await session.run("mkdir d; cd d; export A=bar; sleep 600 &")
        handle = await sandbox.detach()
        assert [info.state for info in await client.list()] == ["detached"]
    settings = msgspec.json.encode(config, enc_hook=str).decode()
    process = script(ATTACH, type(config).__name__, settings, handle.to_json().decode())
    out, err = await anyio.to_thread.run_sync(process.communicate)
    assert json.loads(out) == {
        "output": f"bar {sandbox.workdir}/d\n[1]+  Running                 sleep 600 &\n",
        "epoch": 2,
    }, err


ATTACH = """
import sys, json, anyio, msgspec
from sandbox_k8s import *
from sandbox_k8s.kubernetes.config import KubernetesConfig
async def main():
    name, settings, handle = sys.argv[1:]
    kind = {"LocalConfig": LocalConfig, "KubernetesConfig": KubernetesConfig}[name]
    config = msgspec.json.decode(settings, type=kind, dec_hook=lambda kind, value: kind(value))
    make = SandboxClient.local if kind is LocalConfig else SandboxClient.kubernetes
    handle = SandboxHandle.from_json(handle)
    async with make(config) as client:
        sandbox = await client.attach(handle)
        result = await (await sandbox.session()).run("echo $A $PWD; jobs")
        print(json.dumps({"output": result.stdout_text, "epoch": sandbox.handle.epoch}))
anyio.run(main)
"""


async def test_the_older_owner_is_fenced_and_its_command_ends(make_client, tmp_path: Path) -> None:
    """It gets an error, not a shell: from its session, too."""
    async with make_client() as old, make_client() as new:
        sandbox = await old.start()
        session = await sandbox.session()
        await session.run("X=kept")
        outcome: list[BaseException] = []
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                try:
                    await sandbox.execute("touch begun; sleep 600")
                except FencedError as fenced:
                    outcome.append(fenced)

            tasks.start_soon(run)
            await sandbox.execute("until [ -e begun ]; do sleep 0.01; done", timeout_s=5)
            taken = await new.attach(sandbox.handle)
        assert len(outcome) == 1
        for call in (
            sandbox.execute("true"),
            sandbox.read("begun"),
            sandbox.renew(),
            sandbox.write("x", b""),
            sandbox.upload(tmp_path, "y"),
            sandbox.download("begun", tmp_path / "z"),
            sandbox.session("another"),
            session.run("touch mine; X=mine"),
            session.interrupt(),
            session.close(),
        ):
            with pytest.raises(FencedError):
                await call
        with pytest.raises(FencedError):
            await sandbox.stop()
        with pytest.raises(FencedError):
            await sandbox.detach()
        assert names(tmp_path) == []
        assert (await taken.execute("ls")).stdout == b"begun\n"
        assert (await (await taken.session()).run("echo $X")).stdout == b"kept\n"
        assert (await taken.info())["sessions"] == {"default": True}
        again = await old.attach(sandbox.handle)
        assert again.handle.epoch == 3
        with pytest.raises(FencedError):
            await taken.execute("true")
    assert (old.stats.stopped, new.stats.stopped) == (1, 0)


def names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


async def test_a_guest_runs_beside_the_owner_and_cannot_stop(client: SandboxClient) -> None:
    sandbox = await client.start()
    guest = await client.attach(sandbox.handle, take_ownership=False)
    assert (await guest.execute("echo guest")).stdout == b"guest\n"
    assert (await sandbox.execute("echo owner")).stdout == b"owner\n"
    with pytest.raises(FencedError):
        await guest.stop()
    async with guest:
        assert (await guest.execute("echo again")).exit_code == 0
    assert (await sandbox.execute("echo owner")).stdout == b"owner\n"


async def test_reap_leaves_the_living_alone(client: SandboxClient) -> None:
    sandbox = await client.start()
    assert await client.reap() == ()
    assert (await sandbox.execute("echo here")).stdout == b"here\n"
