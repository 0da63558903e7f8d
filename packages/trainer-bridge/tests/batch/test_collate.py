"""Padded and packed batches: every channel at its token, one copy, nothing invented."""

from __future__ import annotations

import dataclasses
import logging
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_tracking.errors import MissingLogprobsError
from token_tracking.sample import Sample
from trainer_bridge.batch import Batch, token_logprobs
from trainer_bridge.collate import Collator
from trainer_bridge.errors import BatchError
from trainer_bridge.truncation import truncate

Build = Callable[..., Sample]
CHANNELS = ("token_ids", "position_ids", "loss_mask", "logprobs", "temperature", "versions", "weights",
"advantages", "token_rewards", "routed_experts")  # fmt: skip
PROCESSED = {"logprob_kind": "processed", "temperature": 0.7, "top_p": 0.8, "top_k": 20}


def taken_apart(batches: tuple[Batch[Any], ...]) -> dict[int, dict[str, Any]]:
    """Every sample's tokens, channel by channel, as they stand in the batches."""
    found: dict[int, dict[str, Any]] = {}
    for batch in batches:
        for sequence, index in enumerate(batch.sample_index.tolist()):
            at = batch.sequence_ids == sequence
            channels = {name: getattr(batch, name) for name in CHANNELS}
            found[index] = {
                name: None if values is None else values[at].tolist() for name, values in channels.items()
            }
            found[index]["kept"] = [kept_of(batch, place) for place in np.flatnonzero(at)]
            found[index]["group"] = batch.group_index[sequence]
            found[index]["rollout"] = batch.rollout_index[sequence]
    return found


def kept_of(batch: Batch[Any], place: int) -> list[int]:
    if batch.kept is None:
        return []
    return batch.kept.ids[batch.kept.offsets[place] : batch.kept.offsets[place + 1]].tolist()


@pytest.mark.original("B-postprocess")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_padded_and_packed_agree_token_by_token(sample: Build, data: st.DataObject) -> None:
    step = []
    for rollout in range(data.draw(st.integers(1, 5))):
        parts = data.draw(st.integers(1, 2))
        for part in range(parts):
            turns = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
            prompt = data.draw(st.integers(0, 4))
            n = prompt + sum(turns) + 2 * (len(turns) - 1)
            step.append(
                sample(
                    rollout,
                    group=rollout % 2,
                    part=part,
                    parts=parts,
                    turns=turns,
                    prompt=prompt,
                    reward=float(rollout),
                    in_loss=data.draw(st.booleans()),
                    sampling=PROCESSED if rollout % 2 else None,
                    kept=[list(range(1, 50)) if i % 2 else [] for i in range(n)] if rollout % 2 else None,
                    experts=np.full((n - 1, 2, 3), rollout, np.uint8) if data.draw(st.booleans()) else None,
                )
            )
    collator = Collator(ratio=False, side=data.draw(st.sampled_from(["left", "right"])), pad_id=9)
    rows = data.draw(st.integers(1, 8))
    padded = collator.pad(step, max_rows=rows)
    packed = collator.pack(step, row_tokens=max(map(len, step)) + data.draw(st.integers(0, 30)))
    a, b = taken_apart(padded), taken_apart(packed)
    np.testing.assert_equal(a, b)
    for index, each in enumerate(step):
        assert a[index]["token_ids"] == each.token_ids.tolist()
        assert a[index]["versions"] == each.versions.tolist()
        assert a[index]["position_ids"] == list(range(len(each)))
        assert a[index]["loss_mask"][1:] == [bool(m) and each.in_loss for m in each.loss_mask[1:]]
    for batch in (*padded, *packed):
        nowhere = batch.sequence_ids == -1
        assert (batch.token_ids[nowhere] == 9).all()
        assert not batch.weights[nowhere].any()
        assert not batch.loss_mask[nowhere].any()
        assert batch.cu_seqlens[-1] == (batch.sequence_ids >= 0).sum()


def test_right_and_left_padding(sample: Build) -> None:
    step = [sample(1, prompt=1, turns=(2,)), sample(2, prompt=2, turns=(3,))]
    (right,) = Collator(multiple_of=4).pad(step)
    (left,) = Collator(multiple_of=4, side="left").pad(step)
    assert right.attention_mask.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert left.attention_mask.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]]
    assert left.position_ids.tolist() == [[0, 0, 0, 0, 0, 0, 1, 2], [0, 0, 0, 0, 1, 2, 3, 4]]
    assert right.loss_mask.tolist()[0] == [False, True, True, False, False, False, False, False]
    assert left.labels().tolist()[0] == [-100] * 6 + step[0].token_ids[1:].tolist()
    assert set(left.model_inputs()) == {"input_ids", "attention_mask", "position_ids"}
    assert right.max_seqlen == 5


