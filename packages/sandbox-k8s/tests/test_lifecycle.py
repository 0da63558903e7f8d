"""Beginnings and ends: leases, owners, crashes; nothing is ever left."""

import json
import os
import signal
import stat
import time
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import (
    AccessError,
    BackendUnavailableError,
    ConfigError,
    FencedError,
    LocalConfig,
    SandboxClient,
    SandboxHandle,
    SandboxLostError,
    SandboxNotFoundError,
    SandboxSpec,
    SandboxStartError,
)
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.local import KeeperProcess
from sandbox_k8s.store import Store

pytestmark = pytest.mark.anyio


def folders_in(root: Path) -> list[Path]:
    return list((root / "sandboxes").iterdir())


async def test_leaving_the_client_stops_what_it_started(config: LocalConfig) -> None:
    async with SandboxClient.local(config) as client:
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
    assert client.stats.renewal_failures == 1


async def test_a_sandbox_as_a_block_is_stopped_also_by_an_error(client: SandboxClient) -> None:
    async def use() -> None:
        async with await client.start() as sandbox:
            assert (await client.list())[0].handle == sandbox.handle
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()
    assert await client.list() == ()


async def test_the_users_error_comes_out_of_the_client_as_it_is(config: LocalConfig) -> None:
    async def use() -> None:
        async with SandboxClient.local(config) as client:
            await client.start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()


async def test_cancellation_in_the_middle_of_a_command_leaves_nothing(config: LocalConfig) -> None:
    with anyio.move_on_after(0.6) as scope:
        async with SandboxClient.local(config) as client:
            sandbox = await client.start()
            await sandbox.execute("sleep 600")
    assert scope.cancelled_caught
    assert client.stats.stopped == 1


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1])
async def test_cancellation_while_starting_leaves_nothing(config: LocalConfig, after_s: float) -> None:
    async with SandboxClient.local(config) as client:
        with anyio.move_on_after(after_s):
            await client.start()
        states = [info.state for info in await client.list()]
        assert states in ([], ["running"])


async def test_a_sandbox_that_cannot_start_says_why_and_leaves_nothing(client: SandboxClient) -> None:
    if client.config.isolation != "bubblewrap":
        pytest.skip("a plain process has nothing to refuse")
    gone = client._store.root.parent / "gone"
    gone.mkdir()
    spec = SandboxSpec(read_only_paths=(gone / "link",))
    (gone / "link").symlink_to("/proc/self/fdinfo/0")  # exists here, not for bubblewrap
    with pytest.raises(SandboxStartError, match="bwrap: ") as failed:
        await client.start(spec)
    assert (failed.value.retryable, failed.value.fault) == (True, "infra")
    assert await client.list() == ()


async def test_detach_and_attach_in_another_process_with_the_shell_intact(
    config: LocalConfig, script
) -> None:
    """The forerunner closed the shells when it detached, and then failed with SessionExistsError."""
    async with SandboxClient.local(config) as client:
        sandbox = await client.start(SandboxSpec(labels={"task": "t1"}))
        session = await sandbox.session()
        await session.run("mkdir d; cd d; export A=bar; sleep 600 &")
        handle = await sandbox.detach()
        assert [info.state for info in await client.list()] == ["detached"]
    process = script(ATTACH, config.isolation, handle.to_json().decode())
    out, err = await anyio.to_thread.run_sync(process.communicate)
    assert json.loads(out) == {
        "output": f"bar {sandbox.workdir}/d\n[1]+  Running                 sleep 600 &\n",
        "epoch": 2,
    }, err


ATTACH = """
import sys, json, anyio
from pathlib import Path
from sandbox_k8s import *
async def main():
    handle = SandboxHandle.from_json(sys.argv[2])
    async with SandboxClient.local(LocalConfig(root=Path(handle.root), isolation=sys.argv[1])) as client:
        sandbox = await client.attach(handle)
        result = await (await sandbox.session()).run("echo $A $PWD; jobs")
        print(json.dumps({"output": result.stdout_text, "epoch": sandbox.handle.epoch}))
anyio.run(main)
"""


async def test_the_older_owner_is_fenced_and_its_command_ends(config: LocalConfig) -> None:
    async with SandboxClient.local(config) as old, SandboxClient.local(config) as new:
        sandbox = await old.start()
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
        ):
            with pytest.raises(FencedError):
                await call
        with pytest.raises(FencedError):
            await sandbox.stop()
        with pytest.raises(FencedError):
            await sandbox.detach()
        assert (await taken.execute("ls")).stdout == b"begun\n"
        again = await old.attach(sandbox.handle)
        assert again.handle.epoch == 3
        with pytest.raises(FencedError):
            await taken.execute("true")
    assert (old.stats.stopped, new.stats.stopped) == (1, 0)


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


async def test_kill_9_of_the_caller_ends_the_sandbox_within_its_lease(
    config: LocalConfig, script, keeper_ended
) -> None:
    """NovaSky-AI/SkyRL#1194, google/tunix#2312: the trainer is killed before it can clean up."""
    process = script(START, config.isolation, str(config.root))
    folder = Path((await anyio.to_thread.run_sync(process.stdout.readline)).strip())
    process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    await keeper_ended(folder)
    assert time.monotonic() - killed < 1.0 + 1.5
    assert folders_in(config.root) == []


async def test_ctrl_c_leaves_nothing_within_3_seconds(config: LocalConfig, script) -> None:
    process = script(START, config.isolation, str(config.root))
    await anyio.to_thread.run_sync(process.stdout.readline)
    process.send_signal(signal.SIGINT)
    with anyio.fail_after(3):
        await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    assert folders_in(config.root) == []


