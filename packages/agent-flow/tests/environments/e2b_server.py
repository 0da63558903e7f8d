"""A service that speaks E2B, for tests: `python e2b_server.py FOLDER` prints its port and serves.

It follows the public interface of e2b-dev/infra at 54693ff (22 August 2026), as the SDK e2b 2.63.0 uses it:
the control API of spec/openapi.yml 0.1.0 (create by `POST /v2/sandboxes`, list, look, time-out, connect,
kill) with the messages of packages/api, and envd 0.6.13 (packages/envd): `process.Process/Start` of
spec/process/process.proto as Connect RPC in JSON, `/files` and `/health` over HTTP. All else answers 501.

Every sandbox is a bubblewrap container of this machine's programs, entered by `nsenter`; a template is a
folder that is seen as /testbed. Nothing ends by the clock: `/_test/...` says when a lease is over.
"""

import asyncio
import base64
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

from aiohttp import web

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
TEMPLATE = "testbed"
VERSION = "0.6.13"
HOME = "/home/user"
PATH = "/usr/local/bin:/usr/bin:/bin"
SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")
CHUNK = 1 << 15
TIME = "2026-01-01T00:00:00Z"


@dataclass
class Sandbox:
    """One that was created, and is `process` as long as it runs."""

    id: str
    body: dict
    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    timeouts: list[int] = field(default_factory=list)
    pid: int = 0
    process: asyncio.subprocess.Process | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    commands: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)

    def fault(self, words: list[str]) -> str:
        """What goes wrong with a command: the last that a test said of one with such a text in it."""
        said = "\n".join(words)
        return next((what for text, what in reversed(self.faults) if text in said), "")

    async def start(self, testbed: Path) -> None:
        shutil.copytree(testbed, self.folder / "testbed", symlinks=True)
        self.oom_kills(7)
        reader, writer = os.pipe()
        argv = bubblewrap()
        argv += ["--bind", str(self.folder / "testbed"), "/testbed"]
        argv += ["--ro-bind", str(self.folder / "vmstat"), "/proc/vmstat"]
        argv += ["--info-fd", str(writer), "--", "/bin/sh", "-c", "echo ready; exec sleep infinity"]
        self.process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, pass_fds=(writer,)
        )
        os.close(writer)
        assert await self.process.stdout.readline() == b"ready\n"
        with os.fdopen(reader) as told:
            self.pid = json.loads(told.read())["child-pid"]

    def oom_kills(self, count: int) -> None:
        (self.folder / "vmstat").write_text(f"nr_free_pages 1\noom_kill {count}\n")

    async def stop(self) -> None:
        self.gone.set()
        self.process.kill()
        await self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def entering(self, words: list[str], env: dict, cwd: str) -> list[str]:
        """The argument list that runs a program inside."""
        variables = {"PATH": PATH, "HOME": HOME, "USER": "user"}
        variables |= self.body.get("envVars") or {}
        variables |= env
        enter = ["nsenter", "--target", str(self.pid), "--user", "--preserve-credentials", "--mount", "--ipc"]
        set_to = [f"{name}={value}" for name, value in variables.items()]
        inside = ["/bin/sh", "-c", 'cd -- "$1" && shift && exec "$@"', "envd", cwd, *words]
        return [*enter, "--pid", "--", "/usr/bin/env", "-i", *set_to, *inside]


def bubblewrap() -> list[str]:
    """A container of this machine's programs, without a file of its own yet."""
    argv = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--die-with-parent"]
    argv += ["--new-session", "--cap-drop", "ALL", "--clearenv"]
    for name in SHOWN:
        path = Path(name)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            argv += ["--ro-bind", name, name]
    return [*argv, "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--dir", HOME]


