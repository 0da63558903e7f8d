"""Servers that behave as SGLang: one of the tests' own, and the real one where the environment names it."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
import zlib
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from agent_flow.config import SamplingConfig
from agent_flow.engines.replica import ReplicaRequest
from aiohttp import web

RECORDINGS = Path(__file__).parent / "recordings"
CONTEXT = 4096
PROMPT = (151644, 872, 198, 9707, 151645, 198, 151644, 77091, 198)


def recorded(name):
    return json.loads((RECORDINGS / f"{name}.json").read_text())["response"]


def recorded_events(name):
    lines = (RECORDINGS / f"{name}.sse").read_text().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class Call:
    """One /generate under way in the scripted server."""

    def __init__(self, body):
        self.rid = body.get("rid", "0" * 32)
        self.prompt = tuple(body["input_ids"])
        self.sampling = body["sampling_params"]
        self.key = (body.get("extra_key"), body.get("cache_salt"), self.prompt)
        self.cached_tokens = 0
        self.stream = body.get("stream", False)
        self.masks = body.get("return_sampling_mask", False)
        self.ids, self.rows, self.kept, self.values, self.spans = [], [], [], [], []
        self.sent = 0
        self.aborted = False
        self.finish = None


class ScriptedSglang:
    """SGLang 0.5.23 without a model: a token follows from weights, prompt and place; no randomness.

    Where a recorded answer exists it is given. One stepping task per call; `pause` holds them all.
    """

    def __init__(self, incremental=False):
        self.incremental = incremental
        self.weights, self.version = "weights-1", "default"
        self.calls, self.at_the_door, self.requests, self.peers = [], 0, [], set()
        self.mode = None
        self.cached = set()
        self.going = asyncio.Event()
        self.going.set()
        self.changed = asyncio.Condition()

    async def start(self, ssl_context=None):
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        self.site = web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=ssl_context)
        await self.site.start()
        scheme = "https" if ssl_context else "http"
        self.address = f"{scheme}://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def stop(self):
        await self.runner.cleanup()

    async def kill(self):
        for connection in list(self.runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self.stop()

    async def handle(self, request):
        body = await request.read()
        self.peers.add(request.transport.get_extra_info("peername"))
        self.requests.append((request.path, dict(request.headers), json.loads(body or b"{}")))
        answer = getattr(self, "on_" + request.path.strip("/").replace("/", "_"))
        try:
            return await answer(request, json.loads(body or b"{}"))
        finally:
            await self._notify()

    # -- control ------------------------------------------------------------------------------------------
    async def on_model_info(self, request, body):
        said = {"model_path": self.weights, "weight_version": self.version}
        return web.json_response(recorded("model_info") | said)

    async def on_v1_models(self, request, body):
        return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": CONTEXT}]})

    async def on_server_info(self, request, body):
        return web.json_response({"max_total_num_tokens": 16384, "max_req_input_len": CONTEXT - 6})

    async def on_abort_request(self, request, body):
        for call in self.calls:
            call.aborted |= body.get("abort_all", False) or call.rid.startswith(body["rid"])
        return web.Response()

    async def on_pause_generation(self, request, body):
        self.mode = body["mode"]
        if self.mode == "abort":
            for call in self.calls:
                call.aborted = True
            await self._until(lambda: not self.calls)
        self.going.clear()
        return web.json_response(recorded("pause_abort"))

    async def on_continue_generation(self, request, body):
        self.mode = None
        self.going.set()
        return web.json_response(recorded("continue_after_abort"))

    async def on_flush_cache(self, request, body):
        if self._busy():
            return web.Response(status=400, text="Flush cache failed.\n")
        self.cached.clear()
        return web.Response(text="Cache flushed.\n")

    async def on_update_weights_from_disk(self, request, body):
        if body["model_path"].startswith("/nonexistent"):
            return web.json_response(recorded("update_weights_bad_path"), status=400)
        await self._until(lambda: self.mode is not None or not self.calls)
        self.weights, self.scheduler_version = body["model_path"], body["weight_version"]
        if body["flush_cache"] and self._busy():
            what = "Weights were updated, but the cache was not flushed because requests are still running"
            return web.json_response({"success": False, "message": what}, status=400)
        self.version = body["weight_version"]
        what = f"Succeeded to update model weights. Weight version updated to {self.version}."
        return web.json_response(recorded("pause_abort_update_weights") | {"message": what})

    async def on_update_weight_version(self, request, body):
        self.version = body["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def _until(self, condition):
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _notify(self):
        async with self.changed:
            self.changed.notify_all()

    def _busy(self):
        return self.mode != "retract" and bool(self.calls)

    # -- sampling -----------------------------------------------------------------------------------------
    async def on_generate(self, request, body):
        call = Call(body)
        if len(call.prompt) + call.sampling["max_new_tokens"] > CONTEXT:
            (refused,) = recorded_events("too_long")
            words = refused["error"]["message"]
            total = len(call.prompt) + call.sampling["max_new_tokens"]
            words = words.replace(" 5009 ", f" {total} ").replace(" 9 tokens", f" {len(call.prompt)} tokens")
            refused["error"]["message"] = words
            return await self._stream(request, self._one(refused))
        if len(call.prompt) >= CONTEXT - 6:
            (refused,) = recorded_events("too_long_prompt")
            return await self._stream(request, self._one(refused))
        self.at_the_door += 1
        await self.going.wait()  # a paused server: not in the scheduler, where an abort would find it
        self.calls.append(call)
        call.cached_tokens = len(call.prompt) - 1 if call.key in self.cached else 0
        try:
            if call.stream:
                return await self._stream(request, self._chunks(call))
            last = [chunk async for chunk in self._chunks(call)][-1]
            return web.json_response(last)
        finally:
            self.calls.remove(call)
            self.cached.add(call.key)

    async def _stream(self, request, chunks):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for chunk in chunks:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _one(self, chunk):
        yield chunk

    async def _chunks(self, call):
        interval = call.sampling.get("stream_interval", 1)
        while call.finish is None:
            await asyncio.sleep(0.001)
            if not self.going.is_set():
                await self._until(lambda: self.going.is_set() or (self.mode == "retract" and call.aborted))
            self._step(call)
            if call.finish or len(call.ids) - call.sent >= interval or not call.sent:
                yield self._chunk(call)
                call.sent = len(call.ids)

    def _step(self, call):
        if call.aborted:
            queued = {"type": "abort", "message": "Abort in waiting queue"}
            running = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            call.finish = queued if self.mode == "retract" else running
            return
        token = 100 + zlib.crc32(f"{self.weights} {call.prompt} {len(call.ids)}".encode()) % 50000
        call.ids.append(token)
        call.rows.append([-1 - token % 7 / 8, token, None])
        if call.masks:
            width = call.sampling["top_k"]
            call.kept.append(list(range(token, token + width)))
            call.values.append(-float(np.log(np.float32(width))))
        version = getattr(self, "scheduler_version", self.version)
        if not call.spans or call.spans[-1]["version"] != version:
            call.spans.append({"version": version, "start": len(call.ids) - 1, "end": 0})
        call.spans[-1]["end"] = len(call.ids)
        if token in call.sampling["stop_token_ids"]:
            call.finish = {"type": "stop", "matched": token}
        elif len(call.ids) >= call.sampling["max_new_tokens"]:
            call.finish = {"type": "length", "length": len(call.ids)}

    def _chunk(self, call):
        incremental = self.incremental and call.stream
        start = call.sent if incremental else 0
        queued = call.finish is not None and call.finish.get("message") == "Abort in waiting queue"
        ids, start = (call.ids[-1:], 0) if queued and incremental else (call.ids[start:], start)
        meta = {
            "id": call.rid,
            "finish_reason": call.finish,
            "prompt_tokens": len(call.prompt),
            "weight_version": self.version,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": call.rows[start:],
            "output_token_logprobs_length": len(call.rows),
            "reasoning_tokens": 0,
            "completion_tokens": len(call.ids),
            "cached_tokens": call.cached_tokens,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        if call.masks:
            meta["output_token_sampling_mask"] = call.kept[start:]
            meta["output_token_sampling_logprobs"] = call.values[start:]
        if queued:
            del meta["prompt_tokens"]
        if call.finish:
            meta["weight_versions"] = call.spans or [{"version": self.version, "start": 0, "end": 0}]
            meta["weight_version"] = meta["weight_versions"][-1]["version"]
            meta["e2e_latency"] = 0.1
        return {"text": "", "output_ids": ids, "meta_info": meta}


class RealSglang:
    """The real server on this machine's CPU, in a process group of its own."""

    def __init__(self, incremental, folder):
        self.incremental, self.folder = incremental, folder
        self.weights = os.environ["SGLANG_MODEL"]
        self.process = None

    def ensure_up(self):
        if self.process is not None and self.process.poll() is None:
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [*shlex.split(os.environ["SGLANG_SERVE"]), "serve", os.environ["SGLANG_VENV"], self.weights]
        flags = ["--incremental-streaming-output"] if self.incremental else []
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with (self.folder / "sglang.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(port), *flags], stdout=log, stderr=log, env=env, start_new_session=True
            )
        self.address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{self.address}/model_info", timeout=5):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill_now()
                pytest.fail(f"SGLang did not start:\n{(self.folder / 'sglang.log').read_text()[-3000:]}")
            time.sleep(0.25)

    def kill_now(self):
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    async def kill(self):
        await asyncio.to_thread(self.kill_now)


