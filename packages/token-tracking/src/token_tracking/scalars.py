"""Exact Python values of what callers pass: NumPy scalars, enum members, subclasses of str, int and float.

They compare like plain values, and a template prints them otherwise or an encoder refuses them.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

_LOWEST, _BEYOND = -(2**63), 2**64


def plain_text(value: object) -> str | None:
    """The exact `str` of a str or a subclass (an enum member gives its value); None: it is no text."""
    return str.__str__(value) if isinstance(value, str) else None


def plain_bool(value: object) -> bool | None:
    """The exact `bool` of a bool or NumPy bool; None: it is neither."""
    return bool(cast("bool", value)) if isinstance(value, (bool, np.bool_)) else None


def plain_int(value: object) -> int | None:
    """The exact `int` of an integer that has 64 bits; None: it is none (a bool is none either)."""
    if isinstance(value, np.integer):
        return int(cast("int", value))
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    exact = int.__int__(value)
    return exact if _LOWEST <= exact < _BEYOND else None


def plain_float(value: object) -> float | None:
    """The exact `float` of a finite number; None: it is none (a bool, text, NaN, or beyond a float)."""
    if isinstance(value, (float, np.floating)):
        exact = float(cast("float", value))
    else:
        whole = plain_int(value)
        if whole is None:
            return None
        exact = float(whole)
    return exact if math.isfinite(exact) else None
