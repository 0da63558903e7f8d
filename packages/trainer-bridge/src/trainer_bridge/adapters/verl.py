"""verl: `DataProto` as its agent loop hands it to the PPO trainer (verl-project/verl 0.9.1).

| DataProto | from |
|---|---|
| `prompts` `[B, P]`, padded left; `responses` `[B, R]`, padded right; `input_ids`: both (int64) | token ids |
| `attention_mask`, `position_ids` int64 `[B, P+R]` | 1 and 0, 1, 2, ... on tokens; 0 on padding |
| `response_mask` int64 `[B, R]` | loss mask; all 0 if not in the loss |
| `rollout_log_probs` float32 `[B, R]` | logprobs, not shifted; 0 where the mask is 0 and none was recorded |
| `rm_scores` float32 `[B, R]` | the reward, on the last response token |
| `routed_experts` `[B, P+R, layers, top_k]` | row i routed token i; 0 on padding and the last token |
| `advantages`, `returns` float32 `[B, R]` | only if advantages are given |
| non-tensor `uid` | group id: verl's GRPO compares the rows that share it |
| non-tensor `__num_turns__` | sampled turns |
| non-tensor `min_global_steps`, `max_global_steps` | oldest and newest weight version; None if unknown |
| non-tensor `rollout_id`, `part`, `task_id`, `weight_versions` | the sample's |
| meta `temperature` | temperature of the log-probabilities, if there is one and it is known |

verl's `compute_advantage` counts rows, so a rollout in parts counts several times, and it compares with every
row. Give `advantages` and skip `compute_advantage` for such batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from token_tracking.sample import UNKNOWN_VERSION, Sample

from trainer_bridge.adapters.loading import load
from trainer_bridge.adapters.omissions import Omissions
from trainer_bridge.adapters.rows import (
    Float32,
    Row,
    Trainer,
    make_groups,
    routed_experts,
    split_rows,
    temperature_of,
    versions,
    working_rows,
)
from trainer_bridge.errors import BatchError

_VERL = Trainer("verl", frozenset({"routed_experts", "versions"}))
_INSTALL = "verl==0.9.1"


def data_proto(
    samples: Sequence[Sample],
    *,
    pad_token_id: int,
    prompt_width: int | None = None,
    response_width: int | None = None,
    ratio: bool = True,
    advantages: Sequence[Float32] | None = None,
    omissions: Omissions | None = None,
) -> Any:
    """A `verl.protocol.DataProto`, one row per sample, a rollout's and a group's rows together.

    Args:
        samples: of each rollout all parts, of each group all rollouts.
        pad_token_id: the tokenizer's.
        prompt_width: P, verl's `max_prompt_length`. None: the longest prompt.
        response_width: R, verl's `max_response_length`. None: the longest response.
        ratio: False leaves `rollout_log_probs` out.
        advantages: one array per sample, as from `trainer_bridge.advantages.advantages(...).tokens`.
        omissions: what may be left out. None: nothing.

    Raises:
        BatchError: a sample is longer than the widths, is not graded, or does not fit.
        MissingLogprobsError: a sample in the loss cannot be used for a ratio.
        TrainerMissingError: verl, tensordict or torch is not installed.
    """
    groups = make_groups(samples, _VERL, omissions, ratio=ratio, advantages=advantages)
    rows = working_rows(groups, omissions)
    split_rows(rows)
    width = max(row.sample.prompt_length for row in rows) if prompt_width is None else prompt_width
    longest = max(len(row.sample) - row.sample.prompt_length for row in rows)
    total = width + (longest if response_width is None else response_width)
    for row in rows:
        if row.sample.prompt_length > width or len(row.sample) - row.sample.prompt_length > total - width:
            raise BatchError(
                f"rollout {row.sample.rollout_id}, part {row.sample.part}: {row.sample.prompt_length} prompt "
                f"and {len(row.sample) - row.sample.prompt_length} response tokens do not fit {width} and "
                f"{total - width}; raise the widths, or cut it with trainer_bridge.truncation.truncate"
            )
    tensors = _tensors(rows, width, total, pad_token_id)
    if ratio:
        logprobs = [row.logprobs for row in rows]
        tensors["rollout_log_probs"] = _laid_out(rows, logprobs, width, total, np.float32)[:, width:].copy()
    if advantages is not None:
        settled = [row.advantages for row in rows]
        tensors["advantages"] = _laid_out(rows, settled, width, total, np.float32)[:, width:].copy()
        tensors["returns"] = tensors["advantages"].copy()
    torch, tensordict = load("torch", _INSTALL), load("tensordict", _INSTALL)
    batch = tensordict.TensorDict(
        {name: torch.from_numpy(array) for name, array in tensors.items()}, batch_size=len(rows)
    )
    known = {value for row in rows for value in temperature_of(row)}
    temperature = {"temperature": known.pop()} if ratio and len(known) == 1 and None not in known else {}
    proto = load("verl.protocol", _INSTALL).DataProto
    return proto(batch=batch, non_tensor_batch=_columns(rows), meta_info=temperature)


def _tensors(rows: Sequence[Row], width: int, total: int, pad: int) -> dict[str, npt.NDArray[Any]]:
    ids = _laid_out(rows, [row.sample.token_ids for row in rows], width, total, np.int64, pad)
    attention = _laid_out(rows, [np.ones(len(row.sample)) for row in rows], width, total, np.int64)
    scores = np.zeros((len(rows), total - width), np.float32)
    for score, row in zip(scores, rows, strict=True):
        score[len(row.sample) - row.sample.prompt_length - 1] = row.reward()
    tensors: dict[str, npt.NDArray[Any]] = {
        "prompts": ids[:, :width].copy(),
        "responses": ids[:, width:].copy(),
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": np.maximum(np.cumsum(attention, axis=1) - 1, 0) * attention,
        "response_mask": _laid_out(rows, [row.mask for row in rows], width, total, np.int64)[
            :, width:
        ].copy(),
        "rm_scores": scores,
    }
    experts = routed_experts(rows)
    if experts is not None:
        tensors["routed_experts"] = _laid_out(rows, experts, width, total, experts[0].dtype)
    return tensors


def _laid_out(
    rows: Sequence[Row],
    arrays: Sequence[npt.NDArray[Any]],
    width: int,
    total: int,
    dtype: npt.DTypeLike,
    fill: int = 0,
) -> npt.NDArray[Any]:
    """Arrays that begin at each row's first token, laid out `[B, P+R, ...]`: the prompt ends at P."""
    out = np.full((len(rows), total, *arrays[0].shape[1:]), fill, dtype)
    for target, row, array in zip(out, rows, arrays, strict=True):
        start = width - row.sample.prompt_length
        target[start : start + len(array)] = array
    return out


def _columns(rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
    spans = [versions(row) for row in rows]
    unknown = [not span or UNKNOWN_VERSION in span for span in spans]
    columns: dict[str, list[Any]] = {
        "uid": [row.sample.group_id for row in rows],
        "rollout_id": [row.sample.rollout_id for row in rows],
        "part": [row.sample.part for row in rows],
        "task_id": [row.sample.task_id for row in rows],
        "weight_versions": spans,
        "min_global_steps": [None if no else min(span) for no, span in zip(unknown, spans, strict=True)],
        "max_global_steps": [None if no else max(span) for no, span in zip(unknown, spans, strict=True)],
    }
    out: dict[str, npt.NDArray[Any]] = {
        "__num_turns__": np.array([len(row.sample.turns) for row in rows], np.int32)
    }
    for name, values in columns.items():
        out[name] = np.empty(len(rows), object)
        for row, value in enumerate(values):  # one by one: numpy would unpack a list of equally long lists
            out[name][row] = value
    return out
