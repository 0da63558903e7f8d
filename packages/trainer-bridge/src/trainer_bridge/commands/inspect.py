"""`trainer-bridge inspect`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from trainer_bridge.commands.output import write_json, write_line
from trainer_bridge.commands.shown import show_frames, show_letter, summary_of
from trainer_bridge.dead_letters import FILE as LETTERS
from trainer_bridge.dead_letters import read_letters
from trainer_bridge.errors import SpoolError
from trainer_bridge.head import MAGIC
from trainer_bridge.segment import FILE_MAGIC
from trainer_bridge.stored import scan_segments

SQLITE_MAGIC = b"SQLite format 3\x00"
_FRAME = re.compile(r"(?P<stem>.+)\.(?P<number>[0-9]+)\.bin")

Shown = tuple[list[str], dict[str, object], bool]
"""Lines for people, the same for scripts, and whether something is wrong."""


def inspect(path: Path, *, record: int | None, limit: int, as_json: bool) -> int:
    """Show a segment, a spool or store, the frames of a message (NAME.0.bin, NAME.1.bin), or dead letters.

    Without --record, a line for each record; with it, all of one: head, array table, first tokens. Exit
    code 1 if something is damaged; it is said where.
    """
    wrong = False
    for lines, event, bad in _items(path, record=record, limit=limit):
        wrong |= bad
        if as_json:
            write_json(event)
        else:
            for line in lines:
                write_line(line)
    return 1 if wrong else 0


def _items(path: Path, *, record: int | None, limit: int) -> Iterator[Shown]:
    if path.is_dir():
        yield from _records(path, record, limit)
        return
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise SpoolError(f"cannot read {path}: {error.strerror or error}") from error
    if start.startswith(FILE_MAGIC):
        yield from _records(path, record, limit)
    elif start == SQLITE_MAGIC:
        letters = read_letters(path)
        for letter in letters[:limit]:
            yield show_letter(letter)
        yield _rest(len(letters) - limit, "letters")
    elif (match := _FRAME.fullmatch(path.name)) is not None:
        yield show_frames(_frames_beside(path, match["stem"]))
    elif start.startswith(MAGIC):
        yield show_frames([path.read_bytes()])
    else:
        raise SpoolError(
            f"{path} is nothing of trainer-bridge: give a segment-*.tbs file, the folder of a spool or "
            f"store, {LETTERS}, or a head frame (NAME.0.bin)"
        )


def _frames_beside(path: Path, stem: str) -> list[bytes]:
    frames: list[bytes] = []
    while (frame := path.with_name(f"{stem}.{len(frames)}.bin")).exists():
        frames.append(frame.read_bytes())
    if not frames:
        raise SpoolError(f"{path} has no head beside it: {stem}.0.bin is missing")
    return frames


def _records(path: Path, record: int | None, limit: int) -> Iterator[Shown]:
    shown = seen = 0
    found = False
    for segment, faults, torn in scan_segments(path):
        if record is None:
            line = f"{segment.path}: records {segment.first} to {segment.last}, {segment.size} bytes"
            event: dict[str, object] = {
                "event": "segment",
                "path": str(segment.path),
                "first": segment.first,
                "last": segment.last,
                "bytes": segment.size,
            }
            yield [line], event, False
        for each in segment.records():
            seen += 1
            if record == each.seq:
                found = True
                yield show_frames(list(each.frames))
            elif record is None and shown < limit:
                shown += 1
                yield summary_of(each.seq, each.frames)
        for text in (*faults, *([torn] if torn else [])):
            yield [f"DAMAGED {text}"], {"event": "damaged", "text": text}, True
    if record is not None and not found:
        raise SpoolError(f"{path} has no readable record {record}; without --record all are listed")
    if record is None:
        yield _rest(seen - shown, "records")


def _rest(count: int, what: str) -> Shown:
    if count <= 0:
        return [], {"event": "end", "not_shown": 0}, False
    return [f"({count} more {what}: --limit)"], {"event": "end", "not_shown": count}, False
