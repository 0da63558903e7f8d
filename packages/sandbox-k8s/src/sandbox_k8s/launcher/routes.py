"""The launcher's own requests, under ``/sbx``: bytes instead of text, streams instead of bodies, owners."""

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import archive, clean, frames
from .box import SessionExistsError, SessionMissingError
from .clock import monotonic_s
from .execute import CommandRequest, Outcome
from .ownership import FencedError, LeaseOverError, NotOwnerError
from .replies import Reply
from .shell import ShellBusyError, ShellClosedError, ShellRequest
from .web import FRAMED, BadRequestError, Call, Route

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
    with box.operation("command", call.caller(), busy_s=request.timeout_s or 0.0) as wake:
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
    return Reply(body, content_type=FRAMED, repeatable=not outcome.cancelled)


def create_session(call: Call) -> Reply:
    """Start a session and read the start-up files in it."""
    head = call.json()
    with call.box.operation("session", call.caller()) as wake:
        shell = call.box.create_session(
            head["name"], cwd=_folder(head.get("cwd") or call.box.settings.workdir), env=head.get("env")
        )
        return _outcome(shell.start_up(wake, head.get("startup", ()), head["timeout_s"]))


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
    with call.box.operation("session", call.caller(), busy_s=request.timeout_s or 0.0) as wake:
        return _outcome(call.box.run_in_session(head["name"], request, wake, call.connection))


def mark(call: Call) -> Reply:
    """Remember the state of now as the clean one."""
    wanted = call.json()
    box = call.box
    with box.operation("command", call.caller()):
        box.clean = clean.mark(
            wanted.get("repo"), box.settings.env.get("HOME"), box.settings.pipes, box.settings.env
        )
        return Reply.json({"folders": len(box.clean.digests), "tracked": len(box.clean.tracked)})


def reset(call: Call) -> Reply:
    """End everything that runs, and bring the clean state back; says what still differs."""
    box = call.box
    if box.clean is None:
        raise clean.CannotMarkError("no state of this launcher was marked as clean")
    with box.operation("command", call.caller()):
        box.close_sessions()
        return Reply.json({"differences": clean.restore(box.clean, box.settings.env)})


def interrupt_session(call: Call) -> Reply:
    """End what runs in a session."""
    call.box.check(call.epoch)
    return Reply.json({"interrupted": call.box.session(call.json()["name"]).interrupt()})


def close_session(call: Call) -> Reply:
    """End a session."""
    call.box.check(call.epoch)
    call.box.close_session(call.json()["name"])
    return Reply.json({})


def get_file(call: Call) -> Iterable[bytes]:
    """Stream a file's bytes."""
    call.box.check(call.epoch)
    file = _path(call).open("rb")

    def chunks() -> Iterable[bytes]:
        with file:
            while data := file.read(_READ):
                yield data

    return frames.encode(chunks())


def put_file(call: Call) -> Reply:
    """Write a file, whole or not at all."""
    mode = call.query.get("mode")
    with call.box.operation("write", call.caller(sends=True)):
        archive.write_atomically(
            _path(call), frames.decode(call.body), None if mode is None else int(mode, 8)
        )
    return Reply.json({})


def get_tree(call: Call) -> Iterable[bytes]:
    """Stream a file or folder as an archive."""
    call.box.check(call.epoch)
    path = _path(call)
    path.lstat()  # a missing path is an answer, not a broken stream
    return frames.encode(archive.pack(path))


def put_tree(call: Call) -> Reply:
    """Unpack an archive."""
    with call.box.operation("write", call.caller(sends=True)):
        archive.unpack_checked(frames.decode(call.body), _path(call))
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
    LeaseOverError: (410, "lease-over"),
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
