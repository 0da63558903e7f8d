"""Processes of a command where nothing of ours runs in the sandbox: how they are found, ended and heard."""

from __future__ import annotations

KEPT = 8 << 20
"""Bytes that are kept of each output stream of a command: its first and its last half."""
MARK = "AGENT_FLOW_COMMAND"
"""Environment variable by whose value all processes of a command are known."""

KILL = r"""
PATH="$PATH:/usr/local/bin:/usr/bin:/bin"
each() {
  found=1
  for process in /proc/[0-9]*; do
    if grep -q "$2=$3" "$process/environ" 2>/dev/null; then
      kill "-$1" "${process#/proc/}" 2>/dev/null
      found=0
    fi
  done
  return $found
}
each TERM "$@" && sleep 1
while each KILL "$@"; do :; done
"""
"""Ends what has an environment variable, `$1`, of a value, `$2`: in the background or another session too."""


class Kept:
    """The first and the last bytes of a stream."""

    def __init__(self, limit: int | None) -> None:
        self._half = None if limit is None else limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    def add(self, data: bytes) -> None:
        """Take what came next."""
        if self._half is None:
            self._head += data
            return
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            self._left_out += len(self._tail) - self._half
            del self._tail[: -self._half]

    def holds(self, mark: bytes) -> bool:
        """Whether a mark is near the end."""
        return mark in (self._tail[-256:] if self._tail else self._head[-256:])

    def value(self) -> bytes:
        """What is kept, and between its halves how much is not."""
        if self._half is not None and len(self._tail) > self._half:
            self._left_out += len(self._tail) - self._half
            del self._tail[: -self._half]
        middle = b"\n[... %d bytes left out ...]\n" % self._left_out if self._left_out else b""
        return bytes(self._head) + middle + bytes(self._tail)
