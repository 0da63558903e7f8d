"""A bash that keeps its directory, variables, functions and background jobs, made of `Environment.execute`.

`execute` starts a process that must not hold a pipe to survive the call; that is all it asks of an
environment. A keeper runs the shell and starts it again when it ends; commands are files that the shell
sources, named to it over a FIFO; each end comes back over another. As everything lies in one folder of the
sandbox, the shell lives through a detach, and `Shell(environment, folder)` in another process is the same
one.
"""

from __future__ import annotations

import itertools

import msgspec

from agent_flow.environments.folder import make_folder
from agent_flow.errors import EnvError
from agent_flow.protocols import Environment

OUTPUT_LIMIT = 1 << 20
"""Bytes kept of what one command printed."""
_OVERRUN_S = 45.0
"""What a call may take longer than its command: interrupt, kill, a slow sandbox."""
_GONE = 67
_SYNTAX = 65
_LATE = 124

_SHELL = r"""
__af=$1
[ -f "$__af/exported" ] && . "$__af/exported"
[ -f "$__af/cwd" ] && cd -- "$(cat "$__af/cwd")"
trap 'return 130' INT
while :; do
  IFS= read -r __af_n <&3 || continue
  echo "$__af_n" > "$__af/current"
  . "$__af/$__af_n.sh" </dev/null >"$__af/$__af_n.out" 2>&1 3<&-
  echo $? > "$__af/$__af_n.rc"
  declare -px > "$__af/exported"; pwd > "$__af/cwd"
  rm -f "$__af/current"
  echo done > "$__af/$__af_n.done"
done
"""

_KEEPER = r"""
exec 3<>"$1/in"
set -m
while [ -p "$1/in" ]; do
  bash "$1/shell.sh" "$1" </dev/null &
  echo $! > "$1/group"
  wait $!
  code=$?
  if [ -f "$1/current" ]; then
    n=$(cat "$1/current"); rm -f "$1/current"
    echo "$code ended" > "$1/$n.rc"
    echo done > "$1/$n.done"
  fi
done
"""

_START = r"""
[ -p "$1/in" ] || mkfifo "$1/in" || exit 67
kill -0 "$(cat "$1/keeper" 2>/dev/null)" 2>/dev/null && exit 0
set -m
bash "$1/keeper.sh" "$1" </dev/null >/dev/null 2>&1 &
echo $! > "$1/keeper"
disown
"""

_RUN = r"""
[ -p "$1/in" ] && kill -0 "$(cat "$1/keeper")" 2>/dev/null || exit 67
bash -n "$1/$2.sh" || exit 65
rm -f "$1/$2.done" "$1/$2.rc"; mkfifo "$1/$2.done" || exit 67
exec 4<>"$1/$2.done" 5<>"$1/in"
echo "$2" >&5
late=0
read -r -t "$3" _ <&4 || {
  late=124
  kill -INT -- "-$(cat "$1/group")"
  read -r -t 2 _ <&4 || { kill -KILL -- "-$(cat "$1/group")"; read -r -t 5 _ <&4; } || exit 67
} 2>/dev/null
head -c "$4" "$1/$2.out"
cat "$1/$2.rc" >&2
rm -f "$1/$2".*
exit $late
"""

_PROFILE = "PS1='$ '; [ -f ~/.bashrc ] && . ~/.bashrc; unset PS1; true"
"""Images set PATH or conda in `~/.bashrc`, which most skip where there is no prompt."""


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a command in the shell gave."""

    output: str = ""
    """Both streams in the order of writing."""
    exit_code: int = 0
    timed_out: bool = False
    """It was interrupted, and killed where it resisted."""
    ended: bool = False
    """It ended the shell itself; another goes on in the same folder with the exported variables."""
    syntax_error: str = ""
    """What `bash -n` says. Not empty: nothing was run."""


class Shell:
    """See the module. One command at a time."""

    def __init__(self, environment: Environment, folder: str) -> None:
        self._environment = environment
        self._names = itertools.count(1)
        self.folder = folder

    @classmethod
    async def start(cls, environment: Environment) -> Shell:
        """A new shell, which has read `~/.bashrc`.

        Raises:
            EnvError: the sandbox is lost, or has no bash or no FIFOs.
        """
        folder = await make_folder(environment)
        await environment.write(f"{folder}/shell.sh", _SHELL.encode())
        await environment.write(f"{folder}/keeper.sh", _KEEPER.encode())
        shell = cls(environment, folder)
        await shell.keep()
        await shell.run(_PROFILE, timeout_s=60.0)
        return shell

    async def keep(self) -> None:
        """Start the shell if it does not run, with the directory and the exported variables it had.

        Raises:
            EnvError: the sandbox is lost, or the shell's folder is.
        """
        done = await self._environment.execute(
            ["bash", "-c", _START, "shell", self.folder], timeout_s=_OVERRUN_S, cwd="/"
        )
        if done.exit_code != 0:
            evidence = done.stderr.decode("utf-8", "replace")
            raise EnvError("shell", "no shell could be started in the sandbox", evidence=evidence)

    async def run(self, command: str, *, timeout_s: float) -> ShellResult:
        """Run a command in the shell.

        Raises:
            EnvError: the sandbox is lost, or the shell's folder is.
        """
        name = f"c{next(self._names)}"
        await self._environment.write(f"{self.folder}/{name}.sh", command.encode("utf-8", "replace"))
        done = await self._environment.execute(
            ["bash", "-c", _RUN, "shell", self.folder, name, f"{timeout_s:.3f}", str(OUTPUT_LIMIT)],
            timeout_s=timeout_s + _OVERRUN_S,
            cwd="/",
        )
        said = done.stderr.decode("utf-8", "replace")
        if done.exit_code == _SYNTAX:
            return ShellResult(exit_code=2, syntax_error=said)
        code, _, ended = said.strip().rpartition("\n")[2].partition(" ")
        if done.exit_code not in (0, _LATE) or not code.isdecimal():
            fault = "agent" if done.exit_code in (0, _GONE, _LATE) else "infra"
            raise EnvError("shell", "the shell of the sandbox is gone", fault=fault, evidence=said)
        output = done.stdout.decode("utf-8", "replace")
        if len(done.stdout) >= OUTPUT_LIMIT:
            output += f"\n[only the first {OUTPUT_LIMIT} bytes are shown]"
        return ShellResult(
            output=output, exit_code=int(code), timed_out=done.exit_code == _LATE, ended=bool(ended)
        )
