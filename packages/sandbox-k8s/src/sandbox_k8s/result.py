"""How a command ended."""

from typing import Any

import msgspec


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a command.

    Attributes:
        exit_code: 0 to 255; 128 + n when signal n ended it, as shells count. None when it did not end by
            itself (``timed_out``, ``cancelled``) or the code is not known (``infra_failed``). Never guessed.
        stdout: Bytes. When more came than is kept, a line in the middle says how much is left out.
        stderr: The same; empty when the streams were merged.
        timed_out: It was killed at its deadline; the output is what came until then.
        infra_failed: The sandbox failed, not the command: do not count this against anybody.
        infra_error: What failed, empty otherwise.
        cancelled: Why it was cut off (``interrupted``, ``fenced``), empty otherwise.
        signal: The signal that ended it, None when none did.
        duration_s: Inside the sandbox.
        stdout_total: Bytes that it wrote, kept or not.
        stderr_total: The same.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    infra_failed: bool = False
    infra_error: str = ""
    cancelled: str = ""
    signal: int | None = None
    duration_s: float = 0.0
    stdout_total: int = 0
    stderr_total: int = 0
    truncated: bool = False

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with 0."""
        return self.exit_code == 0

    @property
    def stdout_text(self) -> str:
        """Standard output as text; what is not UTF-8 is shown as escapes."""
        return self.stdout.decode("utf-8", "backslashreplace")

    @property
    def stderr_text(self) -> str:
        """Standard error as text; what is not UTF-8 is shown as escapes."""
        return self.stderr.decode("utf-8", "backslashreplace")


class SessionResult(CommandResult, frozen=True, kw_only=True):
    """The end of a command in a session.

    Attributes:
        session_alive: Whether the session takes another command. False after ``exit``, ``exec``, or a command
            that could not be stopped without ending its shell.
    """

    session_alive: bool = True


def fields_of(answer: dict[str, Any], parts: list[bytes]) -> dict[str, Any]:
    """An answer of the launcher as fields of a result."""
    streams: list[bytes] = []
    truncated = False
    for number, total in enumerate(answer["totals"]):
        head, tail = parts[2 * number : 2 * number + 2]
        left_out = total - len(head) - len(tail)
        truncated = truncated or left_out > 0
        middle = b"\n[... %d bytes left out ...]\n" % left_out if left_out else b""
        streams.append(head + middle + tail)
    names = ("exit_code", "signal", "timed_out", "infra_error", "cancelled", "duration_s")
    return {name: answer[name] for name in names} | {
        "stdout": streams[0],
        "stderr": streams[1],
        "stdout_total": answer["totals"][0],
        "stderr_total": answer["totals"][1],
        "truncated": truncated,
        "infra_failed": bool(answer["infra_error"]),
    }
