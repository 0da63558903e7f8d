"""Small JSON files that are replaced whole: after a crash either the old or the new content is there.

The last member of each is `xxh3`, 16 hex digits: xxh3_64 of all bytes of the file before the comma in front
of it. A flipped bit in `upto` would settle what nobody has received.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import msgspec
import xxhash

from trainer_bridge.errors import DamagedError, SpoolError
from trainer_bridge.segment import sync_folder
from trainer_bridge.seqset import SeqSet, all_ranges
from trainer_bridge.session.watermark import Ranges

VERSION = 1
_SUM = re.compile(rb',"xxh3":"([0-9a-f]{16})"}\n')
_SUM_BYTES = 28

Hex16 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class ProducerFile(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trainer-bridge/producer"
):
    """`producer.json` of a spool: the identity under which its samples travel."""

    advice: ClassVar[str] = (
        "restore it from a copy; or move the folder away, and send what is in it with `trainer-bridge "
        "replay` (under a new identity: the receiver drops rollouts that it has)"
    )
    version: int = VERSION
    producer: Hex16
    """32 hex characters."""
    streams: tuple[tuple[int, int], ...]
    """(epoch, first sequence number), rising; one more each time the spool is opened."""


class CursorFile(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trainer-bridge/cursor"):
    """`cursor.json`: which records need no further care."""

    advice: ClassVar[str] = (
        "restore it from a copy, or delete it: then all records of the folder come again, in a store those "
        "that were trained on too, unless the trainer loads a checkpoint"
    )
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


class OwnersFile(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trainer-bridge/owners"):
    """`owners.json` of a store: which key speaks for which producers."""

    advice: ClassVar[str] = (
        "restore it from a copy, or delete it: then each producer belongs to the key that says HELLO first"
    )
    version: int = VERSION
    keys: dict[str, tuple[Hex16, ...]]
    """Name of the key -> producer ids, 32 hex characters each; the last to say HELLO stands last."""


class TrimmedFile(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trainer-bridge/trimmed"):
    """`trimmed.json` of a store: what is still known of records whose segments were deleted."""

    advice: ClassVar[str] = (
        "restore it from a copy, or delete it together with trimmed-*.ids: then messages of records that "
        "were deleted are taken for new ones if they come again"
    )
    version: int = VERSION
    upto: int
    """The last such record."""
    done: dict[str, tuple[Ranges, ...]]
    """Their messages: producer, 32 hex characters -> its epochs."""
    dropped: dict[str, int] = {}
    """How many of them were dropped, by reason; the others were trained on."""
    ids: str
    """Name of the file beside this one with the rollouts, latest last."""
    rollouts: int
    """How many of its entries count; what follows them was not confirmed."""
    digest: str = ""
    """xxh3_64 of these entries, 16 hex characters."""
    groups: str = ""
    """Base64 of 16 bytes each: the groups of the latest of these records, latest last."""


class CheckpointsFile(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trainer-bridge/checkpoints"
):
    """`checkpoints.json` of a store: what the checkpoints hold that were saved last."""

    advice: ClassVar[str] = (
        "restore it from a copy, or delete it: then nothing is deleted from the store until as many "
        "checkpoints as keep_checkpoints says were saved anew"
    )
    version: int = VERSION
    saved: tuple[dict[str, tuple[Ranges, ...]], ...]
    """Oldest first, the `done` of each (`ReceiverState`)."""


File = TypeVar("File", ProducerFile, CursorFile, OwnersFile, TrimmedFile, CheckpointsFile)


def load(path: Path, kind: type[File]) -> File | None:
    """Read a state file. None: there is none.

    Raises:
        DamagedError: it is not what was written.
        SpoolError: it cannot be read just now, or is of a later version.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpoolError(f"cannot read {path}: {error.strerror or error}") from error
    found = _SUM.fullmatch(raw, max(len(raw) - _SUM_BYTES, 0))
    if found is None or found[1] != _sum_of(raw[:-_SUM_BYTES]):
        what = "no xxh3: was it cut off, or edited?" if found is None else "it does not match its xxh3"
        raise DamagedError(f"cannot read {path}, it is damaged ({what}): {kind.advice}")
    try:
        state = msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise DamagedError(f"cannot read {path} ({error}): {kind.advice}") from error
    if state.version != VERSION:
        raise SpoolError(f"{path} has version {state.version}; this version reads {VERSION}")
    return state


def save(path: Path, state: ProducerFile | CursorFile | OwnersFile | TrimmedFile | CheckpointsFile) -> None:
    """Replace a state file; on the disk when this returns.

    Raises:
        SpoolError: the disk does not take it; the old content stands.
    """
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            file.write(_with_sum(msgspec.json.encode(state)))
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


def _with_sum(body: bytes) -> bytes:
    text = body.removesuffix(b"}")
    return text + b',"xxh3":"' + _sum_of(text) + b'"}\n'


def _sum_of(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()
