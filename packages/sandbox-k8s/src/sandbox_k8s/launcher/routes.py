"""The launcher's own requests, under ``/sbx``: bytes instead of text, streams instead of bodies, owners."""

import errno
import json
import os
import socket
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from . import archive, clean, frames
from .body import BadRequestError
from .box import Box, SessionExistsError, SessionMissingError
from .clock import monotonic_s
from .execute import CommandRequest, CutOffError, Outcome, Wake
from .ownership import AloneError, FencedError, LeaseOverError, NotOwnerError, StillRunningError
from .replies import AnswerGoneError, Reply
from .repository import Git
from .shell import ShellBusyError, ShellClosedError, ShellRequest
from .web import FRAMED, Call, Route

VERSION = 1
_OUT_OF_RESOURCES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_READ = 1 << 20


def info(call: Call) -> Reply:
    """What is here, and how long the lease lasts."""
    box = call.box
    return Reply.json(
        {
            "version": VERSION,
            "pid": os.getpid(),
            "epoch": box.epoch,
            "lease_left_s": box.left_s(),
            "shell": box.shell().program,
            "sessions": box.sessions(),
            "running": len(box.children.alive()),
            "marked": box.clean is not None,
        }
    )


def fence(call: Call) -> Reply:
    """Change the owner: the answer is the change."""
    return Reply.json({"epoch": call.box.fence(_int(call.json(), "epoch"))})


def lease(call: Call) -> Reply:
    """The owner's heartbeat; changes the length of the lease when the body gives one."""
    wanted = call.json()
    if "lease_s" in wanted:
        length_s = wanted["lease_s"]
        call.box.change_lease(call.epoch, None if length_s is None else float(length_s))
    else:
        call.box.renew(call.epoch)
    return Reply.json({"lease_left_s": call.box.left_s(), "epoch": call.box.epoch})


def log(call: Call) -> Reply:
    """What was done for whom, above the line number in the query."""
    after = int(call.query.get("after", "0"))
    return Reply.json({"now_s": monotonic_s(), "entries": call.box.log(after)})


def execute(call: Call) -> Reply:
    """Run a command on its own."""
    head, stdin = call.head_and_rest()
    box = call.box
    command = head["command"]
    request = CommandRequest(
        argv=box.argv_for(command),
        cwd=_folder(head.get("cwd") or box.settings.workdir),
        env=box.environment(head.get("env")),
        stdin=stdin,
        timeout_s=head.get("timeout_s"),
        grace_s=head["grace_s"],
        output_limit=head["output_limit"],
        merge=head["merge"],
    )
    with box.operation("command", call.caller(), busy_s=request.timeout_s) as wake:
        try:
            return _outcome(box.execute(request, wake, call.connection))
        except OSError as problem:
            return _not_started(request.argv[0], problem)


def _not_started(program: str, problem: OSError) -> Reply:
    """A shell's convention for a program that cannot be run; the sandbox's own trouble stays its own."""
    result: dict[str, Any] = {"exit_code": 126, "infra_error": ""}
    if problem.errno in _OUT_OF_RESOURCES:
        result = {"exit_code": None, "infra_error": f"cannot start {program!r}: {problem.strerror}"}
    elif problem.errno in (errno.ENOENT, errno.ENOTDIR):
        result["exit_code"] = 127
    text = f"sandbox-k8s: cannot run {program!r}: {problem.strerror}\n".encode()
    result |= {"signal": None, "timed_out": False, "cancelled": "", "duration_s": 0.0, "session_alive": True}
    result |= {"parts": [0, 0, len(text), 0], "totals": [0, len(text)]}
    return Reply(json.dumps(result).encode() + b"\n" + text, content_type=FRAMED)


def _outcome(outcome: Outcome) -> Reply:
    parts = [*outcome.stdout.parts(), *outcome.stderr.parts()]
    head = {
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "timed_out": outcome.timed_out,
        "cancelled": outcome.cancelled,
        "infra_error": outcome.infra_error,
        "duration_s": outcome.duration_s,
        "session_alive": outcome.session_alive,
        "parts": [len(part) for part in parts],
        "totals": [outcome.stdout.total, outcome.stderr.total],
    }
    body = b"".join([json.dumps(head).encode(), b"\n", *parts])
    return Reply(body, content_type=FRAMED)


