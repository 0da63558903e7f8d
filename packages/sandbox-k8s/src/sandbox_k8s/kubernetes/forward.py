"""Port-forward: one WebSocket through the API server per connection, behind a unix socket of our own.

The protocol is ``v4.channel.k8s.io``: channel 0 carries the bytes, channel 1 an error as text, and each
begins with the port in two bytes. One port per WebSocket, so that an error ends one connection and no other.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from sandbox_k8s.errors import ClusterError
from sandbox_k8s.routes import UnixRoute

from .streams import ApiStreams, WebSocket

_log = logging.getLogger("sandbox_k8s")
_PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = 0, 1
_READ = 1 << 16
_LONGEST_TMPDIR = 60
_NOT_ALLOWED = (401, 403)


class ForwardRoute(UnixRoute):
    """Through a socket that leads to a pod."""

    def __init__(self, path: Path, forwards: "PortForwards", pod: str) -> None:
        super().__init__(path)
        self._forwards = forwards
        self._pod = pod

    def options(self) -> dict[str, Any]:
        """Nothing.

        Raises:
            ClusterError: The last connection was refused by the API server.
        """
        self._forwards.check(self._pod)
        return super().options()


class PortForwards:
    """Unix sockets that lead to pods, each made when it is first asked for."""

    def __init__(self, streams: ApiStreams, namespace: str) -> None:
        self._streams = streams
        self._namespace = namespace
        self._listening: dict[str, anyio.CancelScope] = {}
        self._opening = anyio.Lock()
        self._refused: dict[str, ClusterError] = {}

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Hold the folder of the sockets (mode 0700) and what serves them."""
        # A socket's path has 107 bytes at most.
        short = None if len(os.fsencode(tempfile.gettempdir())) < _LONGEST_TMPDIR else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="sbx-pf-", dir=short))
        try:
            async with anyio.create_task_group() as self._tasks:
                try:
                    yield
                finally:
                    for pod in list(self._listening):
                        self.close(pod)
        finally:
            shutil.rmtree(self._folder)

    async def socket_of(self, pod: str, port: int) -> Path:
        """The socket that leads to that port of a pod."""
        path = self._folder / pod
        async with self._opening:
            if pod not in self._listening:
                path.unlink(missing_ok=True)  # of one that was cancelled
                listener = await anyio.create_unix_listener(path, mode=0o600)
                scope = self._listening[pod] = anyio.CancelScope(shield=True)
                self._tasks.start_soon(self._serve, listener, scope, pod, port)
        return path

    def check(self, pod: str) -> None:
        """Say why connections to a pod were cut, where trying again is of no use.

        Raises:
            ClusterError: The API server refuses them to us.
        """
        if pod in self._refused:
            raise self._refused.pop(pod)

    def close(self, pod: str) -> None:
        """Close a pod's socket and the connections through it."""
        self._refused.pop(pod, None)
        scope = self._listening.pop(pod, None)
        if scope is not None:
            scope.cancel()

    async def _serve(
        self, listener: anyio.abc.SocketListener, scope: anyio.CancelScope, pod: str, port: int
    ) -> None:
        async def carry(stream: anyio.abc.SocketStream) -> None:
            path = f"api/v1/namespaces/{self._namespace}/pods/{pod}/portforward?ports={port}"
            async with stream:
                try:
                    async with self._streams.websocket(path, _PROTOCOL) as socket:
                        await _carry(stream, socket)
                except ClusterError as problem:
                    if problem.code in _NOT_ALLOWED and pod in self._listening:
                        self._refused[pod] = problem
                    _log.info("port-forward to pod %s: %s", pod, problem)

        with scope:
            async with listener:
                await listener.serve(carry)


async def _carry(stream: anyio.abc.SocketStream, socket: WebSocket) -> None:
    """Carry bytes both ways until one side ends."""

    async def send() -> None:
        try:
            async for data in stream:
                await socket.send_bytes(bytes([_DATA]) + data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
            pass  # the other side is told below, by the end of the WebSocket
        tasks.cancel_scope.cancel()

    async def receive() -> None:
        begun: set[int] = set()
        try:
            async for message in socket:
                data: bytes = message.data
                channel, payload = data[0], data[1:]
                if channel not in begun:
                    begun.add(channel)
                    payload = payload[2:]
                if channel == _ERROR and payload:
                    _log.info("port-forward: %s", payload.decode("utf-8", "replace"))
                    break
                if channel == _DATA and payload:
                    await stream.send(payload)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        tasks.start_soon(receive)
