"""Routed experts as the engines write them: SGLang's raw int32 and vLLM's `.npy`, both in base64."""

from __future__ import annotations

import base64
import binascii

import numpy as np

from token_tracking.answers.experts import DTYPES, Rows
from token_tracking.answers.npy import NpyHeader
from token_tracking.errors import RecordError


def decode_sglang_experts(payload: str, *, layers: int, top_k: int, experts: int | None = None) -> Rows:
    """Read `meta_info.routed_experts` of SGLang: base64 of raw little-endian int32 without a header.

    Args:
        payload: the text of the answer.
        layers: layers of the model, dense ones among them.
        top_k: experts per token.
        experts: experts per layer. Given, ids are checked and the smallest dtype that holds them is
            returned. None: int32.

    Returns:
        `[rows, layers, top_k]`.

    Raises:
        RecordError: no base64, a length that is no whole number of rows, or an id outside `0..experts - 1`.
    """
    raw = _from_base64(payload)
    row = 4 * layers * top_k
    if layers <= 0 or top_k <= 0 or len(raw) % row:
        raise RecordError(
            f"routed experts of {len(raw)} bytes are no whole number of rows of {layers} layers x top_k "
            f"{top_k} int32 ({row} bytes): check layers and top_k of the model",
            code="routed_rows",
        )
    values = np.frombuffer(raw, "<i4").astype(np.int32, copy=False).reshape(-1, layers, top_k)
    return _narrowed(values, experts)


def decode_vllm_experts(payload: str, *, experts: int | None = None) -> Rows:
    """Read `routed_experts` of a vLLM choice: base64 of a `.npy` file; a pickled array is refused.

    Args:
        payload: the text of the answer.
        experts: see `decode_sglang_experts`. None: the array's own dtype.

    Returns:
        `[rows, layers, top_k]`.

    Raises:
        RecordError: no base64, no `.npy` of integers in three dimensions, bytes after it, or an id outside
            `0..experts - 1`.
    """
    data = _from_base64(payload)
    header = NpyHeader.of(data, "the payload")
    header.check_length(len(data), "the payload")
    if header.dtype.name not in DTYPES:
        raise RecordError(
            f"routed experts of dtype {header.dtype}: need {', '.join(DTYPES)}", code="routed_payload"
        )
    values = header.values(data)
    return _narrowed(np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False)), experts)


def _from_base64(payload: str) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise RecordError(f"routed experts are no base64: {error}", code="routed_payload") from error


def _narrowed(values: Rows, experts: int | None) -> Rows:
    if experts is None or not values.size:
        return values
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= experts:
        bad = low if low < 0 else high
        at = int(np.argwhere(values == bad)[0][0])
        code = "routed_padding" if low < 0 else "routed_payload"
        raise RecordError(f"routed expert {bad} in row {at}: need 0..{experts - 1}", code=code)
    narrow = np.uint8 if experts <= 256 else np.int16 if experts <= 2**15 else np.int32
    return values.astype(narrow, copy=False)
