"""Conversations and ledgers as bytes: `TTSNAP`, a version, a length, a CRC-32, then MessagePack.

A fork stores its own part only and names the branch it shares the rest with. Arrays are little-endian bytes,
so that NaN and every other bit comes back.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from token_tracking.answers.expert_images import ExpertImage, ExpertTable, held_rows
from token_tracking.control import ControlPolicy
from token_tracking.errors import SnapshotError, TokenTrackingError
from token_tracking.history.causes import Cause, CrossStop
from token_tracking.history.identity import TemplateIdentity, other_template, other_tokenizer
from token_tracking.kept import KeptSets
from token_tracking.ledger import TokenLedger
from token_tracking.messages import own

if TYPE_CHECKING:
    from token_tracking.conversation import Conversation
    from token_tracking.history.branch import Branch
    from token_tracking.template import ChatTemplate

KIND_CONVERSATION = b"TTSNAPCV"
KIND_LEDGER = b"TTSNAPLG"
VERSION = 3
_HEAD = struct.Struct("<8sIQI")
T = TypeVar("T")


class LedgerImage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The channels of a ledger from `start` on, little-endian."""

    start: int
    ids: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    sources: bytes
    kept_ids: bytes | None = None
    """int32. None: no kept sets."""
    kept_counts: bytes | None = None
    """int32, ids in each token's set."""


class BranchImage(msgspec.Struct, frozen=True, kw_only=True):
    """One branch."""

    template: str
    why: str
    cause: Cause
    parent: int | None
    inherited: int
    messages: bytes
    """JSON: unlike MessagePack it holds any integer."""
    turns: list[dict[str, Any]]
    prompt: dict[str, Any] | None
    ledger: LedgerImage
    ledger_base: int | None
    """Branch whose first `ledger.start` tokens this one shares."""
    experts: list[tuple[int, int]] = []
    """Indices into `ConversationImage.experts`, and how many rows of each are held."""


class ConversationImage(msgspec.Struct, frozen=True, kw_only=True):
    """A whole conversation."""

    tokenizer: str
    policy: ControlPolicy
    cross_stop: CrossStop
    now: str
    current: int
    turns: int
    branches: list[BranchImage]
    experts: list[ExpertImage] = []
    templates: dict[str, TemplateIdentity] = {}
    """By fingerprint. Snapshots of earlier builds have none."""


def ledger_image(ledger: TokenLedger, start: int = 0) -> LedgerImage:
    """The part of a ledger from `start` on."""
    channels: dict[str, bytes] = {
        name: array[start:].astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        for name, array in ledger.channels().items()
    }
    kept = ledger.kept_sets()
    if kept is None or not len(kept.part(start, len(ledger)).ids):
        return LedgerImage(start=start, **channels)
    kept = kept.part(start, len(ledger))
    return LedgerImage(
        start=start,
        **channels,
        kept_ids=kept.ids.astype("<i4", copy=False).tobytes(),
        kept_counts=np.diff(kept.offsets).astype("<i4").tobytes(),
    )


def _kept_sets(image: LedgerImage) -> KeptSets | None:
    if image.kept_ids is None or image.kept_counts is None:
        return None
    counts = np.frombuffer(image.kept_counts, "<i4")
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    return KeptSets(np.frombuffer(image.kept_ids, "<i4").astype(np.int32), offsets)


def ledger_from_image(image: LedgerImage, base: TokenLedger | None = None) -> TokenLedger:
    """The ledger of an image, sharing what lies before it with `base`.

    Raises:
        SnapshotError: the channels do not fit together, or `base` is too short.
    """
    if (base is None) != (image.start == 0) or (base is not None and len(base) < image.start):
        raise SnapshotError(f"a ledger part from token {image.start} on does not fit the ledger it continues")
    ledger = TokenLedger() if base is None else base.fork(image.start)
    try:
        columns = {
            name: np.frombuffer(getattr(image, name), array.dtype.newbyteorder("<")).astype(array.dtype)
            for name, array in ledger.channels().items()
        }
        ledger.append_columns(columns, _kept_sets(image))
    except ValueError as error:
        raise SnapshotError(f"the ledger's channels do not fit together: {error}") from error
    return ledger


def pack(kind: bytes, value: msgspec.Struct) -> bytes:
    """A framed snapshot."""
    body = msgspec.msgpack.encode(value)
    return _HEAD.pack(kind, VERSION, len(body), zlib.crc32(body)) + body


def unpack(kind: bytes, data: bytes, shape: type[T]) -> T:
    """Check the frame and decode.

    Raises:
        SnapshotError: another kind or version, cut short, or damaged.
    """
    if len(data) < _HEAD.size:
        raise SnapshotError(f"{len(data)} bytes are too short for a snapshot")
    found, version, length, checksum = _HEAD.unpack_from(data)
    if found != kind:
        raise SnapshotError(f"these bytes begin with {bytes(found)!r}, a {kind.decode()} snapshot is needed")
    if version != VERSION:
        raise SnapshotError(
            f"snapshot version {version}; this release reads version {VERSION}: open it with the release "
            "that wrote it, and export its samples there"
        )
    body = data[_HEAD.size :]
    if len(body) != length:
        raise SnapshotError(f"the snapshot has {len(body)} of {length} bytes: it was cut short or has a tail")
    if zlib.crc32(body) != checksum:
        raise SnapshotError("the snapshot is damaged: its checksum does not match")
    try:
        return msgspec.msgpack.decode(body, type=shape)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SnapshotError(f"the snapshot does not decode: {error}") from error


