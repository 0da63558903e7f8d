"""HTTP to a launcher: over its unix socket, a pod's address, or the API server."""

import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import anyio
import anyio.to_thread
import msgspec
from aiohttp.client_exceptions import UnixClientConnectorError

from .errors import (
    AccessError,
    ClusterError,
    CommandRefusedError,
    FencedError,
    FileError,
    ResetRefusedError,
    SandboxError,
    SandboxLostError,
    SessionError,
    TransferError,
)
from .kubernetes.admission import classify_refusal, read_status
from .kubernetes.diagnosis import Diagnosis
from .launcher import frames
from .log import LogEntry

_KEY_HEADER = "X-API-Key"
_EPOCH_HEADER = "X-Sandbox-Epoch"
_REQUEST_ID_HEADER = "X-Request-ID"
_FRAMED = "application/x-sandbox"
_CONNECT_S = 5.0
_REX_FAILURE = 511
_ON_THE_WAY = frozenset({502, 503, 504})
_ERROR_TYPES: dict[str, type[SandboxError]] = {
    "auth": AccessError,
    "fenced": FencedError,
    "not-owner": FencedError,
    "request": CommandRefusedError,
    "transfer": TransferError,
    "archive": TransferError,
    "not-clean": ResetRefusedError,
    "session-exists": SessionError,
    "session-missing": SessionError,
    "session-busy": SessionError,
    "session-closed": SessionError,
}


class NoAnswerError(SandboxLostError):
    """The answer was lost on the way: a request with an id may be sent again."""


class RexError(SandboxError):
    """What the launcher answered to a request of SWE-ReX's protocol.

    Attributes:
        class_path: The exception that it stands for.
        extra_info: What that one carries, for example the output until a time-out.
    """

    def __init__(self, message: str, *, class_path: str, extra_info: dict[str, Any]) -> None:
        super().__init__(message)
        self.class_path = class_path
        self.extra_info = extra_info


class Route(Protocol):
    """A way to a launcher."""

    @property
    def base_url(self) -> str:
        """What its paths are below; ends with a slash."""
        ...

    def connector(self) -> aiohttp.BaseConnector:
        """A new pool of connections, closed by whoever asked for it."""
        ...

    def options(self) -> dict[str, Any]:
        """What each request needs: ``headers`` always, perhaps ``proxy`` and ``server_hostname``."""
        ...


class UnixRoute:
    """Over a unix socket of this machine."""

    base_url = "http://sandbox/"

    def __init__(self, path: Path) -> None:
        self._path = path

    def connector(self) -> aiohttp.BaseConnector:
        """Connections to the socket."""
        return aiohttp.UnixConnector(path=str(self._path), limit=0)

    def options(self) -> dict[str, Any]:
        """Nothing."""
        return {"headers": {}}


class AddressRoute:
    """Over TCP, straight to the launcher."""

    def __init__(self, host: str, port: int) -> None:
        self.base_url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def connector(self) -> aiohttp.BaseConnector:
        """Connections to the address."""
        return aiohttp.TCPConnector(limit=0)

    def options(self) -> dict[str, Any]:
        """Nothing."""
        return {"headers": {}}


class LauncherClient:
    """Requests to one launcher through one pool of connections.

    Args:
        route: The way to the launcher.
        epoch: Sent with each request; None for a guest that owns nothing.
        where: Names the sandbox in errors.

    Attributes:
        explain: Asked for the reason when a launcher that did answer is silent; None asks nobody.
    """

    def __init__(self, route: Route, token: str, epoch: int | None, *, margin_s: float, where: str) -> None:
        headers = {_KEY_HEADER: token}
        if epoch is not None:
            headers[_EPOCH_HEADER] = str(epoch)
        self._margin_s = margin_s
        self._where = where
        self.explain: Callable[[], Awaitable[Diagnosis | None]] | None = None
        self._epoch = epoch
        self._route = route
        self._http = aiohttp.ClientSession(
            route.base_url,
            connector=route.connector(),
            headers=headers,
            skip_auto_headers=["User-Agent"],
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close the connections; what was running under them ends."""
        await self._http.close()

    async def call(
        self, path: str, body: dict[str, Any], *, work_s: float | None = 0.0, request_id: str | None = None
    ) -> dict[str, Any]:
        """A request and its answer in JSON.

        Args:
            path: Of the launcher.
            body: JSON.
            work_s: How long the launcher may work on it before the margin counts; None is for ever.
            request_id: The launcher carries out a request of one id once, and answers it again and again.

        Raises:
            NoAnswerError: It may be sent again if it has an id.
        """
        data = json.dumps(body).encode()
        headers = {} if request_id is None else {_REQUEST_ID_HEADER: request_id}
        async with self._request("POST", path, data=data, headers=headers, work_s=work_s) as response:
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
        if self._http.closed:
            # aiohttp says this with a bare RuntimeError, which a heartbeat that was just waking up would
            # carry into its client's task group.
            raise SandboxLostError(f"{self._where} was stopped or detached by this client ({path})")
        try:
            way = self._route.options()
            headers = {**way.pop("headers"), **options.pop("headers", {})}
            options |= {**way, "timeout": timeout, "headers": headers}
            async with self._http.request(method, path.removeprefix("/"), **options) as response:
                if response.status >= 400:
                    raise _error(await response.read(), response.status, self._where)
                yield response
        except TimeoutError as problem:
            raise await self._lost(f"{self._where} did not answer within {total} s ({path})") from problem
        except (aiohttp.ClientError, ConnectionError, FileNotFoundError) as problem:
            # Nobody listens on a socket of this machine: that is no trouble on the way.
            ended = isinstance(problem, (UnixClientConnectorError, FileNotFoundError))
            raise await self._lost(
                f"{self._where} does not answer: {type(problem).__name__}: {problem} ({path}); it was "
                "stopped, its lease ran out, or it was killed",
                SandboxLostError if ended else NoAnswerError,
            ) from problem

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


def _error(body: bytes, status: int, where: str) -> SandboxError:
    try:
        answer: dict[str, Any] = json.loads(body)
        if status == _REX_FAILURE:
            return _rex_error(answer["swerexception"], where)
        code, message = answer["error"], answer["message"]
    except (ValueError, KeyError, TypeError):
        if status in (401, 403) and read_status(body).kind == "Status":
            # Not the launcher: the API server on the way to it, which will not change its mind.
            refused = classify_refusal(status, body)
            what = f"the way to {where}: HTTP {status}: {refused.failure}: {refused.why}"
            return ClusterError(what, diagnosis=refused, code=status)
        # A launcher says what is wrong; a bare 502 or 503 comes from something on the way to it.
        lost = NoAnswerError if status in _ON_THE_WAY else SandboxLostError
        return lost(f"{where} answered {status}", evidence=body[:2000].decode("utf-8", "replace"))
    if code == "os":
        return FileError(f"{where}: {message}", errno=answer["errno"])
    kind = _ERROR_TYPES.get(code)
    return kind(f"{where}: {message}") if kind else SandboxLostError(f"{where} failed: {message}")


def _rex_error(transfer: dict[str, Any], where: str) -> SandboxError:
    message, extra = str(transfer["message"]), dict(transfer["extra_info"])
    if "sandbox_error" in extra:
        kind = _ERROR_TYPES.get(extra["sandbox_error"], SandboxLostError)
        return kind(f"{where}: {message}")
    return RexError(message, class_path=str(transfer["class_path"]), extra_info=extra)
