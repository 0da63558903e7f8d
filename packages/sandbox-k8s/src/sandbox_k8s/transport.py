"""HTTP to a launcher over its unix socket; the only file that knows aiohttp."""

import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread

from .errors import (
    AccessError,
    CommandRefusedError,
    FencedError,
    FileError,
    SandboxError,
    SandboxLostError,
    SessionError,
    TransferError,
)
from .launcher import frames

_KEY_HEADER = "X-API-Key"
_EPOCH_HEADER = "X-Sandbox-Epoch"
_FRAMED = "application/x-sandbox"
_CONNECT_S = 5.0
_ERROR_TYPES: dict[str, type[SandboxError]] = {
    "auth": AccessError,
    "fenced": FencedError,
    "request": CommandRefusedError,
    "transfer": TransferError,
    "archive": TransferError,
    "session-exists": SessionError,
    "session-missing": SessionError,
    "session-busy": SessionError,
    "session-closed": SessionError,
}


class LauncherClient:
    """Requests to one launcher through one pool of connections.

    Args:
        path: The launcher's socket.
        epoch: Sent with each request; None for a guest that owns nothing.
    """

    def __init__(self, path: Path, token: str, epoch: int | None, *, margin_s: float, where: str) -> None:
        headers = {_KEY_HEADER: token}
        if epoch is not None:
            headers[_EPOCH_HEADER] = str(epoch)
        self._margin_s = margin_s
        self._where = where
        self._http = aiohttp.ClientSession(
            "http://sandbox",
            connector=aiohttp.UnixConnector(path=str(path), limit=0),
            headers=headers,
            skip_auto_headers=["User-Agent"],
        )

    async def close(self) -> None:
        """Close the connections; what was running under them ends."""
        await self._http.close()

    async def call(self, path: str, body: dict[str, Any], *, work_s: float | None = 0.0) -> dict[str, Any]:
        """A request and its answer in JSON.

        ``work_s`` is how long the launcher may work on it before the margin counts; None is for ever.
        """
        data = json.dumps(body).encode()
        async with self._request("POST", path, data=data, work_s=work_s) as response:
            return await response.json()

    async def command(
        self, path: str, head: dict[str, Any], stdin: bytes, *, work_s: float | None
    ) -> tuple[dict[str, Any], list[bytes]]:
        """A request of a head and bytes; the answer's head and its parts."""
        data = io.BytesIO(json.dumps(head).encode() + b"\n" + stdin)  # sent piece by piece
        headers = {"Content-Type": _FRAMED}
        async with self._request("POST", path, data=data, headers=headers, work_s=work_s) as response:
            line, _, rest = (await response.read()).partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        parts: list[bytes] = []
        start = 0
        for length in answer["parts"]:
            parts.append(rest[start : start + length])
            start += length
        return answer, parts

    async def info(self) -> dict[str, Any]:
        """What the launcher says about itself."""
        async with self._request("GET", "/sbx/info") as response:
            return await response.json()

    async def put(self, path: str, query: dict[str, str], chunks: Iterable[bytes]) -> None:
        """Stream bytes in; memory stays constant, the source is read in a thread."""
        data = _in_thread(frames.encode(chunks))
        async with self._request("PUT", path, params=query, data=data, work_s=None):
            return

    async def get(self, path: str, query: dict[str, str]) -> AsyncGenerator[bytes]:
        """Stream bytes out; the stream ends normally only if everything came.

        Raises:
            TransferError: It is not what was sent.
        """
        decoder = frames.Decoder()
        async with self._request("GET", path, params=query, work_s=None) as response:
            try:
                async for data in response.content.iter_chunked(frames.CHUNK):
                    for frame in decoder.feed(data):
                        yield frame
            except frames.FrameError as problem:
                raise TransferError(f"{query['path']} from {self._where}: {problem}") from problem
        if decoder.trailer is None:
            raise TransferError(f"{query['path']} from {self._where}: the stream ended before its trailer")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, *, work_s: float | None = 0.0, **options: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        # aiohttp's own default of 300 s in total would cut long commands off (SWE-agent/SWE-ReX#268).
        total = None if work_s is None else work_s + self._margin_s
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT_S)
        if self._http.closed:
            # aiohttp says this with a bare RuntimeError, which a heartbeat that was just waking up would
            # carry into its client's task group.
            raise SandboxLostError(f"{self._where} was stopped or detached by this client ({path})")
        try:
            async with self._http.request(method, path, timeout=timeout, **options) as response:
                if response.status >= 400:
                    raise _error(await response.read(), response.status, self._where)
                yield response
        except TimeoutError as problem:
            raise SandboxLostError(f"{self._where} did not answer within {total} s ({path})") from problem
        except (aiohttp.ClientError, ConnectionError, FileNotFoundError) as problem:
            raise SandboxLostError(
                f"{self._where} does not answer: {type(problem).__name__}: {problem} ({path}); it was "
                "stopped, its lease ran out, or it was killed"
            ) from problem


async def _in_thread(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(chunks)
    while (chunk := await anyio.to_thread.run_sync(next, iterator, None)) is not None:
        yield chunk


def _error(body: bytes, status: int, where: str) -> SandboxError:
    try:
        answer: dict[str, Any] = json.loads(body)
        code, message = answer["error"], answer["message"]
    except (ValueError, KeyError, TypeError):
        return SandboxLostError(f"{where} answered {status}", evidence=body[:2000].decode("utf-8", "replace"))
    if code == "os":
        return FileError(f"{where}: {message}", errno=answer["errno"])
    kind = _ERROR_TYPES.get(code)
    return kind(f"{where}: {message}") if kind else SandboxLostError(f"{where} failed: {message}")
