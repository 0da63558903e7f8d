"""HTTP to a launcher, whichever way leads to it."""

import io
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import msgspec
from aiohttp.client_exceptions import UnixClientConnectorError

from .answers import NoAnswerError, error_of
from .errors import (
    CommandRefusedError,
    FencedError,
    SandboxError,
    SandboxLostError,
    TransferError,
)
from .kubernetes.diagnosis import Diagnosis
from .launcher import frames
from .launcher.body import LARGEST
from .log import LogEntry
from .routes import Route

_KEY_HEADER = "X-API-Key"
_EPOCH_HEADER = "X-Sandbox-Epoch"
_REQUEST_ID_HEADER = "X-Request-ID"
_KEEP_HEADER = "X-Request-Keep"
_FRAMED = "application/x-sandbox"
_CONNECT_S = 5.0


class _Exchange:
    """A request under way, and its answer while that is read."""

    def __init__(self) -> None:
        self.asking = anyio.CancelScope()
        self.answer: aiohttp.ClientResponse | None = None

    def cut(self) -> None:
        """Break it off, and the connection with it: the launcher ends what ran under it."""
        self.asking.cancel()
        connection = None if self.answer is None else self.answer.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()


class LauncherClient:
    """Requests to one launcher, through a pool of connections that others may share.

    Args:
        route: The way to the launcher.
        epoch: Sent with each request; None for a guest that owns nothing.
        where: Names the sandbox in errors.

    Attributes:
        explain: Asked for the reason when a launcher that did answer is silent; None asks nobody.
    """

    _later: int | None = None

    def __init__(self, route: Route, token: str, epoch: int | None, *, margin_s: float, where: str) -> None:
        self._headers = {_KEY_HEADER: token}
        if epoch is not None:
            self._headers[_EPOCH_HEADER] = str(epoch)
        self._margin_s = margin_s
        self._where = where
        self.explain: Callable[[], Awaitable[Diagnosis | None]] | None = None
        self._epoch = epoch
        self._route = route
        self._http, self._shares = route.connections()
        self._closed = False
        self._under_way: set[_Exchange] = set()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    async def close(self) -> None:
        """Cut what is under way; what was running under it ends. Closing twice does nothing."""
        self._closed = True
        for exchange in self._under_way:
            exchange.cut()
        if not self._shares:
            await self._http.close()

    async def replaced(self, epoch: int) -> None:
        """Close it, since its own client owns the sandbox by a later epoch.

        Whoever still uses it hears what the launcher would answer: `FencedError`.
        """
        self._later = epoch
        await self.close()

    async def call(
        self,
        path: str,
        body: dict[str, Any],
        *,
        work_s: float | None = 0.0,
        request_id: str | None = None,
        keep_s: float = 600.0,
    ) -> dict[str, Any]:
        """A request and its answer in JSON.

        Args:
            path: Of the launcher.
            body: JSON.
            work_s: How long the launcher may work on it before the margin counts; None is for ever.
            request_id: The launcher carries out a request of one id once, and answers it again and again.
            keep_s: How long after its end a request with an id may still be sent again; up to a day.

        Raises:
            NoAnswerError: It may be sent again if it has an id.
            CommandRefusedError: It is larger than a launcher takes.
        """
        data = json.dumps(body).encode()
        self._check_size(path, len(data))
        headers: dict[str, str] = {}
        if request_id is not None:
            headers = {_REQUEST_ID_HEADER: request_id, _KEEP_HEADER: str(math.ceil(keep_s))}
        async with self._request("POST", path, data=data, headers=headers, work_s=work_s) as response:
            return await response.json()

    async def command(
        self, path: str, head: dict[str, Any], stdin: bytes, *, work_s: float | None
    ) -> tuple[dict[str, Any], list[bytes]]:
        """A request of a head and bytes; the answer's head and its parts."""
        line = json.dumps(head).encode() + b"\n"
        self._check_size(path, len(line) + len(stdin))
        data = io.BytesIO(line + stdin)  # sent piece by piece
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

    def _check_size(self, path: str, size: int) -> None:
        if size > LARGEST:
            raise CommandRefusedError(
                f"{self._where}: a request of {size} bytes ({path}), {LARGEST} at most: upload what is large "
                "as a file, and let the command read that"
            )

    async def take_over(self, lease_s: float) -> None:
        """Become the owner: the launcher's answer is the change. Closes the connections if that fails.

        Raises:
            FencedError: A higher epoch owns the sandbox.
        """
        try:
            await self.call("/sbx/fence", {"epoch": self._epoch})
            await self.call("/sbx/lease", {"lease_s": lease_s})
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise

    async def answers(self, within_s: float) -> None:
        """Wait until the launcher answers: it listens a little after its container runs.

        Raises:
            SandboxLostError: It does not, within the time.
            AccessError: Its key is another one.
            ClusterError: The API server keeps the way to it closed to us.
        """
        deadline_s = anyio.current_time() + within_s
        pause_s = 0.01
        last: SandboxLostError | None = None
        while anyio.current_time() < deadline_s:
            with anyio.move_on_at(deadline_s):
                try:
                    await self.info()
                    return
                except SandboxLostError as problem:
                    last = problem
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.5)
        raise SandboxLostError(
            f"{self._where} was not heard of within {within_s:.0f} s", evidence=str(last or "")
        )

    async def info(self) -> dict[str, Any]:
        """What the launcher says about itself."""
        async with self._request("GET", "/sbx/info") as response:
            return await response.json()

    async def log(self, after: int) -> tuple[LogEntry, ...]:
        """The lines of its log above a number."""
        async with self._request("GET", "/sbx/log", params={"after": str(after)}) as response:
            answer: dict[str, Any] = await response.json()
        return msgspec.convert(answer["entries"], tuple[LogEntry, ...])

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
        if self._closed or self._http.closed:
            # aiohttp says this with a bare RuntimeError, which a heartbeat that was just waking up would
            # carry into its client's task group.
            raise self._left(path)
        exchange = _Exchange()
        self._under_way.add(exchange)
        try:
            way = self._route.options()
            headers = {**way.pop("headers"), **self._headers, **options.pop("headers", {})}
            options |= {**way, "timeout": timeout, "headers": headers}
            url = self._route.base_url + path.removeprefix("/")
            with exchange.asking:
                # Nobody but the launcher may see the key, wherever something on the way points to.
                exchange.answer = await self._http.request(method, url, allow_redirects=False, **options)
            if exchange.answer is None:
                raise self._left(path)
            async with exchange.answer as response:
                if self._closed:
                    raise self._left(path)
                if response.status >= 300:
                    raise error_of(await response.read(), response.status, self._where)
                yield response
        except aiohttp.ServerTimeoutError as problem:
            # A TimeoutError, too, but nothing was sent yet.
            raise await self._lost(
                f"{self._where} could not be reached within {_CONNECT_S} s ({path})", NoAnswerError
            ) from problem
        except TimeoutError as problem:
            raise await self._lost(f"{self._where} did not answer within {total} s ({path})") from problem
        except (aiohttp.ClientError, ConnectionError, FileNotFoundError) as problem:
            if self._closed:
                raise self._left(path) from problem
            # Nobody listens on a socket of this machine: that is no trouble on the way.
            ended = isinstance(problem, (UnixClientConnectorError, FileNotFoundError))
            raise await self._lost(
                f"{self._where} does not answer: {type(problem).__name__}: {problem} ({path}); it was "
                "stopped, its lease ran out, or it was killed",
                SandboxLostError if ended else NoAnswerError,
            ) from problem
        finally:
            self._under_way.discard(exchange)

    def _left(self, path: str) -> SandboxError:
        if self._later is not None:
            return FencedError(
                f"{self._where} belongs to epoch {self._later}, you are {self._epoch} ({path})"
            )
        return SandboxLostError(f"{self._where} was stopped or detached by this client ({path})")

    async def _lost(
        self, message: str, unexplained: type[SandboxLostError] = SandboxLostError
    ) -> SandboxLostError:
        found = None if self.explain is None else await self.explain()
        if found is None:
            return unexplained(message)
        return SandboxLostError(
            f"{message}. {found.failure or found.state}: {found.why}",
            evidence=found.evidence_text,
            diagnosis=found,
        )


async def _in_thread(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(chunks)
    while (chunk := await anyio.to_thread.run_sync(next, iterator, None)) is not None:
        yield chunk
