"""A sandbox behind the E2B protocol, through its official SDK. Only this file and `e2b_errors` load `e2b`.

Commands go to the sandbox by the SDK's own client of its process service: `commands.run` decodes what a
command prints, and what is not UTF-8 would be lost. What the SDK raises becomes `EnvError`.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import IO, Literal

import anyio
from connectrpc.errors import ConnectError
from e2b import AsyncSandbox, SandboxQuery
from e2b.api.client_async import get_pyqwest_transport
from e2b.connection_config import READ_TIMEOUT, ApiParams
from e2b.envd.client_async import as_stream, create_rpc_client
from e2b.envd.process import process_connect, process_pb
from e2b.envd.rpc import ahandle_rpc_exception_with_health

from agent_flow.environments.e2b_errors import of_envd, translated
from agent_flow.errors import EnvError

SDK = f"e2b {version('e2b')}"

_RETRIES = 6
"""Of a call of the control API that was refused for now; the SDK heeds `Retry-After` within a call's time."""
_WHILE_THERE_IS_TIME = 1 << 20
"""The same of a start. The SDK waits longer from time to time, up to 10 s, and never beyond a call's time."""
_CALL_S = 60.0
_HEALTH_S = 10.0
_CHUNK = 1 << 20
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")

Output = Literal["stdout", "stderr"]


class E2bService:
    """The control API: it starts sandboxes and finds them again."""

    def __init__(
        self, *, api_key: str, domain: str, api_url: str, sandbox_url: str, proxy: str | None, user: str
    ) -> None:
        if proxy is None:
            _connect_directly()
        self._user = user
        self._access: ApiParams = {
            "api_key": api_key,
            "domain": domain,
            "api_url": api_url,
            "sandbox_url": sandbox_url or None,
            "proxy": proxy,
            "debug": False,
            "retries": _RETRIES,
            "request_timeout": _CALL_S,
        }

    async def check(self) -> None:
        """Ask the service something that costs nothing.

        Raises:
            EnvError: it does not answer, or refuses the key.
        """
        with translated("service"):
            await AsyncSandbox.list(limit=1, **self._access).next_items()

    async def create(
        self,
        template: str,
        *,
        key: str,
        lease_s: int,
        timeout_s: float,
        env: Mapping[str, str],
        metadata: Mapping[str, str],
        network: bool,
        patient: bool = True,
    ) -> E2bSandbox:
        """Start a sandbox that ends by itself after `lease_s`.

        Args:
            template: Name or id.
            key: Of this start alone: however often the service is asked, one sandbox comes up.
            lease_s: Seconds.
            timeout_s: Of the start, repetitions included.
            env: Of everything that runs in it.
            metadata: What the service keeps with it.
            network: Whether it may reach the internet.
            patient: Ask again until the time is up while there is no room.

        Raises:
            EnvError: it did not come up.
        """
        retries = _WHILE_THERE_IS_TIME if patient else _RETRIES
        access: ApiParams = {**self._access, "request_timeout": timeout_s, "retries": retries}
        with translated("start", template=template):
            made = await AsyncSandbox.create(
                template,
                timeout=lease_s,
                metadata=dict(metadata),
                envs=dict(env),
                allow_internet_access=network,
                lifecycle={"on_timeout": "kill"},
                idempotency_key=key,
                **access,
            )
        return E2bSandbox(made, self._user)

    async def end(self, metadata: Mapping[str, str]) -> int:
        """End all sandboxes with something in their metadata. Returns how many there were.

        Raises:
            EnvError: one may be left.
        """
        with translated("stop"):
            found = AsyncSandbox.list(query=SandboxQuery(metadata=dict(metadata)), **self._access)
            names = [one.sandbox_id for one in await found.next_items()]
            for name in names:
                await AsyncSandbox.kill(name, **self._access)
        return len(names)

    async def connect(self, sandbox_id: str, *, lease_s: int) -> E2bSandbox:
        """A sandbox that runs already; its lease is at least `lease_s` from now on.

        Raises:
            EnvError: it is gone.
        """
        with translated("attach"):
            found = await AsyncSandbox.connect(sandbox_id, timeout=lease_s, **self._access)
        return E2bSandbox(found, self._user)


