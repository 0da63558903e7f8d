"""`SglangReplica`: the client of one SGLang server, token-exact. Written against SGLang 0.5.23.

*Sampling.* `POST /generate` with `input_ids`, `return_logprob` and `stream`, so that what came before a cut
is kept. `stop_token_ids` are sent and `ignore_eos` is off: it would switch them off too (`schedule_batch.py`,
`_check_token_based_finish`), and a model's own end token that is not among them ends a turn as well.

*Log-probabilities* (`layers/sampler.py`, `Sampler.forward`): `output_token_logprobs` are the log-softmax of
logits / temperature over the whole vocabulary (`processed`), or of the logits alone (`raw`) where the server
runs with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`: say so with `logprob_kind`. At temperature 0 they are raw. Where
sampling is truncated, the kept ids are asked for (see `sglang_request`), and the log-probabilities are those
over them (`output_token_sampling_logprobs`: `processed`).

*Aborts.* A call that was sent to a paused server does not reach its scheduler, and `/abort_request` is lost
on it (observed). So a call of which nothing has come yet is ended here as well, and any whose abort fails.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import aiohttp
import anyio
import anyio.to_thread
import msgspec
from token_tracking import GenerationRecord

from agent_flow.engines.endpoint import base_url, proxy_of, read_token, tls_context
from agent_flow.engines.replica import PauseMode, ReplicaInfo, ReplicaRequest
from agent_flow.engines.sglang_info import Limits, limits, model_info, replica_info
from agent_flow.engines.sglang_request import check_prompt, check_sampling, generate_body, refusal, truncates
from agent_flow.engines.sglang_stream import (
    Answer,
    EventReader,
    Finish,
    contradiction,
    decode_chunk,
    records_of,
)
from agent_flow.engines.version import VersionReader
from agent_flow.errors import EngineError, UsageError

_NOT_FLUSHED = "Weights were updated, but the cache was not flushed"
_END_S = 1.0
_KEEPALIVE_S = 3.0
"""Shorter than uvicorn's 5 s, so that no call meets a connection that the server is closing."""


