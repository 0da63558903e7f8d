"""Token ids and log-probabilities as flat arrays, checked before a ledger holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from token_tracking.errors import LedgerError
from token_tracking.sample import MAX_VERSION

Ids = Sequence[int] | npt.NDArray[Any]
Logprobs = Sequence[float] | npt.NDArray[Any]
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


def token_ids(ids: Ids) -> npt.NDArray[np.int32]:
    """Flat int32 ids, not copied where they are that already.

    Raises:
        LedgerError: not flat, not integers, or outside 0..2**31-1.
    """
    array = np.asarray(ids)
    if array.dtype is _INT32 and array.ndim == 1 and (not len(array) or np.minimum.reduce(array) >= 0):
        return array
    if array.ndim != 1:
        raise LedgerError(f"token ids must be flat, got shape {array.shape}")
    if not len(array):
        return np.empty(0, np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise LedgerError(f"token ids must be integers, got {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > MAX_VERSION:
        raise LedgerError(f"token ids must lie in 0..2**31-1, got {array.min()}..{array.max()}")
    return array.astype(np.int32, copy=False)


def token_logprobs(
    logprobs: Logprobs | None, tokens: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32] | float:
    """Float32 log-probabilities of sampled tokens, one for each; NaN where none were recorded.

    Raises:
        LedgerError: another count, or a value that is not finite or above 0.
    """
    if logprobs is None:
        return np.nan
    if isinstance(logprobs, np.ndarray) and logprobs.dtype is _FLOAT32:
        values: npt.NDArray[np.float32] = logprobs
    else:
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes -inf, and is refused below
            values = np.asarray(logprobs, dtype=np.float32)
    if values.shape != tokens.shape:
        raise LedgerError(f"{values.size} log-probabilities for {len(tokens)} sampled ids")
    # Two reductions instead of four arrays: NaN makes either comparison False.
    if not len(values) or (np.maximum.reduce(values) <= 0 and np.minimum.reduce(values) > -np.inf):
        return values
    at = int(np.flatnonzero(~(np.isfinite(values) & (values <= 0)))[0])
    raise LedgerError(
        f"log-probability {values[at]} of sampled token {at} (id {tokens[at]}): need a finite "
        "value <= 0; pass None if the engine recorded none"
    )
