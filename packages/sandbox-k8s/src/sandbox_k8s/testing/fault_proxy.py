"""A proxy in front of an API server, fake or real, that does what networks and busy servers do."""

import asyncio
import shutil
import socket
import ssl
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import WSMsgType, web
from yarl import URL

from .background import Background
from .kubeconfig import kubeconfig
from .listening import listening

_TOO_MANY = "Too many requests, please try again later.\n"
_HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host"}
_ERROR: dict[str, Any] = {
    "kind": "Status",
    "apiVersion": "v1",
    "metadata": {},
    "status": "Failure",
    "message": "Internal error occurred: an injected fault",
    "reason": "InternalError",
    "code": 500,
}


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong, and how often: each a probability from 0 to 1.

    The same seed gives the nth request of a kind (a verb on a resource, whatever the object's name) the same
    fate, whatever else is asked meanwhile.

    Attributes:
        seed: Of all draws.
        too_many_requests: 429 as API Priority and Fairness gives it: text, and Retry-After.
        server_error: 500 with a Status; the request is not done.
        reset: The connection is reset; the request is not done.
        lost_answer: The request is done, and the connection is reset in the place of an answer.
        cut_watch: A watch ends in mid answer, after an event.
        stalled_watch: A watch is silent for ``stall_s`` after an event, and then goes on.
        half_open_watch: A watch is silent for ever after an event; nobody says so.
        doubled_event: An event of a watch comes twice.
        late_event: An event of a watch, and all after it, come ``late_s`` later.
        retry_after_s: What a 429 asks for, seconds.
        stall_s: Seconds.
        late_s: Seconds.
    """

    seed: int = 0
    too_many_requests: float = 0.0
    server_error: float = 0.0
    reset: float = 0.0
    lost_answer: float = 0.0
    cut_watch: float = 0.0
    stalled_watch: float = 0.0
    half_open_watch: float = 0.0
    doubled_event: float = 0.0
    late_event: float = 0.0
    retry_after_s: int = 1
    stall_s: float = 5.0
    late_s: float = 0.2


class Upstream(NamedTuple):
    """An API server.

    Attributes:
        url: Without a slash at the end.
        headers: What proves who one is, if that is a token.
        tls: None for a server without TLS; with the client's certificate, if that proves who one is.
    """

    url: str
    headers: Mapping[str, str] = {}
    tls: ssl.SSLContext | None = None


class FaultProxy:
    """The proxy; a context manager.

    Attributes:
        faults: May be set anew at any time.
        counts: How often each fault was made.
        url: Where it listens; without TLS, and for anybody on this machine.
        kubeconfig: A file that leads clients to it.
    """

    def __init__(self, upstream: Upstream, faults: Faults) -> None:
        self.faults = faults
        self.counts: dict[str, int] = {}
        self._upstream = upstream
        self._draws: dict[str, int] = {}
        self._background = Background("fault-proxy")

    def __enter__(self) -> "FaultProxy":
        self._folder = Path(tempfile.mkdtemp(prefix="fault-proxy-"))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.kubeconfig = self._folder / "kubeconfig"
        self.kubeconfig.write_text(kubeconfig(self.url, token=None))
        self._background.start(self._served)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.stop()
        shutil.rmtree(self._folder)

    @asynccontextmanager
    async def _served(self) -> AsyncGenerator[None]:
        connector = aiohttp.TCPConnector(ssl=self._upstream.tls or True, limit=0)
        self._http = aiohttp.ClientSession(
            connector=connector,
            headers=self._upstream.headers,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )
        app = web.Application(client_max_size=1 << 40)
        async with listening(app, self._handle, self._listener):
            try:
                yield
            finally:
                await self._http.close()
                await asyncio.sleep(0)  # aborted transports close their sockets one turn of the loop later

    def _falls(self, fault: str, what: str) -> bool:
        """Draw: whether a fault hits this request or event."""
        key = f"{self.faults.seed} {fault} {what}"
        number = self._draws[key] = self._draws.get(key, 0) + 1
        drawn = int.from_bytes(sha256(f"{key} {number}".encode()).digest()[:8]) / (1 << 64)
        hit = drawn < getattr(self.faults, fault)
        if hit:
            self.counts[fault] = self.counts.get(fault, 0) + 1
        return hit

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        what = _kind(request)
        if self._falls("too_many_requests", what):
            headers = {"Retry-After": str(self.faults.retry_after_s)}
            return web.Response(status=429, text=_TOO_MANY, headers=headers)
        if self._falls("server_error", what):
            return web.json_response(_ERROR, status=500)
        if self._falls("reset", what):
            return _reset(request)
        if "upgrade" in request.headers.get("Connection", "").lower():
            return await self._websocket(request)
        headers = [
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in _HOP_BY_HOP and name not in self._upstream.headers
        ]
        url = URL(self._upstream.url + request.rel_url.raw_path_qs, encoded=True)
        data = await request.read() if request.body_exists else None
        opening = self._http.request(request.method, url, headers=headers, data=data, allow_redirects=False)
        async with opening as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            if _watches(request):
                transport = None if answer.connection is None else answer.connection.transport
                try:
                    return await self._watch(request, answer, what, kept)
                finally:
                    # In the middle of an answer there is nobody to say goodbye to: TLS would wait for it.
                    if transport is not None:
                        transport.abort()
            body = await answer.read()
            if self._falls("lost_answer", what):
                return _reset(request)
            return web.Response(status=answer.status, body=body, headers=kept)

    async def _watch(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        what: str,
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        async for line in answer.content:
            if self._falls("late_event", what):
                await asyncio.sleep(self.faults.late_s)
            await response.write(line)
            if self._falls("doubled_event", what):
                await response.write(line)
            if self._falls("cut_watch", what):
                return _reset(request)
            if self._falls("stalled_watch", what):
                await asyncio.sleep(self.faults.stall_s)
            if self._falls("half_open_watch", what):
                await asyncio.Event().wait()  # until the client gives up
        await response.write_eof()
        return response

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        """Carried as it is, refusals too."""
        offered = request.headers.get("Sec-WebSocket-Protocol", "")
        protocols = [one.strip() for one in offered.split(",") if one.strip()]
        url = URL(self._upstream.url + request.rel_url.raw_path_qs, encoded=True)
        try:
            opening: Any = self._http.ws_connect(url, protocols=protocols, max_msg_size=0)
            upstream: Any = await opening
        except aiohttp.WSServerHandshakeError as problem:
            return web.Response(status=problem.status, text=problem.message)
        chosen = (upstream.protocol,) if upstream.protocol else ()
        socket = web.WebSocketResponse(protocols=chosen, max_msg_size=0, compress=False)
        await socket.prepare(request)
        ways = [asyncio.create_task(_carry(socket, upstream)), asyncio.create_task(_carry(upstream, socket))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await upstream.close()
        await socket.close()
        return socket


async def _carry(source: Any, target: Any) -> None:
    async for message in source:
        if message.type is WSMsgType.BINARY:
            await target.send_bytes(message.data)
        elif message.type is WSMsgType.TEXT:
            await target.send_str(message.data)


def _kind(request: web.Request) -> str:
    """What a request asks for, without the names that clients make up: those differ from run to run."""
    parts = request.path.strip("/").split("/")
    resource = parts.index("namespaces") + 2 if "namespaces" in parts[:-2] else len(parts) - 1
    verb = "WATCH" if _watches(request) else request.method
    named = "/{name}" if len(parts) > resource + 1 else ""
    return f"{verb} {parts[resource]}{named}{''.join('/' + part for part in parts[resource + 2 :])}"


def _watches(request: web.Request) -> bool:
    return request.query.get("watch", "").lower() not in ("", "0", "false")


def _reset(request: web.Request) -> web.StreamResponse:
    """Break the connection; what is returned goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
