"""The launcher in a pod: the main process of its container, reached over TCP.

::

    launcher pod --listen 0.0.0.0:8000 --state /run/sandbox-k8s --token-hash HEX --lease 120 --sandbox-id ID

==================  ================================================================================
``--listen``        ``HOST:PORT``, ``[::]:PORT`` for IPv6; port 0 takes a free one
``--state``         a folder that this user can write to; all that the launcher ever writes is here
``--token-hash``    hex SHA-256 of the token; the token itself is never told to the launcher
``--lease``         seconds from the start, and from each request of the owner (of anybody before there is
                    one), until the launcher ends by itself
``--sandbox-id``    what ``SANDBOX_ID`` shows to commands
``--workdir``       where commands start; the image's working directory when it is left out
``--env``           ``NAME=VALUE`` for commands alone, not for the loader of this process; repeatable
``--memory-bytes``  address space of each process that a command starts; no limit when it is left out
``--end-message``   the file that says why it ended: what a pod shows as its termination message
==================  ================================================================================

Once it listens, it prints one line of JSON. It ends with code 0, all commands with it, when the lease runs
out (also if nobody ever came) and on SIGTERM, SIGINT or SIGHUP *from outside*: of its parent, or from another
PID namespace, as a container runtime's is. The same signals from commands are ignored, and as process 1 of
its container no signal of a command can end it, SIGKILL included.

Commands get the environment that the image and the pod gave this process, and ``--env``; none of its own is
added but SANDBOX_ID, and LANG, TERM and PATH where they are missing. An empty LD_PRELOAD or LD_AUDIT is how
a pod takes an image's own away from the loader of this process, which may be unable to load it; no command
sees it.
"""

import argparse
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from . import orphans
from .box import Box, BoxSettings
from .clock import monotonic_s
from .ownership import Ownership
from .server import answer_on, survive

_SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BACKLOG = 128
_KEEPALIVE_AFTER_S = 30
_KEEPALIVE_EVERY_S = 10
_OF_THE_LOADER = ("LD_PRELOAD", "LD_AUDIT")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# As process 1 these do nothing; elsewhere their default would end the launcher.
_HARMLESS = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _digest(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError("expected 64 hex digits: the SHA-256 of the token, not the token")
    return text


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launcher pod")
    parser.add_argument("--listen", type=_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--state", type=Path, required=True, metavar="DIR")
    parser.add_argument("--token-hash", type=_digest, required=True, metavar="HEX")
    parser.add_argument("--lease", type=_seconds, required=True, metavar="SECONDS")
    parser.add_argument("--sandbox-id", required=True, metavar="ID")
    parser.add_argument("--workdir", type=Path, metavar="DIR")
    parser.add_argument("--env", type=_variable, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--memory-bytes", type=int, metavar="N")
    parser.add_argument("--end-message", type=Path, default=Path("/dev/termination-log"), metavar="FILE")
    return parser


def _environment(sandbox_id: str, more: dict[str, str]) -> dict[str, str]:
    given = dict(os.environ)
    for name in _OF_THE_LOADER:
        if given.get(name) == "":
            del given[name]
    if not {"LANG", "LC_ALL", "LC_CTYPE"} & given.keys():
        given["LANG"] = "C.UTF-8"
    return {"PATH": _SAFE_PATH, "TERM": "dumb", **given, **more, "SANDBOX_ID": sandbox_id}


def _home(env: dict[str, str], state: Path) -> str:
    """The home of commands; a user of whom the image knows none gets a folder that can be written to."""
    home = env.get("HOME", "/")
    if home != "/" and Path(home).is_dir():
        return home
    own = state / "home"
    own.mkdir(mode=0o700, exist_ok=True)
    return str(own)


def _own_folder(state: Path) -> Path:
    """A new folder for pipes; an earlier container of the pod may have left its own."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="launcher-", dir=state))
    except OSError as problem:
        raise SystemExit(
            f"launcher pod: --state {state} cannot be written to by uid {os.getuid()}: {problem.strerror}; "
            "mount an emptyDir there (with securityContext.fsGroup for a user who is not root)"
        ) from problem
    tempfile.tempdir = str(state)
    return folder


def _listener(address: tuple[str, int]) -> socket.socket:
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family is socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as problem:
        raise SystemExit(f"launcher pod: cannot listen on {host}:{port}: {problem.strerror}") from problem
    # Accepted connections inherit these: an answer's last packet must not wait for the client's delayed
    # acknowledgement, and a caller whose node vanished must be noticed.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_AFTER_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
    return listener


class _KeptEpoch:
    """The last owner's epoch, for the next container of this pod: whoever was fenced stays fenced."""

    def __init__(self, state: Path) -> None:
        self._file = state / "epoch"

    def read(self) -> int:
        """0 when there was no container before."""
        try:
            return int(self._file.read_text())
        except FileNotFoundError:
            return 0
        except ValueError as problem:
            raise SystemExit(
                f"launcher pod: {self._file} is spoiled, nobody can own this: {problem}"
            ) from None

    def write(self, epoch: int) -> None:
        """Replace it, whole or not at all; a command that broke the folder must not keep owners out."""
        aside = self._file.with_suffix(".new")
        problem = ""
        try:
            aside.write_text(str(epoch))
            aside.replace(self._file)
        except OSError as failed:
            problem = f"not kept for a restart: {failed}"
        _say(event="owner", epoch=epoch, problem=problem)


def _say(**event: object) -> None:
    print(json.dumps(event), flush=True)  # noqa: T201  (the pod's log)


class _End:
    """The end, reached once, from whichever thread comes first."""

    def __init__(self, message: Path) -> None:
        self._message = message
        self._lock = threading.Lock()

    def __call__(self, why: str) -> None:
        if not self._lock.acquire(blocking=False):
            return  # not even waiting: a second signal's handler runs on top of the first one's
        code = 1
        try:
            with suppress(OSError):  # only a pod has this file, and only for the reader's comfort
                self._message.write_text(f"sandbox-k8s: {why}\n")
            _say(event="end", why=why)
            if os.getpid() != 1:  # the kernel ends everybody with process 1
                orphans.kill_all()
            code = 0
        except OSError as problem:
            sys.stderr.write(f"launcher pod: {problem}\n")
        finally:
            # Not sys.exit: threads may be in the middle of commands.
            os._exit(code)


def _end_on_signals_from_outside(end: Callable[[str], None]) -> None:
    """Wait for a signal to end; those that commands send are swallowed.

    Only the main thread blocks them and waits. The other threads leave them alone, since what they start
    inherits what they block; the kernel prefers the main thread for a process's signal while that one waits.
    """
    if sys.platform != "linux":
        threading.Event().wait()
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    for number in _ENDING:
        signal.signal(number, survive)
    while True:
        got = signal.sigwaitinfo(_ENDING)
        # 0 is a process of another PID namespace, or the kernel; also the parent of process 1.
        if got.si_pid in (0, os.getppid()):
            end(signal.Signals(got.si_signo).name)


def main(arguments: list[str]) -> int:
    """Serve until the lease runs out or the kubelet says so; does not return."""
    options = _parser().parse_args(arguments)
    end = _End(options.end_message)
    for number in _ENDING:  # until there are commands, any such signal comes from outside
        signal.signal(number, lambda number, _: end(signal.Signals(number).name))
    for number in _HARMLESS:
        signal.signal(number, survive)
    env = _environment(options.sandbox_id, dict(options.env))
    workdir = str(options.workdir or Path.cwd())
    folder = _own_folder(options.state)
    if "HOME" not in dict(options.env):
        env["HOME"] = _home(env, options.state)
    orphans.hide_memory()
    orphans.adopt()
    listener = _listener(options.listen)
    kept = _KeptEpoch(options.state)
    box = Box(
        BoxSettings(
            env, workdir, folder, options.memory_bytes, epoch_file=options.state / "epoch", orphans=True
        ),
        Ownership(options.lease, monotonic_s(), epoch=kept.read()),
        keep=kept.write,
    )

    def wait_for_lease() -> None:
        end(box.wait_for_end())

    threading.Thread(target=wait_for_lease, name="lease", daemon=True).start()
    answer_on(listener, box, options.token_hash)
    _say(
        event="listening",
        address=list(listener.getsockname()),
        pid=os.getpid(),
        uid=os.getuid(),
        shell=box.shell().program,
    )
    _end_on_signals_from_outside(end)
    return 0