START = """
import sys, anyio
from pathlib import Path
from sandbox_k8s import *
async def main():
    root = Path(sys.argv[2])
    async with SandboxClient.local(LocalConfig(root=root, isolation=sys.argv[1])) as client:
        sandbox = await client.start(SandboxSpec(lease_s=1.0))
        print(root / "sandboxes" / sandbox.id, flush=True)
        await sandbox.execute("sleep 600 & sleep 600")
anyio.run(main)
"""


async def test_a_detached_sandbox_ends_by_itself(client: SandboxClient, keeper_ended) -> None:
    sandbox = await client.start(SandboxSpec(detached_lease_s=1.0))
    await (await sandbox.session()).run("sleep 600 &")
    handle = await sandbox.detach()
    await keeper_ended(client._store.folder(handle.sandbox_id))
    with pytest.raises(SandboxNotFoundError):
        await client.attach(handle)


async def test_kill_9_of_the_keeper_ends_everything_and_reap_tidies_up(client: SandboxClient) -> None:
    sandbox = await client.start()
    await sandbox.execute("setsid sleep 600 & true")
    owned = client._owned.find(sandbox)
    assert owned is not None
    keeper = owned.keeper
    assert isinstance(keeper, KeeperProcess)
    os.kill(keeper.pid, signal.SIGKILL)
    with anyio.fail_after(5):
        await keeper.ended()

    async def use_until_lost() -> None:
        while True:
            await sandbox.execute("true")

    with anyio.fail_after(5), pytest.raises(SandboxLostError) as lost:
        await use_until_lost()
    assert (lost.value.fault, lost.value.retryable) == ("infra", True)
    assert [info.state for info in await client.list()] == ["dead"]
    assert [one.sandbox_id for one in await client.reap(dry_run=True)] == [sandbox.id]
    assert [one.sandbox_id for one in await client.reap()] == [sandbox.id]
    assert await client.reap() == ()


async def test_reap_leaves_the_living_alone(client: SandboxClient) -> None:
    sandbox = await client.start()
    assert await client.reap() == ()
    assert (await sandbox.execute("echo here")).stdout == b"here\n"


async def test_kill_9_of_the_launcher_is_a_named_error(client: SandboxClient, keeper_ended) -> None:
    if client.config.isolation != "process":
        pytest.skip("under bubblewrap nobody inside can do that")
    sandbox = await client.start()
    folder = client._store.folder(sandbox.id)
    with pytest.raises(SandboxLostError):
        await sandbox.execute(f"kill -9 {(await sandbox.info())['pid']}; sleep 600")
    await keeper_ended(folder)
    assert not folder.exists()


async def test_handles_and_folders_hold_no_secret(client: SandboxClient) -> None:
    sandbox = await client.start()
    root = client._store.root
    key, token = (root / "run.key").read_bytes(), client._key.token(sandbox.id)
    assert stat.S_IMODE((root / "run.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert len(sandbox.handle.to_json()) < 4096
    for data in [sandbox.handle.to_json(), *(p.read_bytes() for p in root.rglob("*") if p.is_file())]:
        assert token.encode() not in data
        assert data == key or key not in data
    assert "***" in repr(client._key)


async def test_handles_that_lead_nowhere(client: SandboxClient, root: Path) -> None:
    sandbox = await client.start()
    handle = SandboxHandle.from_json(sandbox.handle.to_json())
    assert handle == sandbox.handle
    replace = msgspec.structs.replace
    with pytest.raises(SandboxNotFoundError):
        await client.attach(replace(handle, sandbox_id="0" * 16))
    with pytest.raises(ConfigError, match="hex"):
        await client.attach(replace(handle, sandbox_id="../../etc"))
    with pytest.raises(ConfigError, match=r"LocalConfig\(root="):
        await client.attach(replace(handle, root="/elsewhere"))
    with pytest.raises(AccessError):
        await client.attach(replace(handle, key_id="0" * 16))
    for text in ("", "{}", "[]", '{"version": 1}', handle.to_json().decode()[:-1] + ', "extra": 1}'):
        with pytest.raises(ConfigError, match="not a sandbox handle"):
            SandboxHandle.from_json(text)
    with pytest.raises(ConfigError, match="version 9"):
        SandboxHandle.from_json(replace(handle, version=9).to_json())


async def test_a_wrong_key_is_refused_before_anything_else(client: SandboxClient) -> None:
    sandbox = await client.start()
    wrong = client._launcher(sandbox.handle, None)
    wrong._http.headers["X-API-Key"] = "wrong"
    for path in ("/sbx/info", "/no/such/path", "/is_alive"):
        with pytest.raises(AccessError):
            async with wrong._request("GET", path):
                raise AssertionError(path)
    await wrong.close()


async def test_a_client_that_is_not_open_says_how_to_open_it(config: LocalConfig) -> None:
    with pytest.raises(ConfigError, match="async with"):
        await SandboxClient.local(config).start()
    with pytest.raises(BackendUnavailableError, match=r"SandboxClient\.local"):
        SandboxClient.kubernetes()


def test_bad_settings_name_the_field(tmp_path: Path) -> None:
    for wrong in ({"lease_s": 0.1}, {"detached_lease_s": 1e9}, {"env": {"A=B": ""}}, {"workdir": "x"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SandboxSpec(**wrong)
    with pytest.raises(ConfigError, match="start_timeout_s"):
        LocalConfig(start_timeout_s=0)
    with pytest.raises(ConfigError, match="bytes long"):
        LocalConfig(root=tmp_path / ("x" * 80)).resolved_root()


def test_a_root_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="0700"):
        Store(tmp_path / "open")


def test_ids_are_new() -> None:
    clock = SystemClock()
    assert len({clock.new_id() for _ in range(1000)}) == 1000
    assert len(clock.new_id()) == 32
