# pyright: basic
"""`Batch`: the samples of one forward pass as arrays, numpy or torch. The one file here that knows torch.

torch has no part in making a batch: `Collator` fills numpy arrays, each once, and `Batch.torch()` gives
tensors over the same memory.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from trainer_bridge.errors import BatchError, TorchMissingError

T = TypeVar("T")
"""`numpy.ndarray`, or `torch.Tensor` after `Batch.torch()`."""


class Sampling(NamedTuple, Generic[T]):
    """What the engine was told, per token; for looking and for masks of your own."""

    temperature: T
    """float32 `[rows, tokens]`. NaN: not sampled, or not known. The same for `top_p` and `min_p`."""
    top_p: T
    top_k: T
    """int64. -1: off, not sampled, or not known."""
    min_p: T


class Kept(NamedTuple, Generic[T]):
    """The vocabulary ids over which truncated log-probabilities are normalised (trl#6789)."""

    ids: T
    """int64 `[k]`: all sets one after the other."""
    offsets: T
    """int64 `[rows * tokens + 1]`, over the batch's rows laid end to end: token i kept
    `ids[offsets[i]:offsets[i + 1]]`. Empty: the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch(Generic[T]):
    """The samples of one forward pass.

    Every channel of shape `[rows, tokens]` stands at the token it is about, never at the one before:
    `loss_mask`, `logprobs`, `weights` and the rest at i speak of `token_ids` at i, which the model predicts
    from position i - 1. `token_logprobs` and `labels` do the shift; models of `transformers` shift labels
    themselves.

    Attributes:
        layout: `padded`: a row is one sequence. `packed`: one row holds all sequences, end to end, without
            padding.
        token_ids: int64; `pad_id` where no token is.
        attention_mask: int64: 1 where a token is. None if packed: `cu_seqlens` and `position_ids` separate
            the sequences.
        position_ids: int64: from 0 in every sequence; 0 where no token is.
        sequence_ids: int32: the sequence a token belongs to, an index into the arrays of shape `[sequences]`;
            -1: padding.
        loss_mask: bool: the token is trained. Never a sequence's first token, never in a sample out of the
            loss.
        logprobs: float32: what the engine recorded for trained tokens, 0 elsewhere: a NaN there would make a
            NaN of every sum and gradient, also where the weight is 0 (0 * NaN). NaN on a trained token
            without one, which only `Collator(ratio=False)` lets in.
        temperature: float32: of the distribution that `logprobs` belong to. That of the turn where they are
            `processed`; 1 where they are `raw`, which the engine records before it divides, and where nothing
            is trained (`Collator(recompute=True)`: that of every turn).
        kept: The vocabularies of `processed` log-probabilities that were truncated. None: there are none.
        versions: int32: weight version; -1: not sampled, or no token; -2: not known.
        weights: float32: how much the token counts in the step's loss; 0 where not trained.
        advantages: float32; 0 where not trained. None: none were asked for (fill the slot with
            `dataclasses.replace`).
        token_rewards: float32: each reward on the last trained token of what earned it.
        sampling: None: not asked for.
        routed_experts: int16 or int32 `[rows, tokens, layers, top_k]`; -1 where none is recorded: each
            sequence's last token, and samples without routing. None: no sample has any.
        rewards: float32 `[sequences]`, one per sample: the reward of its rollout, so the parts of a rollout
            repeat it; NaN: not graded.
        sample_index: int32 `[sequences]`: index into the samples that the collator was given. -1, as in the
            next two: a sequence of padding, alone in a batch that only makes the number of batches the same
            on all data-parallel ranks; its weights are 0, its reward is NaN.
        rollout_index: int32 `[sequences]`: equal for the parts of one rollout, counted from 0 over the step:
            the same in all of its batches, and starting anew with the next step.
        group_index: int32 `[sequences]`: the same for the rollouts of one group.
        cu_seqlens: int32 `[sequences + 1]`: where the sequences begin and end, laid end to end without
            padding. For packed batches, in the row itself, as variable-length attention kernels read it; the
            rows of a padded batch are not laid out so.
        max_seqlen: Tokens of the longest sequence.
    """

    layout: Literal["padded", "packed"]
    token_ids: T
    attention_mask: T | None
    position_ids: T
    sequence_ids: T
    loss_mask: T
    logprobs: T
    temperature: T
    kept: Kept[T] | None
    versions: T
    weights: T
    advantages: T | None
    token_rewards: T
    sampling: Sampling[T] | None
    routed_experts: T | None
    rewards: T
    sample_index: T
    rollout_index: T
    group_index: T
    cu_seqlens: T
    max_seqlen: int

    def model_inputs(self) -> dict[str, T]:
        """`input_ids`, `position_ids` and, if padded, `attention_mask`: what `transformers` calls them."""
        inputs = {"input_ids": self.token_ids, "position_ids": self.position_ids}
        if self.attention_mask is not None:
            inputs["attention_mask"] = self.attention_mask
        return inputs

    def labels(self, ignore: int = -100) -> T:
        """`token_ids` where trained, `ignore` elsewhere; not shifted, as models of `transformers` take it."""
        ids: Any = self.token_ids
        mask: Any = self.loss_mask
        if isinstance(ids, np.ndarray):
            labels: Any = np.where(mask, ids, ignore)
            return labels
        return ids.masked_fill(~mask, ignore)

    def torch(self, device: Any = None, *, non_blocking: bool = False) -> Batch[Any]:
        """The same batch as tensors. On the CPU they share this batch's memory.

        Args:
            device: where to; None: the CPU, without a copy.
            non_blocking: passed on to `Tensor.to`.

        Raises:
            TorchMissingError: torch is not installed.
        """
        torch = import_torch()

        def convert(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                tensor = torch.from_numpy(value)
                return tensor if device is None else tensor.to(device, non_blocking=non_blocking)
            if isinstance(value, tuple):
                return type(value)(*map(convert, value))
            return value

        return replace(self, **{each.name: convert(getattr(self, each.name)) for each in fields(self)})


def token_logprobs(logits: Any, batch: Batch[Any]) -> Any:
    """The model's log-probability of every token, under the distribution that `batch.logprobs` belong to.

    Divided by the turn's temperature and normalised over the kept vocabulary where the recorded
    log-probabilities are, so that with unchanged weights `exp(token_logprobs - logprobs)` is 1 (trl#6789).

    Args:
        logits: float tensor `[rows, tokens, vocabulary]`, the model's output for `batch.token_ids`.
        batch: as tensors, on the same device.

    Returns:
        float tensor `[rows, tokens]`, not shifted: i is about `token_ids` at i. 0 where not trained.

    Raises:
        BatchError: logits or batch are numpy arrays, the two differ in shape, or the batch has token ids that
            the logits have no column for.
        TorchMissingError: torch is not installed.
    """
    _check_logits(logits, batch)
    torch = import_torch()
    at = batch.loss_mask.reshape(-1).nonzero()[:, 0]
    vocabulary = logits.shape[-1]
    # Only the rows that predict a trained token: the rest of the vocabulary-wide work is saved.
    rows = logits.reshape(-1, vocabulary)[at - 1].float()
    rows = rows / batch.temperature.reshape(-1)[at, None]
    ids = batch.token_ids.reshape(-1)[at, None]
    _check_vocabulary(ids, vocabulary, "token id")
    if batch.kept is not None:
        _check_vocabulary(batch.kept.ids, vocabulary, "kept id")
    chosen = rows.gather(1, ids)[:, 0]
    norm = rows.logsumexp(1)
    if batch.kept is not None:
        norm = _kept_norm(torch, rows, norm, at, batch.kept)
    flat = torch.zeros(batch.token_ids.numel(), dtype=rows.dtype, device=rows.device)
    return flat.index_put((at,), chosen - norm).reshape(batch.token_ids.shape)


def _check_logits(logits: Any, batch: Batch[Any]) -> None:
    for name, value in (("logits", logits), ("batch", batch.token_ids)):
        if isinstance(value, np.ndarray):
            raise BatchError(
                f"token_logprobs takes tensors, so that gradients can flow, and {name} holds numpy arrays: "
                "give batch.torch() to the model, and both to this function"
            )
    if logits.ndim != 3 or logits.shape[:2] != batch.token_ids.shape:
        raise BatchError(
            f"logits have the shape {tuple(logits.shape)}: give [rows, tokens, vocabulary], with the batch's "
            f"rows and tokens, {tuple(batch.token_ids.shape)}, of all its positions and not shifted"
        )


def _check_vocabulary(ids: Any, vocabulary: int, what: str) -> None:
    largest = int(ids.max()) if len(ids) else -1
    if largest >= vocabulary:
        raise BatchError(
            f"the batch has {what} {largest}, and the logits have columns for 0 to {vocabulary - 1}: is this "
            "the model (and the tokenizer) that sampled?"
        )


def _kept_norm(torch: Any, rows: Any, norm: Any, at: Any, kept: Kept[Any]) -> Any:
    """`norm` with the log of the sum over the kept ids alone where a token has any."""
    counts = kept.offsets[at + 1] - kept.offsets[at]
    row = torch.repeat_interleave(torch.arange(len(at), device=at.device), counts)
    if not len(row):
        return norm
    first = torch.cumsum(counts, 0) - counts
    place = torch.arange(len(row), device=at.device) - first[row] + kept.offsets[at][row]
    values = rows[row, kept.ids[place]]
    peak = torch.full_like(norm, -torch.inf).scatter_reduce(0, row, values.detach(), "amax")
    total = torch.zeros_like(norm).index_add(0, row, torch.exp(values - peak[row]))
    return torch.where(counts > 0, peak + torch.log(torch.where(counts > 0, total, 1.0)), norm)


def import_torch() -> Any:
    """The torch module.

    Raises:
        TorchMissingError: it is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise TorchMissingError(
            'tensors were asked for, but torch cannot be imported: pip install "torch>=2.6" (the extra '
            f"trainer-bridge[torch]), or use the batch's numpy arrays as they are ({error})"
        ) from error


def register_iterable(kind: type) -> None:
    """Make torch's `DataLoader` take instances of `kind` as iterable-style datasets.

    Raises:
        TorchMissingError: torch is not installed.
    """
    import_torch()
    # A virtual base class: the class itself stays usable, and importable, without torch.
    importlib.import_module("torch.utils.data").IterableDataset.register(kind)


def in_loader_worker() -> bool:
    """Whether this process is a worker of a torch `DataLoader`. False if nobody has loaded torch here."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