def create_session(call: Call) -> Reply:
    """Start a session and read the start-up files in it."""
    head = call.json()
    with call.box.operation("session", call.caller()) as wake:
        shell = call.box.create_session(
            head["name"], cwd=_folder(head.get("cwd") or call.box.settings.workdir), env=head.get("env")
        )
        try:
            return _outcome(shell.start_up(wake, head.get("startup", ()), head["timeout_s"]))
        except BaseException:
            with suppress(SessionMissingError):  # half a session would be taken for a whole one
                call.box.close_session(head["name"])
            raise


def run_in_session(call: Call) -> Reply:
    """Run a command in a session."""
    head = call.json()
    request = ShellRequest(
        command=head["command"],
        timeout_s=head.get("timeout_s"),
        grace_s=head["grace_s"],
        output_limit=head["output_limit"],
        merge=head["merge"],
    )
    if "\0" in request.command:
        raise BadRequestError("the command holds a NUL byte")
    with call.box.operation("session", call.caller(), busy_s=request.timeout_s) as wake:
        return _outcome(call.box.run_in_session(head["name"], request, wake, call.connection))


def mark(call: Call) -> Reply:
    """Remember the state of now as the clean one."""
    wanted = call.json()
    box = call.box
    with box.operation("command", call.caller()) as wake:
        try:
            box.alone(wake, cut=False)
        except AloneError as problem:
            raise clean.CannotMarkError(f"{problem}: they might change what is looked at") from problem
        state = clean.mark(_bench(box, wake), wanted.get("repo"))
        box.remember(state, wake)
        return Reply.json({"folders": len(state.digests), "tracked": len(state.tracked)})


def reset(call: Call) -> Reply:
    """End everything that runs, and bring the clean state back; says what still differs."""
    call.json()
    box = call.box
    with box.operation("command", call.caller()) as wake:
        if box.clean is None:
            raise clean.CannotMarkError("no state of this launcher was marked as clean")
        box.alone(wake, cut=True)
        box.close_sessions(wake)
        state, differences = clean.restore(_bench(box, wake), box.clean)
        box.remember(state, wake)
        return Reply.json({"differences": differences})


def _bench(box: Box, wake: Wake) -> clean.Bench:
    settings = box.settings
    git = Git(box.children, settings.env, wake)
    return clean.Bench(
        settings.env.get("HOME"), settings.pipes, settings.epoch_file, git, wake, box.keep_epoch
    )


def interrupt_session(call: Call) -> Reply:
    """End what runs in a session."""
    name = call.json()["name"]
    with call.box.operation("session", call.caller()):
        return Reply.json({"interrupted": call.box.session(name).interrupt()})


def close_session(call: Call) -> Reply:
    """End a session."""
    name = call.json()["name"]
    with call.box.operation("session", call.caller()):
        call.box.close_session(name)
    return Reply.json({})


def get_file(call: Call) -> Generator[bytes]:
    """Stream a file's bytes."""
    path = _path(call)

    def chunks() -> Generator[bytes]:
        with archive.open_to_read(path) as file:
            yield b""
            while data := file.read(_READ):
                yield data

    return _streamed(call, chunks)


def _streamed(call: Call, read: Callable[[], Generator[bytes]]) -> Generator[bytes]:
    """What a caller reads while it is the owner; what ``read`` gives first is empty, and says that it began.

    The request lasts as long as its stream: an older owner must not read what its successor writes.
    """

    def stream() -> Generator[bytes]:
        with call.box.operation("read", call.caller(socket.SHUT_RDWR)) as wake, closing(read()) as chunks:
            yield next(chunks)
            yield from frames.encode(_while_owner(chunks, wake))

    begun = stream()
    next(begun)  # whatever can be refused is refused now, before an answer has begun
    return begun


