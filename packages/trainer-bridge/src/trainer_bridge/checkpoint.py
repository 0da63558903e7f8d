"""`ReceiverState`: what a trainer's checkpoint must hold so that no sample is applied twice, and none missed.

A loader that only knows how far it has read skips what was read and not trained when it resumes
(OpenRLHF/OpenRLHF#1322, verl-project/verl PR #4199); this state knows what was trained.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from trainer_bridge.errors import BridgeError
from trainer_bridge.session.watermark import Ranges, Watermark

VERSION = 1
_ID = 16
_ATTEMPT = 4
MAX_ATTEMPT = 2 ** (8 * _ATTEMPT) - 1
KIND = "trainer-bridge/receiver"


class ReceiverState(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=KIND):
    """Plain values only: it goes into JSON, `torch.save` or msgpack as it is."""

    version: int = VERSION
    policy_run: str = ""
    weights_version: int = -1
    """As last published; for people, and for the trainer to compare."""
    done: dict[str, tuple[Ranges, ...]] = {}
    """Per producer (hex) and epoch: messages that were trained on, or dropped for a counted reason."""
    rollouts: str = ""
    """Base64 of 20 bytes each, rollout id and attempt (u32, little endian): what was done last, so that a
    worker that runs one of them again under another identity is recognised."""
    dropped_rollouts: str = ""
    """Base64 of 16 bytes each: those of `rollouts` that were dropped. A later attempt of them is new; of the
    others it is late."""
    closed_groups: str = ""
    """Base64 of 16 bytes each: groups that ended last; late members are dropped."""

    def watermark(self) -> Watermark:
        """`done` as a set.

        Raises:
            BridgeError: it is damaged.
        """
        try:
            return Watermark.from_plain(self.done)
        except ValueError as error:
            raise BridgeError(f"the receiver's state in the checkpoint is damaged: {error}") from error


def encode_rollouts(rollouts: Iterable[tuple[bytes, int]]) -> str:
    """(rollout id, attempt) pairs as they stand in the state.

    Raises:
        BridgeError: an attempt that no message can carry.
    """
    rollouts = list(rollouts)
    for rollout, attempt in rollouts:
        if not 0 <= attempt <= MAX_ATTEMPT:
            raise BridgeError(f"rollout {rollout.hex()} has attempt {attempt}: it must be 0 to {MAX_ATTEMPT}")
    packed = b"".join(rollout + attempt.to_bytes(_ATTEMPT, "little") for rollout, attempt in rollouts)
    return base64.b64encode(packed).decode()


def decode_rollouts(text: str) -> list[tuple[bytes, int]]:
    """The same, back."""
    return [(raw[:_ID], int.from_bytes(raw[_ID:], "little")) for raw in _records(text, _ID + _ATTEMPT)]


def encode_ids(ids: Iterable[bytes]) -> str:
    """Ids of groups or rollouts as they stand in the state."""
    return base64.b64encode(b"".join(ids)).decode()


def decode_ids(text: str) -> list[bytes]:
    """The same, back."""
    return _records(text, _ID)


def state_from(given: object) -> ReceiverState:
    """What `SampleReceiver.state_dict` gave, back from a checkpoint.

    Raises:
        BridgeError: it is something else, of a later version, or damaged.
    """
    if not isinstance(given, Mapping):
        raise BridgeError(
            f"not a state of a SampleReceiver: a {type(given).__name__}; pass what state_dict() returned"
        )
    plain = cast("Mapping[str, Any]", given)
    if plain.get("kind") != KIND:
        raise BridgeError(
            f"not a state of a SampleReceiver: it holds {sorted(map(str, plain))[:8]}; pass what "
            "state_dict() returned, unchanged"
        )
    try:
        state = msgspec.convert(dict(plain), ReceiverState)
    except msgspec.ValidationError as error:
        raise BridgeError(f"the receiver's state in the checkpoint is damaged: {error}") from error
    if state.version != VERSION:
        raise BridgeError(f"the receiver's state has version {state.version}, this version reads {VERSION}")
    # All of it now: what is damaged must change nothing.
    state.watermark()
    decode_rollouts(state.rollouts)
    decode_ids(state.dropped_rollouts)
    decode_ids(state.closed_groups)
    return state


def _records(text: str, size: int) -> list[bytes]:
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise BridgeError(f"the receiver's state in the checkpoint is damaged: {error}") from error
    if len(raw) % size:
        raise BridgeError(f"the receiver's state in the checkpoint is damaged: {len(raw)} bytes of ids")
    return [raw[at : at + size] for at in range(0, len(raw), size)]
