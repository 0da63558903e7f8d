from typing import Any

import msgspec
import numpy as np
import pytest
from token_tracking import MissingLogprobsError, Sample, SampleError, Turn


def build(**change: Any) -> Sample:
    values: dict[str, Any] = {
        "rollout_id": "0" * 32,
        "group_id": "1" * 32,
        "task_id": "t",
        "token_ids": np.array([1, 2, 3, 4], np.int32),
        "loss_mask": np.array([0, 0, 1, 1], np.uint8),
        "logprobs": np.array([np.nan, np.nan, -0.5, -1.0], np.float32),
        "versions": np.array([-1, -1, 0, 0], np.int32),
        "prompt_length": 2,
        "turns": (
            Turn(start=2, end=4, finish_reason="stop", logprob_kind="raw", top_p=1.0, top_k=-1, min_p=0.0),
        ),
        "reward": 1.0,
        "status": "completed",
        "source": "sampled",
    }
    return Sample(**(values | change))


def test_arrays_are_held_read_only_and_the_callers_stay_writable():
    ids = np.array([1, 2, 3, 4], np.int32)
    sample = build(token_ids=ids)
    with pytest.raises(ValueError, match="read-only"):
        sample.token_ids[0] = 9
    ids[0] = 1
    assert np.shares_memory(ids, sample.token_ids)


@pytest.mark.original("A-snapshot-whole", "A-backfill-lengths")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss_mask": np.zeros(3, np.uint8)}, "3 entries for 4"),
        ({"loss_mask": np.array([1, 0, 1, 1], np.uint8)}, "only sampled tokens are trained"),
        (
            {"versions": np.array([-1, -1, -1, 0], np.int32), "loss_mask": np.zeros(4, np.uint8)},
            "exactly where",
        ),
        ({"logprobs": np.array([0, 0, 0.5, 0], np.float32)}, "<= 0"),
        ({"prompt_length": 1}, "prompt_length is 1"),
        ({"rollout_id": "x"}, "32 lower-case hex"),
        ({"reward": float("nan")}, "reward must be finite"),
        ({"part": 1}, "part"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], why: str):
    with pytest.raises(SampleError, match=why):
        build(**change)


@pytest.mark.original("A-statuses")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rollout_id": None}, "rollout_id is None: need a str"),
        ({"task_id": 5}, "task_id is 5: need a str"),
        ({"attempt": "0"}, "attempt is '0': need an int"),
        ({"reward": "1"}, "reward is '1': need a finite number or None"),
        ({"reward": True}, "reward is True"),
        ({"in_loss": 1}, "in_loss is 1: need a bool"),
        ({"status": "done"}, "status is 'done': need one of completed, truncated, aborted, failed"),
        ({"source": None}, "source is None: need one of sampled, replayed"),
    ],
)
def test_values_of_another_kind_are_refused(change: dict[str, Any], why: str):
    with pytest.raises(SampleError, match=why):
        build(**change)


@pytest.mark.parametrize("change", [{"finish_reason": "tool_calls"}, {"logprob_kind": "foo"}, {"start": 2.0}])
def test_a_turn_of_another_kind_is_refused(change: dict[str, Any]):
    values: dict[str, Any] = {"start": 2, "end": 4, "finish_reason": "stop", "logprob_kind": "raw"}
    with pytest.raises(SampleError, match=next(iter(change))):
        Turn(**(values | change))


def test_numpy_scalars_are_held_as_plain_values():
    """A grader gives np.float32, an adapter np.int64: an encoder of the sample would refuse them."""
    values: dict[str, Any] = {
        "start": np.int64(2),
        "end": np.int32(4),
        "finish_reason": np.str_("stop"),
        "logprob_kind": "raw",
        "temperature": np.float32(0.5),
        "top_k": np.int64(-1),
        "reward": np.float64(1),
    }
    turn = Turn(**values)
    sample = build(
        turns=(turn,),
        reward=np.float32(0.5),
        attempt=np.int64(1),
        in_loss=np.bool_(False),
        task_id=np.str_("t"),
    )
    assert [type(value) for value in (turn.start, turn.finish_reason, turn.temperature)] == [int, str, float]
    assert (sample.reward, sample.attempt, sample.in_loss) == (0.5, 1, False)
    held = msgspec.to_builtins(turn)
    assert msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(held)), Turn) == turn
    kinds = [type(value) for value in (sample.reward, sample.attempt, sample.in_loss, sample.task_id)]
    assert kinds == [float, int, bool, str]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token_ids": np.array(1, np.int32)}, "token_ids must be a flat int32 array"),
        ({"token_ids": np.ones((2, 2), np.int32)}, "token_ids must be a flat int32 array"),
        ({"kept_ids": np.array(1, np.int32)}, "kept_ids must be a flat int32 array"),
        ({"kept_ids": np.ones((1, 1), np.int32)}, "kept_ids must be a flat int32 array"),
        ({"routed_experts": np.ones((3, 1, 1), np.float32)}, "routed_experts must be integers of shape"),
    ],
)
def test_arrays_of_other_dimensions_or_types_are_refused(changes: dict[str, Any], text: str):
    """They come from the network: a TypeError there ended a receiver for all."""
    offsets = {"kept_offsets": np.array([0, 0, 0, 1, 1])} if "kept_ids" in changes else {}
    with pytest.raises(SampleError, match=text):
        build(**changes, **offsets)


def test_a_ratio_needs_logprobs():
    build().require_logprobs()
    with pytest.raises(MissingLogprobsError, match="replayed"):
        build(source="replayed").require_logprobs()
    with pytest.raises(MissingLogprobsError, match="1 of 2"):
        build(logprobs=np.array([np.nan, np.nan, np.nan, -1], np.float32)).require_logprobs()


@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
def test_truncated_sampling_needs_its_kept_sets(kind: Any, cut: dict[str, Any]):
    """trl#6789: the ids were drawn from the kept ids, whatever the log-probabilities are over."""
    turns = (Turn(start=2, end=4, finish_reason="stop", logprob_kind=kind, **cut),)
    sample = build(turns=turns)
    with pytest.raises(MissingLogprobsError, match="2 of its trained tokens come without the ids"):
        sample.require_logprobs()
    half: dict[str, Any] = {
        "turns": turns,
        "kept_ids": np.array([3, 7], np.int32),
        "kept_offsets": np.array([0, 0, 0, 2, 2]),
    }
    with pytest.raises(MissingLogprobsError, match="1 of its trained tokens come without the ids"):
        build(**half).require_logprobs()
    build(**half, loss_mask=np.array([0, 0, 1, 0], np.uint8)).require_logprobs()
    both = half | {"kept_ids": np.array([3, 7, 4], np.int32), "kept_offsets": np.array([0, 0, 0, 2, 3])}
    build(**both).require_logprobs()
    kept = build(**both).kept
    assert kept is not None
    assert kept.part(2, 4).ids.tolist() == [3, 7, 4]
    assert sample.kept is None
