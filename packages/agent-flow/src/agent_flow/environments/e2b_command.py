"""A command in a sandbox of E2B: the shell around it, and what is known of it until now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from agent_flow.environments.process import KEPT, Kept
from agent_flow.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_flow.environments.e2b_sandbox import Output

OWNER_FILE = "/tmp/.agent-flow-owner"  # in the sandbox
"""Names who attached last. None there: nobody has."""

PROGRAMS = 'PATH="$PATH:/usr/local/bin:/usr/bin:/bin"'
"""In scripts of ours: what `PATH` says may be for the task's programs alone."""

_HIDDEN = """mark=$1 script=$2
shift 2
exec /bin/sh -c "$script" agent-flow "$@" 3<<END
$mark
END
"""
"""The command can read the arguments and the environment of the shell around it, not what that has read."""

_COMMAND = r"""
read -r mark <&3
exec 3<&-
owner=$1 watch=$2 folder=$3
shift 3
ended() {
  oom=-
  [ -z "$watch" ] || oom=$(PROGRAMS; sed -n 's/^oom_kill //p' /proc/vmstat)
  printf '\n%s %s %s\n' "$mark" "$1" "$oom" >&2
  printf '\n%s end\n' "$mark"
  exit 0
}
if [ -n "$owner" ] && read -r other 2>/dev/null <OWNER_FILE && [ "$other" != "$owner" ]; then
  ended fenced
fi
cd -- "$folder" 2>/dev/null || ended cwd
( exec "$@" )
ended $?
""".replace("OWNER_FILE", OWNER_FILE).replace("PROGRAMS", PROGRAMS)
"""The mark ends both streams: whatever the command left behind may hold them open."""


def wrapped(mark: str, command: Sequence[str], *, owner: str, watch: bool, folder: str) -> list[str]:
    """The argument list of the shell around a command.

    Args:
        mark: Known to nobody in the sandbox.
        command: Its program and arguments.
        owner: Who must have attached last. Empty: nobody ever did.
        watch: Whether kills of the kernel are counted.
        folder: In which it runs.
    """
    words = [owner, "watch" if watch else "", folder, *command]
    return ["/bin/sh", "-c", _HIDDEN, "agent-flow", mark, _COMMAND, *words]


class Run:
    """What a command has printed until now."""

    def __init__(self, mark: str) -> None:
        self._mark = f"\n{mark} ".encode()
        self._kept: dict[Output, Kept] = {"stdout": Kept(KEPT), "stderr": Kept(KEPT)}
        self._ends: dict[Output, bytes] = {"stdout": b"", "stderr": b""}
        self._marked: set[Output] = set()
        self.began = False
        """The sandbox said so."""
        self.done = anyio.Event()
        """Both streams have the mark, or nothing more can come."""
        self.over = anyio.Event()
        """Nothing more can come."""
        self.error: EnvError | None = None
        """Why nothing more can come although the sandbox did not say that the command has ended."""

    def begin(self) -> None:
        """The sandbox has started it."""
        self.began = True

    def take(self, output: Output, data: bytes) -> None:
        """More of a stream."""
        self._kept[output].add(data)
        seen = self._ends[output] + data
        # With room for what follows the mark in its line, which may come in pieces.
        if b"\n" in seen.partition(self._mark)[2]:
            self._marked.add(output)
        start = seen.rfind(self._mark)
        self._ends[output] = seen[start:] if start >= 0 else seen[-len(self._mark) :]
        if len(self._marked) == len(self._kept):
            self.done.set()

    def end(self, error: EnvError | None) -> None:
        """Nothing more comes; as it should be, or for a reason."""
        if len(self._marked) < len(self._kept):
            self.error = error
        self.over.set()
        self.done.set()

    def stream(self, output: Output) -> tuple[bytes, list[str]]:
        """The command's own bytes, and the words after the mark. None of these: it did not come."""
        whole = self._kept[output].value()
        said, found, rest = whole.rpartition(self._mark)
        if not found:
            return whole, []
        words, _, late = rest.partition(b"\n")
        return said + late, words.decode("ascii", "replace").split()
