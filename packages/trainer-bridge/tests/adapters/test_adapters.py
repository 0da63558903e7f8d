"""Each adapter against the fields of its trainer's class; `real.py` is the same against the real classes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_tracking.errors import MissingLogprobsError
from token_tracking.sample import Sample
from trainer_bridge.adapters import Omissions, datasets, prime_rl, skyrl, slime, trl, verl
from trainer_bridge.advantages import advantages
from trainer_bridge.errors import BatchError, ConfigError, TrainerMissingError
from trainer_bridge.testing import differences, make_rollout, make_sample

some = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
change = msgspec.structs.replace


@st.composite
def steps(draw: st.DrawFn, max_parts: int = 3) -> list[Sample]:
    """Whole groups of whole rollouts, each of one to three multi-turn parts."""
    samples: list[Sample] = []
    for group in range(draw(st.integers(1, 3))):
        for member in range(2):
            parts = draw(st.integers(1, max_parts))
            tokens = draw(st.integers(8, 40))
            samples += make_rollout(group * 2 + member, parts=parts, tokens=tokens, group=group)
    return samples


def one_turn(sample: Sample, **changes: Any) -> Sample:
    return change(sample, turns=(*sample.turns[:-1], change(sample.turns[-1], **changes)))


def check_streams(samples: Sequence[Sample], ids: Any, masks: Any, logprobs: Any) -> None:
    """Token by token: full-length lists against the samples, NaN only as 0 under mask 0."""
    assert [list(i) for i in ids] == [s.token_ids.tolist() for s in samples]
    assert [list(map(int, m)) for m in masks] == [s.loss_mask.tolist() for s in samples]
    for held, sample in zip(logprobs, samples, strict=True):
        trained = sample.loss_mask == 1
        assert (np.array(held, np.float32)[trained] == sample.logprobs[trained]).all()
        assert not np.array(held)[~trained].any()


def full(samples: Sequence[Sample], responses: Any) -> list[list[Any]]:
    return [[0] * s.prompt_length + list(r) for s, r in zip(samples, responses, strict=True)]


@given(samples=steps(max_parts=1))
@some
def test_trl_rows(samples: list[Sample]) -> None:
    out = trl.rollout_output(samples, num_generations=2)
    ids = [p + c for p, c in zip(out["prompt_ids"], out["completion_ids"], strict=True)]
    check_streams(samples, ids, full(samples, out["env_mask"]), full(samples, out["logprobs"]))
    assert trl.recorded_reward(**out) == [s.reward for s in samples]
    assert out["weight_versions"] == [[3]] * len(samples)


def test_trl_takes_no_parts_and_no_broken_groups() -> None:
    whole = [make_rollout(0)[0], make_rollout(1)[0]]
    with pytest.raises(BatchError, match=r"accept that with Omissions\(\"parts\"\)"):
        trl.rollout_output([*make_rollout(0, parts=2), *make_rollout(1)], num_generations=2)
    with pytest.raises(BatchError, match="one row per rollout"):
        trl.rollout_output(
            [*make_rollout(0, parts=2), *make_rollout(1)], num_generations=2, omissions=Omissions("parts")
        )
    with pytest.raises(BatchError, match="has 2 rollouts, num_generations is 4"):
        trl.rollout_output(whole, num_generations=4)


def test_a_failure_has_no_reward_in_trl() -> None:
    """Promise 8: TRL leaves a reward of None out of mean and deviation; 0 would count."""
    failed = change(make_rollout(1)[0], in_loss=False, in_baseline=False, status="failed", reward=None)
    out = trl.rollout_output([make_rollout(0)[0], failed], num_generations=2)
    assert out["rollout_reward"] == [0.0, None]
    assert sum(out["env_mask"][1]) == 0
    trained = change(failed, in_loss=True)
    with pytest.raises(BatchError, match="not graded"):
        trl.rollout_output([trained], num_generations=1, omissions=Omissions("baseline"))


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("trainer", ["slime", "miles"])
@given(samples=steps())
@some
def test_slime_and_miles(trainer: Any, samples: list[Sample]) -> None:
    out = slime.training_samples(samples, trainer=trainer, reward_hook=True)
    flat = [made for group in out for rollout in group for made in rollout]
    masks, logprobs = [m.loss_mask for m in flat], [m.rollout_log_probs for m in flat]
    check_streams(samples, [m.tokens for m in flat], full(samples, masks), full(samples, logprobs))
    assert all(m.response_length == len(m.loss_mask) == len(m.rollout_log_probs) for m in flat)
    assert [m.rollout_id for m in flat] == [int(s.rollout_id, 16) for s in samples]
    assert [m.group_index for m in flat] == [int(s.group_id, 16) for s in samples]
    assert all(len({m.rollout_id for m in rollout}) == 1 for group in out for rollout in group)
    assert all(m.weight_versions == ["3"] for m in flat)
    spans = [np.concatenate([[v] * (e - s) for s, e, v in m.metadata["version_spans"]]) for m in flat]
    assert [s.tolist() for s in spans] == [s.versions.tolist() for s in samples]


@pytest.mark.usefixtures("peers")
def test_slime_channels() -> None:
    base = one_turn(make_rollout(0, tokens=16)[0], logprob_kind="processed", top_p=0.9)
    offsets = np.arange(17, dtype=np.int64) * 2  # two kept ids for every token, the prompt's too
    kept = np.arange(offsets[-1], dtype=np.int32)
    experts = np.arange(15 * 4, dtype=np.uint8).reshape(15, 2, 2)
    sample = change(base, kept_ids=kept, kept_offsets=offsets, routed_experts=experts, in_loss=False)
    [[[made]]] = slime.training_samples([sample])
    first = made.rollout_top_p_token_offsets
    assert first[0] == 0
    assert first[-1] == len(made.rollout_top_p_token_ids)
    assert made.rollout_top_p_token_ids == kept[2 * sample.prompt_length :].tolist()
    assert len(first) == made.response_length + 1
    assert made.rollout_routed_experts.dtype == np.int32
    assert (made.rollout_routed_experts == experts).all()
    assert made.remove_sample
    assert sum(made.loss_mask) == 0
    with pytest.raises(BatchError, match="kept ids cannot be replayed"):
        slime.training_samples([sample], trainer="miles")


class Scored(SimpleNamespace):
    def get_reward_value(self, args: Any) -> float:
        return self.reward


@pytest.mark.usefixtures("peers")
def test_slime_reward_hook_counts_a_rollout_once() -> None:
    """radixark/miles#2378: A, reward 1, in three parts, and B, reward 0, have mean 0.5, not 0.75."""
    a, b = make_rollout(1, parts=3), make_rollout(2)
    samples = [*a, *b, change(make_rollout(3)[0], in_baseline=False)]
    with pytest.raises(BatchError, match="Omissions"):
        slime.training_samples(samples)
    out = slime.training_samples(samples, reward_hook=True)
    scored = [Scored(**vars(m)) for group in out for rollout in group for m in rollout]
    settings = SimpleNamespace(
        advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False
    )
    raw, rewards = slime.reward_post_process(settings, scored)
    assert raw == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert rewards == [0.5, 0.5, 0.5, -0.5, 0.5]
    settings.grpo_std_normalization = True
    ours = [
        float(t.max() if s.reward else t.min())
        for t, s in zip(advantages(samples).tokens, samples, strict=True)
    ]
    assert slime.reward_post_process(settings, scored)[1] == pytest.approx(ours, rel=1e-6)


