"""Requests to a real launcher, byte by byte: who is looked at when, what is cut, what is refused."""

import contextlib
import hashlib
import http.client
import json
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_k8s.launcher import frames
from sandbox_k8s.local import LAUNCHER, base_python

KEY = "the key"
SLOW_S = 8.0


class Pod:
    """A launcher with an owner, whose epoch goes up from test to test."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self.folder = folder
        self.address: tuple[str, int] = tuple(json.loads(process.stdout.readline())["address"])
        self.epoch = 0
        self.fence()

    def head(self, method: str, path: str, epoch: object, length: object, *more: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"X-API-Key: {KEY}", f"Content-Length: {length}", *more]
        if epoch is not None:
            lines.append(f"X-Sandbox-Epoch: {epoch}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=SLOW_S)

    def send(self, data: bytes) -> tuple[int, bytes]:
        with self.connect() as connection:
            connection.sendall(data)
            return answer_of(connection)

    def ask(
        self, path: str, body: dict[str, Any], *more: str, epoch: object = "own", method: str = "POST"
    ) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        epoch = self.epoch if epoch == "own" else epoch
        status, answer = self.send(self.head(method, path, epoch, len(data), *more) + data)
        return status, json.loads(answer)

    def fence(self) -> int:
        self.epoch += 1
        status, answer = self.ask("/sbx/fence", {"epoch": self.epoch}, epoch=None)
        assert status == 200, answer
        return self.epoch

    def log(self) -> list[tuple[str, int | None]]:
        entries = self.ask("/sbx/log", {}, method="GET")[1]["entries"]
        return [(one["what"], one["epoch"]) for one in entries]

    def wait_for(self, what: str) -> None:
        """Wait until something has begun."""
        assert any(self.log()[-1][0] == what for _ in range(2000)), self.log()[-5:]

    def wait_for_file(self, name: str) -> None:
        """Wait until a command has made a file."""
        look = {"command": f"until [ -e {name} ]; do sleep 0.01; done", "shell": True, "timeout": SLOW_S}
        assert self.ask("/execute", look)[0] == 200

    def session(self, name: str) -> None:
        assert self.ask("/create_session", {"session": name})[0] == 200

    def open_files(self) -> int:
        """How many descriptors it holds, but for connections (the last may still be closing)."""
        links: list[str] = []
        for one in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                links.append(str(one.readlink()))
        return sum(not link.startswith("socket:") for link in links)


def answer_of(connection: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    folder = tmp_path_factory.mktemp("launcher")
    where = ["--listen", "127.0.0.1:0", "--state", folder / "state", "--end-message", "/dev/null"]
    who = ["--token-hash", hashlib.sha256(KEY.encode()).hexdigest(), "--sandbox-id", "s", "--lease", "600"]
    process = subprocess.Popen(
        [base_python(), "-I", "-S", LAUNCHER, "pod", *where, *who],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
        stdout=subprocess.PIPE,
    )
    yield Pod(process, folder)
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sbx/session/close", {"name": "late"}),
        ("/sbx/session/interrupt", {"name": "late"}),
        ("/close_session", {"session": "late"}),
        ("/run_in_session", {"session": "late", "action_type": "bash_interrupt"}),
        ("/close", {}),
        ("/read_file", {"path": "/etc/hostname"}),
        ("/sbx/reset", {}),
        ("/sbx/lease", {"lease_s": 1.0}),
    ],
)
def test_an_owner_replaced_before_its_body_came_does_nothing(
    pod: Pod, path: str, body: dict[str, Any]
) -> None:
    """Its epoch was looked at first; then it ended the new owner's shell, and the log did not say so."""
    data = json.dumps(body).encode()
    older = pod.epoch
    with pod.connect() as late:
        late.sendall(pod.head("POST", path, older, len(data), "Expect: 100-continue"))
        assert late.recv(100).startswith(b"HTTP/1.1 100")
        pod.fence()
        pod.session("late")
        late.sendall(data)
        status, answer = answer_of(late)
    assert status in (409, 511)
    assert b"is behind the owner" in answer
    sessions = pod.ask("/sbx/info", {}, method="GET")[1]["sessions"]
    assert sessions["late"] is True
    lines = pod.log()
    assert lines[-1] == ("refused", older)
    assert all(epoch != older for _, epoch in lines[lines.index(("fence", pod.epoch)) : -1])
    assert pod.ask("/close_session", {"session": "late"})[0] == 200


