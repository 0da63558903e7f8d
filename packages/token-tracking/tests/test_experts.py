"""Routed experts: each row has a position, later answers replace what they cover, nothing is padded."""

import base64
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_tracking import (
    ChatTemplate,
    Conversation,
    DeferredRows,
    GenerationRecord,
    RecordError,
    Sample,
    SnapshotError,
    decode_sglang_experts,
    decode_vllm_experts,
)
from token_tracking.answers.experts import ExpertRows, padding_rows, repeated_rows
from token_tracking.snapshot import KIND_CONVERSATION, ConversationImage, pack, unpack
from token_tracking.testing import IDENTITY, completion

Compile = Callable[..., ChatTemplate]
LAYERS, TOP_K, EXPERTS = 3, 2, 11
START = [{"role": "user", "content": "fix it"}]


def routing(ids: Any, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    """What a model routes: a function of each token and all before it; no row for the last one."""
    ids = np.asarray(ids, np.int32)
    rows = np.zeros((max(len(ids) - 1, 0), LAYERS, TOP_K), dtype)
    seen = 0
    for i in range(len(rows)):
        seen = crc32(ids[i : i + 1].tobytes(), seen)
        for layer in range(LAYERS):
            one = (seen >> layer) % EXPERTS
            rows[i, layer] = one, (one + 1 + (seen >> 8 + layer) % (EXPERTS - 1)) % EXPERTS
    return rows


def with_rows(record: GenerationRecord, start: int = 0, **change: Any) -> GenerationRecord:
    rows = routing(np.concatenate([record.prompt_ids, record.output_ids]))[start:]
    return msgspec.structs.replace(record, routed_experts=rows, routed_start=start, **change)


def rebuilt(record: GenerationRecord, **change: Any) -> GenerationRecord:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return GenerationRecord(**(fields | change))


def begin(template: ChatTemplate) -> Conversation:
    conversation = Conversation(template)
    conversation.advance(START)
    return conversation


def turn(
    conversation: Conversation, messages: list[Any], mode: str, text: str = "ok", reason: Any = "stop"
) -> None:
    """One turn whose routed experts come in full, from the last turn on, past it, or not at all."""
    held = conversation.branches[conversation.current].held_end
    record = completion(conversation, text, finish_reason=reason)
    known = conversation.branches[conversation.current].experts.held
    starts = {
        "held": known,
        "full": 0,
        "delta": max(held - 1, 0),
        "overlap": max(held - 3, 0),
        "past": max(held, 0),
    }
    record = record if mode == "none" else with_rows(record, starts[mode])
    message = conversation.record(rebuilt(record))
    if reason != "abort":
        messages.append(dict(message))


def exact(sample: Sample) -> None:
    assert sample.routed_experts is not None
    assert np.array_equal(sample.routed_experts, routing(sample.token_ids))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.original("A-experts")
@pytest.mark.parametrize("modes", [("full", "full"), ("full", "delta"), ("delta", "overlap")])
def test_rows_are_joined_by_position_and_not_concatenated(compiled: Compile, modes: tuple[str, str]):
    """verl#6029: a second full-sequence payload was appended; slime and miles send deltas from a position.

    NeMo-RL#3485, prime-rl#1807: the row of a turn's last token comes with the next prefill.
    """
    conversation = begin(compiled("qwen2_5"))
    messages = list(START)
    turn(conversation, messages, modes[0])
    messages.append(user("more"))
    conversation.advance(messages)
    turn(conversation, messages, modes[1], "done")
    (sample,) = conversation.samples(**IDENTITY)
    exact(sample)
    assert conversation.findings() == {}


def test_a_delta_that_skips_the_last_row_leaves_no_placeholder(compiled: Compile):
    """NeMo-RL#3485: the joined rows had a dummy where two turns meet. Here they are left out, by name."""
    conversation = begin(compiled("qwen2_5"))
    messages = list(START)
    turn(conversation, messages, "full")
    boundary = conversation.branches[0].held_end - 1
    messages.append(user("more"))
    conversation.advance(messages)
    turn(conversation, messages, "past")
    (sample,) = conversation.samples(**IDENTITY)
    assert sample.routed_experts is None
    assert sample.provenance["routed_experts_missing"] == (
        f"rows {boundary} to {boundary + 1} are missing: a delta begins after the last row held"
    )
    assert conversation.findings() == {"routed_experts_gap": 1}


@pytest.mark.original("A-experts-missing")
def test_one_turn_without_rows_is_named_and_a_full_answer_later_makes_it_good(compiled: Compile):
    """rllm#756: a mode that dropped the routing matrices in silence. labs-molt#5: some samples have none."""
    conversation = begin(compiled("qwen2_5"))
    messages = list(START)
    for number, mode in enumerate(["delta", "none", "held"]):
        turn(conversation, messages, mode)
        messages.append(user(f"more {number}"))
        conversation.advance(messages)
    (sample,) = conversation.samples(**IDENTITY)
    exact(sample)  # the third turn's delta was asked for from the last row held on
    turn(conversation, messages, "none")
    (sample,) = conversation.samples(**IDENTITY)
    assert sample.routed_experts is None
    assert "turn 3 has none" in str(sample.provenance["routed_experts_missing"])
    assert conversation.findings() == {"routed_experts_turn_without": 1}
    messages.append(user("last"))
    conversation.advance(messages)
    turn(conversation, messages, "full")
    exact(conversation.samples(**IDENTITY)[0])
    assert conversation.findings() == {}


def test_nothing_is_said_where_nothing_was_ever_recorded(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    turn(conversation, [], "none")
    (sample,) = conversation.samples(**IDENTITY)
    assert sample.routed_experts is None
    assert "routed_experts_missing" not in sample.provenance
    assert conversation.findings() == {}


MODES = st.sampled_from(["full", "delta", "overlap"])
STEP = st.tuples(
    st.sampled_from(["turn", "turn", "abort", "retry", "edit", "restore"]), MODES, st.sampled_from("abcde")
)


@given(first=MODES, steps=st.lists(STEP, max_size=9))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_turns_aborts_branches_and_restores_give_the_rows_of_the_tokens(
    compiled: Compile, first: str, steps: list[tuple[str, str, str]]
):
    """AReaL#1496, SkyRL#1908: whatever the way, row i belongs to token i, and there are n - 1 of them."""
    conversation = begin(compiled("qwen2_5"))
    messages: list[Any] = list(START)
    turn(conversation, messages, first)
    for what, mode, text in steps:
        if what == "restore":
            data = conversation.to_bytes()
            conversation = Conversation.from_bytes(data, conversation.template)
            assert conversation.to_bytes() == data
            continue
        if what == "retry":
            messages.pop()
        elif what == "edit":
            messages = [*messages[: 1 + 2 * (len(messages) // 4)], user(f"edited {text}")]
        if messages[-1]["role"] == "assistant":
            messages.append(user(text))
        conversation.advance(messages)
        if what == "abort":
            turn(conversation, messages, mode, text, "abort")
        turn(conversation, messages, mode, text)
    for sample in conversation.samples(**IDENTITY):
        exact(sample)
    assert not [name for name in conversation.findings() if "repeated" not in name]


PAYLOADS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=8)


@given(payloads=PAYLOADS, cut=st.integers(0, 45))
def test_later_rows_win_and_a_cut_changes_nothing_else(payloads: list[tuple[int, int]], cut: int):
    rows, model = ExpertRows(), dict[int, int]()
    for number, (start, count) in enumerate(payloads, start=1):
        rows.join(start, np.full((count, 1, 1), number, np.int32))
        model = {at: value for at, value in model.items() if at < start}
        model.update(dict.fromkeys(range(start, start + count), number))
    for held, end in ((rows, 45), (rows.cut(cut), cut)):
        known = {at: value for at, value in model.items() if at < end}
        full = next(at for at in range(end + 1) if at not in known)
        assert held.held == full
        assert held.gap(full) is None
        if held.pieces:
            assert held.joined(full)[:, 0, 0].tolist() == [known[at] for at in range(full)]
        if full < end:
            gap = held.gap(end)
            assert gap is not None
            assert gap[0] == full
            assert not any(at in known for at in range(*gap))


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        ({"rows": slice(0, -1)}, "routed_rows", "rows of routed experts from token 0 on"),  # SkyRL#1908
        ({"double": True}, "routed_rows", "the last token was not read yet"),
        ({"start": 1}, "routed_rows", "from token 1 on"),
        ({"start": -1}, "routed_rows", "from token -1 on"),
        ({"flat": True}, "routed_shape", "need|must have shape"),
        ({"dtype": np.float32}, "routed_shape", "float32"),
        ({"padded": -1}, "routed_padding", "row 2 of the routed experts holds -1"),
    ],
)
def test_rows_that_cannot_be_are_refused(compiled: Compile, change: dict[str, Any], code: str, why: str):
    conversation = begin(compiled("qwen2_5"))
    record = with_rows(completion(conversation, "ok"))
    rows = record.routed_experts
    assert rows is not None
    rows = rows.astype(change.get("dtype", np.int16))
    if "padded" in change:
        rows[2] = -1
    rows = np.concatenate([rows, rows[-1:]]) if "double" in change else rows[change.get("rows", slice(None))]
    rows = rows.reshape(len(rows), -1) if "flat" in change else rows
    with pytest.raises(RecordError, match=why) as caught:
        rebuilt(record, routed_experts=rows, routed_start=change.get("start", 0))
    assert caught.value.code == code


@pytest.mark.original("A-experts")
def test_a_resumed_turns_full_payload_replaces_the_one_before(compiled: Compile):
    """verl#6029: after an abort the whole sequence came again, and was appended to what was held."""
    conversation = begin(compiled("qwen2_5"))
    messages = list(START)
    turn(conversation, messages, "full", "half", "abort")
    turn(conversation, messages, "full", "the rest")
    (sample,) = conversation.samples(**IDENTITY)
    exact(sample)
    assert sample.routed_experts is not None
    assert len(sample.routed_experts) == len(sample) - 1


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_the_row_of_a_turns_last_token_is_the_next_prefills(compiled: Compile, mode: str):
    """prime-rl#1807: the boundary token kept a row of zeros. It has none until the next answer brings it."""
    conversation = begin(compiled("qwen2_5"))
    messages = list(START)
    turn(conversation, messages, "full")
    boundary = conversation.branches[0].held_end - 1
    assert conversation.branches[0].experts.held == boundary
    messages.append(user("more"))
    conversation.advance(messages)
    turn(conversation, messages, mode)
    (sample,) = conversation.samples(**IDENTITY)
    assert sample.routed_experts is not None
    assert sample.routed_experts[boundary].any()
    exact(sample)


def test_an_answer_with_a_placeholder_for_its_last_token_is_refused(compiled: Compile):
    """prime-rl#1807, SkyRL#1908: n rows for n tokens, the last one zeros."""
    conversation = begin(compiled("qwen2_5"))
    record = with_rows(completion(conversation, "ok"))
    assert isinstance(record.routed_experts, np.ndarray)
    padded = np.concatenate([record.routed_experts, np.zeros_like(record.routed_experts[:1])])
    with pytest.raises(RecordError, match="the last token was not read yet") as caught:
        rebuilt(record, routed_experts=padded)
    assert caught.value.code == "routed_rows"


class Disk:
    """Rows kept elsewhere; counts how often they are read."""

    def __init__(self, rows: Any):
        self.rows = rows
        self.reads = 0

    def deferred(self) -> DeferredRows:
        return DeferredRows(self.rows.shape, self.rows.dtype.name, self.load)

    def load(self) -> Any:
        self.reads += 1
        return self.rows


def deferred_turn(conversation: Conversation, mode: str, text: str = "ok") -> Disk:
    held = conversation.branches[0].held_end
    record = with_rows(completion(conversation, text), 0 if mode == "full" else max(held - 1, 0))
    disk = Disk(record.routed_experts)
    conversation.record(rebuilt(record, routed_experts=disk.deferred()))
    return disk


def test_deferred_rows_are_read_when_a_sample_is_made_and_not_before(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    first = deferred_turn(conversation, "full")
    conversation.advance([*conversation.messages, user("more")])
    second = deferred_turn(conversation, "delta", "done")
    assert (first.reads, second.reads) == (0, 0)
    (sample,) = conversation.samples(**IDENTITY)
    exact(sample)
    assert (first.reads, second.reads) == (1, 1)
    assert conversation.findings() == {}
    restored = Conversation.from_bytes(conversation.to_bytes(), conversation.template)
    exact(restored.samples(**IDENTITY)[0])
    held = conversation.branches[0].experts.pieces
    assert all(isinstance(piece.rows, DeferredRows) for piece in held)  # nothing that was read is kept


def test_rows_in_a_file_are_mapped(compiled: Compile, tmp_path: Path):
    conversation = begin(compiled("qwen2_5"))
    record = with_rows(completion(conversation, "ok"))
    path = tmp_path / "rows.npy"
    np.save(path, record.routed_experts)
    conversation.record(rebuilt(record, routed_experts=DeferredRows.from_npy(path)))
    exact(conversation.samples(**IDENTITY)[0])
    path.write_bytes(b"not numpy")
    with pytest.raises(RecordError) as caught:
        DeferredRows.from_npy(path)
    assert caught.value.code == "routed_payload"
    (sample,) = conversation.samples(**IDENTITY)
    assert sample.routed_experts is None
    assert "no .npy file" in str(sample.provenance["routed_experts_missing"])
    assert conversation.findings() == {"routed_experts_payload": 1}
    path.unlink()
    with pytest.raises(FileNotFoundError):
        DeferredRows.from_npy(path)


def swap_for_npz(path: Path, rows: Any) -> None:
    with path.open("wb") as file:
        np.savez(file, a=rows)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("payload", lambda path, rows: path.unlink()),
        ("payload", lambda path, rows: path.write_bytes(b"")),
        ("payload", lambda path, rows: path.write_bytes(path.read_bytes()[:-1])),
        ("payload", lambda path, rows: path.write_bytes(path.read_bytes()[:100])),
        ("payload", lambda path, rows: path.write_bytes(path.read_bytes() + b"x")),
        ("payload", swap_for_npz),
        ("payload", lambda path, rows: np.save(path, np.array([{}], object))),
        ("shape", lambda path, rows: np.save(path, rows[:-1])),
        ("shape", lambda path, rows: np.save(path, rows.astype(np.float32))),
        ("padding", lambda path, rows: np.save(path, rows.astype(np.int16) * -1)),
    ],
)
def test_deferred_rows_that_cannot_be_read_do_not_take_the_rollout_with_them(
    compiled: Compile, tmp_path: Path, name: str, spoil: Callable[[Path, Any], object]
):
    conversation = begin(compiled("qwen2_5"))
    record = with_rows(completion(conversation, "ok"))
    assert isinstance(record.routed_experts, np.ndarray)
    rows = record.routed_experts.astype(np.int16)
    path = tmp_path / "rows.npy"
    np.save(path, rows)
    conversation.record(rebuilt(record, routed_experts=DeferredRows.from_npy(path)))
    spoil(path, rows)
    data = conversation.to_bytes()
    restored = Conversation.from_bytes(data, conversation.template)
    for one in (conversation, restored):
        (sample,) = one.samples(**IDENTITY)
        assert sample.routed_experts is None
        assert sample.provenance["routed_experts_missing"]
        assert dict(one.findings()) == {f"routed_experts_{name}": 1}
        assert any("without routed experts" in line for line in one.report().lines())
    assert restored.to_bytes() == data
    restored.advance([*restored.messages, user("more")])
    turn(restored, [], "full", "done")
    exact(restored.samples(**IDENTITY)[0])  # a later answer in full makes it good


@pytest.mark.parametrize("raised", [RuntimeError("engine is gone"), KeyError("x"), MemoryError()])
def test_whatever_a_loader_raises_is_the_reason(compiled: Compile, raised: Exception):
    def load() -> Any:
        raise raised

    conversation = begin(compiled("qwen2_5"))
    record = with_rows(completion(conversation, "ok"))
    assert record.routed_experts is not None
    rows = DeferredRows((record.routed_experts.shape[0], LAYERS, TOP_K), "uint8", load)
    conversation.record(rebuilt(record, routed_experts=rows))
    (sample,) = conversation.samples(**IDENTITY)
    assert type(raised).__name__ in str(sample.provenance["routed_experts_missing"])


@pytest.mark.parametrize("loaded", [None, [[1]], {"a": 1}, np.zeros((1, 1), np.uint8)])
def test_a_loader_that_gives_something_else_is_named(loaded: Any):
    with pytest.raises(RecordError) as caught:
        DeferredRows((1, 1, 1), "uint8", lambda: loaded).read()
    assert caught.value.code == "routed_shape"


@pytest.mark.parametrize(
    ("shape", "dtype", "load"),
    [
        ("abc", "uint8", len),
        ((1, 2), "uint8", len),
        ((1, 2, -1), "uint8", len),
        ((1, 2, 3.0), "uint8", len),
        ((1, 2, 3), "float32", len),
        ((1, 2, 3), np.uint8, len),
        ((1, 2, 3), "uint8", None),
    ],
)
def test_deferred_rows_say_what_they_are(shape: Any, dtype: Any, load: Any):
    with pytest.raises(RecordError):
        DeferredRows(shape, dtype, load)


def test_a_file_without_rows_is_mapped(tmp_path: Path):
    np.save(tmp_path / "none.npy", np.empty((0, 3, 2), np.uint8))
    assert DeferredRows.from_npy(tmp_path / "none.npy").read().shape == (0, 3, 2)
    big = np.asfortranarray(routing(np.arange(9)).astype(">i4"))
    np.save(tmp_path / "big.npy", big)
    assert np.array_equal(DeferredRows.from_npy(tmp_path / "big.npy").read(), big)


@pytest.mark.parametrize(
    ("code", "name", "change"),
    [
        ("shape", "routed_experts_shape", lambda rows: rows[:-1]),
        ("shape", "routed_experts_shape", lambda rows: rows.astype(np.int32)),
        ("-1", "routed_experts_padding", lambda rows: rows.astype(np.int16) - np.int16(1) * (rows < 99)),
        ("placeholders", "routed_experts_padding", lambda rows: rows * 0),
    ],
)
def test_deferred_rows_that_turn_out_wrong_are_named_and_left_out(
    compiled: Compile, code: str, name: str, change: Callable[[Any], Any]
):
    conversation = begin(compiled("qwen2_5"))
    record = with_rows(completion(conversation, "ok"))
    assert isinstance(record.routed_experts, np.ndarray)
    wrong = change(record.routed_experts)
    dtype = "int16" if code == "-1" else "uint8"
    made = DeferredRows((len(record.routed_experts), LAYERS, TOP_K), dtype, lambda: wrong)
    conversation.record(rebuilt(record, routed_experts=made))
    (sample,) = conversation.samples(**IDENTITY)
    assert sample.routed_experts is None
    assert str(sample.provenance["routed_experts_missing"])
    assert conversation.findings() == {name: 1}


def test_deferred_rows_are_counted_and_cut_without_being_read(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    whole = completion(conversation, "ok")
    longer = rebuilt(whole, output_ids=np.append(whole.output_ids, whole.output_ids[:2]), stop_id=None)
    disk = Disk(routing(np.concatenate([longer.prompt_ids, longer.output_ids])))
    record = rebuilt(longer, routed_experts=disk.deferred())
    with pytest.raises(RecordError) as caught:
        rebuilt(whole, routed_experts=disk.deferred())
    assert caught.value.code == "routed_rows"
    conversation.record(record.cut_at_stop(conversation.template.stop_ids))
    assert disk.reads == 0
    exact(conversation.samples(**IDENTITY)[0])


def test_another_models_rows_are_refused_and_nothing_is_appended(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    messages = list(START)
    turn(conversation, messages, "full")
    messages.append(user("more"))
    conversation.advance(messages)
    record = with_rows(completion(conversation, "ok"))
    rows = record.routed_experts
    assert rows is not None
    before = conversation.to_bytes()
    for other in (rows[:, :2], np.concatenate([rows, rows], axis=2)):
        with pytest.raises(RecordError, match="earlier answers had 3 and 2") as caught:
            conversation.record(rebuilt(record, routed_experts=other))
        assert caught.value.code == "routed_shape"
    assert conversation.to_bytes() == before


def test_padding_of_zeros_is_named_and_left_out(compiled: Compile):
    """SkyRL#1908, prime-rl#1807: a router picks distinct experts, so a row of zeros was not routed."""
    conversation = begin(compiled("qwen2_5"))
    record = with_rows(completion(conversation, "ok"))
    assert record.routed_experts is not None
    record.routed_experts[4:6] = 0
    conversation.record(record)
    (sample,) = conversation.samples(**IDENTITY)
    assert sample.routed_experts is None
    assert sample.provenance["routed_experts_missing"] == "2 rows are placeholders, the first is row 4"
    assert conversation.findings() == {"routed_experts_padding": 1}


def test_repeated_rows_are_counted_and_kept(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    record = with_rows(completion(conversation, "ok"))
    assert record.routed_experts is not None
    record.routed_experts[-3:] = record.routed_experts[-3]
    conversation.record(record)
    assert conversation.samples(**IDENTITY)[0].routed_experts is not None
    assert conversation.findings() == {"routed_experts_repeated_rows": 2}


def test_a_layer_without_experts_is_no_padding():
    """Models with a dense first layer: its entries stay zero in every row."""
    rows = routing(np.arange(9))
    rows[:, 0] = 0
    assert not len(padding_rows(rows))
    rows[3] = 0
    assert padding_rows(rows).tolist() == [3]
    assert repeated_rows(rows[[0, 1, 1, 2]]).tolist() == [2]
    assert not len(padding_rows(np.zeros((3, 2, 1), np.uint8)))


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(array: Any, *, pickled: bool = False) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return b64(file.getvalue())


def test_sglangs_form_is_read():
    rows = routing(np.arange(20), np.int32)
    data = b64(rows.astype("<i4").tobytes())
    plain = decode_sglang_experts(data, layers=LAYERS, top_k=TOP_K)
    assert plain.dtype == np.int32
    assert np.array_equal(plain, rows)
    small = decode_sglang_experts(data, layers=LAYERS, top_k=TOP_K, experts=EXPERTS)
    assert small.dtype == np.uint8
    assert np.array_equal(small, rows)
    assert decode_sglang_experts(data, layers=LAYERS, top_k=TOP_K, experts=300).dtype == np.int16
    assert decode_sglang_experts("", layers=LAYERS, top_k=TOP_K).shape == (0, LAYERS, TOP_K)


@pytest.mark.parametrize(
    ("payload", "fields", "code"),
    [
        ("%%%", {}, "routed_payload"),
        (b64(bytes(4 * LAYERS * TOP_K + 4)), {}, "routed_rows"),
        (b64(np.full(LAYERS * TOP_K, -1, "<i4").tobytes()), {"experts": EXPERTS}, "routed_padding"),
        (b64(np.full(LAYERS * TOP_K, EXPERTS, "<i4").tobytes()), {"experts": EXPERTS}, "routed_payload"),
        (b64(bytes(8)), {"layers": 0}, "routed_rows"),
        (b64(bytes(16)), {"layers": -1, "top_k": -1}, "routed_rows"),
        (5, {}, "routed_payload"),
    ],
)
def test_what_is_not_sglangs_form_is_refused(payload: str, fields: dict[str, int], code: str):
    with pytest.raises(RecordError) as caught:
        decode_sglang_experts(payload, **{"layers": LAYERS, "top_k": TOP_K, **fields})
    assert caught.value.code == code


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">i4", "<i4", "<i2"])
def test_vllms_form_is_read(dtype: str):
    rows = routing(np.arange(20)).astype(dtype)
    for given_rows in (rows, np.asfortranarray(rows)):
        read = decode_vllm_experts(npy(given_rows))
        assert read.dtype == rows.dtype.newbyteorder("=")
        assert read.flags.c_contiguous
        assert np.array_equal(read, rows)
    assert decode_vllm_experts(npy(rows), experts=EXPERTS).dtype == np.uint8


def with_header(header: str, data: bytes = bytes(16)) -> str:
    return b64(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000, 60, 8), }",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999999999, 60, 8), }",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (0, 999999, 999999), }",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (-1, 2, 2), }",
        "{'descr': '<i3', 'fortran_order': False, 'shape': (4, 1, 1), }",
        "{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (4, 1, 1), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1), }",
        "{{{",
        "[" * 5000,
    ],
)
def test_a_header_is_compared_with_the_bytes_before_anything_is_made(header: str):
    with pytest.raises(RecordError) as caught:
        decode_vllm_experts(with_header(header))
    assert caught.value.code == "routed_payload"


