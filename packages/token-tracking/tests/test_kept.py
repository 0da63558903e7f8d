"""Kept sets of truncated sampling: with their tokens through record, ledger, fork, snapshot and sample."""

from collections.abc import Callable
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
from token_tracking.testing import IDENTITY, completion

Compile = Callable[..., ChatTemplate]
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
            others = st.lists(st.integers(0, 50), max_size=3, unique=True)
            sets = [[*(other for other in data.draw(others) if other != i), i] for i in ids]
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
    for ids in ([1, 5, 3], [1, 5], [1, 5, 2, 2], [1, 1, 2]):
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


@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize(
    "change", [{}, {"top_p": None, "top_k": 50}, {"top_p": None, "min_p": 0.1}, {"top_p": 1.0, "top_k": 1}]
)
def test_truncated_sampling_without_kept_sets_is_refused_before_a_ratio(
    compiled: Compile, change: dict[str, Any], kind: str
):
    """trl#6789: p = [.5, .3, .15, .05], top_p 0.8, id 0: the engine says -0.470, the trainer -0.693.

    Raw log-probabilities are refused too: the ratio begins at 1, and is one to a distribution that the ids
    were not drawn from.
    """
    change = {**change, "logprob_kind": kind}
    conversation, _ = begin(compiled("qwen2_5"))
    conversation.record(record(conversation, None, **change))
    (sample,) = conversation.samples(**IDENTITY)
    with pytest.raises(MissingLogprobsError, match=r"turn 0.*kept mass .trl#6789.*return_sampling_mask"):
        sample.require_logprobs()


@pytest.mark.parametrize(
    ("change", "unsaid"),
    [
        ({"top_p": None, "top_k": None, "min_p": None}, "top_p, top_k, min_p"),
        ({"top_p": 1.0, "top_k": None, "min_p": 0.0}, "top_k"),
        ({"top_p": 1.0, "top_k": -1, "min_p": None}, "min_p"),
    ],
)
def test_sampling_that_is_not_known_is_refused_before_a_ratio(
    compiled: Compile, change: dict[str, Any], unsaid: str
):
    """vLLM takes top_k 20 from Qwen3's generation config where a request does not name it."""
    conversation, _ = begin(compiled("qwen2_5"))
    conversation.record(record(conversation, None, **change))
    (sample,) = conversation.samples(**IDENTITY)
    with pytest.raises(MissingLogprobsError, match=rf"turn 0.*\({unsaid} not recorded"):
        sample.require_logprobs()


def test_raw_logprobs_with_kept_sets_are_let_through(compiled: Compile):
    conversation, ids = begin(compiled("qwen2_5"))
    conversation.record(record(conversation, [[5, i] for i in ids], logprob_kind="raw"))
    (sample,) = conversation.samples(**IDENTITY)
    sample.require_logprobs()
    assert sample.kept is not None
    turn = sample.turns[0]
    assert sample.kept.part(turn.start, turn.end).ids.tolist() == [i for one in ids for i in (5, one)]


