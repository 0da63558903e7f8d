"""Answers of the API server that do not end: watches, and connections through it.

By aiohttp and not by the official client, whose reads are in threads that nothing can interrupt.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast

import aiohttp
import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from sandbox_k8s.routes import open_pool

from .access import ApiAccess
from .api import refusal

_CONNECT_S = 5.0
_SILENCE_S = 5.0
_LONGEST_LINE = 8 << 20
_CLOSE_S = 0.5
_UNAUTHORIZED, _FORBIDDEN = 401, 403


class WebSocket(Protocol):
    """The little of a WebSocket that is used."""

    def __aiter__(self) -> AsyncIterator[aiohttp.WSMessage]:
        """Its messages, until it is closed."""
        ...

    async def send_bytes(self, data: bytes) -> None:
        """Send one message."""
        ...

    async def close(self) -> object:
        """Say goodbye."""
        ...


class ApiStreams:
    """Long requests to one API server over one pool of connections."""

    def __init__(self, access: ApiAccess) -> None:
        self._access = access

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Hold the pool."""
        connector = aiohttp.TCPConnector(ssl=self._access.tls or True, limit=0)
        self._http = open_pool(connector, self._access.base_url)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._http.close()
                # Aborted transports close their sockets one turn of the loop later.
                await anyio.lowlevel.checkpoint()

    async def watch(self, path: str, query: dict[str, str], lasts_s: float) -> AsyncGenerator[dict[str, Any]]:
        """The events of a watch, until the server ends it after ``lasts_s``, or the connection breaks.

        Both ends look alike: a cut connection and a time-out leave the same state, to go on from the last
        version that was seen. A connection that is silent for longer than the server would keep it is dead.

        Raises:
            ClusterError: The watch was refused, or there is no connection.
            msgspec.DecodeError: A line is no JSON.
        """
        options = self._access.known_options()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=lasts_s + _SILENCE_S)
        query = {**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": f"{lasts_s:.0f}"}
        try:
            async with self._http.get(
                path, params=query, timeout=timeout, allow_redirects=False, **options
            ) as response:
                if response.status >= 300:
                    body = await response.read()
                    await self._renew(response.status)
                    raise refusal(f"watching {path}", response.status, body, response.headers)
                transport = None if response.connection is None else response.connection.transport
                try:
                    async for line in _lines(response.content):
                        yield msgspec.json.decode(line)
                except (aiohttp.ClientError, TimeoutError, ConnectionError):
                    return
                finally:
                    # In the middle of an answer there is nobody to say goodbye to: TLS would wait for it.
                    if transport is not None:
                        transport.abort()
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            what = f"{type(problem).__name__}: {problem}"
            raise refusal(f"watching {path}", 0, what) from problem

    async def _renew(self, status: int) -> None:
        """After that answer, see to it that the next try is with the credentials of now."""
        if status == _UNAUTHORIZED:
            await anyio.to_thread.run_sync(self._access.renew, abandon_on_cancel=True)

    @asynccontextmanager
    async def websocket(self, path: str, protocol: str) -> AsyncGenerator[WebSocket]:
        """A WebSocket through the API server.

        Raises:
            ClusterError: It was refused, or there is no connection.
        """
        http = cast("Any", self._http)  # the type of its WebSockets differs between releases of aiohttp
        try:
            socket: WebSocket = await http.ws_connect(
                path, protocols=[protocol], max_msg_size=0, **self._access.known_options()
            )
        except aiohttp.WSServerHandshakeError as problem:
            # The body, which says more, is lost; a subresource may take two verbs, get and create.
            said = f"{problem.message}: the verbs get or create are missing, or an admission refused"
            body = said if problem.status == _FORBIDDEN else problem.message
            await self._renew(problem.status)
            raise refusal(f"connecting to {path}", problem.status, body) from problem
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            raise refusal(f"connecting to {path}", 0, f"{type(problem).__name__}: {problem}") from problem
        try:
            yield socket
        finally:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await socket.close()


async def _lines(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Whole lines, also those above 128 KiB that aiohttp's reader refuses: annotations may have 256 KiB."""
    rest = b""
    async for data in stream.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(rest) > _LONGEST_LINE:
            raise aiohttp.ClientPayloadError(f"a line of a watch has more than {_LONGEST_LINE} bytes")
