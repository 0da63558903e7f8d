"""One container as a process in bubblewrap: its own processes, files and users; the machine's network.

A pod has an address of its own in 127.0.0.0/8. ``0.0.0.0`` in its command means that address, so that many
pods can use one port.
"""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .logs import Log

_ANYWHERE = "0.0.0.0"  # replaced, never listened on
_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")
_NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--as-pid-1",
    "--new-session", "--cap-drop", "ALL", "--clearenv",
)  # fmt: skip
_LOOK_EVERY_S = 0.002
_NO_PROGRAM = b"bwrap: execvp "
_CHUNK = 1 << 15


class Container:
    """A container that was started.

    Attributes:
        pid: Of its first process, as the machine sees it.
        exit_code: None while it runs; 128 + n after a signal, as the runtimes tell it.
        start_error: Why the program could not be started, as a runtime says it; empty when it was.
        execs: Commands that were started beside the program.
    """

    def __init__(self, process: asyncio.subprocess.Process, env: Mapping[str, str], log: Log) -> None:
        self.pid = 0
        self.exit_code: int | None = None
        self.start_error = ""
        self.env = env
        self.execs: set[asyncio.Task[None]] = set()
        self._log = log
        self._process = process
        self._reading = asyncio.create_task(self._read())

    async def wait(self) -> int:
        """Wait for its end. Who waits may be cancelled, and another may wait after that."""
        await asyncio.shield(self._reading)
        code = await self._process.wait()
        self.exit_code = 128 - code if code < 0 else code
        return self.exit_code

    async def kill(self) -> None:
        """End it, all that runs in it, and wait for that."""
        self.signal(signal.SIGKILL)
        await self.wait()
        await asyncio.gather(*self.execs, return_exceptions=True)

    def signal(self, number: int) -> None:
        """Send its first process a signal; one that has ended gets none."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and nobody has told us yet
                os.kill(self.pid or self._process.pid, number)

    async def started(self, status: int) -> None:
        """Wait until the program itself runs: before, its file system is not ready to be entered."""
        told = await asyncio.to_thread(_read_object, status)
        if told:
            self.pid = json.loads(told)["child-pid"]
        while self._process.returncode is None and _program(self.pid) in ("", "bwrap"):  # noqa: ASYNC110
            # Nothing tells of another process's execve.
            await asyncio.sleep(_LOOK_EVERY_S)
        if self._process.returncode is not None:
            await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        head = await head_of(self._process.stdout, _NO_PROGRAM)
        if head.startswith(_NO_PROGRAM):
            head += await self._process.stdout.read()
            self.start_error = missing_program(head.removeprefix(_NO_PROGRAM))
            head = b""
        while head:
            self._log.feed(head)
            head = await self._process.stdout.read(_CHUNK)
        self._log.end()


async def start(
    container: Mapping[str, Any],
    mounts: Sequence[tuple[Path, str, bool]],
    *,
    address: str,
    hostname: str,
    log: Log,
) -> Container:
    """Start a container.

    Args:
        container: From a pod's spec.
        mounts: Folders or files of this machine, where they are to be seen, and whether they can be written.
        address: Of the pod.
        hostname: What the container takes for its machine's name.
        log: Takes what it prints.

    It must not be cancelled, as a process would be left; it takes milliseconds.
    """
    given: dict[str, str] = {}
    for one in container.get("env", ()):
        given[one["name"]] = _expanded(one.get("value", ""), given)
    env = {"PATH": _PATH, "HOME": "/root", "HOSTNAME": hostname, **given}
    words = [*container.get("command", ()), *container.get("args", ())]
    words = [_expanded(word, given).replace(_ANYWHERE, address) for word in words]
    reader, writer = os.pipe()
    try:
        argv = [*_bubblewrap(container, mounts, env, hostname), "--info-fd", str(writer), "--", *words]
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(writer,),
        )
    finally:
        os.close(writer)
    made = Container(process, env, log)
    await made.started(reader)
    os.close(reader)
    return made


def _expanded(text: str, known: Mapping[str, str]) -> str:
    """As the kubelet does: ``$(NAME)`` of a known variable, and one dollar of two."""
    return _REFERENCE.sub(lambda found: "$" if found[1] is None else known.get(found[1], found[0]), text)


def _bubblewrap(
    container: Mapping[str, Any],
    mounts: Sequence[tuple[Path, str, bool]],
    env: Mapping[str, str],
    hostname: str,
) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bwrap is not installed")
    argv = [program, *_NAMESPACES, "--hostname", hostname]
    for name in _SHOWN:
        path = Path(name)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            argv += ["--ro-bind", name, name]
    argv += ["--dev", "/dev", "--mqueue", "/dev/mqueue", "--proc", "/proc"]
    argv += ["--tmpfs", "/run", "--tmpfs", "/tmp", "--tmpfs", "/root"]
    for source, target, writable in mounts:
        argv += ["--bind" if writable else "--ro-bind", str(source), target]
    workdir = container.get("workingDir", "/")
    argv += ["--dir", workdir, "--chdir", workdir]
    if container.get("securityContext", {}).get("readOnlyRootFilesystem"):
        argv += ["--remount-ro", "/"]
    for name, value in env.items():
        argv += ["--setenv", name, value]
    return argv


def entering(container: Container, words: Sequence[str]) -> list[str]:
    """The argument list that runs a program in a container that runs."""
    enter = ["nsenter", "--target", str(container.pid), "--user", "--preserve-credentials", "--mount"]
    return [*enter, "--ipc", "--uts", "--pid", "--wd", "--", *words]


async def head_of(stream: asyncio.StreamReader, marker: bytes) -> bytes:
    """The first bytes; as many as are needed to see whether they begin with the marker."""
    head = b""
    while len(head) < len(marker) and marker.startswith(head):
        data = await stream.read(_CHUNK)
        if not data:
            break
        head += data
    return head


def missing_program(said: bytes) -> str:
    """What a runtime says of a program that it cannot start.

    Args:
        said: ``PROGRAM: REASON``, the reason in the words of the C library.
    """
    word, _, reason = said.decode("utf-8", "replace").strip().rpartition(": ")
    if reason == "No such file or directory":
        found = (
            f"stat {word}: no such file or directory" if "/" in word else "executable file not found in $PATH"
        )
        return f'exec: "{word}": {found}'
    return f'exec: "{word}": {reason.lower()}'


def _read_object(descriptor: int) -> bytes:
    """What bubblewrap writes when it has made the first process; empty when it failed before."""
    told = b""
    while not told.rstrip().endswith(b"}"):
        data = os.read(descriptor, _CHUNK)
        if not data:
            break
        told += data
    return told


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return ""