def test_a_damaged_payload_is_refused_or_read_and_never_fails_otherwise():
    good = base64.b64decode(npy(np.zeros((3, 2, 2), np.uint8)))
    for at in range(len(good) - 12):
        for flip in (1, 8, 64, 255):
            bad = bytearray(good)
            bad[at] ^= flip
            try:
                read = decode_vllm_experts(b64(bytes(bad)))
            except RecordError as error:
                assert error.code == "routed_payload"  # noqa: PT017
                continue
            assert read.size == 12 or read.nbytes == 12
    for end in range(len(good)):
        with pytest.raises(RecordError):
            decode_vllm_experts(b64(good[:end]))


def npz(array: Any) -> str:
    file = io.BytesIO()
    np.savez(file, a=array)
    return b64(file.getvalue())


@pytest.mark.parametrize(
    "payload",
    [
        "%%%",
        "",
        b64(b"\x93NUMPY\x01\x00"),
        b64(b"not numpy at all"),
        npy(np.array([{"a": 1}], dtype=object), pickled=True),
        npy(np.zeros((2, 3), np.uint8)),
        npy(np.zeros((2, 3, 1), np.float32)),
        npz(np.zeros((2, 3, 1), np.uint8)),
        b64(base64.b64decode(npy(np.zeros((2, 3, 1), np.uint8))) + b"x"),
        b64(base64.b64decode(npy(np.zeros((2, 3, 1), np.uint8)))[:-1]),
    ],
)
def test_what_is_not_vllms_form_is_refused(payload: str):
    with pytest.raises(RecordError) as caught:
        decode_vllm_experts(payload)
    assert caught.value.code == "routed_payload"


