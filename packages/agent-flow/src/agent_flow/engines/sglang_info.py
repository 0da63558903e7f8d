"""What an SGLang server says of itself."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from agent_flow.engines.replica import ReplicaInfo
from agent_flow.engines.sglang_stream import contradiction

T = TypeVar("T")


class ModelInfo(msgspec.Struct, frozen=True):
    """`/model_info`, which answers at once."""

    weight_version: str
    model_path: str


class Limits(msgspec.Struct, frozen=True):
    """What does not change while a server runs."""

    context_length: int
    """What it takes: a few tokens less than the model has (`max_req_input_len` limits the prompt)."""
    kv_tokens: int | None


class _Model(msgspec.Struct, frozen=True):
    max_model_len: int


class _Models(msgspec.Struct, frozen=True):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _ServerInfo(msgspec.Struct, frozen=True):
    max_total_num_tokens: int | None = None
    max_req_input_len: int | None = None


def model_info(text: str) -> ModelInfo:
    """Of the answer to `/model_info`.

    Raises:
        EngineError: of both: it is another answer.
    """
    return _decoded(text, ModelInfo, "/model_info")


def limits(models: str, server: str) -> Limits:
    """Of the answers to `/v1/models` and `/server_info`; the second one waits for a busy scheduler."""
    context = _decoded(models, _Models, "/v1/models").data[0].max_model_len
    info = _decoded(server, _ServerInfo, "/server_info")
    if info.max_req_input_len is not None:
        context = min(context, info.max_req_input_len)  # a prompt has to be shorter (observed)
    return Limits(context_length=context, kv_tokens=info.max_total_num_tokens)


def replica_info(model: ModelInfo, known: Limits) -> ReplicaInfo:
    """Both together."""
    return ReplicaInfo(
        weight_version=model.weight_version,
        context_length=known.context_length,
        kv_tokens=known.kv_tokens,
        model_path=model.model_path,
    )


def _decoded(text: str, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise contradiction(f"{path}: {error}", text.encode()) from error
