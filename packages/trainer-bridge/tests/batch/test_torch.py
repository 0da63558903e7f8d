"""Batches as torch tensors. Skipped without torch; `.ci/run` has an environment with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from token_tracking.sample import Sample
from trainer_bridge.batch import token_logprobs
from trainer_bridge.collate import Collator
from trainer_bridge.errors import BatchError

torch = pytest.importorskip("torch", reason="torch is not installed: tensors are not tested here")

Build = Callable[..., Sample]
PROCESSED = {"logprob_kind": "processed", "temperature": 0.7, "top_p": 0.8}


def test_tensors_share_the_batchs_memory(sample: Build) -> None:
    """The one copy is the one into the batch; samples are read-only and stay as they were."""
    step = [sample(1, experts=np.ones((6, 2, 2), np.uint8)), sample(2, reward=1.0)]
    for (batch,) in (Collator(sampling=True).pad(step), Collator(sampling=True).pack(step)):
        tensors = batch.torch()
        for name in ("token_ids", "logprobs", "loss_mask", "weights", "routed_experts", "cu_seqlens"):
            array, tensor = getattr(batch, name), getattr(tensors, name)
            assert isinstance(tensor, torch.Tensor), name
            assert np.shares_memory(array, tensor.numpy()), name
            assert tensor.shape == array.shape
            assert not np.shares_memory(array, step[0].token_ids)
        tensors.token_ids[0, 0] = 77
        assert batch.token_ids[0, 0] == 77
        assert tensors.token_ids.dtype == torch.int64
        assert tensors.cu_seqlens.dtype == torch.int32
        assert isinstance(tensors.sampling.temperature, torch.Tensor)
        np.testing.assert_array_equal(tensors.labels().numpy(), batch.labels())
        assert tensors.torch is not None
        assert tensors.max_seqlen == 7


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_a_batch_that_only_fills_up_goes_through_a_model_and_back(sample: Build, layout: str) -> None:
    """With FSDP each rank must run backward; a row with nothing to attend to makes NaN of all gradients."""
    torch.manual_seed(0)
    embed = torch.nn.Embedding(32, 8)
    layer = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
    made = getattr(Collator(multiple_of=4, pad_id=0), layout)([sample(1), sample(2, reward=1.0)], batches=2)
    batch = made[-1].torch()
    hidden = None if batch.attention_mask is None else batch.attention_mask == 0
    logits = layer(embed(batch.token_ids), src_key_padding_mask=hidden) @ embed.weight.T
    logprobs = token_logprobs(logits, batch)
    ratio = torch.exp(logprobs - batch.logprobs)
    (-ratio * batch.advantages * batch.weights).sum().backward()
    for parameter in (*embed.parameters(), *layer.parameters()):
        assert parameter.grad is not None
        assert not parameter.grad.any()


def full_vocabulary(batch: Any, p: list[float], temperature: float) -> Any:
    logits = torch.tensor(p).log() * temperature
    return logits.expand(*batch.token_ids.shape, len(p)).clone().requires_grad_()


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_ratio_starts_at_one(sample: Build, layout: str) -> None:
    """huggingface/trl#6789: p = [.5, .3, .15, .05], top_p 0.8, id 0: -0.470 against -0.693."""
    p = [0.5, 0.3, 0.15, 0.05]

    def one(rollout: int, said: float, **changes: Any) -> Sample:
        logprobs = np.array([np.nan, np.nan, said, said], np.float32)
        ids = np.array([3, 2, 0, 0], np.int32)
        return sample(rollout, prompt=2, turns=(2,), token_ids=ids, logprobs=logprobs, **changes)

    kept = [[], [], [0, 1], [1, 0]]
    cut = one(1, math.log(0.5 / 0.8), sampling=PROCESSED, kept=kept)
    hot = one(2, math.log(0.5), sampling={"logprob_kind": "processed", "temperature": 0.7}, reward=1.0)
    (batch,) = getattr(Collator(), layout)([cut, hot])
    batch = batch.torch()
    logits = full_vocabulary(batch, p, 0.7)
    now = token_logprobs(logits, batch)
    assert now.shape == batch.token_ids.shape
    ratio = torch.exp(now - batch.logprobs)
    torch.testing.assert_close(ratio, torch.ones_like(ratio))
    assert not (now[~batch.loss_mask]).any()
    now.sum().backward()
    assert torch.isfinite(logits.grad).all()
    used = logits.grad.reshape(-1, 4).abs().sum(1) > 0
    assert used.nonzero()[:, 0].tolist() == (batch.loss_mask.reshape(-1).nonzero()[:, 0] - 1).tolist()
    cut_rows = logits.grad.reshape(-1, 4)[:3][used[:3]]
    assert not cut_rows[:, 2:].any(), "what was not kept gets no gradient"

    (raw,) = Collator(ratio=False).pad([one(1, math.log(0.5 / 0.8), sampling={"logprob_kind": "raw"})])
    off = torch.exp(token_logprobs(full_vocabulary(raw, p, 1.0), raw.torch()) - raw.torch().logprobs)
    assert off[0, 3].item() == pytest.approx(0.8, rel=1e-4), "without the sets the ratio is off by the mass"


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_every_token_is_normalised_over_its_own_set(sample: Build, layout: str) -> None:
    """Sets of every size, also on tokens that are not trained, against the definition in numpy."""
    rng = np.random.default_rng(3)
    step = []
    for rollout, cut in enumerate((True, False, True, True)):
        ids = rng.integers(0, 20, 9).astype(np.int32)
        sets = [
            [] if i < 3 or i == 7 else [int(ids[i]), *map(int, rng.integers(20, 30, i))] for i in range(9)
        ]
        sets = [[int(ids[i]), *map(int, rng.integers(20, 30, i))] for i in range(9)]
        sets[:3], sets[7] = [[]] * 3, []
        mask = [0, 0, 0, 1, 0, 1, 1, int(not cut), 1]
        step.append(
            sample(
                rollout,
                turns=(6,),
                token_ids=ids,
                mask=mask,
                sampling={**PROCESSED, "top_p": 0.8 if cut else 1.0},
                kept=sets if cut else None,
                reward=float(rollout),
            )
        )
    for each in getattr(Collator(), layout)(step, **({"max_rows": 2} if layout == "pad" else {})):
        logits = rng.normal(size=(*each.token_ids.shape, 30)).astype(np.float32)
        got = token_logprobs(torch.from_numpy(logits), each.torch()).numpy().reshape(-1)
        flat = logits.reshape(-1, 30)
        for place in np.flatnonzero(each.loss_mask.reshape(-1)):
            scaled = flat[place - 1].astype(np.float64) / 0.7
            low, high = (0, 0) if each.kept is None else each.kept.offsets[place : place + 2]
            over = scaled[each.kept.ids[low:high]] if high > low else scaled
            said = scaled[each.token_ids.reshape(-1)[place]] - np.log(np.exp(over).sum())
            assert got[place] == pytest.approx(said, rel=1e-4)


