"""`reward.txt` and `reward.json`, as Harbor's verifiers write them: one finite number, or no verdict."""

from __future__ import annotations

import json
import math
import re
from typing import cast

from agent_flow.errors import GraderError

LARGEST = 1 << 16
"""Bytes of a file that are looked at."""
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")


def read_reward(text: bytes | None, table: bytes | None, *, key: str = "") -> float:
    """The reward.

    Args:
        text: `reward.txt`. None: it is not there.
        table: `reward.json`, a number or an object of numbers by name. None: it is not there.
        key: Which of several numbers counts. Empty: there may be only one.

    Raises:
        GraderError: there is none, it is not a finite number, or it is not said which of several counts. The
            fault is the infrastructure's: none of these is a reward of 0.
    """
    if text is None and table is None:
        raise GraderError("no_reward", "the tests wrote neither reward.txt nor reward.json", retryable=True)
    found = [] if text is None else [("reward.txt", _number(text))]
    if table is not None:
        found.append(("reward.json", _of_table(table, key)))
    if len({reward for _, reward in found}) > 1:
        said = " and ".join(f"{name} says {reward:g}" for name, reward in found)
        raise GraderError("several_rewards", said)
    return found[0][1]


def _number(data: bytes) -> float:
    _check_size("reward.txt", data)
    text = data.decode("utf-8", "replace").strip()
    if not text:
        raise GraderError("empty_reward", "reward.txt is empty", retryable=True)
    if len(text.split()) > 1 and all(_NUMBER.fullmatch(word) for word in text.split()):
        raise GraderError("several_rewards", f"reward.txt holds several numbers: {text[:200]!r}")
    if not _NUMBER.fullmatch(text):
        raise _no_number("reward.txt", text)
    return _finite("reward.txt", float(text))


def _of_table(data: bytes, key: str) -> float:
    _check_size("reward.json", data)
    if not data.strip():
        raise GraderError("empty_reward", "reward.json is empty", retryable=True)
    try:
        value: object = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise GraderError("reward_format", f"reward.json is not JSON: {error}") from error
    if isinstance(value, dict):
        rewards = cast("dict[str, object]", value)
        if key and key not in rewards:
            said = ", ".join(sorted(rewards)) or "nothing"
            raise GraderError("no_reward", f"reward.json holds no {key!r}, but {said}")
        if not rewards:
            raise GraderError("no_reward", "reward.json holds nothing")
        if not key and len(rewards) > 1:
            said = f"reward.json holds {', '.join(sorted(rewards))}"
            raise GraderError("several_rewards", f"{said}; runtime.reward says which of them counts")
        value = rewards[key] if key else next(iter(rewards.values()))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _no_number("reward.json", json.dumps(value))
    return _finite("reward.json", value)


def _check_size(file: str, data: bytes) -> None:
    if len(data) > LARGEST:
        raise GraderError("reward_format", f"{file} is too large: more than {LARGEST} bytes")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise GraderError("several_rewards", f"reward.json says {twice!r} more than once")
    return dict(pairs)


def _finite(file: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError as error:
        raise _no_number(file, "an integer that no float can hold") from error
    if not math.isfinite(number):
        raise _no_number(file, str(value))
    return number


def _no_number(file: str, said: str) -> GraderError:
    return GraderError("reward_format", f"{file} holds no finite number: {said[:200]}")
