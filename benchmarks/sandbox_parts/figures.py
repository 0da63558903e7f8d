"""Figures, and how they are printed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

Figures = dict[str, float | None]


def quartiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, digits), "q1": round(low, digits), "q3": round(high, digits)}


def show(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def rounded(figures: Figures) -> Figures:
    return {name: None if value is None else round(value, 3) for name, value in figures.items()}
