"""Ways to launchers, and the pools of connections that they lead through."""

import asyncio
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiohttp
from aiohttp.client_proto import ResponseHandler


class Connections(NamedTuple):
    """A pool of connections.

    Attributes:
        shared: Others use it too, and whoever made it closes it.
    """

    http: aiohttp.ClientSession
    shared: bool


class Route(Protocol):
    """A way to a launcher."""

    @property
    def base_url(self) -> str:
        """What its paths are below; ends with a slash."""
        ...

    def connections(self) -> Connections:
        """The pool to use. Asked for once per client of a launcher, in the loop."""
        ...

    def options(self) -> dict[str, Any]:
        """What each request needs: ``headers`` always, perhaps ``proxy`` and ``server_hostname``."""
        ...


class UnixRoute:
    """Over a unix socket of this machine."""

    base_url = "http://sandbox/"

    def __init__(self, path: Path) -> None:
        self._path = path

    def connections(self) -> Connections:
        """A new pool: it can lead to one socket only."""
        return Connections(open_pool(aiohttp.UnixConnector(path=str(self._path), limit=0)), shared=False)

    def options(self) -> dict[str, Any]:
        """Nothing."""
        return {"headers": {}}


class AddressRoute:
    """Over TCP, straight to the launcher.

    Args:
        host: Name or address.
        port: Where it listens.
        shared: The pool to use; None is a new one.
    """

    def __init__(self, host: str, port: int, shared: aiohttp.ClientSession | None = None) -> None:
        self.base_url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        self._shared = shared

    def connections(self) -> Connections:
        """The pool that it was given, or a new one."""
        if self._shared is not None:
            return Connections(self._shared, shared=True)
        return Connections(open_pool(aiohttp.TCPConnector(limit=0)), shared=False)

    def options(self) -> dict[str, Any]:
        """Nothing."""
        return {"headers": {}}


def open_pool(connector: aiohttp.BaseConnector, base_url: str | None = None) -> aiohttp.ClientSession:
    """A pool that adds nothing to requests and keeps nothing of answers; connections that idle are closed.

    Args:
        connector: Becomes the pool's own.
        base_url: What paths are relative to; None is nothing.
    """
    factory: Any = partial(_Connection, asyncio.get_running_loop())
    connector._factory = factory  # pyright: ignore[reportPrivateUsage]  (there is no other way in)
    return aiohttp.ClientSession(
        base_url, connector=connector, skip_auto_headers=["User-Agent"], cookie_jar=aiohttp.DummyCookieJar()
    )


class _Connection(ResponseHandler):
    """A connection that ends for the other side when it is closed here.

    A fork has a copy of its descriptor, so that closing ours alone tells nobody: a launcher ends a cancelled
    command because its caller went away.
    """

    _socket: socket.socket | None = None
    _is_secure = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember what a transport that was closed twice does not tell any more."""
        self._socket = transport.get_extra_info("socket")
        self._is_secure = transport.get_extra_info("sslcontext") is not None
        super().connection_made(transport)

    def close(self) -> None:
        """Close it, as its pool does when a request is cancelled."""
        self._shut()
        transport = self.transport
        super().close()
        if transport is not None and self._is_secure:
            transport.abort()  # TLS would wait for the other side's goodbye, after the end of the loop too

    def connection_lost(self, exc: BaseException | None) -> None:
        """It was closed by whoever else, with the descriptor still open."""
        self._shut()
        super().connection_lost(exc)

    def _shut(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it is closed, or was never connected
                self._socket.shutdown(socket.SHUT_RDWR)
