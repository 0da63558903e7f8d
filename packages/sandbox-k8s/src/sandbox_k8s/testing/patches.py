"""The three kinds of PATCH: merge, strategic merge, JSON patch. Objects are never changed in place."""

import copy
from collections.abc import Mapping
from typing import Any, cast

from .answers import RefusalError, unusable_patch

_MERGE_KEYS: Mapping[str, str] = {
    "conditions": "type",
    "containers": "name",
    "containerStatuses": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "ports": "containerPort",
    "taints": "key",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
_SETS = ("finalizers",)


def merge(old: Any, patch: Any) -> Any:
    """RFC 7386: null takes away, objects merge, all else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result: dict[str, Any] = dict(cast("dict[str, Any]", old)) if isinstance(old, dict) else {}
    for name, value in cast("dict[str, Any]", patch).items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def strategic(old: Any, patch: Any, field: str = "") -> Any:
    """Like `merge`, but lists of objects merge by a key of theirs.

    ``$patch`` and ``$deleteFromPrimitiveList/NAME`` mean what they do for Kubernetes.
    """
    if isinstance(patch, list):
        return _strategic_list(cast("list[Any]", old or []), cast("list[Any]", patch), field)
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    words = cast("dict[str, Any]", patch)
    result: dict[str, Any] = dict(cast("dict[str, Any]", old)) if isinstance(old, dict) else {}
    if words.get("$patch") == "replace":
        result = {}
    for name, value in words.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            target = name.partition("/")[2]
            result[target] = [one for one in result.get(target, []) if one not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = strategic(result.get(name), value, name)
    return result


def _strategic_list(old: list[Any], patch: list[Any], field: str) -> list[Any]:
    if field in _SETS:
        return [*old, *(one for one in patch if one not in old)]
    key = _MERGE_KEYS.get(field)
    if key is None or any(not isinstance(one, dict) or key not in one for one in patch):
        return copy.deepcopy(patch)
    result = list(old)
    for one in patch:
        places = [index for index, other in enumerate(result) if other.get(key) == one[key]]
        if one.get("$patch") == "delete":
            result = [other for index, other in enumerate(result) if index not in places]
        elif places:
            result[places[0]] = strategic(result[places[0]], one)
        else:
            result.append(copy.deepcopy(one))
    return result


def json_patch(old: dict[str, Any], operations: Any) -> dict[str, Any]:
    """RFC 6902.

    Raises:
        RefusalError: An operation cannot be done, or a test fails.
    """
    result: Any = copy.deepcopy(old)
    try:
        for operation in operations:
            result = _operate(result, operation)
    except (KeyError, IndexError, ValueError, TypeError) as problem:
        raise unusable_patch() from problem
    return result


def _operate(root: Any, operation: Mapping[str, Any]) -> Any:
    kind, path = operation["op"], _path(operation["path"])
    if kind in ("move", "copy"):
        source = _path(operation["from"])
        value = copy.deepcopy(_at(root, source))
        if kind == "move":
            _remove(root, source)
        return _add(root, path, value)
    if kind == "add":
        return _add(root, path, operation["value"])
    if kind == "remove":
        _remove(root, path)
        return root
    if kind == "replace":
        _at(root, path)
        return _put(root, path, operation["value"])
    if kind == "test":
        if _at(root, path) != operation["value"]:
            raise unusable_patch()
        return root
    raise RefusalError(400, "BadRequest", f"Unexpected kind: {kind}")


def _path(text: str) -> list[str]:
    return [word.replace("~1", "/").replace("~0", "~") for word in text.split("/")[1:]]


def _step(inner: Any, word: str) -> Any:
    if isinstance(inner, list):
        return cast("list[Any]", inner)[int(word)]
    return inner[word]


def _at(root: Any, path: list[str]) -> Any:
    for word in path:
        root = _step(root, word)
    return root


def _put(root: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent = _at(root, path[:-1])
    if isinstance(parent, list):
        parent[int(path[-1])] = value
    else:
        parent[path[-1]] = value
    return root


def _add(root: Any, path: list[str], value: Any) -> Any:
    parent = _at(root, path[:-1])
    if path and isinstance(parent, list):
        items = cast("list[Any]", parent)
        items.insert(len(items) if path[-1] == "-" else int(path[-1]), value)
        return root
    return _put(root, path, value)


def _remove(root: Any, path: list[str]) -> None:
    parent = _at(root, path[:-1])
    if isinstance(parent, list):
        del parent[int(path[-1])]
    else:
        del parent[path[-1]]