class E2bSandbox:
    """A running sandbox. All methods raise `EnvError`."""

    def __init__(self, sandbox: AsyncSandbox, user: str) -> None:
        self._sandbox = sandbox
        self._user = user or None
        # The SDK does not say what its `IO` is of.
        self._write: Callable[..., Awaitable[object]] = sandbox.files.write  # pyright: ignore[reportUnknownMemberType]
        self._rpc = create_rpc_client(
            process_connect.ProcessClient, sandbox.envd_api_url, sandbox.connection_config
        )
        files = sandbox.files
        for client in (files._envd_api, files._envd_api_download, files._envd_api_streaming):  # pyright: ignore[reportPrivateUsage]
            client.event_hooks["response"].append(of_envd)
        name = base64.b64encode(f"{user}:".encode()).decode()
        self._headers = {"Authorization": f"Basic {name}"} if user else {}

    @property
    def id(self) -> str:
        """Which the service gave it."""
        return self._sandbox.sandbox_id

    async def about(self) -> tuple[str, str]:
        """The id of its template, and which versions of the SDK and of envd talk to each other."""
        with translated("start"):
            info = await self._sandbox.get_info()
        return info.template_id, f"{SDK}, envd {info.envd_version}"

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        take: Callable[[Output, bytes], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """Run an argument vector to its end and hand over what it prints.

        Args:
            command: Its program and arguments.
            env: Variables, on top of the sandbox's.
            timeout_s: After which the sandbox kills the program, if nobody did before.
            take: Is given the bytes.
            begin: Is called when the sandbox says that the program was started.

        Raises:
            EnvError: the sandbox did not say that the program has ended.
        """
        request = process_pb.StartRequest(
            process=process_pb.ProcessConfig(cmd=command[0], args=list(command[1:]), envs=dict(env)),
            stdin=False,
        )
        limit_ms = round(timeout_s * 1000)
        events = as_stream(self._rpc.start(request, headers=self._headers, timeout_ms=limit_ms))
        with translated("execute"):
            try:
                async for response in events:
                    kind = _kind(response)
                    if kind == "end":
                        return
                    if kind == "start":
                        begin()
                    output = _output(response)
                    if output is not None:
                        take(*output)
            except ConnectError as error:
                if isinstance(error.__cause__, anyio.get_cancelled_exc_class()):
                    raise error.__cause__ from None
                raise await ahandle_rpc_exception_with_health(error, self._is_running) from error
            finally:
                with anyio.CancelScope(shield=True):
                    await events.aclose()
        raise EnvError(
            "unreachable",
            "the output of a command broke off",
            retryable=True,
            evidence=f"{command[0]}: its stream ended without an `end` event",
        )

    async def _is_running(self) -> bool:
        return await self._sandbox.is_running(request_timeout=_HEALTH_S)

    async def read(self, path: str) -> bytes:
        """A file's bytes."""
        with translated("read", path=path):
            return bytes(await self._sandbox.files.read(path, format="bytes", user=self._user))

    async def read_into(self, path: str, target: IO[bytes], timeout_s: float) -> None:
        """The same for a file that may be larger than memory."""
        with translated("read", path=path), _limited(timeout_s, path):
            async with await self._sandbox.files.read(path, format="stream", user=self._user) as chunks:
                async for chunk in chunks:
                    target.write(chunk)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file's bytes; its folders are made."""
        with translated("write", path=path):
            await self._write(path, data, user=self._user)

    async def write_from(self, path: str, source: IO[bytes], timeout_s: float) -> None:
        """The same for a file that may be larger than memory."""
        with translated("write", path=path), _limited(timeout_s, path):
            await self._write(path, source, user=self._user)

    async def renew(self, lease_s: int) -> None:
        """Let it end `lease_s` from now, and not earlier."""
        with translated("lease"):
            await self._sandbox.set_timeout(lease_s)

    async def kill(self) -> None:
        """End it. One that is gone already is no failure."""
        with translated("stop"):
            await self._sandbox.kill()


@contextmanager
def _limited(timeout_s: float, path: str) -> Generator[None]:
    with anyio.move_on_after(timeout_s) as limit:
        yield
    if limit.cancelled_caught:
        raise EnvError("file", f"{path!r} took longer than {timeout_s:g} s", retryable=True)


def _kind(response: process_pb.StartResponse) -> str:
    """Of an event: `start`, `data`, `end` or `keepalive`."""
    event = response.event.event if response.event is not None else None
    return event.field if event is not None else ""


def _output(response: process_pb.StartResponse) -> tuple[Output, bytes] | None:
    """What a program printed. None: the event is about something else."""
    event = response.event.event if response.event is not None else None
    if event is None or event.field != "data":
        return None
    output = event.value.output
    if output is None or output.field not in ("stdout", "stderr"):
        return None
    return output.field, output.value


def _connect_directly() -> None:
    """Make the connection pools that the SDK keeps for calls without a proxy while no variable names one.

    They read `HTTP_PROXY` and its like when they are made, and there is no option against it.
    """
    named = [name for name in os.environ if name.lower() in _PROXY_VARIABLES]
    hidden = {name: os.environ.pop(name) for name in named}
    try:
        get_pyqwest_transport(None)
        get_pyqwest_transport(None, http_version="1.1")
        get_pyqwest_transport(None, READ_TIMEOUT, http_version="1.1")
    finally:
        os.environ.update(hidden)