class _Call:
    """One `sample` under way."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.scope = anyio.CancelScope()


class SglangReplica:
    """See `Replica`. An async context manager: it owns the connections."""

    def __init__(
        self,
        address: str,
        *,
        versions: VersionReader,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        trust_env: bool = False,
        session_header: str = "",
        stream_interval: int = 32,
        logprob_kind: Literal["processed", "raw"] = "processed",
        vocab_size: int | None = None,
        connect_timeout_s: float = 10.0,
        control_timeout_s: float = 60.0,
        update_timeout_s: float = 1800.0,
        silence_timeout_s: float = 1800.0,
    ) -> None:
        """Nothing is opened yet.

        Args:
            address: base URL, without credentials.
            versions: one for all replicas of a run.
            token_file: a file with the server's API key alone. Read when the context is entered.
            ca_file: PEM file of the authorities that sign its certificate. None: those of the system.
            trust_env: use `HTTP_PROXY` and its like; else proxies are ignored.
            session_header: which header carries `ReplicaRequest.session` to a router in between, such as
                `X-SMG-Routing-Key`. Empty: none.
            stream_interval: tokens per chunk. More are cheaper: with each chunk the server sends everything
                again, unless it runs with `--incremental-streaming-output`. What it has sampled of a chunk is
                lost if the stream is cut.
            logprob_kind: see the module.
            vocab_size: one past the tokenizer's highest id; prompts with others are not sent. None: unknown.
            connect_timeout_s: for a connection.
            control_timeout_s: for a call that samples nothing. A pause waits for the running requests.
            update_timeout_s: for new weights.
            silence_timeout_s: between two chunks; a paused server sends none.

        Raises:
            UsageError: the address is no URL of a server.
        """
        self.address = base_url(address)
        self._versions = versions
        self._token_file = token_file
        self._ca_file = ca_file
        # Not aiohttp's own `trust_env`, which takes credentials from ~/.netrc too.
        self._proxy = proxy_of(self.address) if trust_env else None
        self._session_header = session_header
        self._stream_interval = stream_interval
        self._logprob_kind: Literal["processed", "raw"] = logprob_kind
        self._vocab_size = vocab_size
        self._update_timeout_s = update_timeout_s
        self._control = aiohttp.ClientTimeout(total=control_timeout_s, sock_connect=connect_timeout_s)
        self._stream = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=silence_timeout_s
        )
        self._token = ""
        self._http: aiohttp.ClientSession | None = None
        self._calls: set[_Call] = set()
        self._limits: Limits | None = None
        self._named: str | None = None
        """What the server last named as its weights."""

    async def __aenter__(self) -> Self:
        """Read token and certificates.

        Raises:
            UsageError: a file is missing or is not what it should be.
        """
        if self._token_file is not None:
            self._token = await anyio.to_thread.run_sync(read_token, self._token_file)
        tls: ssl.SSLContext | bool = True
        if self._ca_file is not None:
            tls = await anyio.to_thread.run_sync(tls_context, self._ca_file)
        # A proxy that compresses would hold chunks back.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._http = aiohttp.ClientSession(
            # limit=0: aiohttp's default of 100 connections would cap the fleet (trl#5847).
            connector=aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections; the server aborts what still runs on them."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def info(self) -> ReplicaInfo:
        """Ask it; see `Replica`. Context and KV size are asked for again only after a lost connection."""
        model = model_info(await self._ask("GET", "/model_info"))
        if self._limits is None:
            self._limits = limits(
                await self._ask("GET", "/v1/models"), await self._ask("GET", "/server_info")
            )
        self._named = model.weight_version
        return replica_info(model, self._limits)

    async def sample(self, request: ReplicaRequest) -> tuple[GenerationRecord, ...]:
        """Sample; see `Replica`. A call that is aborted before its first token gives one empty record."""
        check_sampling(request.sampling)
        check_prompt(request.prompt_ids, self._vocab_size)
        answer = Answer(
            request.rid,
            len(request.prompt_ids),
            kept_sets=truncates(request.sampling),
            version_before=self._named,
        )
        call = _Call(answer)
        self._calls.add(call)
        failed: EngineError | None = None
        try:
            with call.scope:
                await self._read(request, answer)
        except EngineError as error:
            failed = error
        except (aiohttp.ClientError, OSError) as error:
            failed = self._failure(error, "/generate") if answer.finish is None else None
        finally:
            self._calls.remove(call)
        if call.scope.cancelled_caught:
            answer.finish = answer.finish or Finish("abort")
        elif failed is None and answer.finish is None:
            what = f"{self.address}/generate: the stream ended in mid answer"
            failed = EngineError("cut", what, retryable=True)
        kind = self._logprob_kind if request.sampling.temperature else "raw"
        if failed is None:
            return records_of(answer, request, kind, self._versions.read)
        if answer.ids and failed.cause != "contradiction":
            failed.partial = records_of(answer, request, kind, self._versions.read)
        raise failed

    async def abort(self, rid: str) -> None:
        """Abort one call; see `Replica`. On a server paused `in_place` it returns when that goes on.

        Raises:
            UsageError: not 32 hex characters: the server aborts every call whose id begins with it.
            EngineError: see `Replica`.
        """
        if len(rid) != 32 or not set(rid) <= set("0123456789abcdef"):
            raise UsageError(f"{rid!r} is not the id of a call: 32 hex characters")
        await self._abort({"rid": rid}, rid)

    async def abort_all(self) -> None:
        """Abort every call of this server, whoever sent it; see `Replica`."""
        await self._abort({"abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; see `Replica`. In mode `abort` it returns when nothing runs any more."""
        await self._ask("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on; see `Replica`."""
        await self._ask("POST", "/continue_generation", {})

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; see `Replica`."""
        status, body = await self._send("POST", "/flush_cache", {})
        if status not in (200, 400):
            raise self._refusal(status, body, "/flush_cache")
        return status == 200

    async def update_from_disk(self, path: str, weight_version: str, *, flush_cache: bool) -> None:
        """Load other weights; see `Replica`.

        Not paused, the server waits for what runs.

        Raises:
            EngineError: see `Replica`. `not_flushed`: the new weights are there, but `flush_cache` met calls
                that run (paused `in_place`), and the KV cache of the old ones is still used.
        """
        body = {
            "model_path": path,
            "weight_version": weight_version,
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        timeout = aiohttp.ClientTimeout(total=self._update_timeout_s, sock_connect=self._control.sock_connect)
        status, text = await self._send("POST", "/update_weights_from_disk", body, timeout)
        flushed = _NOT_FLUSHED not in text
        if not flushed:
            # Else /model_info and the chunks would go on naming the old weights (observed).
            new = {"new_version": weight_version, "abort_all_requests": False}
            await self._ask("POST", "/update_weight_version", new)
        elif status != 200:
            raise self._refusal(status, text, "/update_weights_from_disk")
        self._named = weight_version
        if not flushed:
            raise EngineError("not_flushed", f"{self.address}: loaded {weight_version}", evidence=text)

    async def _read(self, request: ReplicaRequest, answer: Answer) -> None:
        headers = {self._session_header: request.session} if self._session_header and request.session else {}
        events = EventReader()
        async with self._session().post(
            f"{self.address}/generate",
            data=generate_body(request, self._stream_interval),
            headers=headers,
            timeout=self._stream,
            allow_redirects=False,
            proxy=self._proxy,
        ) as response:
            if response.status != 200:
                text = (await response.read()).decode("utf-8", "backslashreplace")
                raise self._refusal(response.status, text, "/generate")
            async for data in response.content.iter_any():
                for event in events.feed(data):
                    if event == b"[DONE]":
                        # Read to the end of the body, or the connection could not be used again.
                        with anyio.move_on_after(_END_S):
                            await response.read()
                        return
                    self._take(event, answer)

    def _take(self, event: bytes, answer: Answer) -> None:
        chunk = decode_chunk(event)
        if chunk.error is not None:
            raise self._refusal(chunk.error.code, chunk.error.message, "/generate")
        meta = chunk.meta_info
        if meta is None:
            raise contradiction("an event without meta_info", event)
        self._named = meta.weight_version
        finish = meta.finish_reason
        if finish is not None and (finish.status_code or 0) >= 400:
            # Nothing of this chunk counts: of a prompt that is too long one token is read, and one sampled.
            raise self._refusal(finish.status_code or 500, finish.message or "", "/generate")
        answer.add(meta, chunk.output_ids)

    async def _abort(self, body: object, rid: str = "") -> None:
        answered = False
        try:
            await self._ask("POST", "/abort_request", body)
            answered = True
        finally:
            # Without an answer nobody knows when a call will end: it ends here, with the tokens that came.
            for call in [call for call in self._calls if call.answer.rid.startswith(rid)]:
                if call.answer.finish is None and not (answered and call.answer.ids):
                    call.scope.cancel()

    async def _ask(self, method: str, path: str, body: object = None) -> str:
        status, text = await self._send(method, path, body)
        if status != 200:
            raise self._refusal(status, text, path)
        return text

    async def _send(
        self, method: str, path: str, body: object = None, timeout: aiohttp.ClientTimeout | None = None
    ) -> tuple[int, str]:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session().request(
                method,
                f"{self.address}{path}",
                data=data,
                timeout=timeout or self._control,
                allow_redirects=False,
                proxy=self._proxy,
            ) as response:
                return response.status, (await response.read()).decode("utf-8", "backslashreplace")
        except (aiohttp.ClientError, OSError) as error:
            failed = self._failure(error, path)
        # Raised out here: an error of aiohttp may hold the request's headers, and so the token.
        raise failed

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise UsageError(f"the client of {self.address} is not open", fix="async with SglangReplica(...)")
        return self._http

    def _refusal(self, status: int, body: str, path: str) -> EngineError:
        body = body.replace(self._token, "***") if self._token else body
        return refusal(f"{self.address}{path}", status, body)

    def _failure(self, error: aiohttp.ClientError | OSError, path: str) -> EngineError:
        """A call that got no answer, or half of one."""
        self._limits = None  # another server may answer next
        cause, what = "cut", f"the connection was lost ({type(error).__name__})"
        if isinstance(error, aiohttp.ClientSSLError):
            cause, what = "tls", str(error)
        elif isinstance(error, TimeoutError):
            cause, what = "timeout", str(error) or "no answer in time"
        elif isinstance(error, aiohttp.ClientConnectorError):
            cause, what = "connection", str(error)
        return EngineError(cause, f"{self.address}{path}: {what}", retryable=cause != "tls")
