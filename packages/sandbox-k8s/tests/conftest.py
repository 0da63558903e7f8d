"""Sandboxes for tests, on both kinds of isolation, and the check that none of them leaves anything behind."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from sandbox_k8s import LocalConfig, Sandbox, SandboxClient, Session, bubblewrap
from sandbox_k8s.local import PYTHON_PREFIX

WHY_NO_BUBBLEWRAP = bubblewrap.why_unusable(PYTHON_PREFIX)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["bubblewrap", "process"], scope="session")
def isolation(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap" and WHY_NO_BUBBLEWRAP:
        pytest.skip(WHY_NO_BUBBLEWRAP)
    return request.param


@contextmanager
def checked_root() -> Iterator[Path]:
    """A folder for sandboxes; at the end there must be none, nor a process of one."""
    # Not tmp_path: its names are too long for a unix socket.
    folder = Path(tempfile.mkdtemp(prefix="sbx-")).resolve() / "r"
    yield folder
    left = leftovers(folder)
    shutil.rmtree(folder.parent)
    assert left == [], "a sandbox left something behind"


@pytest.fixture
def root() -> Iterator[Path]:
    with checked_root() as folder:
        yield folder


def leftovers(folder: Path) -> list[str]:
    """Folders of sandboxes under a root, and processes that speak of it."""
    sandboxes = folder / "sandboxes"
    left = [str(entry) for entry in sandboxes.iterdir()] if sandboxes.exists() else []
    table = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return left + [line for line in table.splitlines() if f"{folder}/sandboxes" in line]


@pytest.fixture
def config(root: Path, isolation: str) -> LocalConfig:
    return LocalConfig(root=root, isolation=isolation, grace_s=0.3)  # type: ignore[arg-type]


@pytest.fixture
async def client(config: LocalConfig) -> AsyncIterator[SandboxClient]:
    async with SandboxClient.local(config) as client:
        yield client


@pytest.fixture(scope="module")
async def shared_sandbox(isolation: str) -> AsyncIterator[Sandbox]:
    with checked_root() as root:
        config = LocalConfig(root=root, isolation=isolation, grace_s=0.3)  # type: ignore[arg-type]
        async with SandboxClient.local(config) as client:
            yield await client.start()


@pytest.fixture
async def sandbox(shared_sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    """One sandbox for all tests of a file, empty and without sessions for each."""
    yield shared_sandbox
    for name in (await shared_sandbox.info())["sessions"]:
        await Session(shared_sandbox, name).close()
    emptied = await shared_sandbox.execute("chmod -R u+rwX . && find . -mindepth 1 -delete")
    assert emptied.exit_code == 0


@pytest.fixture
def nobody_left() -> Callable[[Sandbox, str], object]:
    """Wait, inside, until no process has a variable of that name in its environment."""

    async def wait(sandbox: Sandbox, variable: str) -> None:
        quiet = await sandbox.execute(
            f"while grep -qsz '^{variable}=' /proc/[0-9]*/environ; do sleep 0.02; done", timeout_s=5
        )
        assert quiet.exit_code == 0, f"processes with {variable} live on"

    return wait


@pytest.fixture
def keeper_ended() -> Callable[[Path], object]:
    """Wait until the keeper of a sandbox's folder has ended: its lock becomes free."""

    async def wait(folder: Path, within_s: float = 15) -> None:
        def take_lock() -> None:
            try:
                descriptor = os.open(folder / "keeper.lock", os.O_RDWR)
            except FileNotFoundError:
                return
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.close(descriptor)

        with anyio.fail_after(within_s):
            await anyio.to_thread.run_sync(take_lock, abandon_on_cancel=True)

    return wait


@pytest.fixture
def script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run Python in another process; what it prints is read line by line. Killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