def test_packed_rows_are_filled_first_fit_by_length(sample: Build) -> None:
    lengths = [4, 9, 5, 3, 8]
    step = [sample(n, prompt=1, turns=(length - 1,)) for n, length in enumerate(lengths)]
    rows = Collator().pack(step, row_tokens=12)
    assert [row.sample_index.tolist() for row in rows] == [[1, 3], [0, 4], [2]]
    assert [row.cu_seqlens.tolist() for row in rows] == [[0, 9, 12], [0, 4, 12], [0, 5]]
    assert rows[0].position_ids.tolist() == [[*range(9), *range(3)]]
    assert rows[0].attention_mask is None
    assert "attention_mask" not in rows[0].model_inputs()
    assert sum(float(row.weights.sum()) for row in rows) == pytest.approx(1)
    with pytest.raises(BatchError, match="sample 1 has 9 tokens, a packed row holds 8"):
        Collator().pack(step, row_tokens=8)


def test_ratio_starts_at_one_with_kept_sets(sample: Build) -> None:
    """huggingface/trl#6789: p = [.5, .3, .15, .05], top_p 0.8, id 0: the engine says log(.5 / .8)."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    said = np.float32(np.log(0.5 / 0.8))
    logits = np.log(p) * 0.7  # the engine divides by temperature 0.7 first

    def one(rollout: int, **changes: Any) -> Sample:
        ids = np.array([3, 2, 0, 0], np.int32)
        logprobs = np.array([np.nan, np.nan, said, said], np.float32)
        return sample(rollout, prompt=2, turns=(2,), token_ids=ids, logprobs=logprobs, **changes)

    step = [one(n, sampling=PROCESSED, kept=[[], [], [0, 1], [1, 0]], reward=float(n)) for n in range(3)]
    for batches in (Collator(side="left", multiple_of=8).pad(step), Collator().pack(step, row_tokens=8)):
        for batch in batches:
            ids, flat = batch.token_ids.reshape(-1), batch.logprobs.reshape(-1)
            for place in np.flatnonzero(batch.loss_mask):
                scaled = logits / batch.temperature.reshape(-1)[place]
                norm = np.log(np.exp(scaled[kept_of(batch, place)]).sum())
                assert np.exp(scaled[ids[place]] - norm - flat[place]) == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(MissingLogprobsError, match="kept ids"):
        Collator().pad([one(1, sampling=PROCESSED)])
    with pytest.raises(MissingLogprobsError, match="temperature that was not recorded"):
        Collator().pad([one(1, sampling={"logprob_kind": "processed", "temperature": None})])


def test_raw_logprobs_are_over_the_whole_vocabulary(sample: Build) -> None:
    raw = {**PROCESSED, "logprob_kind": "raw"}
    kept = [[], [], [], *[list(range(1, 50))] * 4]
    (batch,) = Collator(sampling=True).pad([sample(1, sampling=raw, kept=kept)])
    assert batch.kept is None
    assert (batch.temperature == 1).all()
    (again,) = Collator(recompute=True).pad([sample(1, sampling=raw, kept=kept)])
    assert [len(kept_of(again, place)) for place in range(7)] == [0, 0, 0, 49, 49, 49, 49]
    assert again.temperature[0].tolist() == pytest.approx([1, 1, 1, 0.7, 0.7, 0.7, 0.7])
    assert batch.sampling is not None
    np.testing.assert_allclose(batch.sampling.temperature[0], [np.nan] * 3 + [0.7] * 4, rtol=1e-6)
    np.testing.assert_allclose(batch.sampling.top_p[0], [np.nan] * 3 + [0.8] * 4, rtol=1e-6)
    assert batch.sampling.top_k.tolist() == [[-1, -1, -1, 20, 20, 20, 20]]
    np.testing.assert_array_equal(batch.sampling.min_p[0], [np.nan] * 3 + [0.0] * 4)


def test_missing_logprobs_are_refused_where_a_ratio_is_needed(sample: Build) -> None:
    missing = np.full(7, np.nan, np.float32)
    bare = sample(1, logprobs=missing, sampling={"logprob_kind": "none"})
    with pytest.raises(MissingLogprobsError, match="4 of 4 trained tokens"):
        Collator().pad([bare])
    with pytest.raises(MissingLogprobsError, match="replayed"):
        Collator().pack([sample(1, source="replayed")])
    evidence = sample(2, logprobs=missing, sampling={"logprob_kind": "none"}, in_loss=False)
    (batch,) = Collator().pad([sample(1), evidence])
    assert not np.isnan(batch.logprobs).any(), "evidence is not trained, so it needs no ratio"
    (batch,) = Collator(ratio=False, advantages=None).pad([bare])
    assert np.isnan(batch.logprobs).tolist() == [[False] * 3 + [True] * 4]
    assert batch.advantages is None


def test_untrained_tokens_cannot_overflow_a_ratio(sample: Build) -> None:
    """exp(0 - logprob) of a sampled, masked, very unlikely token is infinite, and infinity by 0 is NaN."""
    unlikely = np.array([np.nan] * 3 + [-1.0, -200.0, -1.0, -1.0], np.float32)
    (batch,) = Collator().pad([sample(1, logprobs=unlikely, mask=[0, 0, 0, 1, 0, 1, 1])])
    assert batch.logprobs.tolist() == [[0, 0, 0, -1, 0, -1, -1]]


@pytest.mark.parametrize("pack", [False, True])
def test_experts_in_some_samples_and_not_in_others(
    sample: Build, pack: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """NVIDIA-NeMo/labs-molt#5: a merge that drops the channel, or crashes."""
    routed = np.arange(6 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2)
    step = [sample(1, experts=routed), sample(2)]
    collator = Collator()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (batch,) = (collator.pack if pack else collator.pad)(step)
    experts = batch.routed_experts.reshape(14, 2, 2)
    assert experts.dtype == np.int16
    np.testing.assert_array_equal(experts[:6], routed)
    assert (experts[6:] == -1).all(), "the last token routed nothing, the second sample recorded nothing"
    assert collator.counters() == {"samples_without_experts": 2, "groups_without_signal": 2}
    assert len(caplog.records) == 1, "said once"
    assert Collator(missing_experts="drop").pad(step)[0].routed_experts is None
    with pytest.raises(BatchError, match="1 of 2 samples carry no routed experts"):
        Collator(missing_experts="refuse").pad(step)
    with pytest.raises(BatchError, match="different shape"):
        Collator().pad([step[0], sample(2, experts=np.zeros((6, 2, 4), np.uint8))])
    (whole,) = Collator(missing_experts="refuse").pad(step[:1])
    assert whole.routed_experts is not None


