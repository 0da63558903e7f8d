"""Starting and ending sandboxes on this machine: the keeper's order, its answer, its end."""

import hashlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

from . import bubblewrap
from .errors import BackendUnavailableError, SandboxLostError, SandboxStartError
from .handle import Isolation
from .launcher.keeper import LOG, MARK, STOP_SOCKET
from .spec import SandboxSpec

LAUNCHER = Path(__file__).parent / "launcher"
PYTHON_PREFIX = Path(sys.base_prefix)
_BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STOP_ANSWER_S = 15.0
_LOG_TAIL = 4096


def base_python() -> Path:
    """The interpreter under the caller's virtual environment, without the environment.

    Raises:
        BackendUnavailableError: It is not where an installation has it.
    """
    names = (f"python{sys.version_info.major}.{sys.version_info.minor}", "python3")
    for name in names:
        candidate = PYTHON_PREFIX / "bin" / name
        if candidate.exists():
            return candidate
    raise BackendUnavailableError(
        f"no {' or '.join(names)} in {PYTHON_PREFIX / 'bin'}, where Python says it lives"
    )


def environment_for(folder: Path, isolation: Isolation, spec: SandboxSpec, sandbox_id: str) -> dict[str, str]:
    """The environment of everything inside, built from nothing."""
    inside = isolation == "bubblewrap"
    return {
        "PATH": _BASE_PATH,
        "HOME": bubblewrap.HOME if inside else str(folder / "home"),
        "TMPDIR": "/tmp" if inside else str(folder / "tmp"),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "USER": "root" if os.getuid() == 0 else "sandbox",
        **spec.env,
        MARK: sandbox_id,
    }


def order_for(
    folder: Path,
    isolation: Isolation,
    spec: SandboxSpec,
    *,
    sandbox_id: str,
    token: str,
    start_timeout_s: float,
) -> dict[str, Any]:
    """What the keeper is told; the token goes in as its hash only."""
    inside = isolation == "bubblewrap"
    python = [str(base_python()), "-I", "-S", "-B"]
    own_workdir = bubblewrap.WORKSPACE if inside else str(folder / "work")
    launcher = bubblewrap.LAUNCHER if inside else str(LAUNCHER)
    pipes = bubblewrap.PIPES if inside else str(folder / "pipes")
    argv = [*python, f"{launcher}/__main__.py", "serve", "--pipes", pipes]
    if inside:
        argv = bubblewrap.command_line(folder, spec, prefix=PYTHON_PREFIX, launcher=LAUNCHER, program=argv)
    return {
        "sandbox_id": sandbox_id,
        "folder": str(folder),
        "argv": argv,
        "env": {"PATH": _BASE_PATH, "LANG": "C.UTF-8", MARK: sandbox_id, "TMPDIR": str(folder / "tmp")},
        "cwd": "/" if inside else own_workdir,
        "start_timeout_s": start_timeout_s,
        "settings": {
            "key_hash": hashlib.sha256(token.encode()).hexdigest(),
            "env": environment_for(folder, isolation, spec, sandbox_id),
            "workdir": spec.workdir or own_workdir,
            "lease_s": spec.lease_s,
            "memory_bytes": spec.memory_bytes,
        },
    }


class KeeperProcess:
    """A keeper that this process started; collected by `collect`, or by the system if we end first."""

    def __init__(self, pid: int, answer_fd: int) -> None:
        self.pid = pid
        self._answer_fd = answer_fd
        self._collected = False

    async def ready(self, folder: Path, timeout_s: float) -> None:
        """Wait for the launcher.

        Raises:
            SandboxStartError: It did not come up; the evidence is the end of its log.
        """
        line = b""
        with anyio.move_on_after(timeout_s):
            while not line.endswith(b"\n"):
                await anyio.wait_readable(self._answer_fd)
                data = os.read(self._answer_fd, 1 << 16)
                if not data:
                    break
                line += data
        if not line.endswith(b"\n"):
            what = "its keeper ended" if self.collect() else f"nothing was heard of it within {timeout_s} s"
            raise SandboxStartError(f"the sandbox did not come up: {what}", evidence=log_tail(folder))
        answer = json.loads(line)
        if "error" in answer:
            raise SandboxStartError(answer["error"], evidence=answer["log"])

    def close(self) -> None:
        """Let go of the answer's pipe."""
        if self._answer_fd >= 0:
            os.close(self._answer_fd)
            self._answer_fd = -1

    def terminate(self) -> None:
        """Ask it to end everything; for a keeper whose sockets may not be up yet."""
        if not self.collect():
            os.kill(self.pid, signal.SIGTERM)  # not collected, so the pid is still its own

    def collect(self) -> bool:
        """Take its exit status, so that no zombie stays; True when it has ended."""
        if not self._collected:
            try:
                self._collected = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            except ChildProcessError:
                self._collected = True  # somebody waits for all children of this process
        return self._collected

    async def ended(self) -> None:
        """Wait until it has ended."""
        pause_s = 0.005
        while not self.collect():
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)


def start_keeper(order: dict[str, Any]) -> KeeperProcess:
    """Start a keeper. The order goes through an unnamed file: no argument, no environment, no size limit.

    ``posix_spawn``, since the parent may be a trainer with a hundred gigabytes that must not be forked.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    try:
        with tempfile.TemporaryFile() as paper:
            paper.write(json.dumps(order).encode())
            paper.seek(0)
            log = Path(order["folder"], LOG)
            pid = os.posix_spawn(
                str(base_python()),
                [str(base_python()), "-I", "-S", "-B", str(LAUNCHER / "__main__.py"), "keep"],
                {"PATH": _BASE_PATH, "LANG": "C.UTF-8"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, paper.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, write_fd, 1),
                    (os.POSIX_SPAWN_OPEN, 2, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                ],
            )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return KeeperProcess(pid, read_fd)


def log_tail(folder: Path) -> str:
    """The last lines that keeper, bubblewrap and launcher wrote; empty when the log is gone already."""
    try:
        return (folder / LOG).read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


async def ask_to_stop(folder: Path) -> None:
    """End a sandbox through its keeper and wait until it and its folder are gone.

    Raises:
        SandboxLostError: The keeper could not remove everything, or did not answer.
    """
    try:
        stream = await anyio.connect_unix(folder / STOP_SOCKET)
    except (FileNotFoundError, ConnectionError):
        return  # already gone; what a killed keeper left behind is for reap
    answer = b""
    async with stream:
        with anyio.move_on_after(_STOP_ANSWER_S) as scope:
            try:
                async for data in stream:
                    answer += data
            except anyio.BrokenResourceError:
                pass
    if scope.cancelled_caught:
        raise SandboxLostError(f"the keeper of {folder} did not confirm the end within {_STOP_ANSWER_S} s")
    if not answer:
        return  # it was ending already, and is gone
    report = json.loads(answer)
    if not report["gone"]:
        raise SandboxLostError(report["problem"])
