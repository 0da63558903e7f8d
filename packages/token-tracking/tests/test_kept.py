"""Kept sets of truncated sampling: with their tokens through record, ledger, fork, snapshot and sample."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_tracking import (
    ChatTemplate,
    Conversation,
    GenerationRecord,
    KeptSets,
    LedgerError,
    MissingLogprobsError,
    RecordError,
    SnapshotError,
    TokenLedger,
)
from token_tracking.snapshot import KIND_LEDGER, ledger_image, pack
from token_tracking.testing import completion

Compile = Callable[..., ChatTemplate]
IDENTITY: dict[str, Any] = {
    "rollout_id": "0" * 32,
    "group_id": "1" * 32,
    "task_id": "task",
    "reward": 1.0,
    "status": "completed",
    "source": "sampled",
}
START = [{"role": "user", "content": "fix it"}]


def lists(kept: KeptSets | None, count: int) -> list[list[int]]:
    if kept is None:
        return [[] for _ in range(count)]
    assert len(kept.offsets) == count + 1
    return [kept.ids[a:b].tolist() for a, b in zip(kept.offsets[:-1], kept.offsets[1:], strict=True)]


IDS = st.lists(st.integers(0, 50), max_size=6)
STEP = st.tuples(
    st.sampled_from(["prompt", "sampled", "kept", "fork", "restore"]), st.integers(0, 99), IDS, st.data()
)


@given(steps=st.lists(STEP, max_size=14))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_appends_forks_and_restores_keep_the_sets_beside_their_tokens(steps: list[Any]):
    held: list[tuple[TokenLedger, list[tuple[int, list[int]]]]] = [(TokenLedger(), [])]
    for what, pick, ids, data in steps:
        ledger, model = held[pick % len(held)]
        if what == "prompt":
            ledger.append_prompt(ids)
            model += [(i, []) for i in ids]
        elif what == "sampled":
            ledger.append_sampled(ids, None, 0)
            model += [(i, []) for i in ids]
        elif what == "kept":
            sets = [[*data.draw(st.lists(st.integers(0, 50), max_size=3)), i] for i in ids]
            ledger.append_sampled(ids, None, 0, KeptSets.from_lists(sets))
            model += list(zip(ids, sets, strict=True))
        elif what == "fork":
            length = data.draw(st.integers(0, len(model)))
            held.append((ledger.fork(length), model[:length]))
        else:
            again = TokenLedger.from_bytes(ledger.to_bytes())
            assert again.to_bytes() == ledger.to_bytes()
            held.append((again, list(model)))
    for ledger, model in held:
        assert ledger.ids.tolist() == [i for i, _ in model]
        assert lists(ledger.kept_sets(), len(model)) == [kept for _, kept in model]
        half = len(model) // 2
        assert lists(ledger.kept_sets(half), half) == [kept for _, kept in model[:half]]


def test_a_ledger_without_kept_sets_has_none_and_pays_nothing():
    ledger = TokenLedger()
    ledger.append_sampled([1, 2], None, 0)
    assert ledger.kept_sets() is None
    image = ledger_image(ledger)
    assert image.kept_ids is None
    assert image.kept_counts is None


def test_the_sets_are_copied_and_a_wrong_one_is_refused():
    kept = KeptSets.from_lists([[1, 5], [2]])
    ledger = TokenLedger()
    ledger.append_sampled([1, 2], None, 0, kept)
    kept.ids[:] = 9
    assert lists(ledger.kept_sets(), 2) == [[1, 5], [2]]
    with pytest.raises(LedgerError, match="own kept set"):
        ledger.append_sampled([1, 2], None, 0, KeptSets.from_lists([[1], [3]]))
    assert len(ledger) == 2
    assert lists(ledger.kept_sets(), 2) == [[1, 5], [2]]


def test_a_snapshot_whose_sets_do_not_fit_is_refused():
    ledger = TokenLedger()
    ledger.append_sampled([1, 2], None, 0, KeptSets.from_lists([[1, 5], [2]]))
    image = ledger_image(ledger)
    for ids in ([1, 5, 3], [1, 5], [1, 5, 2, 2]):
        bad = type(image)(**{**_fields(image), "kept_ids": np.array(ids, "<i4").tobytes()})
        with pytest.raises(SnapshotError, match="kept sets"):
            TokenLedger.from_bytes(pack(KIND_LEDGER, bad))


def _fields(image: Any) -> dict[str, Any]:
    return {name: getattr(image, name) for name in image.__struct_fields__}


def record(conversation: Conversation, sets: list[list[int]] | None, **change: Any) -> GenerationRecord:
    made = completion(conversation, "ok", logprob=-0.5)
    kept = None if sets is None else KeptSets.from_lists(sets)
    values: dict[str, Any] = {
        **_fields(made),
        "logprob_kind": "processed",
        "temperature": 1.0,
        "top_p": 0.8,
        "kept_ids": None if kept is None else kept.ids,
        "kept_offsets": None if kept is None else kept.offsets,
    }
    return GenerationRecord(**(values | change))


def begin(template: ChatTemplate) -> tuple[Conversation, list[int]]:
    conversation = Conversation(template)
    conversation.advance(START)
    return conversation, completion(conversation, "ok").output_ids.tolist()


def test_sample_carries_the_sets_over_turns_branches_and_processes(compiled: Compile):
    conversation, ids = begin(compiled("qwen2_5"))
    sets = [[ids[0], 7], [ids[1], 8, 9]]
    first = conversation.record(record(conversation, sets))
    conversation.advance([*START, first, {"role": "user", "content": "more"}])
    conversation = Conversation.from_bytes(conversation.to_bytes(), conversation.template)
    conversation.record(record(conversation, [[5, i] for i in ids]))
    conversation.advance([*START, first, {"role": "user", "content": "other"}])
    conversation.record(completion(conversation, "ok", logprob=-0.5))
    restored = Conversation.from_bytes(conversation.to_bytes(), conversation.template)
    assert restored.to_bytes() == conversation.to_bytes()
    one, two = restored.samples(**IDENTITY)
    for sample, last in ((one, [[5, i] for i in ids]), (two, [[], []])):
        assert sample.kept_ids is not None
        assert sample.kept_offsets is not None
        found = lists(KeptSets(sample.kept_ids, sample.kept_offsets), len(sample))
        expected: list[list[int]] = [[] for _ in range(len(sample))]
        for turn, held in zip(sample.turns, (sets, last), strict=True):
            expected[turn.start : turn.end] = held
        assert found == expected
        sample.require_logprobs()  # the branch's own turn has raw log-probabilities


@pytest.mark.parametrize(
    "change", [{}, {"top_p": None, "top_k": 50}, {"top_p": None, "min_p": 0.1}, {"top_p": 1.0, "top_k": 1}]
)
def test_truncated_sampling_without_kept_sets_is_refused_before_a_ratio(
    compiled: Compile, change: dict[str, Any]
):
    """trl#6789: p = [.5, .3, .15, .05], top_p 0.8, id 0: the engine says -0.470, the trainer -0.693."""
    conversation, _ = begin(compiled("qwen2_5"))
    conversation.record(record(conversation, None, **change))
    (sample,) = conversation.samples(**IDENTITY)
    with pytest.raises(MissingLogprobsError, match=r"turn 0.*kept mass.*return_sampling_mask"):
        sample.require_logprobs()


