"""SWE-ReX's HTTP protocol (swe-rex 1.4), so that its stock ``RemoteRuntime`` works against the launcher.

The same requests and answers, with these differences: commands run in threads, a time-out ends what it timed
out, uploads are written as they come, start-up has at least ten seconds, interactive programs are refused.
"""

import socket
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

from . import archive
from .box import SessionExistsError, SessionMissingError
from .execute import CommandRequest, CutOffError, Outcome, Wake
from .multipart import parse
from .output import Capture
from .ownership import AloneError, FencedError, LeaseOverError, NotOwnerError
from .replies import AnswerGoneError, Reply
from .shell import ShellBusyError, ShellClosedError, ShellRequest
from .web import Call, Route

_SHORTEST_START_S = 10.0
GRACE_S = 1.0
_OUTPUT_LIMIT = 8 << 20  # per stream; as text in JSON it may be five times that
_INTERRUPTED = "interrupted"


class ResultLostError(Exception):
    """A command was begun and cut off: what came of it is no result, whoever asks."""


class RexError(Exception):
    """An error by the name that the client will raise."""

    def __init__(self, name: str, message: str, extra: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.class_path = f"swerex.exceptions.{name}"
        self.extra = extra or {}


_NAMES: dict[type[Exception], str] = {
    SessionExistsError: "SessionExistsError",
    SessionMissingError: "SessionDoesNotExistError",
    ShellClosedError: "SessionNotInitializedError",
    ShellBusyError: "SwerexException",
}
_OURS: dict[type[Exception], str] = {
    FencedError: "fenced",
    CutOffError: "fenced",
    NotOwnerError: "not-owner",
    LeaseOverError: "lease-over",
    AnswerGoneError: "answer-gone",
    ResultLostError: "cut-off",
    AloneError: "busy",
}


def failure(problem: Exception) -> Reply:
    """An exception in the shape that the client rebuilds it from."""
    extra: dict[str, Any] = {}
    message = str(problem)
    if isinstance(problem, RexError):
        class_path, extra = problem.class_path, problem.extra
    elif type(problem) in _NAMES:
        class_path = f"swerex.exceptions.{_NAMES[type(problem)]}"
    elif type(problem).__module__ == "builtins":
        class_path = f"builtins.{type(problem).__name__}"
    else:
        class_path, message = "swerex.exceptions.SwerexException", f"{type(problem).__name__}: {problem}"
        if type(problem) in _OURS:
            extra = {"sandbox_error": _OURS[type(problem)]}  # for a client that knows more than SWE-ReX's
    transfer = {"message": message, "class_path": class_path, "traceback": "", "extra_info": extra}
    return Reply.json({"swerexception": transfer}, status=511)


def root(call: Call) -> Reply:
    """A word of welcome."""
    return Reply.json({"message": "sandbox-k8s launcher"})


def is_alive(call: Call) -> Reply:
    """Whether the launcher answers."""
    return Reply.json({"is_alive": True, "message": ""})


def create_session(call: Call) -> Reply:
    """Start a bash session."""
    wanted = call.json()
    timeout_s = max(float(wanted.get("startup_timeout", 1.0)), _SHORTEST_START_S)
    name, sources = wanted.get("session", "default"), wanted.get("startup_source", ())
    with call.box.operation("session", call.caller()) as wake:
        shell = call.box.create_session(name)
        try:
            outcome = shell.start_up(wake, sources, timeout_s)
            _must_have_started(outcome, timeout_s)
        except BaseException:
            with suppress(SessionMissingError):  # half a session would be taken for a whole one
                call.box.close_session(name)
            raise
    return Reply.json({"output": text_of(outcome.stdout), "session_type": "bash"})


def _must_have_started(outcome: Outcome, timeout_s: float) -> None:
    said = text_of(outcome.stdout)
    if outcome.timed_out:
        message = f"the start-up files took more than {timeout_s} seconds"
        raise RexError("CommandTimeoutError", message, {"output": said})
    _must_be_whole(outcome)
    if not outcome.session_alive:
        message = f"the start-up files ended the shell, with exit code {outcome.exit_code}: {said!r}"
        raise RexError("SessionNotInitializedError", message, {"output": said})


def _must_be_whole(outcome: Outcome) -> None:
    """Refuse what came until a command was cut off, unless its caller interrupted it."""
    why = outcome.infra_error or outcome.cancelled
    if why and why != _INTERRUPTED:
        raise ResultLostError(f"the command was begun and cut off: {why}")


def run_in_session(call: Call) -> Reply:
    """Run a command in a session, or interrupt one."""
    action = call.json()
    name = action.get("session", "default")
    if action.get("action_type") == "bash_interrupt":
        with call.box.operation("session", call.caller()):
            call.box.session(name).interrupt()
        return Reply.json(_observation("", 0))
    if action.get("is_interactive_command") or action.get("is_interactive_quit") or action.get("expect"):
        raise RexError("SwerexException", "interactive programs are not supported: sessions have no terminal")
    command = action["command"]
    call.box.session(name)
    _check_syntax(command, call)
    request = ShellRequest(
        command, timeout_s=action.get("timeout"), grace_s=GRACE_S, output_limit=_OUTPUT_LIMIT, merge=True
    )
    with call.box.operation("session", call.caller(), busy_s=request.timeout_s) as wake:
        outcome = call.box.run_in_session(name, request, wake, call.connection)
    _must_be_whole(outcome)
    output = text_of(outcome.stdout)
    if outcome.timed_out:
        message = f"timeout after {request.timeout_s} seconds while running command {command!r}"
        raise RexError("CommandTimeoutError", message, {"output": output})
    check = action.get("check", "raise")
    if check == "raise" and outcome.exit_code is None:
        raise RexError("NoExitCodeError", f"no exit code: {outcome.cancelled}")
    if check == "raise" and outcome.exit_code != 0:
        _raise_nonzero(action, command, outcome.exit_code, f"Here is the output:\n{output!r}")
    return Reply.json(_observation(output, None if check == "ignore" else outcome.exit_code))


def _observation(output: str, exit_code: int | None) -> dict[str, Any]:
    return {
        "output": output,
        "exit_code": exit_code,
        "failure_reason": "",
        "expect_string": "",
        "session_type": "bash",
    }


def _raise_nonzero(wanted: dict[str, Any], command: object, exit_code: int | None, rest: str) -> None:
    message = f"Command {command!r} failed with exit code {exit_code}. {rest}"
    if wanted.get("error_msg"):
        message = f"{wanted['error_msg']}: {message}"
    raise RexError("NonZeroExitCodeError", message)


def _check_syntax(command: str, call: Call) -> None:
    with call.box.operation("command", call.caller()) as wake:
        outcome = call.box.execute(
            CommandRequest(
                [call.box.shell().program, "-n"],
                cwd=call.box.settings.workdir,
                env=call.box.settings.env,
                stdin=command.encode("utf-8", "surrogateescape") + b"\n",
                timeout_s=10.0,
            ),
            wake,
            None,
        )
    if outcome.exit_code not in (0, None):
        stderr = text_of(outcome.stderr)
        extra = {"bash_stdout": text_of(outcome.stdout), "bash_stderr": stderr}
        raise RexError(
            "BashIncorrectSyntaxError", f"syntax error in bash command {command!r}:\n{stderr}", extra
        )


def close_session(call: Call) -> Reply:
    """End a session."""
    name = call.json().get("session", "default")
    with call.box.operation("session", call.caller()):
        call.box.close_session(name)
    return Reply.json({"session_type": "bash"})


def execute(call: Call) -> Reply:
    """Run a command as ``subprocess.run`` would: ``env`` replaces everything, a string names a program."""
    wanted = call.json()
    command = wanted["command"]
    if wanted.get("shell"):
        argv = call.box.argv_for(command if isinstance(command, str) else command[0])
    else:
        argv = [command] if isinstance(command, str) else list(command)
    env = wanted.get("env")
    request = CommandRequest(
        argv,
        cwd=wanted.get("cwd") or call.box.settings.workdir,
        env=call.box.environment(None) if env is None else env,
        timeout_s=wanted.get("timeout"),
        output_limit=_OUTPUT_LIMIT,
        merge=bool(wanted.get("merge_output_streams")),
    )
    with call.box.operation("command", call.caller(), busy_s=request.timeout_s) as wake:
        outcome = call.box.execute(request, wake, call.connection)
    _must_be_whole(outcome)
    stdout, stderr = text_of(outcome.stdout), text_of(outcome.stderr)
    if outcome.timed_out:
        message = f"Timeout ({request.timeout_s}s) exceeded while running command"
        raise RexError("CommandTimeoutError", message, {"stdout": stdout, "stderr": stderr})
    if outcome.exit_code is None:
        raise RexError("NoExitCodeError", f"no exit code: {outcome.cancelled}")
    # subprocess reports a signal as a negative number, and its callers look for that
    exit_code = outcome.exit_code if outcome.signal is None else -outcome.signal
    if wanted.get("check") and exit_code != 0:
        _raise_nonzero(wanted, command, exit_code, f"Stdout:\n{stdout!r}\nStderr:\n{stderr!r}")
    return Reply.json({"stdout": stdout, "stderr": stderr, "exit_code": exit_code})


def read_file(call: Call) -> Reply:
    """A file as text."""
    wanted = call.json()
    path = Path(call.box.settings.workdir) / wanted["path"]
    encoding, errors = wanted.get("encoding") or "utf-8", wanted.get("errors") or "strict"
    with call.box.operation("read", call.caller()), archive.open_to_read(path) as file:
        # As it is, CRLF too: editing compares what was read with what is there (langchain-ai/deepagents#2879)
        return Reply.json({"content": file.read().decode(encoding, errors)})


def write_file(call: Call) -> Reply:
    """Write a file from text."""
    wanted = call.json()
    path = Path(call.box.settings.workdir) / wanted["path"]
    content = wanted["content"].encode("utf-8", "surrogateescape")
    with call.box.operation("write", call.caller()) as wake:
        path.parent.mkdir(parents=True, exist_ok=True)
        archive.write_atomically(path, [content], None, wake.go_on)
    return Reply.json({})


def upload(call: Call) -> Reply:
    """Receive a file, or a folder as a zip archive."""
    who = call.caller(socket.SHUT_RD)
    with call.box.operation("write", who) as wake, tempfile.TemporaryFile() as spool:
        fields = parse(call.body, call.content_type, file_field="file", sink=spool)
        target = Path(call.box.settings.workdir) / fields["target_path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        spool.seek(0)
        if fields.get("unzip", "false").lower() == "true":
            _unzip(spool, target, wake)
        else:
            archive.write_atomically(target, _pieces(spool), None, wake.go_on)
    return Reply.json({})


def _unzip(spool: IO[bytes], target: Path, wake: Wake) -> None:
    with zipfile.ZipFile(spool) as bundle:
        for entry in bundle.infolist():
            wake.go_on()
            names = [name for name in PurePosixPath(entry.filename).parts if name not in ("/", "//", "..")]
            path = target.joinpath(*names)
            mode = (entry.external_attr >> 16) & 0o777  # the reference server loses the executable bit
            if entry.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                path.chmod(mode or path.stat().st_mode)
                continue
            with bundle.open(entry) as content:
                archive.write_atomically(path, _pieces(content), mode or None, wake.go_on)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(1 << 20), b"")


def close(call: Call) -> Reply:
    """End all sessions; the launcher goes on."""
    call.json()
    with call.box.operation("session", call.caller()) as wake:
        call.box.close_sessions(wake)
    return Reply.json({})


def text_of(capture: Capture) -> str:
    """What was captured as text; bytes that are not UTF-8 are shown as escapes."""
    head, tail = capture.parts()
    left_out = capture.total - len(head) - len(tail)
    middle = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
    return (head + middle + tail).decode("utf-8", "backslashreplace")


ROUTES: dict[tuple[str, str], Route] = {
    ("GET", "/"): root,
    ("GET", "/is_alive"): is_alive,
    ("POST", "/create_session"): create_session,
    ("POST", "/run_in_session"): run_in_session,
    ("POST", "/close_session"): close_session,
    ("POST", "/execute"): execute,
    ("POST", "/read_file"): read_file,
    ("POST", "/write_file"): write_file,
    ("POST", "/upload"): upload,
    ("POST", "/close"): close,
}
