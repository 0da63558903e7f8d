"""SWE-ReX's runtime on a sandbox: stock requests and answers over the sandbox's own connections."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from pydantic import BaseModel
from swerex.runtime.abstract import IsAliveResponse, UploadRequest, UploadResponse
from swerex.runtime.config import RemoteRuntimeConfig
from swerex.runtime.remote import RemoteRuntime
from swerex.utils.log import get_logger

from sandbox_k8s.answers import NoAnswerError
from sandbox_k8s.errors import SandboxError, SandboxLostError
from sandbox_k8s.launcher import execute, rex, shell
from sandbox_k8s.sync_sandbox import SyncSandbox

from .errors import as_swerex

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_DAY_S = 86400.0


class K8sRemoteRuntime(RemoteRuntime):
    """A sandbox as SWE-ReX sees it. Made by `K8sDeployment`, or from any `SyncSandbox`.

    Unlike the stock class it keeps its connections from call to call, over whichever path the back end
    found, and from event loop to event loop (one ``asyncio.run`` per call is fine). A request whose answer is
    lost is asked for again and never carried out twice: a command that was cut off, or whose answer is gone,
    raises `K8sError` (its cause is a `ResultLostError`), whatever its ``check`` says. The time-out of a
    command is the one that counts: no 300 s of the HTTP client (SWE-agent/SWE-ReX#268).

    A sandbox that is gone raises `K8sLostError`, one that another worker owns `K8sFencedError`; what a
    command can cause raises SWE-ReX's own errors.
    """

    def __init__(self, sandbox: SyncSandbox, *, logger: logging.Logger | None = None) -> None:
        self.sandbox = sandbox
        self.logger = logger or get_logger("rex-runtime")
        self._margin_s = sandbox.client.config.answer_margin_s
        # For whoever looks at it: there is no address, and the key is not shown.
        self._config = RemoteRuntimeConfig(auth_token="", host="http://sandbox", timeout=self._margin_s)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether the sandbox answers and is still this worker's; also while commands run."""
        within_s = self._margin_s if timeout is None else timeout

        async def ask() -> None:
            inside = self.sandbox.sandbox
            with anyio.fail_after(within_s):
                await (inside.renew() if inside.owned else inside.info())

        try:
            await self.sandbox.client.thread.call_from(ask)
        except TimeoutError:
            return IsAliveResponse(is_alive=False, message=f"no answer within {within_s} s")
        except SandboxError as problem:
            return IsAliveResponse(is_alive=False, message=str(problem))
        return IsAliveResponse(is_alive=True)

    async def wait_until_alive(self, *, timeout: float = 60.0) -> None:
        """Return once the sandbox answers; the event loop goes on meanwhile.

        Raises:
            TimeoutError: It does not.
        """
        answers = partial(self.sandbox.sandbox.launcher.answers, timeout)
        try:
            await self.sandbox.client.thread.call_from(answers)
        except SandboxLostError as problem:
            raise TimeoutError(str(problem)) from problem

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a file, or what a folder holds: modes and links are kept, memory stays constant."""
        source = await anyio.to_thread.run_sync(_source, request.source_path)
        upload = partial(self.sandbox.sandbox.upload, source, request.target_path)
        try:
            await self.sandbox.client.thread.call_from(upload)
        except SandboxError as problem:
            raise as_swerex(problem) from problem
        return UploadResponse()

    async def _request(
        self, endpoint: str, payload: BaseModel | None, output_class: Any, num_retries: int = 0
    ) -> Any:
        body = {} if payload is None else payload.model_dump()
        try:
            answer = await self.sandbox.client.thread.call_from(partial(self._ask, endpoint, body))
        except SandboxError as problem:
            raise as_swerex(problem) from problem
        return output_class(**answer)

    async def _ask(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask until there is an answer, or the sandbox is known to be gone, or it stays silent too long."""
        launcher = self.sandbox.sandbox.launcher
        request_id = self.sandbox.client.client.clock.new_id()
        work_s = _work_s(endpoint, body)
        # An answer may be missed for as long as we wait for it, and then be asked for during the margin.
        keep_s = (_DAY_S if work_s is None else work_s) + 2 * self._margin_s
        pause_s = _FIRST_PAUSE_S
        until_s = None
        while True:
            try:
                return await launcher.call(
                    f"/{endpoint}", body, work_s=work_s, request_id=request_id, keep_s=keep_s
                )
            except NoAnswerError as problem:
                until_s = until_s or anyio.current_time() + self._margin_s
                if anyio.current_time() + pause_s > until_s:
                    raise
                self.logger.warning("asking again after %.1f s: %s", pause_s, problem)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _source(path: str) -> Path:
    source = Path(path).resolve()
    if not (source.is_file() or source.is_dir()):
        raise ValueError(f"Source path {source} is not a file or directory")
    return source


def _work_s(endpoint: str, body: dict[str, Any]) -> float | None:
    """How long the launcher may work on a request; None is for ever."""
    if endpoint == "create_session":
        # The launcher gives start-up files at least 10 s.
        return body["startup_timeout"] + 10.0 + shell.OVERRUN_S
    if endpoint == "execute" or body.get("action_type") == "bash":
        overrun_s = execute.OVERRUN_S if endpoint == "execute" else shell.OVERRUN_S
        return None if body["timeout"] is None else body["timeout"] + rex.GRACE_S + overrun_s
    return 0.0