@pytest.mark.usefixtures("peers")
@given(samples=steps())
@some
def test_skyrl(samples: list[Sample]) -> None:
    out = skyrl.generator_output(samples)
    from skyrl.train.generators.base import GeneratorOutput

    assert out.keys() == GeneratorOutput.__annotations__.keys()
    ids = [p + r for p, r in zip(out["prompt_token_ids"], out["response_ids"], strict=True)]
    check_streams(samples, ids, full(samples, out["loss_masks"]), full(samples, out["rollout_logprobs"]))
    assert out["is_last_step"] == [s.part == s.parts - 1 for s in samples]
    assert [sum(r) for r in out["rewards"]] == [s.reward if s.part == s.parts - 1 else 0 for s in samples]
    assert [t.instance_id for t in out["trajectory_ids"]] == [s.group_id for s in samples]
    steps_of = [(t.instance_id, t.repetition_id) for t in out["trajectory_ids"]]
    for i, last in enumerate(out["is_last_step"][:-1]):  # SkyRL's own rule
        assert last == (steps_of[i] != steps_of[i + 1])


@pytest.mark.usefixtures("peers")
@given(samples=steps())
@some
def test_prime_rl(samples: list[Sample]) -> None:
    settled = advantages(samples).tokens
    out = prime_rl.training_samples(samples, advantages=settled, env_name="swe")
    check_streams(samples, [m.token_ids for m in out], [m.mask for m in out], [m.logprobs for m in out])
    assert [np.float32(m.advantages).tolist() for m in out] == [a.tolist() for a in settled]
    # Its wire is positional msgpack, and decoding checks the types.
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=list[type(out[0])])
    assert again == out