class NamedSglang:
    """A server that somebody else started, `SGLANG_URL`."""

    def __init__(self, address):
        self.address = address
        self.weights = os.environ.get("SGLANG_MODEL", "")

    async def kill(self):
        pytest.skip("SGLANG_URL is not ours to kill; name SGLANG_VENV, SGLANG_MODEL and SGLANG_SERVE")


class Wire:
    """A TCP relay in front of a server: says when events have passed, and can be cut."""

    def __init__(self, target):
        self.host, _, port = target.removeprefix("http://").partition(":")
        self.port = int(port)
        self.events = 0
        self.moved = asyncio.Condition()
        self.writers = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error):
        self.server.close()
        self.cut()

    async def seen(self, events):
        async with self.moved:
            await self.moved.wait_for(lambda: self.events >= events)

    def cut(self):
        for writer in self.writers:
            writer.transport.abort()

    async def _relay(self, reader, writer):
        try:
            back, forth = await asyncio.open_connection(self.host, self.port)
        except OSError:
            writer.transport.abort()
            return
        self.writers |= {writer, forth}
        await asyncio.gather(self._pump(reader, forth, False), self._pump(back, writer, True))
        self.writers -= {writer, forth}

    async def _pump(self, reader, writer, answers):
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
                if answers:
                    async with self.moved:
                        self.events += data.count(b'data: {"')
                        self.moved.notify_all()
        with suppress(OSError):
            writer.close()