@pytest.mark.parametrize(
    "change",
    [
        {"logprob_kind": "raw", "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        {"top_p": 1.0, "top_k": -1, "min_p": 0.0},
        {"top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
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
    """trl#6789: with the kept ids the ratio is 1, without them 0.8."""
    whole = np.log(np.array([[0.5, 0.3, 0.15, 0.05]]))
    kept = KeptSets.from_lists([[0, 1]])
    chosen = np.array([0], np.int32)
    engine = np.log(0.5 / 0.8)
    assert engine == pytest.approx(-0.470, abs=1e-3)
    assert whole[0, 0] == pytest.approx(-0.693, abs=1e-3)
    assert np.exp(kept.log_mass(whole)).tolist() == pytest.approx([0.8])
    assert np.exp(kept.logprobs(whole, chosen) - engine).tolist() == pytest.approx([1.0])
    assert np.exp(whole[0, 0] - engine) == pytest.approx(0.8)


@given(
    seed=st.integers(0, 2**32 - 1),
    sets=st.lists(st.lists(st.integers(0, 19), max_size=20, unique=True), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_log_probabilities_over_kept_sets_are_a_softmax_over_them(seed: int, sets: list[list[int]]):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 8, (len(sets), 20)).astype(np.float32)
    whole = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    kept = KeptSets.from_lists(sets)
    chosen = np.array([rng.choice(one) if one else 3 for one in sets], np.int32)
    found = kept.logprobs(whole, chosen)
    for at, one in enumerate(sets):
        among = logits[at, one or slice(None)].astype(np.float64)
        expected = logits[at, chosen[at]] - np.log(np.exp(among).sum())
        assert found[at] == pytest.approx(expected, abs=1e-4)
        assert one or kept.log_mass(whole)[at] == 0


def test_what_sglang_kept_gives_the_log_probabilities_that_it_gave():
    """SGLang 0.5.23, temperature 0.5, top_k 50, top_p 0.8: its mask, and its number for each id in it."""
    kept = KeptSets.from_lists([[86, 178, 209, 207, 78]] * 5)
    given_ones = [-0.8412379, -1.1239337, -1.8267889, -3.0918388, -3.2840347]
    whole = np.full((5, 512), -20.0)
    whole[:, kept.part(0, 1).ids] = [-2.2885, -2.4299, -2.7813, -3.4138, -3.5099]  # at temperature 1
    found = kept.logprobs(whole / 0.5, kept.part(0, 1).ids)
    assert found.tolist() == pytest.approx(given_ones, abs=2e-4)


@pytest.mark.parametrize(
    ("shape", "ids", "why"),
    [
        ((2, 4), 1, r"need \[1, vocabulary\]"),
        ((4,), 1, "need"),
        ((1, 1), 1, "kept id 1"),
        ((1, 4), 2, "2 ids"),
    ],
)
def test_log_probabilities_of_another_shape_are_refused(shape: tuple[int, ...], ids: int, why: str):
    with pytest.raises(ValueError, match=why):
        KeptSets.from_lists([[0, 1]]).logprobs(np.zeros(shape), np.zeros(ids, np.int32))


@pytest.mark.parametrize(
    ("kept", "code", "why"),
    [
        (KeptSets.from_lists([[5], [6, 1], [7]]), "kept_sampled", "token 2 .id 99. is not among the 1"),
        (KeptSets.from_lists([[5], [6], []]), "kept_sampled", "not among the 0"),
        (KeptSets.from_lists([[5, 1], [1, 6, 2, 1], [99]]), "kept_duplicate", "token 1 holds id 1 twice"),
        (KeptSets.from_lists([[5, 5], [6], [99]]), "kept_duplicate", "token 0 holds id 5 twice"),
        (KeptSets.from_lists([[5], [6]]), "kept_offsets", "length 4"),
        (KeptSets(np.array([5, 6, 99], np.int32), np.array([1, 1, 2, 3])), "kept_offsets", "rise from 0"),
        (KeptSets(np.array([5, 6, 99], np.int32), np.array([0, 2, 1, 3])), "kept_offsets", "rise from 0"),
        (KeptSets(np.array([5, 6, 99, 1], np.int32), np.arange(4)), "kept_offsets", "rise from 0 to 4"),
        (
            KeptSets(np.array([5, 6, 99, -1], np.int32), np.array([0, 1, 2, 4])),
            "kept_vocabulary",
            "padding was not cut",
        ),
        (KeptSets(np.array([5, 6, 99]), np.array([0, 1, 2, 3])), "kept_set", "int32"),
    ],
)
def test_sets_that_cannot_be_are_refused(kept: KeptSets, code: str, why: str):
    with pytest.raises(RecordError, match=why) as caught:
        GenerationRecord(
            prompt_ids=np.arange(3, dtype=np.int32),
            output_ids=np.array([5, 6, 99], np.int32),
            finish_reason="length",
            kept_ids=kept.ids,
            kept_offsets=kept.offsets,
        )
    assert caught.value.code == code


def test_sets_in_any_order_and_shared_between_tokens_are_taken():
    made = KeptSets.from_lists([[9, 5, 1], [5, 9, 1]])
    GenerationRecord(
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=np.array([5, 5], np.int32),
        finish_reason="length",
        kept_ids=made.ids,
        kept_offsets=made.offsets,
    )


def test_ids_without_offsets_are_refused():
    with pytest.raises(RecordError, match="come together"):
        GenerationRecord(
            prompt_ids=np.arange(3, dtype=np.int32),
            output_ids=np.array([5], np.int32),
            finish_reason="length",
            kept_ids=np.array([5], np.int32),
        )