def test_truncation_is_refused_unless_asked_for_and_cuts_all_channels(sample: Build) -> None:
    """vllm#54539, verl PR #6089: ids cut, another channel not."""
    long = sample(
        1,
        turns=(4, 4),
        rewards=(0.5, 1.0),
        reward=None,
        sampling=PROCESSED,
        kept=[[i + 1] * (i % 3) for i in range(13)],
        experts=np.arange(12, dtype=np.int32).reshape(12, 1, 1),
    )
    with pytest.raises(BatchError, match="has 13 tokens, max_length is 11"):
        Collator(max_length=11, ratio=False, advantages=None).pad([long])
    cut = truncate(long, 11)
    assert [(t.start, t.end, t.finish_reason) for t in cut.turns] == [(3, 7, "stop"), (9, 11, "length")]
    assert cut.kept_offsets is not None
    assert cut.kept_ids is not None
    assert long.kept_ids is not None
    assert len(cut.kept_ids) == cut.kept_offsets[-1] < len(long.kept_ids)
    assert np.shares_memory(cut.token_ids, long.token_ids)
    collator = Collator(max_length=11, truncate=True, ratio=False, advantages=None, credit="turn")
    (batch,) = collator.pad([long])
    assert batch.token_ids.tolist() == [long.token_ids[:11].tolist()]
    assert batch.routed_experts.reshape(-1).tolist() == [*range(10), -1]
    assert batch.weights.sum() == pytest.approx(1)
    assert batch.token_rewards.nonzero()[1].tolist() == [6, 10]
    assert collator.counters() == {"samples_truncated": 1}
    assert truncate(long, 2).turns == ()
    assert truncate(long, 13) is long
    with pytest.raises(BatchError, match="max_length must be 1"):
        truncate(long, 0)