REAL = (pytest.mark.slow, pytest.mark.timeout(400))
"""The first test of a module waits for the server to start, which takes minutes on a busy machine."""
SERVERS = [
    "scripted",
    "scripted-incremental",
    pytest.param("sglang", marks=REAL),
    pytest.param("sglang-incremental", marks=REAL),
]
MISSING = "no real SGLang: set SGLANG_URL; or SGLANG_VENV, SGLANG_MODEL and SGLANG_SERVE"


@pytest.fixture(scope="module", params=SERVERS)
def kind(request, tmp_path_factory):
    """(incremental, the real server or None); the real one lives as long as the tests of a module."""
    name = request.param
    incremental = name.endswith("-incremental")
    if name.startswith("scripted"):
        yield incremental, None
    elif os.environ.get("SGLANG_URL"):
        if incremental:
            pytest.skip("SGLANG_URL is one server: its stream is tried as it is")
        yield incremental, NamedSglang(os.environ["SGLANG_URL"])
    elif {"SGLANG_VENV", "SGLANG_MODEL", "SGLANG_SERVE"} <= os.environ.keys():
        real = RealSglang(incremental, tmp_path_factory.mktemp(name))
        yield incremental, real
        real.kill_now()
    else:
        pytest.skip(MISSING)


@pytest.fixture
async def server(kind):
    """A server that runs, with nothing running on it."""
    incremental, real = kind
    if real is None:
        scripted = await ScriptedSglang(incremental).start()
        yield scripted
        await scripted.stop()
        return
    if isinstance(real, RealSglang):
        await asyncio.to_thread(real.ensure_up)
    yield real


@pytest.fixture
async def wire(server):
    async with Wire(server.address) as relay:
        yield relay


@pytest.fixture
async def scripted():
    """Starts scripted servers."""
    started = []

    async def start(incremental=False, ssl_context=None):
        started.append(await ScriptedSglang(incremental).start(ssl_context))
        return started[-1]

    yield start
    for one in started:
        await one.stop()


@pytest.fixture
async def answering():
    """Starts a server that answers everything with a handler's answer; gives address and requests."""
    runners = []

    @asynccontextmanager
    async def start(handler):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def make_request():
    """A `ReplicaRequest` with a new id."""
    made = iter(range(1, 10**6))

    def make(max_new_tokens=5, *, prompt=PROMPT, stop_ids=(), rid=None, salt="", session="", **sampling):
        return ReplicaRequest(
            rid=rid or os.urandom(14).hex() + f"{next(made):04x}",
            prompt_ids=np.array(prompt, np.int32),
            stop_ids=frozenset(stop_ids),
            sampling=SamplingConfig(**sampling),
            max_new_tokens=max_new_tokens,
            salt=salt,
            session=session,
        )

    return make


@pytest.fixture
def recording():
    """`recording(name)`: a recorded stream's events; `recording.bytes(name)`: its bytes."""

    def read(name):
        return recorded_events(name)

    read.bytes = lambda name: (RECORDINGS / f"{name}.sse").read_bytes()
    read.answer = recorded
    return read


@pytest.fixture
def free_port():
    """A port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
async def garbage_server():
    """The address of something that does not speak HTTP."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail.example.org ESMTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
