"""Frames: what goes in comes out, bit for bit; whatever else comes in is refused with a name."""

from __future__ import annotations

import math
import struct

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from token_tracking.sample import Sample, Turn
from trainer_bridge.codec import Data, Frames, decode_frames, draft
from trainer_bridge.config import MAX_HEAD_BYTES
from trainer_bridge.errors import ErrorCode, ProtocolError, UnsendableError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.messages import Bye, DataHead, Hello, Levels, Message, Welcome, WireSet
from trainer_bridge.payload import DTYPES, Bfloat16, pack, to_float32, unpack
from trainer_bridge.testing import differences, make_rollout, make_sample

PRODUCER = bytes(range(16))
text = st.text(max_size=20).filter(lambda s: not any(0xD800 <= ord(c) <= 0xDFFF for c in s))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=True), text
)
number = st.one_of(st.none(), st.floats(0, 2, allow_nan=False))


def frames_of(*samples: Sample, sequence: int = 1) -> Frames:
    return draft(samples).numbered(PRODUCER, 1, sequence, 1_700_000_000_000_000_000)


@st.composite
def turns_of(draw: st.DrawFn, tokens: int) -> tuple[Turn, ...]:
    cuts = sorted(draw(st.sets(st.integers(0, tokens), max_size=6)))
    return tuple(
        Turn(
            start=start,
            end=end,
            finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
            logprob_kind=draw(st.sampled_from(["raw", "processed", "none"])),
            temperature=draw(number),
            top_p=draw(number),
            top_k=draw(st.one_of(st.none(), st.integers(-1, 1000))),
            min_p=draw(number),
            reward=draw(number),
        )
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    )


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Sample, ...]:
    parts = draw(st.integers(1, 3))
    ids = {"rollout_id": draw(st.binary(min_size=16, max_size=16)).hex(), "group_id": "ab" * 16}
    attempt, task = draw(st.integers(0, 2**31)), draw(text)
    return tuple(
        draw(samples(part=part, parts=parts, attempt=attempt, task_id=task, **ids)) for part in range(parts)
    )


@st.composite
def samples(draw: st.DrawFn, **fixed: object) -> Sample:
    n = draw(st.integers(0, 40))
    turns = draw(turns_of(n))
    sampled = np.zeros(n, bool)
    logprobs = np.empty(n, np.float32)
    # NaN with payload bits: they must arrive as they are.
    bits = draw(hnp.arrays(np.uint32, n, elements=st.integers(0x7FC00001, 0x7FFFFFFF)))
    logprobs[:] = bits.view(np.float32)
    for turn in turns:
        sampled[turn.start : turn.end] = True
        if turn.logprob_kind != "none":
            values = draw(
                hnp.arrays(np.float32, turn.end - turn.start, elements=st.floats(-100, 0, width=32))
            )
            logprobs[turn.start : turn.end] = values
    mask = sampled & draw(hnp.arrays(bool, n))
    kept = draw(st.one_of(st.none(), hnp.arrays(np.int64, n, elements=st.integers(0, 4))))
    experts = draw(st.one_of(st.none(), st.sampled_from(["<u1", "<i2", ">i4", "<i8", "<u8"])))
    return Sample(
        token_ids=draw(hnp.arrays(np.int32, n, elements=st.integers(0, 2**31 - 1))),
        loss_mask=mask.astype(np.uint8),
        logprobs=logprobs,
        versions=np.where(
            sampled, draw(hnp.arrays(np.int32, n, elements=st.sampled_from([-2, 0, 2**31 - 1]))), -1
        ).astype(np.int32),
        prompt_length=turns[0].start if turns else draw(st.integers(0, n)),
        turns=turns,
        reward=draw(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))),
        in_loss=draw(st.booleans()),
        in_baseline=draw(st.booleans()),
        status=draw(st.sampled_from(["completed", "truncated", "aborted", "failed"])),
        source=draw(st.sampled_from(["sampled", "replayed"])),
        policy_run=draw(text),
        kept_offsets=None if kept is None else np.concatenate([[0], np.cumsum(kept)]).astype(np.int64),
        kept_ids=None if kept is None else np.arange(int(kept.sum()), dtype=np.int32),
        routed_experts=None
        if experts is None
        else np.arange(max(n - 1, 0) * 2 * 3).reshape(-1, 2, 3).astype(experts),
        provenance=draw(st.dictionaries(text, scalars, max_size=4)),
        extra=draw(st.dictionaries(text, scalars, max_size=4)),
        **fixed,
    )


def assert_same(sent: tuple[Sample, ...], got: Data) -> None:
    assert len(sent) == len(got.samples)
    for a, b in zip(sent, got.samples, strict=True):
        different = differences(a, b)
        if a.routed_experts is not None and a.routed_experts.dtype.byteorder == ">":
            assert np.array_equal(a.routed_experts, b.routed_experts)
            different = [field for field in different if field != "routed_experts"]
        assert not different


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rollouts())
def test_every_field_survives_bit_for_bit(rollout: tuple[Sample, ...]) -> None:
    assert_same(rollout, decode_frames(frames_of(*rollout)))


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rollouts())
def test_every_field_survives_bit_for_bit_in_many_rollouts(rollout: tuple[Sample, ...]) -> None:
    assert_same(rollout, decode_frames(frames_of(*rollout)))


def test_arrays_are_read_only_views_of_the_message() -> None:
    frames = frames_of(make_sample(1, tokens=4096))
    got = decode_frames(frames).samples[0]
    payload = np.frombuffer(frames.payload, np.uint8)
    for array in (got.token_ids, got.loss_mask, got.logprobs, got.versions):
        assert not array.flags.writeable
        assert np.shares_memory(array, payload)