@pytest.mark.parametrize("kind", ["file", "tree"])
def test_a_fence_ends_the_streams_of_older_owners_also_those_that_nobody_reads(pod: Pod, kind: str) -> None:
    content = pod.folder / "large"
    with content.open("wb") as file:
        file.truncate(200 << 20)
    older = pod.epoch
    with pod.connect() as reader:
        reader.sendall(pod.head("GET", f"/sbx/{kind}?path={content}", older, 0))
        assert reader.recv(1000).startswith(b"HTTP/1.1 200")
        pod.fence()
        got = 0
        while data := reader.recv(1 << 20):
            got += len(data)
    assert got < 100 << 20
    assert pod.ask("/sbx/info", {}, method="GET")[0] == 200
    lines = pod.log()
    assert lines[-4:] == [("read", older), ("fence", pod.epoch), ("end", older), ("fenced", pod.epoch)]


def test_nobody_is_kept_waiting_by_a_pipe(pod: Pod) -> None:
    """An agent can make one wherever files are read and written, and its next owner would never come in."""
    pipe = pod.folder / "pipe"
    os.mkfifo(pipe)
    status, answer = pod.ask(f"/sbx/file?path={pipe}", {}, method="GET")
    assert (status, answer["message"]) == (422, f"{pipe}: is a pipe; read it with a command")
    assert pod.ask("/read_file", {"path": str(pipe)})[0] == 511
    assert pod.ask("/write_file", {"path": str(pipe), "content": "x"})[0] == 511
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    data = b"".join(frames.encode([bytes(1 << 20)]))
    with pod.connect() as writer:
        writer.sendall(pod.head("PUT", f"/sbx/file?path={pipe}", pod.epoch, len(data)) + data)
        pod.wait_for("write")
        pod.fence()
        assert answer_of(writer)[0] == 409
    os.close(reader)


def test_a_tree_that_is_cut_off_moves_nothing_into_place(pod: Pod) -> None:
    target = pod.folder / "to"
    with pod.connect() as writer:
        begun = struct.pack(">I", 1 << 20) + bytes(1000)
        writer.sendall(pod.head("PUT", f"/sbx/tree?path={target}", pod.epoch, 2 << 20) + begun)
        pod.wait_for("write")
        pod.fence()
        assert answer_of(writer)[0] == 409
    assert not target.exists()


@pytest.mark.parametrize("epoch", ["²", "-1", "1.5", "x", "", "9" * 30])
def test_an_unreadable_epoch_is_no_guests(pod: Pod, epoch: str) -> None:
    status, answer = pod.ask("/sbx/execute", {"command": "true"}, epoch=epoch)
    assert status == 400
    assert "X-Sandbox-Epoch must be a whole number" in answer["message"]


@pytest.mark.parametrize(
    ("length", "more"), [("²", []), ("-1", []), ("0", ["Transfer-Encoding: gzip, chunked"])]
)
def test_a_body_of_unknown_length_ends_the_connection(pod: Pod, length: str, more: list[str]) -> None:
    """It counted as empty, and its bytes as the next request."""
    smuggled = pod.head("GET", "/sbx/info", None, 0)
    with pod.connect() as connection:
        connection.sendall(pod.head("POST", "/sbx/lease", pod.epoch, length, *more) + smuggled)
        assert answer_of(connection)[0] == 400
        assert connection.recv(1000) == b""


@pytest.mark.parametrize("size", ["-5", "0x5", "+5", "1_0"])
def test_a_chunk_of_a_strange_size_is_refused(pod: Pod, size: str) -> None:
    head = f"POST /sbx/lease HTTP/1.1\r\nX-API-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert pod.send(f"{head}{size}\r\n{{}}\r\n".encode())[0] == 400