class Service:
    """The control API, the proxy before the sandboxes, and envd in each of them."""

    def __init__(self, folder: Path, testbed: Path) -> None:
        self.folder = folder
        self.testbed = testbed
        self.sandboxes: dict[str, Sandbox] = {}
        self.started: dict[str, asyncio.Task[Sandbox]] = {}
        self.refusals: list[dict] = []
        self.faults: list[tuple[str, str]] = []
        self.calls: Counter[str] = Counter()
        self.changed = asyncio.Condition()
        self.tasks: set[asyncio.Task] = set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard], client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/v2/sandboxes", self.list),
                web.post("/v2/sandboxes", self.create),
                web.get("/sandboxes/{id}", self.look),
                web.delete("/sandboxes/{id}", self.kill),
                web.post("/sandboxes/{id}/timeout", self.timeout),
                web.post("/v2/sandboxes/{id}/connect", self.connect),
                web.get("/health", self.health),
                web.get("/files", self.read),
                web.post("/files", self.write),
                web.post("/process.Process/Start", self.command),
                web.post("/_test/{what}", self.test),
            ]
        )
        app.on_cleanup.append(self.end)
        return app

    async def end(self, app) -> None:
        await asyncio.gather(*self.started.values(), return_exceptions=True)
        for sandbox in [*self.sandboxes.values()]:
            await sandbox.stop()

    @web.middleware
    async def guard(self, request, handler):
        """Keys, and what a test wants to see refused."""
        if request.path.startswith("/_test/"):
            return await handler(request)
        route = request.match_info.route.resource
        name = f"{request.method} {route.canonical}" if route else f"{request.method} {request.path}"
        async with self.changed:
            self.calls[name] += 1
            self.changed.notify_all()
        for refusal in self.refusals:
            if refusal["call"] == name and refusal["times"]:
                refusal["times"] -= 1
                if refusal["done"]:
                    await handler(request)
                if refusal["silent"]:
                    await asyncio.Event().wait()  # until the client goes away
                if refusal["body"] is not None:
                    return web.Response(status=refusal["status"], text=refusal["body"])
                return failed(refusal["status"], refusal["message"], refusal["headers"])
        if route is None:
            return failed(501, f"this server of tests has no {name}")
        if "E2b-Sandbox-Id" in request.headers:
            sandbox = self.sandboxes.get(request.headers["E2b-Sandbox-Id"])
            if sandbox is None:
                return failed(502, "The sandbox was not found")
            if request.path != "/health" and request.headers.get("X-Access-Token") != sandbox.token:
                return failed(401, "unauthorized access, please provide a valid access token or method")
            request["sandbox"] = sandbox
        elif request.headers.get("X-API-KEY") != KEY:
            return failed(401, "Invalid API key, please visit https://e2b.dev/docs for more information.")
        return await handler(request)

    # The control API

    async def list(self, request):
        wanted = dict(parse_qsl(request.query.get("metadata", "")))
        named = [one for one in self.sandboxes.values() if wanted.items() <= one.body["metadata"].items()]
        return web.json_response([self.described(sandbox) for sandbox in named])

    async def create(self, request):
        body = await request.json()
        template = body["templateID"]
        if template != TEMPLATE:
            return failed(404, f"template '{template}' not found")
        key = request.headers.get("Idempotency-Key", secrets.token_hex(8))
        if key not in self.started:
            self.started[key] = asyncio.create_task(self.begin(body))
        # A client that goes away while its sandbox starts gets one all the same.
        return web.json_response(self.access(await asyncio.shield(self.started[key])), status=201)

    async def begin(self, body) -> Sandbox:
        sandbox = Sandbox(secrets.token_hex(10), body, Path(tempfile.mkdtemp(dir=self.folder)))
        sandbox.timeouts.append(body["timeout"])
        sandbox.faults += self.faults
        await sandbox.start(self.testbed)
        async with self.changed:
            self.sandboxes[sandbox.id] = sandbox
            self.changed.notify_all()
        return sandbox

    def of_run(self, run):
        return [one for one in self.sandboxes.values() if one.body["metadata"]["agent-flow.run"] == run]

    async def look(self, request):
        sandbox = self.sandboxes.get(request.match_info["id"])
        return web.json_response(self.described(sandbox)) if sandbox else unknown(request)

    async def kill(self, request):
        sandbox = self.sandboxes.pop(request.match_info["id"], None)
        if sandbox is None:
            return unknown(request)
        await sandbox.stop()
        return web.Response(status=204)

    async def timeout(self, request):
        sandbox = self.sandboxes.get(request.match_info["id"])
        if sandbox is None:
            return unknown(request)
        async with self.changed:
            sandbox.timeouts.append((await request.json())["timeout"])
            self.changed.notify_all()
        return web.Response(status=204)

    async def connect(self, request):
        sandbox = self.sandboxes.get(request.match_info["id"])
        if sandbox is None:
            return unknown(request)
        sandbox.timeouts.append((await request.json())["timeout"])
        return web.json_response(self.access(sandbox))

    def access(self, sandbox):
        names = {"templateID": "tid-0001", "alias": TEMPLATE, "sandboxID": sandbox.id, "clientID": "6532622b"}
        return names | {"envdVersion": VERSION, "envdAccessToken": sandbox.token, "domain": None}

    def described(self, sandbox):
        about = {"startedAt": TIME, "endAt": TIME, "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024}
        body = {"state": "running", "metadata": sandbox.body.get("metadata") or {}}
        return {k: v for k, v in self.access(sandbox).items() if k != "envdAccessToken"} | about | body

    # envd

    async def health(self, request):
        return web.Response(status=204)

    async def read(self, request):
        path = request.query["path"]
        sandbox = request["sandbox"]
        seen = 'if [ -d "$1" ]; then exit 3; fi; [ -e "$1" ] || exit 4; exec cat -- "$1"'
        process = await self.run(sandbox, ["/bin/sh", "-c", seen, "read", path], {"PATH": PATH}, HOME)
        content = await process.stdout.read()
        code = await process.wait()
        if code == 3:
            return failed(400, f"path '{path}' is a directory")
        if code == 4:
            return failed(404, f"path '{path}' does not exist")
        return web.Response(body=content, content_type="application/octet-stream")

    async def write(self, request):
        path = request.query["path"]
        if request.content_type == "application/octet-stream":
            content = await request.read()
        else:
            part = await (await request.multipart()).next()
            assert part.name == "file"
            content = bytes(await part.read())
        script = 'mkdir -p -- "${1%/*}" && if [ -d "$1" ]; then exit 3; fi; exec cat > "$1"'
        words = ["/bin/sh", "-c", script, "write", path]
        process = await self.run(request["sandbox"], words, {"PATH": PATH}, HOME)
        await process.communicate(content)
        if process.returncode == 3:
            return failed(400, f"path is a directory: {path}")
        if process.returncode:
            return failed(500, "error opening file")
        return web.json_response([{"path": path, "name": path.rpartition("/")[2], "type": "file"}])

    async def run(self, sandbox, words, env, cwd):
        return await asyncio.create_subprocess_exec(
            *sandbox.entering(words, env, cwd),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def command(self, request):
        """A client that goes away ends nothing: its command goes on, and what it prints is thrown away."""
        assert request.content_type == "application/connect+json"
        sandbox = request["sandbox"]
        asked = json.loads((await request.read())[5:])["process"]
        sandbox.commands += 1
        fault = sandbox.fault([asked["cmd"], *asked.get("args", [])])
        if fault == "silent":
            await sandbox.gone.wait()
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        process = await self.run(
            sandbox, [asked["cmd"], *asked.get("args", [])], asked.get("envs", {}), asked.get("cwd", HOME)
        )
        process.stdin.close()
        events = asyncio.Queue()
        limit_ms = request.headers.get("Connect-Timeout-Ms")
        task = asyncio.create_task(follow(process, events, int(limit_ms) / 1000 if limit_ms else None))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        await response.write(envelope({"event": {"start": {"pid": process.pid}}}))
        if fault == "begun":
            await sandbox.gone.wait()
        async for event in until(events, sandbox):
            if sandbox.cut.is_set():
                request.transport.abort()
                return response
            if fault == "half" and "stdout" in event.get("data", {}):
                continue
            if fault and "end" in event:
                if fault == "half":
                    request.transport.abort()
                    return response
                continue
            await response.write(envelope({"event": event}))
        end = {}
        if sandbox.gone.is_set():
            why = f"the connection to sandbox {sandbox.id} ended before the stream completed"
            end = {"error": {"code": "unavailable", "message": why}}
        await response.write(envelope(end, flags=2))
        return response

    # What tests say and ask

    async def test(self, request):
        asked = await request.json()
        what = request.match_info["what"]
        sandbox = self.sandboxes.get(asked.get("id", ""))
        if what == "refuse":
            self.refusals.append(
                {"times": 1, "done": False, "silent": False, "body": None, "headers": {}}
                | {"message": "said by a test"}
                | asked
            )
        elif what == "calm":
            self.refusals.clear()
            self.faults.clear()
        elif what == "expire":
            self.sandboxes.pop(asked["id"])
            await sandbox.stop()
        elif what == "cut":
            sandbox.cut.set()
        elif what == "mend":
            sandbox.cut.clear()
        elif what == "oom":
            sandbox.oom_kills(asked["count"])
        elif what == "fault":
            sandbox.faults.append((asked["text"], asked["how"]))
        elif what == "fault_of_all":
            self.faults.append((asked["text"], asked["how"]))
        elif what == "came":
            async with self.changed:
                await self.changed.wait_for(lambda: self.of_run(asked["run"]))
        elif what == "renewed":
            async with self.changed:
                await self.changed.wait_for(lambda: len(sandbox.timeouts) > asked["times"])
        sandboxes = {
            one.id: {"body": one.body, "timeouts": one.timeouts, "commands": one.commands, "token": one.token}
            for one in self.sandboxes.values()
        }
        return web.json_response({"calls": self.calls, "sandboxes": sandboxes})


async def follow(process, events, limit_s) -> None:
    """What a process prints, then how it ended: when nobody holds its streams any more, as envd does."""

    async def read(name, stream):
        while data := await stream.read(CHUNK):
            events.put_nowait({"data": {name: base64.b64encode(data).decode()}})

    reading = asyncio.gather(read("stdout", process.stdout), read("stderr", process.stderr))
    try:
        await asyncio.wait_for(reading, limit_s)
    except TimeoutError:
        process.kill()
    code = await process.wait()
    how = {"exited": code >= 0, "status": f"exit status {code}"}
    events.put_nowait({"end": how | ({"exitCode": code} if code else {})})
    events.put_nowait(None)


async def until(events, sandbox):
    """Events until the last one, or until the sandbox is gone or its connection is cut."""
    ends = [asyncio.create_task(event.wait()) for event in (sandbox.gone, sandbox.cut)]
    getting = asyncio.create_task(events.get())
    try:
        while True:
            await asyncio.wait([getting, *ends], return_when=asyncio.FIRST_COMPLETED)
            if any(end.done() for end in ends):
                if sandbox.cut.is_set():
                    yield {}
                return
            event = await getting
            if event is None:
                return
            getting = asyncio.create_task(events.get())
            yield event
    finally:
        for task in (getting, *ends):
            task.cancel()


def envelope(message: dict, flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def failed(status: int, message: str, headers: dict | None = None) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status, headers=headers)


def unknown(request) -> web.Response:
    return failed(404, f"Sandbox \"{request.match_info['id']}\" doesn't exist or you don't have access to it")


async def main(folder: Path, testbed: Path) -> None:
    runner = web.AppRunner(Service(folder, testbed).app(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    try:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
