"""The launcher under a keeper: settings come over a channel, requests over a socket that was inherited.

It ends with its lease, or with its keeper. In a pod there is no keeper: see `pod`.
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

from . import orphans, rex, routes
from .box import Box, BoxSettings
from .clock import monotonic_s
from .ownership import Ownership
from .replies import Reply
from .web import Server, Site


class Channel:
    """The line to the keeper: settings come in, renewals go out, its end is our end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()

    def settings(self) -> dict[str, Any]:
        """Read the settings the keeper sends."""
        line = b""
        while not line.endswith(b"\n"):
            data = self._socket.recv(1 << 20)
            if not data:
                raise SystemExit("the keeper went away before it sent the settings")
            line += data
        return json.loads(line)

    def send(self, message: dict[str, Any]) -> None:
        """Tell the keeper something; it may be gone, which `watch` sees."""
        with self._lock, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def watch(self, end: threading.Event) -> None:
        """Set ``end`` once the keeper is gone."""

        def wait() -> None:
            # A keeper that is killed with a report unread resets the connection instead of closing it.
            with suppress(ConnectionError):
                while self._socket.recv(1):
                    pass
            end.set()

        threading.Thread(target=wait, name="channel", daemon=True).start()


def survive(number: int, frame: object) -> None:
    """Nothing: ``kill -TERM 0`` of a command must not end its launcher (NVIDIA-NeMo/Gym#2262).

    A function and not SIG_IGN, which every command would inherit.
    """


def _failure(path: str, problem: Exception) -> Reply:
    return routes.failure(problem) if path.startswith("/sbx/") else rex.failure(problem)


def answer_on(listener: socket.socket, box: Box, key_hash: str) -> None:
    """Answer requests for ``box`` in the background, from now on."""
    site = Site(box, key_hash, {**rex.ROUTES, **routes.ROUTES}, _failure)
    threading.Thread(target=Server(listener, site).serve_forever, name="serve", daemon=True).start()


def _make_workdir(workdir: str) -> None:
    """Make it where it is missing, as a container's runtime does; the log says why it cannot be."""
    try:
        Path(workdir).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise SystemExit(f"SandboxSpec.workdir {workdir} cannot be made: {problem.strerror}") from problem


def main(arguments: list[str]) -> int:
    """Serve until the lease runs out or the keeper goes away."""
    parser = argparse.ArgumentParser(prog="launcher serve")
    parser.add_argument("--listen-fd", type=int, required=True, help="a listening socket that was inherited")
    parser.add_argument("--channel-fd", type=int, required=True, help="the socket to the keeper")
    parser.add_argument("--pipes", type=Path, required=True, help="a folder of the launcher's own")
    options = parser.parse_args(arguments)
    orphans.hide_memory()
    channel = Channel(options.channel_fd)
    settings = channel.settings()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, survive)
    _make_workdir(settings["workdir"])
    listener = socket.socket(fileno=options.listen_fd)
    box = Box(
        BoxSettings(
            settings["env"], settings["workdir"], options.pipes, settings["memory_bytes"], orphans=True
        ),
        Ownership(settings["lease_s"], monotonic_s()),
        told=lambda left_s: channel.send({"lease_left_s": left_s}),
    )
    end = threading.Event()
    channel.watch(end)

    def wait_for_lease() -> None:
        print(box.wait_for_end(), flush=True)  # noqa: T201  (the sandbox's log)
        end.set()

    threading.Thread(target=wait_for_lease, name="lease", daemon=True).start()
    answer_on(listener, box, settings["key_hash"])
    channel.send({"ready": True, "address": str(listener.getsockname())})
    end.wait()
    for child in box.children.alive():
        os.killpg(child.pid, signal.SIGKILL)
    sys.stdout.flush()
    # Not sys.exit: threads may be in the middle of commands, and as process 1 our end is everybody's.
    os._exit(0)
