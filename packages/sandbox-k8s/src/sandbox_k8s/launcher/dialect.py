r"""What differs between the shells that can run commands: bash, or the ``sh`` of an image without bash.

With ``sh`` (dash, busybox) sessions keep their promises: directory, variables, functions and background jobs
stay, exit codes are the commands' own, a time-out interrupts and the session goes on. What it cannot give:

- bash's language: arrays, ``[[``, ``source``, ``pipefail``; a command written for bash fails as in any sh;
- start-up files: ``~/.bashrc`` is bash's, so only the image's environment holds.
"""

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

_STATUS = '__sbx_status() { return "$1"; }\n'


@dataclass(frozen=True)
class Dialect:
    """One kind of shell.

    Attributes:
        interactive: Arguments that make it read lines from a pipe and survive an interrupt.
        own_mark_fd: Whether marks go over a descriptor of their own; else over its standard output, since sh
            can name no descriptor above 9, and commands may want any of those.
        reads_startup: Whether it runs `startup.sh`.
    """

    program: str
    interactive: tuple[str, ...]
    own_mark_fd: bool
    reads_startup: bool

    def prepare(self, env: Mapping[str, str]) -> str:
        """The first lines of a session; ``env`` is what `session_environment` was made from."""
        if self.own_mark_fd:
            return f"set +H +o history; unset HISTFILE MAILCHECK PROMPT_COMMAND; PS1= PS2=; {_STATUS}"
        kept = f"export ENV={shlex.quote(env['ENV'])}; " if "ENV" in env else ""
        return f"unset HISTFILE MAILCHECK; PS1= PS2=; {kept}{_STATUS}"

    def session_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """What a session's shell is started with."""
        started = {**env, "PS1": "", "PS2": ""}
        if not self.own_mark_fd:
            started.pop("ENV", None)  # an interactive sh would run the file that it names
        return started

    def line(self, turn: int, command: str, *, status: int, out: str, err: str, mark_fd: int) -> bytes:
        r"""The line that runs one command.

        ``B turn`` says that the line was read whole (an interrupt before that would leave the shell in the
        middle of somebody's quotes), ``D turn status`` that the command ended.
        """
        quoted = command.replace("'", "'\\''")
        if self.own_mark_fd:
            text = (
                f"builtin echo B {turn} >&{mark_fd}; {{ __sbx_status {status}; eval '{quoted}'; }} "
                f"</dev/null >{out} 2>{err} {mark_fd}>&-; builtin echo D {turn} $? >&{mark_fd}\n"
            )
        else:
            # Without `command`, a syntax error or a failed `.` in eval would end the whole line in sh. Marks
            # begin with a newline: a trap of an earlier command may have printed half a line.
            text = (
                f"command printf '\\nB {turn}\\n'; {{ __sbx_status {status}; command eval '{quoted}'; }} "
                f"</dev/null >{out} 2>{err}; command printf '\\nD {turn} %d\\n' $?\n"
            )
        return text.encode("utf-8", "surrogateescape")

    def question(self, turn: int, mark_fd: int) -> bytes:
        """The line whose answer ``S turn`` says that the shell reads its input again.

        Without quotes: an interrupt may swallow its beginning, and the rest must stay harmless.
        """
        line = f"builtin echo S {turn} >&{mark_fd}" if self.own_mark_fd else f"command echo S {turn}"
        return f"\n{line}\n".encode()


BASH = Dialect("bash", ("--norc", "--noprofile", "--noediting", "-i"), own_mark_fd=True, reads_startup=True)
SH = Dialect("sh", ("-i",), own_mark_fd=False, reads_startup=False)


def of(path: str | None) -> Dialect:
    """The shell to use with this PATH: bash where there is one."""
    return BASH if shutil.which(BASH.program, path=path) else SH
