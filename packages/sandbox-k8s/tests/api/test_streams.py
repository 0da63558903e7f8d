"""Ways into a pod: logs, exec, port-forward, proxy. Runs on the fake and on a real cluster."""

import json
from typing import Any

import aiohttp
import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("needs_processes")]
V4, V5 = "v4.channel.k8s.io", "v5.channel.k8s.io"
SERVER = (
    "import http.server, socketserver\n"
    "class Answer(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(404 if 'none' in self.path else 200)\n"
    "        self.send_header('Content-Length', '6')\n"
    "        self.end_headers()\n"
    "        self.wfile.write(b'hello\\n')\n"
    "    def do_POST(self):\n"
    "        data = self.rfile.read(int(self.headers['Content-Length']))\n"
    "        said = self.path.encode() + b' ' + self.headers['X-Given'].encode() + b' ' + data\n"
    "        self.send_response(201)\n"
    "        self.send_header('Content-Length', str(len(said)))\n"
    "        self.end_headers()\n"
    "        self.wfile.write(said)\n"
    "    def log_message(self, *words): pass\n"
    "server = socketserver.ThreadingTCPServer(('0.0.0.0', 8000), Answer)\n"
    "print('listening', flush=True)\n"
    "server.serve_forever()\n"
)


@pytest.fixture
async def box(wire: Any, run: Any) -> Any:
    """A running pod that serves HTTP on port 8000."""
    await wire.create("box", run("/usr/bin/python3", "-c", SERVER))
    await wire.until("box", lambda found: found["status"]["phase"] == "Running")
    await wire.says("box", b"listening\n")
    return wire


def execute(wire: Any, protocol: str | None, *command: str, **flags: str) -> Any:
    query = [("command", word) for word in command]
    query += [*{"stdout": "true", "stderr": "true", **flags}.items()]
    protocols = () if protocol is None else (protocol,)
    return wire.http.ws_connect(f"{wire.base}/pods/box/exec", params=query, protocols=protocols)


async def frames(socket: Any) -> list[tuple[int, bytes]]:
    return [(message.data[0], message.data[1:]) async for message in socket]


def joined(found: list[tuple[int, bytes]], channel: int) -> bytes:
    return b"".join(data for number, data in found if number == channel)


@pytest.mark.parametrize("protocol", [V4, V5])
async def test_a_command_ends_with_its_code_as_a_status(box: Any, protocol: str) -> None:
    async with execute(box, protocol, "sh", "-c", "echo out; echo err >&2; exit 7") as socket:
        assert socket.protocol == protocol
        found = await frames(socket)
    assert found[0] == (1, b"")
    assert (joined(found, 1), joined(found, 2)) == (b"out\n", b"err\n")
    status = json.loads(joined(found, 3))
    assert (status["status"], status["reason"]) == ("Failure", "NonZeroExitCode")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "7"}]
    assert ("metadata" in status) is (protocol == V5)
    assert ("error executing command [sh" in status["message"]) is (protocol == V4)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("true",), {"status": "Success"}),
        (("sh", "-c", "kill -9 $$"), "137"),
        (("sh", "-c", "/no/such"), "127"),
        (("/no/such",), "InternalError"),
    ],
)
async def test_ends_of_commands(box: Any, command: tuple[str, ...], status: Any) -> None:
    async with execute(box, V4, *command) as socket:
        found = json.loads(joined(await frames(socket), 3))
    if isinstance(status, dict):
        assert found == status
    elif status == "InternalError":
        assert (found["reason"], found["code"]) == (status, 500)
        assert "details" not in found
        assert 'exec: "/no/such": stat /no/such: no such file or directory' in found["message"]
    else:
        assert found["details"]["causes"][0]["message"] == status


async def test_input_ends_with_a_frame_of_version_5_alone(box: Any) -> None:
    async with execute(box, V5, "cat", stdin="true") as socket:
        await socket.send_bytes(b"\0in")
        await socket.send_bytes(b"\0")
        await socket.send_bytes(b"\0put")
        await socket.send_bytes(b"\xff\0")
        found = await frames(socket)
    assert joined(found, 1) == b"input"
    assert json.loads(joined(found, 3))["status"] == "Success"
    async with execute(box, V4, "sh", "-c", "read line; echo got $line", stdin="true") as socket:
        await socket.send_bytes(b"\xff\0")
        await socket.send_bytes(b"\0a b\n")
        assert joined(await frames(socket), 1) == b"got a b\n"


async def test_a_command_lives_on_after_its_client(box: Any) -> None:
    words = "while [ ! -e /tmp/go ]; do sleep 0.05; done; echo done > /tmp/done"
    async with execute(box, V5, "sh", "-c", words) as socket:
        assert (await socket.receive()).data == b"\1"
    look = "touch /tmp/go; while [ ! -e /tmp/done ]; do sleep 0.05; done; cat /tmp/done"
    async with execute(box, V5, "sh", "-c", look) as socket:
        assert joined(await frames(socket), 1) == b"done\n"


async def test_without_a_subprotocol_a_failure_is_a_text_and_a_success_nothing(box: Any) -> None:
    async with execute(box, None, "sh", "-c", "echo out; exit 3") as socket:
        found = await frames(socket)
    assert joined(found, 1) == b"out\n"
    assert joined(found, 3).startswith(b"command terminated with non-zero exit code: ")
    async with execute(box, None, "true") as socket:
        assert joined(await frames(socket), 3) == b""


