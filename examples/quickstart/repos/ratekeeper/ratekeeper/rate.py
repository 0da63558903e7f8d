"""Rates as people write them in configuration files."""

import re

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(\d+)?\s*(s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def parse_rate(text: str) -> float:
    """Read ``"100/min"`` or ``"5/10s"`` and return events per second.

    Raises:
        ValueError: if the text is not a positive rate.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a rate: {text!r}; write something like '100/min'")
    events, period = float(match[1]), int(match[2] or 1) * _SECONDS[match[3]]
    if events == 0 or period == 0:
        raise ValueError(f"a rate must be positive: {text!r}")
    return events / period