def test_a_request_id_is_one_owners_for_one_path(pod: Pod) -> None:
    said = {"command": "echo secret", "shell": True}
    mine = "X-Request-ID: mine"
    assert pod.ask("/execute", said, mine)[1]["stdout"] == "secret\n"
    (pod.folder / "f").write_text("content")
    assert pod.ask("/read_file", {"path": "f"}, mine)[1] == {"content": "content"}
    older = pod.epoch
    pod.fence()
    status, answer = pod.ask("/execute", said, mine, epoch=older)
    assert status == 511
    assert answer["swerexception"]["extra_info"] == {"sandbox_error": "fenced"}
    assert pod.ask("/execute", said, "X-Request-ID: " + "i" * 129)[0] == 511
    assert pod.ask("/sbx/execute", said, "X-Request-ID: " + "i" * 129)[0] == 400


def test_a_command_whose_answer_is_too_large_to_keep_runs_once(pod: Pod) -> None:
    said = {"command": "echo run >> runs; head -c 2000000 /dev/zero | tr '\\0' '\\377'", "shell": True}
    assert len(pod.ask("/execute", said, "X-Request-ID: large")[1]["stdout"]) == 8_000_000
    status, answer = pod.ask("/execute", said, "X-Request-ID: large")
    assert (status, answer["swerexception"]["extra_info"]) == (511, {"sandbox_error": "answer-gone"})
    assert (pod.folder / "runs").read_text() == "run\n"


@pytest.mark.parametrize("check", ["silent", "ignore", "raise"])
def test_what_came_until_a_connection_was_cut_is_no_result(pod: Pod, check: str) -> None:
    """With "silent" and "ignore" the half was an answer like any other, and kept for the repetition."""
    pod.session(check)
    command = f"echo half; echo run >> {check}; sleep 600"
    data = json.dumps({"session": check, "command": command, "check": check, "timeout": 600}).encode()
    request = pod.head("POST", "/run_in_session", pod.epoch, len(data), "X-Request-ID: " + check) + data
    with pod.connect() as first:
        first.sendall(request)
        pod.wait_for_file(check)
    status, answer = pod.send(request)
    told = json.loads(answer)["swerexception"]
    assert (status, told["extra_info"]) == (511, {"sandbox_error": "cut-off"})
    assert (pod.folder / check).read_text() == "run\n"


def test_the_same_holds_for_a_command_on_its_own(pod: Pod) -> None:
    said = {"command": "echo half; echo run >> own; sleep 600", "shell": True}
    data = json.dumps(said).encode()
    request = pod.head("POST", "/execute", pod.epoch, len(data), "X-Request-ID: own") + data
    with pod.connect() as first:
        first.sendall(request)
        pod.wait_for_file("own")
    assert b'"cut-off"' in pod.send(request)[1]
    assert (pod.folder / "own").read_text() == "run\n"


def test_start_up_files_that_end_the_shell_leave_no_session(pod: Pod) -> None:
    """It was answered as started, and the next request found the session ended."""
    (pod.folder / "rc").write_text("echo why; exit 3\n")
    wanted = {"session": "half", "startup_source": [str(pod.folder / "rc")]}
    status, answer = pod.ask("/create_session", wanted)
    told = answer["swerexception"]
    assert (status, told["class_path"]) == (511, "swerex.exceptions.SessionNotInitializedError")
    assert "with exit code 3: 'why\\n'" in told["message"]
    pod.session("half")


def test_a_nul_byte_is_refused_and_not_left_out(pod: Pod) -> None:
    pod.session("nul")
    for path, said in (
        ("/run_in_session", {"session": "nul", "command": "echo a\0b"}),
        ("/execute", {"command": "echo a\0b", "shell": True}),
    ):
        status, answer = pod.ask(path, said)
        assert (status, answer["swerexception"]["class_path"]) == (511, "builtins.ValueError")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")
def test_a_session_that_has_ended_holds_no_descriptor(pod: Pod) -> None:
    def use(number: int, end: Callable[[str], object]) -> None:
        pod.session(f"fd-{number}")
        end(f"fd-{number}")

    ends = (
        lambda name: pod.ask("/close_session", {"session": name}),
        lambda name: pod.ask("/run_in_session", {"session": name, "command": "exit 0"}),
    )
    before = pod.open_files()
    for number in range(10):
        use(number, ends[number % 2])
    assert any(pod.log() and pod.open_files() <= before for _ in range(2000)), (before, pod.open_files())
