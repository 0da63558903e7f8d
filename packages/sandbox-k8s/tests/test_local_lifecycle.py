"""What only this machine has: folders, keepers and their crashes; nothing is ever left."""

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
    ConfigError,
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
from sandbox_k8s.local_backend import LocalBackend
from sandbox_k8s.store import Store

pytestmark = pytest.mark.anyio


@pytest.fixture
def client(local_client: SandboxClient) -> SandboxClient:
    return local_client


def backend_of(client: SandboxClient) -> LocalBackend:
    backend = client._backend
    assert isinstance(backend, LocalBackend)
    return backend


def folders_in(root: Path) -> list[Path]:
    return list((root / "sandboxes").iterdir())


async def test_a_sandbox_that_cannot_start_says_why_and_leaves_nothing(client: SandboxClient) -> None:
    if client.config.isolation != "bubblewrap":
        pytest.skip("a plain process has nothing to refuse")
    gone = backend_of(client).store.root.parent / "gone"
    gone.mkdir()
    spec = SandboxSpec(read_only_paths=(gone / "link",))
    (gone / "link").symlink_to("/proc/self/fdinfo/0")  # exists here, not for bubblewrap
    with pytest.raises(SandboxStartError, match="bwrap: ") as failed:
        await client.start(spec)
    assert (failed.value.retryable, failed.value.fault) == (True, "infra")
    assert await client.list() == ()


async def test_kill_9_of_the_caller_ends_the_sandbox_within_its_lease(
    local_config: LocalConfig, script, keeper_ended
) -> None:
    """NovaSky-AI/SkyRL#1194, google/tunix#2312: the trainer is killed before it can clean up."""
    process = script(START, local_config.isolation, str(local_config.root))
    folder = Path((await anyio.to_thread.run_sync(process.stdout.readline)).strip())
    process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    await keeper_ended(folder)
    assert time.monotonic() - killed < 1.0 + 1.5
    assert folders_in(local_config.root) == []


async def test_ctrl_c_leaves_nothing_within_3_seconds(local_config: LocalConfig, script) -> None:
    process = script(START, local_config.isolation, str(local_config.root))
    await anyio.to_thread.run_sync(process.stdout.readline)
    process.send_signal(signal.SIGINT)
    with anyio.fail_after(3):
        await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    assert folders_in(local_config.root) == []


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
    await keeper_ended(backend_of(client).store.folder(handle.sandbox_id))
    with pytest.raises(SandboxNotFoundError):
        await client.attach(handle)


async def test_kill_9_of_the_keeper_ends_everything_and_reap_tidies_up(client: SandboxClient) -> None:
    sandbox = await client.start()
    await sandbox.execute("setsid sleep 600 & true")
    keeper = backend_of(client).keeper(sandbox.id)
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


async def test_kill_9_of_the_launcher_is_a_named_error(client: SandboxClient, keeper_ended) -> None:
    if client.config.isolation != "process":
        pytest.skip("under bubblewrap nobody inside can do that")
    sandbox = await client.start()
    folder = backend_of(client).store.folder(sandbox.id)
    with pytest.raises(SandboxLostError):
        await sandbox.execute(f"kill -9 {(await sandbox.info())['pid']}; sleep 600")
    await keeper_ended(folder)
    assert not folder.exists()


@pytest.mark.original("A-k8s-secret")
async def test_handles_and_folders_hold_no_secret(client: SandboxClient) -> None:
    sandbox = await client.start()
    root = backend_of(client).store.root
    key, token = (root / "run.key").read_bytes(), backend_of(client).key.token("local", sandbox.id)
    assert stat.S_IMODE((root / "run.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert len(sandbox.handle.to_json()) < 4096
    for data in [sandbox.handle.to_json(), *(p.read_bytes() for p in root.rglob("*") if p.is_file())]:
        assert token.encode() not in data
        assert data == key or key not in data
    assert "***" in repr(backend_of(client).key)


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
        await client.attach(replace(handle, place=replace(handle.place, root="/elsewhere")))
    with pytest.raises(AccessError):
        await client.attach(replace(handle, key_id="0" * 16))
    for text in ("", "{}", "[]", '{"version": 2}', handle.to_json().decode()[:-1] + ', "extra": 1}'):
        with pytest.raises(ConfigError, match="not a sandbox handle"):
            SandboxHandle.from_json(text)
    with pytest.raises(ConfigError, match="version 9"):
        SandboxHandle.from_json(replace(handle, version=9).to_json())


async def test_a_wrong_key_is_refused_before_anything_else(client: SandboxClient) -> None:
    sandbox = await client.start()
    wrong = backend_of(client).launcher(sandbox.handle, None)
    wrong._headers["X-API-Key"] = "wrong"
    for path in ("/sbx/info", "/no/such/path", "/is_alive"):
        with pytest.raises(AccessError):
            async with wrong._request("GET", path):
                raise AssertionError(path)
    await wrong.close()


async def test_a_client_that_is_not_open_says_how_to_open_it(local_config: LocalConfig) -> None:
    with pytest.raises(ConfigError, match="async with"):
        await SandboxClient.local(local_config).start()


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
