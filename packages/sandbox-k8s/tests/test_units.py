"""Parts of the launcher on their own."""

import hashlib
import io
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_k8s.launcher import multipart
from sandbox_k8s.launcher.body import BadRequestError, Body
from sandbox_k8s.launcher.box import Box, BoxSettings
from sandbox_k8s.launcher.clock import monotonic_s
from sandbox_k8s.launcher.output import Capture
from sandbox_k8s.launcher.ownership import Ownership
from sandbox_k8s.launcher.replies import Reply
from sandbox_k8s.launcher.web import Server, Site


@given(st.lists(st.binary(max_size=30)), st.integers(0, 60))
def test_capture_keeps_all_or_both_ends(chunks: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for chunk in chunks:
        capture.add(chunk)
    whole = b"".join(chunks)
    head, tail = capture.parts()
    assert capture.total == len(whole)
    assert len(head) + len(tail) == min(len(whole), limit)
    assert whole.startswith(head)
    assert whole.endswith(tail)


@given(
    content=st.binary(max_size=300),
    fields=st.dictionaries(
        st.text("abc", min_size=1, max_size=3), st.text("xyz\r\n-", max_size=20), max_size=3
    ),
    boundary=st.text("abc-", min_size=1, max_size=10),
)
def test_multipart_gives_back_what_was_put_in(content: bytes, fields: dict[str, str], boundary: str) -> None:
    mark = b"\r\n--" + boundary.encode()
    if mark in b"\r\n" + content + mark[:-1] or any(mark in f"\r\n{v}".encode() for v in fields.values()):
        return
    parts = [('form-data; name="file"; filename="x"', content)]
    parts += [
        (f'form-data; name="{name}"', value.encode()) for name, value in fields.items() if name != "file"
    ]
    body = b"".join(
        b"--%b\r\nContent-Disposition: %b\r\n\r\n%b\r\n" % (boundary.encode(), head.encode(), value)
        for head, value in parts
    )
    sink = io.BytesIO()
    stream = io.BytesIO(body + b"--" + boundary.encode() + b"--\r\n")
    assert (
        multipart.parse(stream, f"multipart/form-data; boundary={boundary}", file_field="file", sink=sink)
        == fields
    )
    assert sink.getvalue() == content


def test_multipart_that_breaks_off_is_an_error() -> None:
    for text in (
        b"",
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nhalf',
        b"--b\r\nnonsense\r\n\r\n\r\n--b--",
    ):
        with pytest.raises(multipart.MultipartError):
            multipart.parse(
                io.BytesIO(text), "multipart/form-data; boundary=b", file_field="file", sink=io.BytesIO()
            )
    with pytest.raises(multipart.MultipartError, match="boundary"):
        multipart.parse(io.BytesIO(), "text/plain", file_field="file", sink=io.BytesIO())


def test_a_stranger_who_says_nothing_is_hung_up_on_and_an_owner_is_not(tmp_path: Path) -> None:
    box = Box(BoxSettings({}, "/", tmp_path), Ownership(None, 0.0))
    routes = {("GET", "/"): lambda call: Reply.json({})}
    site = Site(box, hashlib.sha256(b"k").hexdigest(), routes, lambda *_: Reply(b""), stranger_s=0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(listener, site)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with socket.create_connection(listener.getsockname()) as owner:
        owner.sendall(b"GET / HTTP/1.1\r\nX-API-Key: k\r\n\r\n")
        owner.settimeout(10)
        assert owner.recv(1000).endswith(b"{}")
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.settimeout(10)
            stranger.sendall(b"GET / HTTP/1.1\r\nX-API")
            assert stranger.recv(1000) == b""
        owner.sendall(b"GET / HTTP/1.1\r\nX-API-Key: k\r\n\r\n")
        assert owner.recv(1000).endswith(b"{}")
    server.shutdown()
    listener.close()


@given(st.lists(st.binary(min_size=1, max_size=40)), st.integers(1, 50))
def test_chunked_bodies(chunks: list[bytes], size: int) -> None:
    encoded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\nnext request"
    stream = io.BytesIO(encoded)
    body = Body(stream, None, chunked=True)
    got = b""
    while data := body.read(size):
        assert len(data) == size or got + data == b"".join(chunks)
        got += data
    assert got == b"".join(chunks)
    assert stream.read() == b"next request"


def test_a_body_that_ends_early_is_an_error() -> None:
    for body in (
        Body(io.BytesIO(b"abc"), 5, chunked=False),
        Body(io.BytesIO(b"5\r\nabc"), None, chunked=True),
    ):
        with pytest.raises(BadRequestError):
            body.read()


@pytest.mark.parametrize("orphans", [False, True])
def test_an_exit_status_is_read_once_and_never_guessed(
    script: Callable[..., subprocess.Popen[str]], orphans: bool
) -> None:
    """Two waiters on one process steal each other's status, and subprocess then reports 0."""
    out, err = script(STATUSES, str(int(orphans))).communicate(timeout=50)
    assert out.splitlines() == [str(list(range(40))), "FileNotFoundError", "[]", "7"], err


STATUSES = """
import subprocess, sys, threading
from sandbox_k8s.launcher.children import Children

orphans = sys.argv[1] == "1"
children = Children(orphans=orphans)
waiting = threading.Semaphore(0)
options = {"cwd": "/", "env": {"PATH": "/usr/bin:/bin"}, "stdin": -3, "stdout": -3, "stderr": -3}
started = [
    children.start(["sh", "-c", f"exit {number}"], on_exit=waiting.release, **options)
    for number in range(40)
]
for _ in started:
    assert waiting.acquire(timeout=10)
print([child.returncode for child in started])
try:
    children.start(["no-such-program"], on_exit=waiting.release, **options)
except FileNotFoundError as missing:
    print(type(missing).__name__)
print(children.alive())
# Of a process that is somebody else's, where others have some.
print(7 if orphans else subprocess.run(["sh", "-c", "sleep 0.1; exit 7"]).returncode, flush=True)
"""


def test_a_lease_tells_its_changes_and_ends(tmp_path: Path) -> None:
    told: list[float | None] = []
    box = Box(BoxSettings({}, "/", tmp_path), Ownership(0.05, monotonic_s()), told=told.append)
    with box.operation("command", busy_s=100.0):
        left = box.left_s()
        assert left is not None
        assert 99 < left <= 100.1
    box.change_lease(None, None)
    assert box.left_s() is None
    box.change_lease(None, 0.05)
    why: list[str] = []
    ended = threading.Thread(target=lambda: why.append(box.wait_for_end()), daemon=True)
    ended.start()
    ended.join(5)
    assert "the lease ran out at 20" in why[0]
    assert len(told) == 3
    assert told[1] is None