@pytest.mark.usefixtures("peers")
def test_prime_rl_temperatures_and_experts() -> None:
    base = make_rollout(0, tokens=16)[0]
    heat = {"logprob_kind": "processed", "temperature": 0.7}
    base = change(base, turns=(change(base.turns[0], **heat), base.turns[1]))
    experts = np.ones((15, 2, 2), np.uint8)
    zeros = [np.zeros(16, np.float32)]
    [made] = prime_rl.training_samples(
        [change(base, routed_experts=experts)], advantages=zeros, env_name="swe"
    )
    assert made.temperatures == [1.0] * 4 + [0.7] * 4 + [1.0] * 8
    assert made.routed_experts.shape == [16, 2, 2]
    assert len(made.routed_experts.data) == 16 * 4
    with pytest.raises(BatchError, match="unknown temperature"):
        prime_rl.training_samples(
            [one_turn(base, logprob_kind="processed", temperature=None)], advantages=zeros, env_name="swe"
        )
    with pytest.raises(BatchError, match="each as long as the sample"):
        prime_rl.training_samples([base], advantages=[zeros[0][:-1]], env_name="swe")


def test_ratio_needs_logprobs() -> None:
    sample = make_rollout(0)[0]
    bare = change(
        sample,
        logprobs=np.full(len(sample), np.nan, np.float32),
        turns=tuple(change(turn, logprob_kind="none") for turn in sample.turns),
    )
    with pytest.raises(MissingLogprobsError):
        trl.rollout_output([bare], num_generations=1)
    assert trl.rollout_output([bare], num_generations=1, ratio=False)["logprobs"] is None
    outside = change(bare, in_loss=False)
    assert not np.array(trl.rollout_output([outside], num_generations=1)["logprobs"]).any()


@pytest.mark.parametrize(
    ("what", "sample"),
    [
        ("turn_rewards", one_turn(make_rollout(1)[0], reward=0.5)),
        ("baseline", change(make_rollout(1)[0], in_baseline=False)),
        ("routed_experts", change(make_rollout(1)[0], routed_experts=np.ones((63, 1, 1), np.uint8))),
        ("temperatures", one_turn(make_rollout(1)[0], logprob_kind="processed", temperature=0.5)),
    ],
)
def test_nothing_is_lost_in_silence(what: Any, sample: Sample, caplog: pytest.LogCaptureFixture) -> None:
    samples = [make_rollout(0)[0], sample, change(sample, rollout_id="f" * 32)]
    with pytest.raises(BatchError, match=f'{sample.rollout_id} does not fit TRL.*Omissions."{what}"'):
        trl.rollout_output(samples, num_generations=3)
    omissions = Omissions(what)
    trl.rollout_output(samples, num_generations=3, omissions=omissions)
    assert omissions.counts == {what: 2, "provenance": 3}
    assert len([r for r in caplog.records if what in r.getMessage()]) == 1
    with pytest.raises(ConfigError, match="unknown omissions"):
        Omissions("everything")


@pytest.mark.usefixtures("peers")
def test_idle_rollouts_are_left_out_and_counted() -> None:
    failed = [
        change(part, in_loss=False, in_baseline=False, reward=None, status="failed")
        for part in make_rollout(1, parts=2)
    ]
    omissions = Omissions()
    out = skyrl.generator_output([*make_rollout(0), *failed], omissions=omissions)
    assert len(out["response_ids"]) == 1
    assert omissions.counts["idle"] == 2
    with pytest.raises(BatchError, match="nothing to hand"):
        skyrl.generator_output(failed)
    with pytest.raises(BatchError, match="has 2 parts, but parts"):
        skyrl.generator_output([*make_rollout(0), failed[0]])


@pytest.mark.usefixtures("peers")
def test_routed_experts_in_some_samples_only() -> None:
    """NVIDIA-NeMo/labs-molt#5: routing in some samples of a batch, none in others."""
    samples = [make_rollout(0)[0], change(make_rollout(1)[0], routed_experts=np.ones((63, 1, 1), np.uint8))]
    with pytest.raises(BatchError, match="1 of 2 samples have routed experts"):
        skyrl.generator_output(samples)


def test_a_missing_trainer_is_named() -> None:
    with pytest.raises(TrainerMissingError, match=r"install verl==0\.9\.1"):
        verl.data_proto(make_rollout(0), pad_token_id=0)


def test_importing_adapters_loads_no_trainer() -> None:
    code = (
        "import sys, trainer_bridge.adapters as a\n"
        "from trainer_bridge.adapters import datasets, openrlhf, prime_rl, skyrl, slime, tinker, trl, verl\n"
        "heavy = 'torch trl verl slime miles skyrl openrlhf prime_rl tinker datasets pyarrow ray'\n"
        "print([name for name in heavy.split() if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_extra_goes_to_a_table_and_back_bit_for_bit() -> None:
    """JSON has no NaN and no infinity: they came back as None."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: tables are not tested here")
    extra = {"nan": math.nan, "low": -math.inf, "high": math.inf, "zero": -0.0, "small": 5e-324,
    "one": 1.0, "int": 1, "large": 2**63, "none": None, "yes": True, "text": '{"float64": "é"}',
    "float64": 0.1}  # fmt: skip
    sample = change(make_sample(1), extra=extra, provenance={"loss": math.nan})
    (row,) = datasets.table([sample]).to_pylist()
    assert differences(sample, datasets.sample_of(row)) == []
