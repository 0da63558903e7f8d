"""The journal: one line per event, appended and never rewritten; and the law that its events must obey.

`started = live + parked + delivered + dropped`: every rollout that was started ends exactly once (design
promise 6).
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import cast

import msgspec

from agent_flow.clock import Clock
from agent_flow.errors import JournalError, text_of

logger = logging.getLogger(__name__)

HEADER = {"kind": "agent-flow-journal", "version": 1}
_ENDS = ("delivered", "dropped", "parked")


class Journal:
    """Appends events of one worker to `journal/WORKER.jsonl`. One writer per file."""

    def __init__(self, folder: Path, worker: str, clock: Clock) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{worker}.jsonl"
        self._clock = clock
        _cut_torn_line(self.path)
        self._file = self.path.open("ab", buffering=0)
        if self._file.tell() == 0:
            self._append(_encoded(HEADER))

    def write(self, event: str, rollout_id: str = "", **values: object) -> None:
        """Append one event. The line is handed to the system before this returns."""
        self.put(self.prepare(event, rollout_id, **values))

    def prepare(self, event: str, rollout_id: str = "", **values: object) -> bytes:
        """An event for `put`. What JSON has no form for becomes text."""
        line: dict[str, object] = {"event": event}
        if rollout_id:
            line["rollout_id"] = rollout_id
        return _encoded({**line, **values})

    def put(self, prepared: bytes) -> None:
        """Append what `prepare` gave, with the time of now."""
        self._append(b'{"t_ns": %d, ' % self._clock.now_ns() + prepared.removeprefix(b"{"))

    def _append(self, line: bytes) -> None:
        data = line + b"\n"
        end = self._file.tell()
        try:
            written = self._file.write(data)
            if written == len(data):
                return
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # Half a line would swallow the next one.
            os.truncate(self.path, end)
            raise JournalError(
                f"{self.path}: the journal cannot be written ({error.strerror}), so the run cannot go on"
            ) from error

    def close(self) -> None:
        """Bring the file to the disk and close it."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise JournalError(
                f"{self.path}: the disk did not confirm the journal: {error.strerror}"
            ) from error
        finally:
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rollouts of a run are, counted from its journals."""

    started: int
    live: int
    parked: int
    delivered: int
    dropped: Mapping[str, int]
    """Reason to number."""
    live_ids: tuple[str, ...] = ()

    @property
    def balanced(self) -> bool:
        """`started = live + parked + delivered + dropped`."""
        return self.started == self.live + self.parked + self.delivered + sum(self.dropped.values())

    def line(self) -> str:
        """The law as one line of text."""
        dropped = sum(self.dropped.values())
        sign = "=" if self.balanced else "!="
        return (
            f"started {self.started} {sign} live {self.live} + parked {self.parked} "
            f"+ delivered {self.delivered} + dropped {dropped}"
        )


def read_ledger(folder: Path) -> Ledger:
    """Count a run's journals. A torn last line (a crash in mid write) is left out.

    Raises:
        JournalError: a file is no journal, or a rollout started twice, ended twice, or ended without a start.
    """
    started: set[str] = set()
    ended: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in _lines(path):
            _take(line, started, ended, reasons, where=f"{path}:{number}")
    counts = Counter(ended.values())
    return Ledger(
        started=len(started),
        live=len(started - ended.keys()),
        parked=counts["parked"],
        delivered=counts["delivered"],
        dropped=dict(reasons),
        live_ids=tuple(sorted(started - ended.keys())),
    )


def read_events(folder: Path) -> list[dict[str, object]]:
    """Every event of a run's journals, file by file, in order. A torn last line is left out.

    Raises:
        JournalError: a file is no journal.
    """
    return [line for path in sorted(folder.glob("*.jsonl")) for _, line in _lines(path)]


def _encoded(line: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(line, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):  # then each value by itself, to keep the others
        return json.dumps({name: _held(name, value) for name, value in line.items()}).encode()


def _held(name: str, value: object) -> object:
    """The value, or its text: an end that cannot be written would leave its rollout alive for good."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        logger.warning("the journal has the text of %s, a %s", name, type(value).__name__)
        return text_of(value)
    return value


def _cut_torn_line(path: Path) -> None:
    """A crash in mid write leaves half a line; a line that is appended to it would be lost with it."""
    if path.exists():
        whole = path.read_bytes().rpartition(b"\n")
        os.truncate(path, len(whole[0]) + len(whole[1]))


def _lines(path: Path) -> list[tuple[int, dict[str, object]]]:
    raw = path.read_bytes()
    rows = raw.split(b"\n")
    whole = rows[:-1]  # what stands behind the last line end was torn by a crash
    decoded: list[tuple[int, dict[str, object]]] = []
    for number, row in enumerate(whole, 1):
        try:
            decoded.append((number, cast("dict[str, object]", json.loads(row))))
        except json.JSONDecodeError as error:
            raise JournalError(f"{path}:{number}: not JSON: {error}") from error
    if not decoded or decoded[0][1].get("kind") != HEADER["kind"]:
        raise JournalError(f"{path} is not an agent-flow journal")
    if decoded[0][1].get("version") != HEADER["version"]:
        raise JournalError(f"{path}: journal version {decoded[0][1].get('version')} is not known here")
    return decoded[1:]


def _take(
    line: dict[str, object], started: set[str], ended: dict[str, str], reasons: Counter[str], *, where: str
) -> None:
    event, rollout = line.get("event"), line.get("rollout_id")
    if not isinstance(rollout, str) or not isinstance(event, str):
        return
    if event == "started":
        if rollout in started:
            raise JournalError(f"{where}: rollout {rollout} started twice")
        started.add(rollout)
    elif event in _ENDS:
        if rollout not in started:
            raise JournalError(f"{where}: rollout {rollout} {event} but never started")
        if rollout in ended:
            raise JournalError(f"{where}: rollout {rollout} {event}, but it was already {ended[rollout]}")
        ended[rollout] = event
        if event == "dropped":
            reasons[str(line.get("reason", "unknown"))] += 1