def test_a_payload_at_an_odd_address_is_copied_to_a_better_one() -> None:
    frames = frames_of(make_sample(1))
    shifted = memoryview(b"x" + bytes(frames.payload))[1:]
    got = decode_frames([frames.head, shifted]).samples[0]
    assert got.logprobs.flags.aligned
    assert not differences(make_sample(1), got)


def test_arrays_lie_at_64_byte_offsets_and_gaps_are_zero() -> None:
    table, payload = pack([("a", np.ones(3, np.uint8)), ("b", np.ones(2, np.float32)), ("c", np.empty(0))])
    assert [entry.offset for entry in table] == [0, 64, 128]
    assert bytes(payload[3:64]) == bytes(61)
    assert len(payload) == 128


@pytest.mark.parametrize("code", list(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 4)])
def test_every_dtype_and_shape(code: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(DTYPES[code])
    table, payload = pack([("x", array), ("strided", np.asarray(array)[..., ::-1] if shape else array)])
    got = unpack(table, payload)
    assert got["x"].dtype == DTYPES[code]
    assert got["x"].shape == shape
    assert got["x"].tobytes() == array.tobytes()


def test_bfloat16_travels_as_its_bits() -> None:
    """AReaL widens bfloat16 to float32: twice the bytes."""
    values = np.array([[1.0, -0.0], [np.inf, 3.140625]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    table, payload = pack([("x", Bfloat16(bits)), ("strided", Bfloat16(bits.T))])
    assert [(e.dtype, e.shape, e.nbytes) for e in table] == [("bf2", (2, 2), 8)] * 2
    got = unpack(table, payload)
    assert np.array_equal(to_float32(got["x"]), values)
    assert np.array_equal(to_float32(got["strided"]), values.T)
    with pytest.raises(UnsendableError, match="16 bits in uint16"):
        Bfloat16(values)


def test_ml_dtypes_bfloat16_needs_no_mark() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    table, payload = pack([("x", values)])
    assert table[0].dtype == "bf2"
    assert unpack(table, payload)["x"].tobytes() == values.tobytes()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_changed_message_never_gives_a_sample(data: st.DataObject) -> None:
    frames = frames_of(*make_rollout(3, parts=2))
    which = data.draw(st.integers(0, 1))
    raw = bytearray(frames[which])
    if data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    changed = [frames.head, frames.payload]
    changed[which] = bytes(raw)
    with pytest.raises(ProtocolError):
        decode_frames(changed)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=3), st.booleans())
def test_noise_is_refused(frames: list[bytes], signed: bool) -> None:
    if signed and frames:
        # Past the hash: the body itself is noise.
        start = b"TB\x01\x00\x03\x00\x00\x00" + frames[0]
        frames[0] = start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start))
    with pytest.raises(ProtocolError):
        decode_frames(frames)


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, "producer", PRODUCER, "w", 0, 0, (("sample/1", 5),), (), 2, ((1, 7), (2, 9))),
        Welcome(1, PRODUCER, 0, "sample/1", (), 64, 1 << 29, "", (Levels(1, WireSet(7, ((9, 9),)),
        WireSet(), WireSet()),), 9, 9), Bye(2**63 - 1, "because"),
    ],
)  # fmt: skip
def test_session_messages(message: Message) -> None:
    assert decode_head(encode_head(message)) == message


def test_a_later_minor_version_may_append_fields() -> None:
    body = [7, "bye", "a field of version 1.5", {"nested": [1, 2]}]
    start = b"TB\x01\x05\x07\x00\x00\x00" + msgspec.msgpack.encode(body)
    head = start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start))
    assert decode_head(head) == Bye(7, "bye")


def test_the_parts_of_a_rollout_travel_together() -> None:
    whole = make_rollout(1, parts=3)
    for wrong in (whole[:2], whole[1:], (whole[0], whole[2], whole[1]), (*whole, whole[0]), ()):
        with pytest.raises(UnsendableError):
            draft(wrong)
    other = make_rollout(2, parts=3)
    with pytest.raises(UnsendableError, match="must agree"):
        draft((whole[0], other[1], whole[2]))


@pytest.mark.parametrize("value", [2**64, [1], np.float32(1), b"x", {"a": 1}])
def test_values_that_cannot_travel_are_named(value: object) -> None:
    sample = msgspec.structs.replace(make_sample(1), extra={"key": value})
    with pytest.raises(UnsendableError):
        draft([sample])


def test_a_payload_over_the_limit_is_refused_before_it_is_built() -> None:
    with pytest.raises(UnsendableError, match="max_payload_bytes"):
        draft([make_sample(1, tokens=4096)], max_payload_bytes=1000)


def test_a_head_over_the_limit_is_neither_written_nor_read() -> None:
    with pytest.raises(UnsendableError, match="put large values into a file"):
        frames_of(msgspec.structs.replace(make_sample(1), extra={"log": "x" * MAX_HEAD_BYTES}))
    with pytest.raises(ProtocolError) as caught:
        decode_head(b"TB\x01\x00\x07\x00\x00\x00" + bytes(MAX_HEAD_BYTES))
    assert caught.value.code == ErrorCode.TOO_LARGE


def test_the_hash_covers_what_the_table_says() -> None:
    frames = frames_of(make_sample(1))
    head = decode_head(frames.head)
    assert isinstance(head, DataHead)
    wrong = msgspec.structs.replace(head, payload_nbytes=head.payload_nbytes + 1)
    with pytest.raises(ProtocolError) as caught:
        decode_frames([encode_head(wrong), frames.payload])
    assert caught.value.code == ErrorCode.BAD_PAYLOAD_LENGTH