@pytest.mark.parametrize(
    "change",
    [
        {"logprob_kind": "raw"},
        {"top_p": 1.0},
        {"top_p": None, "top_k": -1},
        {"top_p": None, "top_k": 1 << 30},
        {"top_p": None, "top_k": 0, "min_p": 0.0},
        {"top_p": None},
    ],
)
def test_what_needs_no_kept_sets_is_let_through(compiled: Compile, change: dict[str, Any]):
    conversation, _ = begin(compiled("qwen2_5"))
    conversation.record(record(conversation, None, **change))
    conversation.samples(**IDENTITY)[0].require_logprobs()


def test_an_aborted_segment_without_sets_taints_the_turn(compiled: Compile):
    """Half of a turn under one engine with sets, half under another without: the half is not trained."""
    conversation, ids = begin(compiled("qwen2_5"))
    values = {"finish_reason": "abort", "stop_id": None, "output_ids": np.array(ids[:1], np.int32)}
    one = {**values, "logprobs": np.array([-0.5], np.float32)}
    conversation.record(record(conversation, None, **one))
    conversation.record(record(conversation, [[i] for i in ids]))
    (sample,) = conversation.samples(**IDENTITY)
    with pytest.raises(MissingLogprobsError, match=r"turn 0.* 1 of its trained"):
        sample.require_logprobs()