async def refusal(opening: Any) -> int:
    with pytest.raises(aiohttp.WSServerHandshakeError) as problem:
        async with opening:
            pass
    return problem.value.status


async def test_what_cannot_be_executed_is_refused_before_it_begins(box: Any, run: Any) -> None:
    assert await refusal(execute(box, "v9.channel.k8s.io", "true")) == 403
    assert await refusal(execute(box, V4, "true", container="nope")) == 400
    async with execute(box, V4) as socket:
        assert json.loads(joined(await frames(socket), 3))["reason"] == "InternalError"
    await box.create("pending")
    for name, code in (("none", 404), ("pending", 400)):
        opening = box.http.ws_connect(f"{box.base}/pods/{name}/exec?command=true&stdout=1", protocols=(V4,))
        assert await refusal(opening) == code
    plain = await box("GET", "pods/box/exec?command=true&stdout=true")
    assert (plain.status, plain.body["message"]) == (400, "Upgrade request required")


async def test_dollars_in_variables_and_words_are_kubernetes_own(box: Any, run: Any) -> None:
    spec = run("sh", "-c", 'printf "%s|" "$A" "$B" "$C" "$@"', "sh", "$(A)", "$$(A)", "$(NONE)", "$A", "a$$b")
    values = {"A": "known", "B": "x$(A)y", "C": "x$$(A)y"}
    spec["containers"][0]["env"] = [{"name": name, "value": value} for name, value in values.items()]
    await box.create("dollars", spec)
    await box.until("dollars", lambda found: found["status"]["phase"] == "Succeeded")
    said = (await box("GET", "pods/dollars/log")).body
    assert said == b"known|xknowny|x$(A)y|known|$(A)|$(NONE)|$A|a$b|"


async def test_logs(box: Any, run: Any) -> None:
    await box.create("talk", run("sh", "-c", "for i in 1 2 3; do echo $i; done"))
    await box.until("talk", lambda found: found["status"]["phase"] == "Succeeded")
    assert (await box("GET", "pods/talk/log")).body == b"1\n2\n3\n"
    assert (await box("GET", "pods/talk/log?tailLines=1")).body == b"3\n"
    assert (await box("GET", "pods/talk/log?follow=true")).body == b"1\n2\n3\n"
    stamped = (await box("GET", "pods/talk/log?timestamps=true&tailLines=1")).body
    assert stamped.endswith(b"Z 3\n")
    await box.create("pending")
    assert (await box("GET", "pods/pending/log")).status == 204
    previous = await box("GET", "pods/talk/log?previous=true")
    assert (previous.status, previous.body["message"]) == (
        400,
        'previous terminated container "main" in pod "talk" not found',
    )
    wrong = await box("GET", "pods/talk/log?container=nope")
    assert (wrong.status, wrong.body["message"]) == (400, "container nope is not valid for pod talk")
    assert (await box("GET", "pods/none/log")).status == 404


async def test_the_proxy_carries_requests_and_tells_its_own_errors(box: Any) -> None:
    found = await box("GET", "pods/box:8000/proxy/index.html")
    assert (found.status, found.body) == (200, b"hello\n")
    headers = {"X-Given": "yes"}
    posted = await box(
        "POST", "pods/box:8000/proxy/a/b?c=d%20e", b"\0\xff" * 5, headers=headers, media_type="a/b"
    )
    assert (posted.status, posted.body) == (201, b"/a/b?c=d%20e yes " + b"\0\xff" * 5)
    assert (await box("GET", "pods/box:8000/proxy/none")).body == b"hello\n"
    closed = await box("GET", "pods/box:9999/proxy/")
    assert (closed.status, closed.body["reason"]) == (503, "ServiceUnavailable")
    assert "connect: connection refused" in closed.body["message"]
    await box.create("pending")
    pending = await box("GET", "pods/pending:80/proxy/")
    assert (pending.status, pending.body["message"]) == (400, "address not allowed")
    assert (await box("GET", "pods/none:80/proxy/")).body["reason"] == "NotFound"


async def test_port_forward_opens_each_channel_with_its_port(box: Any) -> None:
    path = f"{box.base}/pods/box/portforward?ports=8000&ports=9999"
    async with box.http.ws_connect(path, protocols=(V4,)) as socket:
        opened = {(await socket.receive()).data for _ in range(4)}
        assert opened == {b"\0\x40\x1f", b"\1\x40\x1f", b"\2\x0f\x27", b"\3\x0f\x27"}
        await socket.send_bytes(b"\0GET / HTTP/1.0\r\n\r\n")
        found = await frames(socket)
    assert joined(found, 0).endswith(b"\r\n\r\nhello\n")
    assert b"error forwarding port 9999 to pod" in joined(found, 3)
    assert b"connection refused" in joined(found, 3)


async def test_port_forward_is_refused(box: Any) -> None:
    path = f"{box.base}/pods/box/portforward"
    assert await refusal(box.http.ws_connect(path + "?ports=8000", protocols=(V5,))) == 403
    assert await refusal(box.http.ws_connect(path, protocols=(V4,))) == 400
    opening = box.http.ws_connect(f"{box.base}/pods/none/portforward?ports=1", protocols=(V4,))
    assert await refusal(opening) == 404
