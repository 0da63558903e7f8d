"""Small JSON files that are replaced whole: after a crash either the old or the new content is there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from trainer_bridge.errors import SpoolError
from trainer_bridge.segment import sync_folder
from trainer_bridge.seqset import SeqSet

VERSION = 1


class ProducerFile(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trainer-bridge/producer"
):
    """`producer.json` of a spool: the identity under which its samples travel."""

    version: int = VERSION
    producer: str
    """32 hex characters."""
    streams: tuple[tuple[int, int], ...]
    """(epoch, first sequence number), rising; one more each time the spool is opened."""


class CursorFile(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trainer-bridge/cursor"):
    """`cursor.json`: which records need no further care."""

    version: int = VERSION
    upto: int
    ranges: tuple[tuple[int, int], ...] = ()
    dropped: dict[str, tuple[tuple[int, int], ...]] = {}
    """Of a store: (first, last) of records that were dropped, by reason; they are in the set as well."""

    def to_set(self) -> SeqSet:
        """As a set."""
        seqs = SeqSet(self.upto)
        for first, last in self.ranges:
            seqs.add_range(first, last)
        return seqs


File = TypeVar("File", ProducerFile, CursorFile)


def load(path: Path, kind: type[File]) -> File | None:
    """Read a state file. None: there is none.

    Raises:
        SpoolError: it is damaged, or of a later version.
    """
    try:
        state = msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise SpoolError(f"cannot read {path}: {error}") from error
    if state.version != VERSION:
        raise SpoolError(f"{path} has version {state.version}; this version reads {VERSION}")
    return state


def save(path: Path, state: ProducerFile | CursorFile) -> None:
    """Replace a state file; on the disk when this returns.

    Raises:
        SpoolError: the disk does not take it; the old content stands.
    """
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            file.write(msgspec.json.encode(state) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise SpoolError(f"cannot write {path}: {error.strerror or error}") from error


def cursor_of(seqs: SeqSet, dropped: Mapping[str, SeqSet] | None = None) -> CursorFile:
    """A set as a cursor file."""
    return CursorFile(
        upto=seqs.upto,
        ranges=tuple(seqs.ranges()),
        dropped={reason: all_ranges(each) for reason, each in (dropped or {}).items()},
    )


def all_ranges(seqs: SeqSet) -> tuple[tuple[int, int], ...]:
    """A set as (first, last), rising."""
    return (*(((1, seqs.upto),) if seqs.upto else ()), *seqs.ranges())
