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

from agent_flow.errors import EnvError
from agent_flow.protocols import Environment

OUTPUT_LIMIT = 1 << 20
"""Bytes kept of what one command printed."""
_OVERRUN_S = 45.0
"""What a call may take longer than its command: interrupt, kill, a slow sandbox."""
_GONE = 67
_SYNTAX = 65
_LATE = 124
_KILLED = 137

_STEP = r"""
if [[ ! ${__af_ready-} ]]; then
  __af_ready=$__af_n
  [[ -s $__af/exported ]] && \builtin source "$__af/exported"
  [[ -s $__af/cwd ]] && \builtin cd -- "$(<"$__af/cwd")"
  __af_n=$__af_ready
fi
\builtin trap '[[ ${#BASH_SOURCE[@]} -gt 2 ]] && \builtin return 130' INT
\builtin printf '%s\n' "$__af_n" >| "$__af/current"
\builtin source "$__af/$__af_n.sh" </dev/null >| "$__af/$__af_n.out" 2>&1
\builtin printf '%s\n' "$?" >| "$__af/$__af_n.rc"
\builtin export -n __af __af_n __af_ready
\builtin declare -px >| "$__af/exported"
\builtin pwd >| "$__af/cwd"
\builtin printf '' >| "$__af/current"
\builtin printf 'done\n' >| "$__af/$__af_n.done"
"""
"""What the shell itself runs for a command, among the agent's functions, aliases and options.

Words are quoted and output goes over `noclobber`; every file is there already, as the umask is the agent's.
The trap is set anew, since bash (5.2) may not run one again that was left by `return`."""

_KEEPER = r"""
exec 3<>"$1/in"
set -m
while [ -p "$1/in" ]; do
  bash "$1/in" </dev/null 3<&- &
  echo $! > "$1/group"
  wait $!
  code=$?
  if [ -s "$1/current" ]; then
    n=$(cat "$1/current"); : > "$1/current"
    echo "$code ended" > "$1/$n.rc"
    echo done > "$1/$n.done"
  fi
done
"""
"""The FIFO is the shell's script: so no loop is around a command, which its `break` could end."""

_START = r"""
[ -p "$1/in" ] && kill -0 "$(cat "$1/keeper" 2>/dev/null)" 2>/dev/null && exit 0
rm -f "$1/in"; mkfifo "$1/in" || exit 67
touch "$1/exported" "$1/cwd"; : > "$1/current"
set -m
bash "$1/keeper.sh" "$1" </dev/null >/dev/null 2>&1 &
echo $! > "$1/keeper"
disown
"""

_RUN = r"""
[ -p "$1/in" ] && kill -0 "$(cat "$1/keeper")" 2>/dev/null || exit 67
bash -n "$1/$2.sh" || exit 65
rm -f "$1/$2.done"; : > "$1/$2.rc"; : > "$1/$2.out"; mkfifo "$1/$2.done" || exit 67
exec 4<>"$1/$2.done" 5<>"$1/in"
printf '__af=%q __af_n=%q; \\builtin source %q\n' "$1" "$2" "$1/step.sh" >&5
lives() {
  [ -p "$1/in" ] && { kill -0 "$(cat "$1/keeper")" || kill -0 -- "-$(cat "$1/group")"; }
} 2>/dev/null
rc="$1/$2.rc"
said() { # within $1 seconds; a read may be out of time when it has just read what came: then there is a code
  read -r -t "$1" _ <&4 || { [ -s "$rc" ] && { read -r -t 1 _ <&4; true; }; }
}
ends() { # within $3 seconds, which have three decimals
  [ "${3#*.}" != 000 ] && said "0.${3#*.}" && return
  for ((left = ${3%.*}; left > 0; left--)); do
    said 1 && return
    lives "$1" || exit 68
  done
  return 1
}
late=0
ends "$@" || {
  late=124
  kill -INT -- "-$(cat "$1/group")"
  said 2 || { kill -KILL -- "-$(cat "$1/group")"; said 5; } || exit 68
} 2>/dev/null
head -c "$4" "$1/$2.out"
cat "$1/$2.rc" >&2
rm -f "$1/$2".*
exit $late
"""
"""Whether the shell is still there is looked at each second: one killed with its keeper says nothing."""

_FOLDER = 'umask 077; mktemp -d "${TMPDIR:-/tmp}/.af-XXXXXXXX"'
"""With a dot, which `rm -rf /tmp/*` passes over."""

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
    """The shell ended, by itself or by force; another goes on in the same folder with the exported variables,
    as far as they are still known."""
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
        made = await environment.execute(["bash", "-c", _FOLDER], timeout_s=_OVERRUN_S)
        folder = made.stdout.decode("utf-8", "replace").strip()
        if made.exit_code != 0 or not folder.startswith("/"):
            evidence = made.stderr.decode("utf-8", "replace")
            raise EnvError("shell", "no folder for a shell in the sandbox", retryable=True, evidence=evidence)
        shell = cls(environment, folder)
        await shell._begin()
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
        """Run a command in the shell. Where that is gone with all that kept it, a new one is started.

        Raises:
            EnvError: the sandbox is lost, or no shell can be started there any more.
        """
        done = await self._run(command, timeout_s)
        if isinstance(done, ShellResult):
            return done
        # Such as `pkill bash`, or its folder was removed.
        await self._begin()
        return ShellResult(output=done, exit_code=_KILLED, ended=True)

    async def _begin(self) -> None:
        folder = self.folder
        made = await self._environment.execute(["mkdir", "-p", folder], timeout_s=_OVERRUN_S, cwd="/")
        if made.exit_code != 0:
            evidence = made.stderr.decode("utf-8", "replace")
            raise EnvError("shell", "the shell's folder cannot be made", evidence=evidence)
        await self._environment.write(f"{folder}/step.sh", _STEP.encode())
        await self._environment.write(f"{folder}/keeper.sh", _KEEPER.encode())
        await self.keep()
        done = await self._run(_PROFILE, 60.0)
        if isinstance(done, str):
            raise EnvError("shell", "the shell of the sandbox is gone", fault="agent", evidence=done)

    async def _run(self, command: str, timeout_s: float) -> ShellResult | str:
        """A text says of a shell that is gone what became of the command."""
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
        if done.exit_code == _GONE:
            return "[the shell was gone: the command was not run]"
        if done.exit_code not in (0, _LATE) or not code.isdecimal():
            return "[the shell was lost while the command ran]"
        output = done.stdout.decode("utf-8", "replace")
        if len(done.stdout) >= OUTPUT_LIMIT:
            output += f"\n[only the first {OUTPUT_LIMIT} bytes are shown]"
        return ShellResult(
            output=output, exit_code=int(code), timed_out=done.exit_code == _LATE, ended=bool(ended)
        )
