"""The keeper: a small process outside the sandbox that owns its folder and sees to its end.

It starts the launcher (through bubblewrap where there is one), listens on ``stop.sock``, and ends everything
when asked, when the launcher ends, or when the lease that the launcher last reported is well over. It is the
parent of all that runs in the sandbox: orphans fall to it, so that nothing escapes even without a PID
namespace.
"""

import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from . import archive, orphans, processes
from .clock import monotonic_s

SOCKET = "http.sock"
STOP_SOCKET = "stop.sock"
ALIVE_LOCK = "keeper.lock"
LOG = "log"
MARK = "SANDBOX_ID"
_OVERDUE_S = 5.0
_LOG_TAIL = 4096


class Keeper:
    """One sandbox seen from outside."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._folder = Path(order["folder"])
        self._deadline: float | None = monotonic_s() + order["start_timeout_s"]
        self._ready = False
        self._stopping = False
        self._waiting: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._partial = b""

    def run(self) -> int:
        """Start, watch, end; 0 when everything was cleaned up."""
        os.chdir(self._folder)  # sockets are bound by relative names: their paths are short of room
        lock = os.open(ALIVE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        orphans.adopt()
        self._watch_signals()
        stop_listener = _bind(STOP_SOCKET)
        self._selector.register(stop_listener, selectors.EVENT_READ, lambda: self._take_stop(stop_listener))
        self._channel, self._launcher = self._start()
        self._selector.register(self._channel, selectors.EVENT_READ, self._take_report)
        while not self._stopping:
            wait_s = None if self._deadline is None else self._deadline - monotonic_s()
            if wait_s is not None and wait_s <= 0:
                break
            for key, _ in self._selector.select(wait_s):
                key.data()
            if self._launcher.poll() is not None:
                break
        if not self._ready:
            self._announce({"error": "the launcher did not start", "log": self._log_tail()})
        os.chdir("/")
        return self._end()

    def _start(self) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
        listener = _bind(SOCKET)
        ours, theirs = socket.socketpair()
        argv = [
            *self._order["argv"],
            "--listen-fd",
            str(listener.fileno()),
            "--channel-fd",
            str(theirs.fileno()),
        ]
        with Path(LOG).open("ab") as log:
            launcher = subprocess.Popen(
                argv,
                env=self._order["env"],
                cwd=self._order["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(), theirs.fileno()),
                start_new_session=True,
            )
        listener.close()
        theirs.close()
        with suppress(BrokenPipeError):  # it ended at once: the log says why
            ours.sendall(json.dumps(self._order["settings"]).encode() + b"\n")
        return ours, launcher

    def _watch_signals(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd)
        signal.signal(signal.SIGCHLD, _note)
        signal.signal(signal.SIGHUP, _note)
        signal.signal(signal.SIGINT, _note)
        signal.signal(signal.SIGTERM, _note)

        def take() -> None:
            with suppress(BlockingIOError):
                if signal.SIGTERM in os.read(read_fd, 4096):
                    self._stopping = True

        self._selector.register(read_fd, selectors.EVENT_READ, take)

    def _take_stop(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self._waiting.append(connection)
        self._stopping = True

    def _take_report(self) -> None:
        try:
            data = self._channel.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(self._channel)
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "ready" in report:
                self._ready = True
                lease_s = self._order["settings"]["lease_s"]
                self._deadline = None if lease_s is None else monotonic_s() + lease_s + _OVERDUE_S
                self._announce({"ready": True, "pid": os.getpid()})
            elif report["lease_left_s"] is None:
                self._deadline = None
            else:
                self._deadline = monotonic_s() + report["lease_left_s"] + _OVERDUE_S

    def _announce(self, message: dict[str, Any]) -> None:
        """Answer whoever started us, once, and let go of the pipe."""
        with suppress(BrokenPipeError):
            os.write(1, json.dumps(message).encode() + b"\n")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.close(null)

    def _log_tail(self) -> str:
        with suppress(OSError):
            return Path(LOG).read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
        return ""

    def _end(self) -> int:
        problem = ""
        try:
            orphans.kill_all(partial(_victims, self._order["sandbox_id"]))
            archive.remove_tree(self._folder)
        except OSError as failed:
            problem = f"{self._folder} could not be removed: {failed}"
        for connection in self._waiting:
            with suppress(OSError):
                connection.sendall(json.dumps({"gone": not problem, "problem": problem}).encode() + b"\n")
            connection.close()
        return 1 if problem else 0


def _note(number: int, frame: object) -> None:
    """Nothing: the number arrives through the wakeup descriptor."""


def _bind(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(128)
    return listener


def _victims(sandbox_id: str) -> set[int]:
    own = os.getpid()
    return (processes.descendants_of(own) | processes.marked(MARK, sandbox_id)) - {own}


def main(arguments: list[str]) -> int:
    """Read the order from standard input and carry it out."""
    if arguments:
        sys.stderr.write("keep takes no arguments\n")
        return 2
    os.setsid()
    os.closerange(3, 1 << 16)
    order = json.loads(sys.stdin.buffer.read())
    return Keeper(order).run()
