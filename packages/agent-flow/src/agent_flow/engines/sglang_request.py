"""What SGLang's `/generate` is asked for, and what its refusals mean."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from agent_flow.config import SamplingConfig
from agent_flow.engines.replica import ReplicaRequest
from agent_flow.errors import EngineError, UsageError

MAX_KEPT = 4096
"""Largest top_k with a kept set: the default of SGLang's `--sampling-mask-max-tokens`."""
_TOO_LONG = ("longer than the model's context", "maximum context length", "maximum allowed length")


def truncates(sampling: SamplingConfig) -> bool:
    """Whether tokens are sampled from a part of the vocabulary."""
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def check_sampling(sampling: SamplingConfig, where: str = "") -> None:
    """Refuse truncated sampling whose kept ids SGLang does not return: every ratio would be off (trl#6789).

    It returns them (`return_sampling_mask`) for a finite top_k, with or without top_p and min_p, and at
    temperature 0 (`scheduler.py`; observed on 0.5.23, on a CPU too).

    Args:
        sampling: what is to be asked for.
        where: file and table that it was read from.

    Raises:
        UsageError: it is such; says what to change.
    """
    if not truncates(sampling) or sampling.temperature == 0 or 0 < sampling.top_k <= MAX_KEPT:
        return
    raise UsageError(
        f"SGLang returns the ids that truncated sampling kept for top_k from 1 to {MAX_KEPT} alone; it is "
        f"{sampling.top_k}, with top_p = {sampling.top_p:g} and min_p = {sampling.min_p:g}. Without them "
        "every probability ratio is off by what was cut",
        where=where,
        fix=f"set top_k to {MAX_KEPT // 2} as well, or top_p = 1, top_k = -1, min_p = 0",
    )


def check_prompt(prompt_ids: npt.NDArray[np.int32], vocab_size: int | None) -> None:
    """Refuse ids that are no tokens: SGLang does not look at them, and its scheduler can die of one.

    The model reads them as rows of its embedding, and `TokenizerManager` of 0.5.23 checks none: past the end
    is an error on the device, with every call that runs there, and a negative one is read from the end.

    Args:
        prompt_ids: shape `[n]`.
        vocab_size: one past the tokenizer's highest id. None: not known.

    Raises:
        EngineError: `vocabulary`, of the fault `task`: it would be sent by every rollout.
    """
    wrong = prompt_ids < 0
    if vocab_size is not None:
        wrong |= prompt_ids >= vocab_size
    if wrong.any():
        at = int(wrong.argmax())
        known = "0 and up" if vocab_size is None else f"0 to {vocab_size - 1}"
        what = f"the prompt was not sent: it holds {prompt_ids[at]} at {at}, the tokenizer's ids are {known}"
        raise EngineError("vocabulary", what, fault="task")


def generate_body(request: ReplicaRequest, stream_interval: int) -> bytes:
    """The request's JSON.

    Everything that shapes the distribution is said, temperature 0 as 0: what is left out would be taken from
    the server's `preferred_sampling_params`.

    Args:
        request: what to sample.
        stream_interval: tokens per chunk.
    """
    sampling = request.sampling
    parameters = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": request.max_new_tokens,
        "n": 1,
        "stop": [],
        "stop_regex": [],
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": False,
        "skip_special_tokens": False,
        "stream_interval": stream_interval,
    }
    body: dict[str, object] = {
        "rid": request.rid,
        "input_ids": request.prompt_ids.tolist(),
        "sampling_params": parameters,
        "stream": True,
        "return_logprob": True,
    }
    if truncates(sampling):
        body["return_sampling_mask"] = True
    if request.salt:
        # Both are part of the key of the prefix cache; older servers know the first one alone.
        body |= {"extra_key": request.salt, "cache_salt": request.salt}
    return msgspec.json.encode(body)


def refusal(url: str, status: int, body: str) -> EngineError:
    """What an HTTP status other than 200 means, or the same number in a stream.

    4xx would be refused again (but for 408, 425 and 429, which pass); the cause is `too_long` where prompt
    and budget do not fit the context, else `refused`. With all others (`unavailable`) it helps to try again.

    Args:
        url: what was asked.
        status: as the server gave it.
        body: its own words, without secrets.
    """
    again = not 300 <= status < 500 or status in (408, 425, 429)
    cause = "unavailable" if again else "refused"
    if not again and any(words in body for words in _TOO_LONG):
        cause = "too_long"
    return EngineError(cause, f"{url}: status {status}", retryable=again, evidence=body[:2000])