def dump(conversation: Conversation) -> bytes:
    """See `Conversation.to_bytes`."""
    branches = conversation.branches
    images: list[BranchImage] = []
    experts = ExpertTable()
    for index, branch in enumerate(branches):
        base, start = _shared(branches[:index], branch.ledger)
        images.append(
            BranchImage(
                template=branch.template.fingerprint,
                why=branch.why,
                cause=branch.cause,
                parent=branch.parent,
                inherited=branch.inherited,
                messages=json.dumps(branch.messages).encode(),
                turns=[msgspec.to_builtins(turn) for turn in branch.turns],
                prompt=None if branch.prompt is None else msgspec.to_builtins(branch.prompt),
                ledger=ledger_image(branch.ledger, start),
                ledger_base=base,
                experts=[experts.add(piece) for piece in branch.experts.pieces],
            )
        )
    image = ConversationImage(
        tokenizer=conversation.template.tokenizer.fingerprint,
        policy=conversation.control_tokens,
        cross_stop=conversation.cross_stop,
        now=conversation.template.now.isoformat(),
        current=conversation.current,
        turns=conversation.turns,
        branches=images,
        experts=experts.images,
        templates={b.template.fingerprint: TemplateIdentity.of(b.template) for b in branches},
    )
    return pack(KIND_CONVERSATION, image)


def _check_branch(branch: Branch, index: int) -> None:
    """Refuse turns that do not lie on the ledger's sampled spans."""
    covered = np.zeros(len(branch.ledger), np.uint8)
    at = 0
    for segment in (segment for turn in branch.turns for segment in turn.segments):
        if not at <= segment.start < segment.end <= len(covered):
            raise SnapshotError(
                f"branch {index}: a turn spans {segment.start}..{segment.end} of {len(covered)}"
            )
        covered[segment.start : segment.end] = 1
        at = segment.end
    if not np.array_equal(covered, branch.ledger.mask) or not all(turn.segments for turn in branch.turns):
        raise SnapshotError(f"branch {index}: its turns are not where its ledger has loss mask 1")
    if not 0 <= branch.inherited <= len(branch.turns):
        raise SnapshotError(f"branch {index} shares {branch.inherited} of {len(branch.turns)} turns")


def _shared(earlier: Sequence[Any], ledger: TokenLedger) -> tuple[int | None, int]:
    """The earlier branch that shares most with `ledger`, and how many tokens."""
    shares = [branch.ledger.shared_length(ledger) for branch in earlier]
    best = max(shares, default=0)
    return (shares.index(best), best) if best else (None, 0)


def load(data: bytes, templates: Sequence[ChatTemplate]) -> Conversation:
    """See `Conversation.from_bytes`."""
    from token_tracking.conversation import Conversation
    from token_tracking.history.branch import Branch
    from token_tracking.history.turn import HeldTurn, Prompt

    image = unpack(KIND_CONVERSATION, data, ConversationImage)
    try:
        now = datetime.fromisoformat(image.now)
        turns = [[msgspec.convert(turn, HeldTurn) for turn in part.turns] for part in image.branches]
        prompts = [msgspec.convert(part.prompt, Prompt | None) for part in image.branches]
        messages = [own(json.loads(part.messages)) for part in image.branches]
    except (TokenTrackingError, ValueError, TypeError) as error:
        raise SnapshotError(f"the snapshot's turns or messages do not decode: {error}") from error
    known = {template.fingerprint: template.at(now) for template in templates}
    branches: list[Branch] = []
    pieces = [expert.rows() for expert in image.experts]
    conversation: Conversation | None = None
    for index, part in enumerate(image.branches):
        template = known.get(part.template)
        if template is None:
            raise SnapshotError(
                other_template(part.template, image.templates.get(part.template), image.tokenizer, templates)
            )
        if template.tokenizer.fingerprint != image.tokenizer:
            raise SnapshotError(other_tokenizer(image.tokenizer, template))
        conversation = conversation or Conversation(
            template, control_tokens=image.policy, cross_stop=image.cross_stop
        )
        branch = Branch(
            template,
            conversation.control,
            why=part.why,
            cause=part.cause,
            parent=part.parent,
            cross_stop=image.cross_stop,
        )
        branch.inherited = part.inherited
        branch.messages, branch.turns, branch.prompt = messages[index], turns[index], prompts[index]
        if part.ledger_base is not None and not 0 <= part.ledger_base < index:
            raise SnapshotError(
                f"branch {index} shares the ledger of branch {part.ledger_base}, not yet read"
            )
        base = None if part.ledger_base is None else branches[part.ledger_base].ledger
        branch.ledger = ledger_from_image(part.ledger, base)
        _check_branch(branch, index)
        branch.experts = held_rows(image.experts, pieces, part.experts, len(branch.ledger))
        branches.append(branch)
    if conversation is None or not 0 <= image.current < len(branches):
        raise SnapshotError("the snapshot holds no current branch")
    conversation.restore(branches, image.current, image.turns)
    return conversation
