"""The launcher: reads its settings, serves its socket, ends with its lease.

Started by the keeper it inherits a listening unix socket and a channel; by hand it listens on TCP::

    SANDBOX_KEY_SHA256=... python -I -S launcher serve --tcp 127.0.0.1:8000
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import rex, routes
from .box import Box, BoxSettings
from .lease import Lease
from .replies import Reply
from .web import Server, Site

_SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Channel:
    """The line to the keeper: settings come in, renewals go out, its end is our end."""

    def __init__(self, descriptor: int | None) -> None:
        self._socket = None if descriptor is None else socket.socket(fileno=descriptor)
        self._lock = threading.Lock()

    def settings(self) -> dict[str, Any]:
        """Read the settings the keeper sends; without a keeper they come from the environment."""
        if self._socket is None:
            home = os.environ.get("HOME", "/")
            return {
                "key_hash": os.environ["SANDBOX_KEY_SHA256"],
                "env": {"PATH": os.environ.get("PATH", _SAFE_PATH), "HOME": home, "LANG": "C.UTF-8"},
                "workdir": str(Path.cwd()),
                "lease_s": None,
                "memory_bytes": None,
            }
        line = b""
        while not line.endswith(b"\n"):
            data = self._socket.recv(1 << 20)
            if not data:
                raise SystemExit("the keeper went away before it sent the settings")
            line += data
        return json.loads(line)

    def send(self, message: dict[str, Any]) -> None:
        """Tell the keeper something; it may be gone, which `watch` sees."""
        if self._socket is not None:
            with self._lock, suppress(OSError):
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def watch(self, end: threading.Event) -> None:
        """Set ``end`` once the keeper is gone."""
        if self._socket is None:
            return
        connection = self._socket

        def wait() -> None:
            # A keeper that is killed with a report unread resets the connection instead of closing it.
            with suppress(ConnectionError):
                while connection.recv(1):
                    pass
            end.set()

        threading.Thread(target=wait, name="channel", daemon=True).start()


def _survive(number: int, frame: object) -> None:
    """Nothing: ``kill -TERM 0`` of a command must not end its launcher (NVIDIA-NeMo/Gym#2262).

    A function and not SIG_IGN, which every command would inherit.
    """


def _failure(path: str, problem: Exception) -> Reply:
    return routes.failure(problem) if path.startswith("/sbx/") else rex.failure(problem)


def _listener(options: argparse.Namespace) -> socket.socket:
    if options.listen_fd is not None:
        return socket.socket(fileno=options.listen_fd)
    host, _, port = options.tcp.rpartition(":")
    return socket.create_server((host, int(port)), backlog=128)


def main(arguments: list[str]) -> int:
    """Serve until the lease runs out or the keeper goes away."""
    parser = argparse.ArgumentParser(prog="launcher serve")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen-fd", type=int, help="a listening socket that was inherited")
    where.add_argument("--tcp", help="HOST:PORT to listen on; the key's hash is read from SANDBOX_KEY_SHA256")
    parser.add_argument("--channel-fd", type=int, help="the socket to the keeper")
    parser.add_argument("--pipes", type=Path, required=True, help="a folder of the launcher's own")
    options = parser.parse_args(arguments)
    channel = Channel(options.channel_fd)
    settings = channel.settings()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _survive)
    listener = _listener(options)
    lease = Lease(settings["lease_s"], lambda left: channel.send({"lease_left_s": left}))
    box = Box(
        BoxSettings(settings["env"], settings["workdir"], options.pipes, settings["memory_bytes"]), lease
    )
    site = Site(box, settings["key_hash"], {**rex.ROUTES, **routes.ROUTES}, _failure)
    server = Server(listener, site)
    end = threading.Event()
    channel.watch(end)

    def wait_for_lease() -> None:
        lease.wait_for_end()
        end.set()

    threading.Thread(target=wait_for_lease, name="lease", daemon=True).start()
    threading.Thread(target=server.serve_forever, name="serve", daemon=True).start()
    channel.send({"ready": True, "address": str(listener.getsockname())})
    if options.channel_fd is None:
        print(json.dumps({"event": "listening", "address": list(listener.getsockname())}), flush=True)  # noqa: T201
    end.wait()
    for child in box.children.alive():
        os.killpg(child.pid, signal.SIGKILL)
    sys.stdout.flush()
    # Not sys.exit: threads may be in the middle of commands, and as process 1 our end is everybody's.
    os._exit(0)
