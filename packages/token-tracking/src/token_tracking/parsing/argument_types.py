"""`ArgumentTypes`: the JSON types that tool schemas declare, and argument text decoded by them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from token_tracking.parsing import strict_json

ANY = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
TEXT = frozenset({"string"})
MAX_REFERENCES = 16
"""Longest chain of `$ref`, `anyOf` and `allOf` that is followed in a schema."""


class ArgumentTypes:
    """Declared types by tool and parameter."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        """Read tool schemas, in the usual form with `function` or without it.

        What declares no parameters in the usual form declares no types.
        """
        self._types: dict[str, dict[str, frozenset[str]]] = {}
        for tool in tools:
            function = _mapping(tool.get("function", tool))
            root = _mapping(function.get("parameters"))
            properties = _mapping(root.get("properties"))
            if isinstance(name := function.get("name"), str):
                self._types[name] = {key: _types(value, root, 0) for key, value in properties.items()}

    def of(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types of an argument; text alone if nothing is declared for it."""
        return self._types.get(tool, {}).get(parameter, TEXT)


def decode(text: str, types: frozenset[str], words: Mapping[str, str]) -> tuple[str, str | None]:
    """An argument that a template prints bare: text without quotes, else JSON or words of its own.

    Args:
        text: what the model wrote.
        types: declared JSON types. Where text is one of them, only an array, an object or null is decoded:
            a number may be meant as text.
        words: the template's own words (`True`) and the JSON that they stand for.

    Returns:
        JSON text, numbers and blanks as written, and what is wrong. A value that does not decode stays text.
    """
    as_text = json.dumps(text, ensure_ascii=False)
    if types == TEXT:
        return as_text, None
    written = text.strip(" \t\r\n")
    written = words.get(written, written)
    try:
        value = strict_json.read(written)
    except ValueError as error:
        problem = f"is not JSON: {error}"
    else:
        if _fits(value, types):
            return written, None
        problem = f"is JSON of another type: {written[:20]!r}"
    if "string" in types:
        return as_text, None
    return as_text, f"is declared {' or '.join(sorted(types))}, but {problem}"


def _fits(value: Any, types: frozenset[str]) -> bool:
    text = "string" in types
    if isinstance(value, bool):
        return "boolean" in types and not text
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return ("number" in types or ("integer" in types and whole)) and not text
    if value is None:
        return "null" in types
    return ("array" if isinstance(value, list) else "object" if isinstance(value, dict) else "") in types


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    fields = _mapping(schema)
    if depth > MAX_REFERENCES:
        return ANY
    if isinstance(reference := fields.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth + 1)
    declared = fields.get("type")
    if isinstance(declared, str):
        return ANY & {declared} or ANY
    if isinstance(declared, list):
        return ANY & set(map(str, cast("list[Any]", declared))) or ANY
    values = [fields["const"]] if "const" in fields else fields.get("enum")
    if isinstance(values, list) and values:
        return frozenset(map(_type_of, cast("list[Any]", values)))
    for choice in ("anyOf", "oneOf"):
        if isinstance(schemas := fields.get(choice), list) and schemas:
            return frozenset[str]().union(*(_types(s, root, depth + 1) for s in cast("list[Any]", schemas)))
    if isinstance(schemas := fields.get("allOf"), list) and schemas:
        return ANY.intersection(*(_types(s, root, depth + 1) for s in cast("list[Any]", schemas))) or ANY
    return frozenset({"object"}) if "properties" in fields else ANY


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    at: Any = root if reference.startswith("#/") else None
    for step in reference.removeprefix("#/").split("/"):
        at = _mapping(at).get(step.replace("~1", "/").replace("~0", "~"))
    return at


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(cast("type[Any]", type(value)), "object")


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