def test_samples_are_copied_once(sample: Build) -> None:
    """Beside the batch itself only weights, advantages and rewards are held, 12 bytes a token."""
    step = [sample(n, group=n // 4, turns=(20_000,), reward=float(n)) for n in range(8)]
    collator = Collator()
    for make in (collator.pad, collator.pack):
        tracemalloc.start()
        try:
            (batch,) = make(step)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        arrays = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        held = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        assert peak < 1.5 * held


def test_a_step_without_anything_to_train(sample: Build) -> None:
    (batch,) = Collator().pad([sample(1, in_loss=False, reward=None, in_baseline=False)])
    assert batch.weights.sum() == 0
    assert np.isnan(batch.rewards).all()
    with pytest.raises(BatchError, match="no samples"):
        Collator().pad([])


def test_a_first_token_that_cannot_be_trained_is_counted(sample: Build) -> None:
    collator = Collator()
    (batch,) = collator.pad([sample(1, prompt=0), sample(2, reward=1.0)])
    assert not batch.loss_mask[0, 0]
    assert batch.advantages[0, 0] == batch.weights[0, 0] == 0
    assert collator.counters()["first_tokens_not_trained"] == 1


def test_settings_that_cannot_work() -> None:
    for wrong in ({"multiple_of": 0}, {"max_length": 0}, {"pad_id": -1}):
        with pytest.raises(BatchError, match="must be 1 or more"):
            Collator(**wrong)


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_a_turn_beyond_the_cut_has_earned_its_reward(sample: Build, layout: str) -> None:
    """Rewards 0, 1, 2, 3 on the second turns, those of 2 and 3 cut off: the best looked like the worst."""
    step = [
        sample(n, turns=(4, 4), rewards=(0.0, float(n)), prompt=3 if n < 2 else 9, reward=None)
        for n in range(4)
    ]
    whole = Collator(credit="turn")
    cut = Collator(credit="turn", max_length=13, truncate=True)
    for number, sample_ in enumerate(step):
        (batch,) = getattr(whole, layout)(step)
        (short,) = getattr(cut, layout)(step)
        first = [
            b.advantages[(b.sequence_ids == order_of(b, number)) & b.loss_mask][0] for b in (batch, short)
        ]
        assert first[0] == first[1], number
        assert short.token_rewards[short.sequence_ids == order_of(short, number)].sum() == number
        assert len(sample_) == (13 if number < 2 else 19)
    assert cut.counters()["samples_truncated"] == 8


def order_of(batch: Batch[Any], number: int) -> int:
    """Which sequence of the batch a sample of the step is."""
    return batch.sample_index.tolist().index(number)


def test_a_reward_with_no_token_left_moves_to_the_rollouts_earlier_part(sample: Build) -> None:
    parts = [
        sample(1, parts=2, turns=(4,), rewards=(1.0,), reward=None),
        sample(1, part=1, parts=2, prompt=9, turns=(4,), rewards=(2.0,), reward=None),
    ]
    (batch,) = Collator(credit="turn", max_length=8, truncate=True).pad([*parts, sample(2, rewards=(1.0,))])
    assert batch.token_rewards[0].tolist() == [0, 0, 0, 0, 0, 0, 3.0, 0]
    assert not batch.token_rewards[1].any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"weights": "tokens"},
            "weights is 'tokens': give 'token', 'sample', 'rollout', 'group' or 'constant'",
        ),
        ({"advantages": "gppo"}, "advantages is 'gppo': give 'grpo', 'dr_grpo', 'rloo', 'reward' or None"),
        ({"credit": "turns"}, "credit is 'turns': give 'rollout', 'turn', 'turn_and_rollout' or None"),
        ({"side": "top"}, "side is 'top': give 'left' or 'right'"),
        ({"missing_experts": "dorp"}, "missing_experts is 'dorp': give 'fill', 'drop' or 'refuse'"),
        ({"discount": math.nan, "credit": "turn"}, "discount is nan: give a number"),
        ({"discount": 1.5, "credit": "turn"}, r"discount must lie in 0\.\.1, got 1.5"),
        ({"discount": 0.9}, "discount=0.9 is per turn, and with credit=None there are none"),
        ({"weights": "constant"}, "'constant' needs a length of 1 or more"),
        ({"max_length": "4096"}, "max_length is '4096': give an int or None"),
        ({"ratio": 1}, "ratio is 1: give True or False"),
    ],
)
def test_misspelt_options_are_refused_when_the_collator_is_made(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        Collator(**options)


def test_token_logprobs_of_numpy_arrays_says_what_it_takes(sample: Build) -> None:
    (batch,) = Collator(advantages=None).pad([sample(1)])
    with pytest.raises(
        BatchError, match=r"takes tensors.* and logits holds numpy arrays: give batch\.torch\(\)"
    ):
        token_logprobs(np.zeros((1, 7, 60), np.float32), batch)