def _while_owner(chunks: Iterable[bytes], wake: Wake) -> Generator[bytes]:
    for chunk in chunks:
        wake.go_on()
        yield chunk


def put_file(call: Call) -> Reply:
    """Write a file, whole or not at all."""
    mode = call.query.get("mode")
    permissions = None if mode is None else int(mode, 8)
    with call.box.operation("write", call.caller(socket.SHUT_RD)) as wake:
        archive.write_atomically(_path(call), frames.decode(call.body), permissions, wake.go_on)
    return Reply.json({})


def get_tree(call: Call) -> Generator[bytes]:
    """Stream a file or folder as an archive."""
    path = _path(call)

    def chunks() -> Generator[bytes]:
        path.lstat()  # a missing path is an answer, not a broken stream
        yield b""
        yield from archive.pack(path)

    return _streamed(call, chunks)


def put_tree(call: Call) -> Reply:
    """Unpack an archive."""
    with call.box.operation("write", call.caller(socket.SHUT_RD)) as wake:
        archive.unpack_checked(frames.decode(call.body), _path(call), wake.go_on)
    return Reply.json({})


ROUTES: dict[tuple[str, str], Route] = {
    ("GET", "/sbx/info"): info,
    ("POST", "/sbx/fence"): fence,
    ("POST", "/sbx/lease"): lease,
    ("GET", "/sbx/log"): log,
    ("POST", "/sbx/execute"): execute,
    ("POST", "/sbx/mark"): mark,
    ("POST", "/sbx/reset"): reset,
    ("POST", "/sbx/session/create"): create_session,
    ("POST", "/sbx/session/run"): run_in_session,
    ("POST", "/sbx/session/interrupt"): interrupt_session,
    ("POST", "/sbx/session/close"): close_session,
    ("GET", "/sbx/file"): get_file,
    ("PUT", "/sbx/file"): put_file,
    ("GET", "/sbx/tree"): get_tree,
    ("PUT", "/sbx/tree"): put_tree,
}

_CODES: dict[type[Exception], tuple[int, str]] = {
    FencedError: (409, "fenced"),
    NotOwnerError: (409, "not-owner"),
    CutOffError: (409, "fenced"),
    StillRunningError: (409, "still-running"),
    AloneError: (409, "busy"),
    LeaseOverError: (410, "lease-over"),
    AnswerGoneError: (410, "answer-gone"),
    clean.CannotMarkError: (409, "not-clean"),
    SessionExistsError: (409, "session-exists"),
    SessionMissingError: (404, "session-missing"),
    ShellBusyError: (409, "session-busy"),
    ShellClosedError: (410, "session-closed"),
    frames.FrameError: (400, "transfer"),
    archive.ArchiveError: (400, "archive"),
    BadRequestError: (400, "request"),
}


def failure(problem: Exception) -> Reply:
    """An exception as an answer: a code for the program, a sentence for the reader."""
    if isinstance(problem, OSError):
        status, code = 422, "os"
        message = f"{problem.filename or 'the request'}: {problem.strerror or problem}"
    elif isinstance(problem, (KeyError, TypeError, ValueError)):
        status, code, message = 400, "request", f"malformed request: {type(problem).__name__}: {problem}"
    else:
        status, code = _CODES.get(type(problem), (500, "launcher"))
        message = str(problem) if code != "launcher" else f"{type(problem).__name__}: {problem}"
    number = problem.errno if isinstance(problem, OSError) else None
    return Reply.json({"error": code, "message": message, "errno": number}, status=status)


def _path(call: Call) -> Path:
    path = call.query.get("path", "")
    if not path or "\0" in path:
        raise BadRequestError("a path is missing, or holds a NUL byte")
    return Path(call.box.settings.workdir) / path


def _folder(path: str) -> str:
    if "\0" in path:
        raise BadRequestError("the working directory holds a NUL byte")
    if not Path(path).is_dir():
        raise BadRequestError(f"the working directory {path!r} is not a folder")
    return path


def _int(values: dict[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or value < 0:
        raise BadRequestError(f"{name} must be a whole number from 0")
    return value
