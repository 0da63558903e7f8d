"""Connections to a pod's ports through the API server: port-forward and the pod proxy."""

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
from aiohttp import WSMsgType, web
from yarl import URL

from .answers import RefusalError
from .paths import Path

_PROTOCOL = "v4.channel.k8s.io"
_REFUSED = "connect: connection refused"
_CHUNK = 32 << 10
_CLOSE_AFTER_S = 1.0
"""From the program's end of a connection to the WebSocket's; as recorded."""
_HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "authorization",
}  # fmt: skip


async def forward(request: web.Request, address: str) -> web.StreamResponse:
    """Port-forward: two channels for each port, both opened by the port in two bytes."""
    asked = [int(port) for value in request.query.getall("ports", []) for port in value.split(",")]
    offered = request.headers.get("Sec-WebSocket-Protocol", "")
    if _PROTOCOL not in [one.strip() for one in offered.split(",")]:
        return web.Response(status=403)
    if not asked:
        return web.Response(status=400, text='query parameter "port" is required')
    socket = web.WebSocketResponse(protocols=(_PROTOCOL,), max_msg_size=0, compress=False)
    await socket.prepare(request)
    for index, port in enumerate(asked):
        for channel in (2 * index, 2 * index + 1):
            await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
    writers: dict[int, asyncio.StreamWriter] = {}
    tasks: list[asyncio.Task[None]] = []
    for index, port in enumerate(asked):
        try:
            reader, writers[2 * index] = await asyncio.open_connection(address, port)
        except OSError:
            text = f"error forwarding port {port} to pod: dial tcp4 {address}:{port}: {_REFUSED} "
            await socket.send_bytes(bytes([2 * index + 1]) + text.encode())
        else:
            tasks.append(asyncio.create_task(_bring(socket, 2 * index, reader)))
    try:
        if tasks:
            taking = asyncio.create_task(_take(socket, writers))
            ending = asyncio.create_task(_ended(tasks))
            await asyncio.wait([taking, ending], return_when=asyncio.FIRST_COMPLETED)
            tasks += [taking, ending]
    finally:
        for task in tasks:
            task.cancel()
        for writer in writers.values():
            writer.close()
    await socket.close()
    return socket


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(_CLOSE_AFTER_S)


async def _bring(socket: web.WebSocketResponse, channel: int, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(_CHUNK):
        await socket.send_bytes(bytes([channel]) + data)


async def _take(socket: web.WebSocketResponse, writers: dict[int, asyncio.StreamWriter]) -> None:
    async for message in socket:
        if message.type is WSMsgType.BINARY and (writer := writers.get(message.data[0])):
            writer.write(message.data[1:])
            await writer.drain()


def unreachable(address: str, port: str) -> RefusalError:
    """503: nobody listens there."""
    message = f"error trying to reach service: dial tcp {address}:{port}: {_REFUSED}"
    return RefusalError(503, "ServiceUnavailable", message)


async def proxy(request: web.Request, address: str, path: Path) -> web.StreamResponse:
    """The pod proxy: a request goes to the program, and its answer comes back as it is."""
    port = path.port or "80"
    # As it came: what is escaped in it, and how, is the program's business.
    behind = request.rel_url.raw_path_qs.partition("/proxy")[2] or "/"
    url = URL(f"http://{address}:{port}{behind}", encoded=True)
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
    session: aiohttp.ClientSession = request.app[PROXY_SESSION]
    try:
        opening = session.request(
            request.method,
            url,
            headers=headers,
            data=_body(request) if request.body_exists else None,
            allow_redirects=False,
        )
        async with opening as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=kept)
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response
    except aiohttp.ClientConnectorError as problem:
        raise unreachable(address, port) from problem


async def _body(request: web.Request) -> AsyncGenerator[bytes]:
    async for data in request.content.iter_any():
        yield data


PROXY_SESSION = web.AppKey("PROXY_SESSION", aiohttp.ClientSession)