def test_the_sets_give_the_trainer_the_engines_number():
    """trl#6789, the arithmetic: with the kept ids the ratio is 1, without them 0.8."""
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    kept = KeptSets.from_lists([[0, 1]])
    engine = np.log(0.5 / 0.8)
    low, high = kept.offsets[:2]
    over_kept = logits[0] - np.log(np.exp(logits[kept.ids[low:high]]).sum())
    assert engine == pytest.approx(-0.470, abs=1e-3)
    assert logits[0] == pytest.approx(-0.693, abs=1e-3)
    assert np.exp(over_kept - engine) == pytest.approx(1.0)
    assert np.exp(logits[0] - engine) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (KeptSets.from_lists([[5], [6, 1], [7]]), "token 2 .id 99. is not among the 1"),
        (KeptSets.from_lists([[5], [6], []]), "not among the 0"),
        (KeptSets.from_lists([[5], [6]]), "length 4"),
        (KeptSets(np.array([5, 6, 99], np.int32), np.array([1, 1, 2, 3])), "rise from 0"),
        (KeptSets(np.array([5, 6, 99], np.int32), np.array([0, 2, 1, 3])), "rise from 0"),
        (KeptSets(np.array([5, 6, 99, 1], np.int32), np.array([0, 1, 2, 3])), "rise from 0 to 4"),
        (KeptSets(np.array([5, 6, 99, -1], np.int32), np.array([0, 1, 2, 4])), "padding was not cut"),
        (KeptSets(np.array([5, 6, 99]), np.array([0, 1, 2, 3])), "int32"),
    ],
)
def test_sets_that_cannot_be_are_refused(kept: KeptSets, why: str):
    with pytest.raises(RecordError, match=why) as caught:
        GenerationRecord(
            prompt_ids=np.arange(3, dtype=np.int32),
            output_ids=np.array([5, 6, 99], np.int32),
            finish_reason="length",
            kept_ids=kept.ids,
            kept_offsets=kept.offsets,
        )
    assert caught.value.code == "kept_set"


def test_ids_without_offsets_are_refused():
    with pytest.raises(RecordError, match="come together"):
        GenerationRecord(
            prompt_ids=np.arange(3, dtype=np.int32),
            output_ids=np.array([5], np.int32),
            finish_reason="length",
            kept_ids=np.array([5], np.int32),
        )


ANSWERS = Path(__file__).with_name("data") / "engines"


def answer(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    recorded = json.loads((ANSWERS / f"{name}.json").read_text())
    return recorded["request"]["body"], recorded["response"]


@pytest.mark.parametrize("name", ["sglang_stop_token", "sglang_length", "sglang_after_update"])
def test_a_recorded_sglang_answer_fits_a_record(name: str):
    """SGLang 0.5.23, POST /generate. `weight_version` is text there; the engine adapter reads it."""
    body, response = answer(name)
    meta = response["meta_info"]
    finish = meta["finish_reason"]
    triples = meta["output_token_logprobs"]
    made = GenerationRecord(
        prompt_ids=np.array(body["input_ids"], np.int32),
        output_ids=np.array(response["output_ids"], np.int32),
        logprobs=np.array([triple[0] for triple in triples], np.float32),
        finish_reason=finish["type"],
        stop_id=finish.get("matched"),
        weight_version=10 if meta["weight_version"] == "v10" else -2,
        logprob_kind="raw",
        temperature=body["sampling_params"]["temperature"],
        prompt_tokens=meta["prompt_tokens"],
        completion_tokens=meta["completion_tokens"],
    )
    made.check_prompt(np.array(body["input_ids"], np.int32))
    assert [triple[1] for triple in triples] == made.output_ids.tolist()
    made.check_stop({134159}, lambda ids: response["text"])
    assert made.finish_reason == ("stop" if name == "sglang_stop_token" else "length")


@pytest.mark.parametrize("name", ["vllm_stop", "vllm_length"])
def test_a_recorded_vllm_answer_fits_a_record(name: str):
    """vLLM 0.32, POST /inference/v1/generate."""
    body, response = answer(name)
    (choice,) = response["choices"]
    content = choice["logprobs"]["content"]
    made = GenerationRecord(
        prompt_ids=np.array(body["token_ids"], np.int32),
        output_ids=np.array(choice["token_ids"], np.int32),
        logprobs=np.array([entry["logprob"] for entry in content], np.float32),
        finish_reason=choice["finish_reason"],
        stop_id=choice["stop_reason"],
        logprob_kind="raw",
        temperature=body["sampling_params"]["temperature"],
        prompt_tokens=response["usage"]["prompt_tokens"],
        completion_tokens=response["usage"]["completion_tokens"],
    )
    assert [entry["token_id"] for entry in content] == made.output_ids.tolist()
    made.check_stop({134159}, lambda ids: "")
    assert choice["routed_experts"] is None
    assert choice["sampling_mask"] is None