def test_padded_and_packed_losses_and_gradients_are_equal(sample: Build, miles_2378: list[Sample]) -> None:
    """Whatever the number of micro-batches: weights add up over all of them."""
    step = [*miles_2378, sample(3, group=1, turns=(3, 4), reward=1.0), sample(4, group=1, in_loss=False)]
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(1))
    seen = []
    for batches in (
        Collator().pad(step),
        Collator(side="left").pad(step, max_rows=2),
        Collator().pack(step),
        Collator().pack(step, row_tokens=45),
    ):
        weight = table.clone().requires_grad_()
        total = 0.0
        for batch in (each.torch() for each in batches):
            ratio = torch.exp(token_logprobs(weight[batch.token_ids], batch) - batch.logprobs)
            loss = -(batch.weights * batch.advantages * ratio).sum()
            loss.backward()
            total += loss.item()
        seen.append((total, weight.grad))
    for total, grad in seen[1:]:
        assert total == pytest.approx(seen[0][0], rel=1e-4)
        torch.testing.assert_close(grad, seen[0][1], rtol=1e-4, atol=1e-6)
    assert seen[0][1].abs().sum() > 0


def test_device_moves_the_batch(sample: Build) -> None:
    (batch,) = Collator().pad([sample(1)])
    moved = batch.torch("meta")
    assert {moved.token_ids.device.type, moved.weights.device.type} == {"meta"}
    assert moved.kept is None


def test_logits_of_another_model_are_named(sample: Build) -> None:
    """A model with a smaller vocabulary than the one that sampled gave an IndexError out of `gather`."""
    kept = [[], [], [], *([[50]] * 4)]
    for step, said in (
        (
            [sample(1, token_ids=np.full(7, 40, np.int32))],
            "token id 40, and the logits have columns for 0 to 31",
        ),
        (
            [sample(1, token_ids=np.full(7, 50, np.int32), sampling=PROCESSED, kept=kept)],
            "token id 50, and the logits have columns",
        ),
    ):
        (batch,) = Collator(advantages=None).pad(step)
        batch = batch.torch()
        with pytest.raises(BatchError, match=said):
            token_logprobs(torch.zeros(*batch.token_ids.shape, 32), batch)
        with pytest.raises(BatchError, match=r"shape \(1, 6, 60\)"):
            token_logprobs(torch.zeros(1, 6, 60), batch)