def test_shared_rows_are_written_once_and_damage_is_found(compiled: Compile):
    conversation = begin(compiled("qwen2_5"))
    messages = list(START)
    turn(conversation, messages, "full")
    for text in ("one", "two", "three"):
        conversation.advance([*messages, user(text)])
        turn(conversation, list(messages), "delta", text)
    image = unpack(KIND_CONVERSATION, conversation.to_bytes(), ConversationImage)
    assert len(image.branches) == 3
    assert len(image.experts) == 4
    good, length = image.experts[0], image.branches[0].experts[0][1]

    def refused(experts: Any, held: Any) -> None:
        branch = msgspec.structs.replace(image.branches[0], experts=held)
        bad = msgspec.structs.replace(
            image, experts=[experts, *image.experts[1:]], branches=[branch, *image.branches[1:]]
        )
        with pytest.raises(SnapshotError, match="routed experts"):
            Conversation.from_bytes(pack(KIND_CONVERSATION, bad), conversation.template)

    held = image.branches[0].experts
    refused(msgspec.structs.replace(good, dtype="object"), held)
    refused(msgspec.structs.replace(good, data=good.data[:-1]), held)
    refused(good, [(9, length)])
    refused(good, [(0, length + 1)])
    refused(good, [(1, 1), (0, 1)])
