"""Scripts that judge: run in a grader's sandbox, their whole output read back as one log."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from agent_flow.errors import GraderError
from agent_flow.protocols import Environment

LOOK_S = 60.0
_LARGEST_LOG = 64 << 20
_RUN = r"""
log="$1"; shift
exec "$@" > "$log" 2>&1
"""
_SIZE = 'wc -c < "$1"'
_NOT_FETCHED = re.compile(
    r"""
    Temporary\ failure\ (?:in\ name\ resolution|resolving)   # glibc; apt
    |\bEAI_AGAIN\b                                           # node, npm
    |failed\ to\ lookup\ address\ information                # uv, cargo
    |[Cc]ould\ not\ resolve\ (?:host|proxy)                  # curl, git
    |unable\ to\ resolve\ host\ address                      # wget
    |^E:\ Failed\ to\ fetch\ (?:http|ftp)                    # apt
    |/tests/\S*:\ (?:line\ )?\d+:\               # a shell, of a script of the tests' own
     (?:curl|wget|uvx?|pipx?|pip3|npm|npx|apt-get|apk):\ (?:command\ )?not\ found$
    """,
    re.MULTILINE | re.VERBOSE,
)
"""What programs say that find no network, and shells that find no such program."""


class ScriptRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a script did."""

    log: str
    """Everything that it wrote to both streams, in the order in which it came."""
    exit_code: int | None
    """None: its time ran out."""
    timed_out: bool


def ended_by_signal(code: int | None) -> bool:
    """Whether a script was killed; shells say 128 and the signal's number."""
    return code is None or code < 0 or 128 < code < 160


def not_fetched(log: str) -> bool:
    """Whether the log shows that tests could not fetch what they run with."""
    return _NOT_FETCHED.search(log) is not None


async def run_logged(
    environment: Environment, command: Sequence[str], log: str, *, timeout_s: float, cwd: str
) -> ScriptRun:
    """Run a command with both streams in a file.

    Of a command's output a sandbox keeps only the beginning and the end.

    Args:
        environment: A grader's.
        command: Argument vector.
        log: Path of the file, in a folder that is there.
        timeout_s: The command is killed after so long.
        cwd: Where it runs.

    Raises:
        GraderError: it left no log (infrastructure, retryable), or more than 64 MiB (the agent's fault).
        EnvError: the sandbox was lost.
    """
    done = await environment.execute(["sh", "-c", _RUN, "run", log, *command], timeout_s=timeout_s, cwd=cwd)
    return ScriptRun(log=await read_log(environment, log), exit_code=done.exit_code, timed_out=done.timed_out)


async def read_log(environment: Environment, path: str) -> str:
    """A file that a script wrote, as text; raises as `run_logged` does."""
    sized = await environment.execute(["sh", "-c", _SIZE, "size", path], timeout_s=LOOK_S)
    text = sized.stdout.decode("utf-8", "replace").strip()
    if sized.exit_code != 0 or not text.isdecimal():
        evidence = sized.stderr.decode("utf-8", "replace")
        raise GraderError("log", "the eval script left no log", retryable=True, evidence=evidence)
    if int(text) > _LARGEST_LOG:
        raise GraderError(
            "log_too_large", f"the eval script wrote {text} bytes, more than {_LARGEST_LOG}", fault="agent"
        )
    return (await environment.read(path)).decode("utf-8", "replace")
