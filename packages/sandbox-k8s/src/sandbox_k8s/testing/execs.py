"""Exec over a WebSocket: ``v4.channel.k8s.io`` and ``v5.channel.k8s.io``.

Channel 0 is standard input, 1 output, 2 errors, 3 the end as a Status, 4 the size of a terminal (there is no
terminal here). Version 5 adds channel 255, whose payload names a channel that its sender has closed.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

from aiohttp import WSMsgType, web

from .container import Container, entering, head_of, missing_program

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STDIN, _STDOUT, _STDERR, _STATUS, _CLOSE = 0, 1, 2, 3, 255
_TRUE = ("1", "true")
_FRAME = 32 << 10
_NO_WORDS = (
    "Internal error occurred: error executing command in container: failed to exec in container: failed to "
    "start exec: OCI runtime exec failed: exec failed: args must not be empty"
)
_NOT_STARTED = b"nsenter: failed to execute "


async def serve(request: web.Request, container: Container) -> web.StreamResponse:
    """Run what the query names. A client that goes away does not end it, as on a real cluster."""
    offered = [one.strip() for one in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if one]
    if offered and not set(offered) & {*PROTOCOLS}:
        return web.Response(status=403)
    flags = [name for name in ("stdin", "stdout", "stderr") if request.query.get(name, "").lower() in _TRUE]
    if not flags:
        return web.Response(status=400, text="you must specify at least 1 of stdin, stdout, stderr")
    socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=0, compress=False)
    await socket.prepare(request)
    words = request.query.getall("command", [])
    exchange = _Exchange(socket, words, request.query.get("tty", "").lower() in _TRUE)
    await exchange.send(_STDOUT, b"")
    if not words:
        await exchange.finish(_internal(_NO_WORDS))
        return socket
    work = asyncio.create_task(exchange.run(container, wants_input="stdin" in flags))
    container.execs.add(work)
    work.add_done_callback(container.execs.discard)
    await asyncio.shield(work)
    return socket


class _Exchange:
    """One command and its socket."""

    def __init__(self, socket: web.WebSocketResponse, words: list[str], tty: bool) -> None:
        self._socket = socket
        self._words = words
        self._tty = tty
        self._v5 = socket.ws_protocol == PROTOCOLS[0]
        self._not_started = b""

    async def run(self, container: Container, *, wants_input: bool) -> None:
        """Run the command to its end."""
        process = await asyncio.create_subprocess_exec(
            *entering(container, self._words),
            env=dict(container.env),
            stdin=asyncio.subprocess.PIPE if wants_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        receiving = asyncio.create_task(self._receive(process))
        try:
            outputs = (process.stdout, _STDOUT), (process.stderr, _STDOUT if self._tty else _STDERR)
            await asyncio.gather(*(self._pump(stream, channel) for stream, channel in outputs))
            code = await process.wait()
        finally:
            receiving.cancel()
        await self.finish(self._status(128 - code if code < 0 else code))

    async def send(self, channel: int, data: bytes) -> None:
        """A frame, if there is still somebody to send it to."""
        if not self._socket.closed:
            try:
                await self._socket.send_bytes(bytes([channel]) + data)
            except ConnectionError:
                return  # the client went away; the command runs on

    async def finish(self, status: Mapping[str, Any]) -> None:
        """Say how it ended, and close. Without a subprotocol a failure is a text, a success nothing."""
        if self._socket.ws_protocol is None:
            if "message" in status:
                await self.send(_STATUS, status["message"].encode())
        else:
            told: dict[str, Any] = {"metadata": {}, **status} if self._v5 else {**status}
            await self.send(_STATUS, json.dumps(told, separators=(",", ":")).encode())
        await self._socket.close()

    async def _pump(self, stream: asyncio.StreamReader, channel: int) -> None:
        head = await head_of(stream, _NOT_STARTED)
        if head.startswith(_NOT_STARTED):
            self._not_started = head + await stream.read()
            return
        if head:
            await self.send(channel, head)
        while data := await stream.read(_FRAME):
            await self.send(channel, data)

    async def _receive(self, process: asyncio.subprocess.Process) -> None:
        """Standard input. An empty frame is no end; version 5 says the end with a frame of its own."""
        async for message in self._socket:
            if message.type is not WSMsgType.BINARY or process.stdin is None:
                continue
            data: bytes = message.data
            if self._v5 and data == bytes([_CLOSE, _STDIN]):
                process.stdin.close()
            elif data[:1] == bytes([_STDIN]) and not process.stdin.is_closing():
                process.stdin.write(data[1:])
                try:
                    await process.stdin.drain()
                except ConnectionError:
                    return  # the command reads no more

    def _status(self, code: int) -> dict[str, Any]:
        if self._not_started:
            problem = (
                "error executing command in container: failed to exec in container: failed to start exec "
                f'"{os.urandom(32).hex()}": OCI runtime exec failed: exec failed: unable to start container '
                f"process: {missing_program(self._not_started.removeprefix(_NOT_STARTED))}"
            )
            return _internal(problem, v5=self._v5)
        if code == 0:
            return {"status": "Success"}
        told = f"command terminated with exit code {code}"
        if not self._v5:
            told = f"error executing command [{' '.join(self._words)}], exit code {code}"
        return {
            "status": "Failure",
            "message": f"command terminated with non-zero exit code: {told}",
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
        }


def _internal(problem: str, *, v5: bool = False) -> dict[str, Any]:
    status: dict[str, Any] = {
        "status": "Failure",
        "message": f"Internal error occurred: {problem}",
        "reason": "InternalError",
    }
    if v5:
        status["details"] = {"causes": [{"message": problem}]}
    return {**status, "code": 500}
