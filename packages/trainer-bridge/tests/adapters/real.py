"""The adapters against the trainers' real classes; `.ci/adapters.py` makes the environment and runs this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets as hf
import msgspec
import numpy as np
import pytest
import tensordict
import tinker as tinker_api
import torch
import trl as trl_api
from token_tracking.sample import Sample
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trainer_bridge.adapters import Omissions, datasets, openrlhf, tinker, trl, verl
from trainer_bridge.advantages import advantages
from trainer_bridge.errors import BatchError
from trainer_bridge.testing import differences, make_rollout
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

change = msgspec.structs.replace
VOCABULARY = 64


def small(sample: Sample) -> Sample:
    """The same sample in a vocabulary that a tiny model has."""
    return change(sample, token_ids=sample.token_ids % VOCABULARY)


@pytest.fixture
def samples() -> list[Sample]:
    """Two groups of two rollouts, of different lengths; one is longer in the prompt."""
    return [make_rollout(i, tokens=8 + 12 * i, group=i // 2)[0] for i in range(4)]


class Recording(trl_api.GRPOTrainer):
    """Keeps what TRL made of the rollouts."""

    made: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.made = super()._generate_and_score_completions(inputs)
        return self.made


def test_trl_trains_a_step_on_it(tmp_path: Path, samples: list[Sample]) -> None:
    samples = [small(sample) for sample in samples]
    samples[0] = change(samples[0], in_loss=False, in_baseline=False, reward=None, status="failed")
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    trainer = Recording(
        model=LlamaForCausalLM(config),
        processing_class=tokenizer,
        reward_funcs=trl.recorded_reward,
        train_dataset=hf.Dataset.from_dict({"prompt": ["w3", "w4"]}),
        rollout_func=lambda prompts, trainer: trl.rollout_output(samples, num_generations=2),
        args=trl_api.GRPOConfig(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=2,
            max_completion_length=64, use_cpu=True, report_to=[], save_strategy="no", bf16=False,
        ),
    )  # fmt: skip
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    made = trainer.made
    for row, sample in enumerate(samples):
        n, p = len(sample), sample.prompt_length
        prompt = made["prompt_ids"][row][made["prompt_mask"][row] == 1]
        completion = made["completion_ids"][row][made["completion_mask"][row] == 1]
        assert [*prompt.tolist(), *completion.tolist()] == sample.token_ids.tolist()
        mask = made["tool_mask"][row][: n - p].numpy()
        assert mask.tolist() == (sample.loss_mask[p:] * sample.in_loss).tolist()
        held = made["sampling_per_token_logps"][row][: n - p].numpy()
        assert (held[mask == 1] == sample.logprobs[p:][mask == 1]).all()
    ours = [tokens[sample.loss_mask == 1][0] for tokens, sample in
            zip(advantages(samples, epsilon=1e-4).tokens, samples, strict=True)]  # fmt: skip
    assert made["advantages"].tolist() == pytest.approx([float(a) for a in ours], abs=1e-5)
    assert made["advantages"].tolist()[:2] == [0.0, 0.0]
    after = trainer.model.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_verl_data_proto(samples: list[Sample]) -> None:
    proto = verl.data_proto(samples, pad_token_id=7, prompt_width=20, response_width=40)
    assert isinstance(proto, DataProto)
    assert isinstance(proto.batch, tensordict.TensorDict)
    proto.check_consistency()
    assert proto.meta_info == {"temperature": 1.0}
    batch = proto.batch
    for row, sample in enumerate(samples):
        n, p = len(sample), sample.prompt_length
        attended = batch["attention_mask"][row] == 1
        assert batch["input_ids"][row][attended].tolist() == sample.token_ids.tolist()
        assert batch["position_ids"][row][attended].tolist() == list(range(n))
        assert (batch["input_ids"][row][~attended] == 7).all()
        assert batch["prompts"][row][20 - p :].tolist() == sample.token_ids[:p].tolist()
        assert batch["responses"][row][: n - p].tolist() == sample.token_ids[p:].tolist()
        mask = batch["response_mask"][row].numpy()
        assert mask.tolist() == [*sample.loss_mask[p:].tolist(), *[0] * (40 - n + p)]
        held = batch["rollout_log_probs"][row].numpy()
        assert (held[mask == 1] == sample.logprobs[sample.loss_mask == 1]).all()
        assert not held[mask == 0].any()
        assert batch["rm_scores"][row].tolist().index(sample.reward) == (n - p - 1 if sample.reward else 0)
    assert proto.non_tensor_batch["uid"].tolist() == [sample.group_id for sample in samples]
    assert proto.non_tensor_batch["min_global_steps"].tolist() == [3] * 4
    theirs, _ = compute_grpo_outcome_advantage(
        batch["rm_scores"], batch["response_mask"], proto.non_tensor_batch["uid"]
    )
    given = verl.data_proto(
        samples, pad_token_id=7, prompt_width=20, response_width=40, advantages=advantages(samples).tokens
    )
    torch.testing.assert_close(given.batch["advantages"], theirs, rtol=1e-5, atol=1e-5)
    DataProto.concat([proto, proto])[1:3].union(proto[1:3])


def test_verl_parts_experts_and_widths(samples: list[Sample]) -> None:
    experts = np.arange(63 * 4, dtype=np.uint8).reshape(63, 2, 2)
    parts = [change(part, routed_experts=experts + part.part) for part in make_rollout(1, parts=3)]
    step = [*parts, change(make_rollout(2)[0], routed_experts=experts)]
    with pytest.raises(BatchError, match="several parts"):
        verl.data_proto(step, pad_token_id=0)
    verl.data_proto(step, pad_token_id=0, omissions=Omissions("parts"))
    batch = verl.data_proto(step, pad_token_id=0, prompt_width=30, advantages=advantages(step).tokens).batch
    for row, sample in enumerate(step):
        start = 30 - sample.prompt_length
        rows = batch["routed_experts"][row].numpy()
        assert (rows[start : start + 63] == sample.routed_experts).all()
        assert not rows[:start].any()
        assert not rows[start + 63 :].any()
    assert batch["advantages"][:3].max(dim=1).values.tolist() == pytest.approx([0.5**0.5] * 3, abs=1e-5)
    with pytest.raises(BatchError, match="do not fit 4 and"):
        verl.data_proto(samples, pad_token_id=0, prompt_width=4)


def test_tinker_datums(samples: list[Sample]) -> None:
    settled = advantages(samples).tokens
    for sample, given, datum in zip(
        samples, settled, tinker.datums(samples, advantages=settled), strict=True
    ):
        assert isinstance(datum, tinker_api.Datum)
        inputs = {name: data.to_numpy() for name, data in datum.loss_fn_inputs.items()}
        assert datum.model_input.to_ints() == sample.token_ids[:-1].tolist()
        assert inputs["target_tokens"].tolist() == sample.token_ids[1:].tolist()
        trained = sample.loss_mask[1:] == 1
        assert (inputs["logprobs"][trained] == sample.logprobs[1:][trained]).all()
        assert not inputs["logprobs"][~trained].any()
        assert (inputs["advantages"] == given[1:]).all()
    for sample, datum in zip(samples, tinker.sft_datums(samples), strict=True):
        assert datum.loss_fn_inputs["weights"].to_numpy().tolist() == sample.loss_mask[1:].tolist()
    hot = [
        change(s, turns=tuple(change(t, logprob_kind="processed", temperature=0.6) for t in s.turns))
        for s in samples
    ]
    with pytest.raises(BatchError, match="temperature"):
        tinker.datums(hot, advantages=settled)


def test_datasets_and_parquet_bit_for_bit(tmp_path: Path, samples: list[Sample]) -> None:
    offsets = np.concatenate([[0], np.cumsum(samples[0].loss_mask * 2)]).astype(np.int64)
    turns = tuple(change(turn, reward=0.25, top_k=None) for turn in samples[0].turns)
    samples[0] = change(
        samples[0], kept_ids=np.arange(offsets[-1], dtype=np.int32), kept_offsets=offsets, turns=turns,
        routed_experts=np.arange(7 * 4, dtype=np.uint8).reshape(7, 2, 2),
        extra={"note": "ü", "ok": True, "nan": float("nan")},
    )  # fmt: skip
    samples[1] = change(samples[1], reward=None, in_loss=False, in_baseline=False, status="failed")
    made = datasets.dataset(samples)
    assert isinstance(made, hf.Dataset)
    assert [differences(a, datasets.sample_of(row)) for a, row in zip(samples, made, strict=True)] == [[]] * 4
    assert datasets.write_parquet(samples, tmp_path / "s.parquet", batch=3) == 4
    back = list(datasets.read_parquet(tmp_path / "s.parquet"))
    assert [differences(a, b) for a, b in zip(samples, back, strict=True)] == [[]] * 4
    loaded = hf.Dataset.from_parquet(str(tmp_path / "s.parquet"), cache_dir=str(tmp_path / "cache"))
    assert loaded[3]["token_ids"] == samples[3].token_ids.tolist()


@pytest.mark.usefixtures("peers")
def test_openrlhf_experiences(samples: list[Sample]) -> None:
    """Real tensors; the class itself is a copy of its fields."""
    for sample, made in zip(samples, openrlhf.experiences(samples, n_samples_per_prompt=2), strict=True):
        assert made.sequences.tolist() == [sample.token_ids.tolist()]
        assert made.action_mask.tolist() == [sample.loss_mask[1:].tolist()]
        trained = sample.loss_mask[1:] == 1
        assert (made.rollout_log_probs[0].numpy()[trained] == sample.logprobs[1:][trained]).all()
        assert made.action_mask.shape == made.rollout_log_probs.shape == (1, len(sample) - 1)
        assert made.rewards.tolist() == [sample.reward]
        assert made.response_length.item() == len(sample) - sample.prompt_length
        assert made.advantages is None
    parts = [*make_rollout(0, parts=2), *make_rollout(1)]
    with pytest.raises(BatchError, match="several parts"):
        openrlhf.experiences(parts, n_samples_per_prompt=2)
    with pytest.raises(BatchError, match="gives 3 experiences"):
        openrlhf.experiences(parts, n_samples_per_prompt=2, omissions=Omissions("parts"))
    settled = advantages(parts).tokens
    for given, made in zip(
        settled, openrlhf.experiences(parts, n_samples_per_prompt=2, advantages=settled), strict=True
    ):
        assert made.advantages.tolist() == [given[1:].tolist()]
