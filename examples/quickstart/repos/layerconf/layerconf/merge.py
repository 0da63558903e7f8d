"""Merging one layer into another."""

from typing import Any

Layer = dict[str, Any]


class MergeError(ValueError):
    """Two layers that do not go together."""


def merge(base: Layer, over: Layer, *, path: str = "") -> Layer:
    """Return ``base`` with ``over`` on top.

    Tables are merged key by key, and ``name+`` appends to the list ``name``. Everything else in
    ``over`` replaces what ``base`` has.

    Args:
        base: the lower layer.
        over: the upper layer.
        path: where both stand in the configuration, for error messages.

    Raises:
        MergeError: if a list is appended to something else.
    """
    result = dict(base)
    for key, value in over.items():
        if key.endswith("+"):
            _append(result, key[:-1], value, path)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            _merge_into(result[key], value, f"{path}{key}.")
        else:
            result[key] = value
    return result


def _merge_into(table: Layer, over: Layer, path: str) -> None:
    table.update(merge(table, over, path=path))


def _append(table: Layer, key: str, items: Any, path: str) -> None:
    target = table.setdefault(key, [])
    if not isinstance(target, list) or not isinstance(items, list):
        raise MergeError(f"{path}{key}+ must append a list to a list")
    target += items
