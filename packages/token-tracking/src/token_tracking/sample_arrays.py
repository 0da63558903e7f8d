"""What the arrays of a `Sample` may be, beside the four that every sample has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from token_tracking.errors import SampleError


def require_array(name: str, value: object) -> None:
    """Raise SampleError for what is no array."""
    if not isinstance(value, np.ndarray):
        raise SampleError(f"{name} must be a numpy array, got a {type(value).__name__}")


def read_only_view(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same elements: the caller's own array stays writable for the caller, and not through the view."""
    view = array.view()
    view.flags.writeable = False
    return view


def check_channels(
    kept_ids: npt.NDArray[np.int32] | None,
    kept_offsets: npt.NDArray[np.int64] | None,
    routed_experts: npt.NDArray[np.integer] | None,
    n: int,
) -> None:
    """Raise SampleError unless the optional arrays fit to each other and to `n` tokens."""
    if (kept_ids is None) != (kept_offsets is None):
        raise SampleError("kept_ids and kept_offsets come together")
    if kept_ids is not None and kept_offsets is not None:
        if (kept_offsets.dtype, kept_offsets.shape) != (np.int64, (n + 1,)):
            raise SampleError(f"kept_offsets must be int64 of length {n + 1}")
        if (kept_ids.dtype, kept_ids.ndim) != (np.int32, 1):
            raise SampleError(f"kept_ids must be a flat int32 array, got {kept_ids.dtype} {kept_ids.shape}")
        first, last = int(kept_offsets[0]), int(kept_offsets[-1])
        if first != 0 or last != len(kept_ids) or bool(np.any(np.diff(kept_offsets) < 0)):
            raise SampleError("kept_offsets must rise from 0 to len(kept_ids)")
    if routed_experts is not None and (
        routed_experts.ndim != 3
        or routed_experts.shape[0] != max(n - 1, 0)
        or routed_experts.dtype.kind not in "iu"
    ):
        raise SampleError(
            f"routed_experts must be integers of shape [{max(n - 1, 0)}, layers, top_k], got "
            f"{routed_experts.dtype} {routed_experts.shape}"
        )
