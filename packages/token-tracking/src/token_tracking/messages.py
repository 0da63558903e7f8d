"""Chat messages as plain mappings: checks, comparison, and a map over the text inside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from token_tracking.errors import TemplateError, UnsupportedContentError

Message = Mapping[str, Any]


def check(messages: Sequence[Message]) -> None:
    """Refuse what would be rendered wrongly in silence.

    Raises:
        TemplateError: a message has no role, or content that is neither text, parts, nor None.
        UnsupportedContentError: a content part is not text.
    """
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise TemplateError(f"message {index} has no role: {dict(message)!r:.200}")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise TemplateError(
                f"message {index} ({message['role']}): content must be a string, a list of parts or None, "
                f"got {type(content).__name__}"
            )
        for part in cast("list[Any]", content):
            if not (isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("text"), str)):
                raise UnsupportedContentError(
                    f"message {index} ({message['role']}) has a part that is not text: {part!r:.120}; "
                    "images and audio are not supported"
                )


def texts(message: Message) -> list[str]:
    """The texts of a message's content: one for a string, one per part of a list."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or ()]


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` (JSON-like) with `change` applied to every string in it, keys of mappings included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        return {change(key): map_text(item, change) for key, item in mapping.items()}
    if isinstance(value, (list, tuple)):
        return [map_text(item, change) for item in cast("Sequence[Any]", value)]
    return value


def map_message(message: Message, change: Callable[[str], str]) -> dict[str, Any]:
    """`message` with `change` applied to every string in it but the role and the field names."""
    return {
        key: value
        if key == "role"
        else map_text(value, change)
        if key != "tool_calls"
        else _calls(value, change)
        for key, value in message.items()
    }


def _calls(calls: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(calls, (list, tuple)):
        return map_text(calls, change)
    changed: list[Any] = []
    for call in cast("Sequence[Any]", calls):
        if not isinstance(call, Mapping):
            changed.append(map_text(call, change))
            continue
        fields = dict(cast("Mapping[str, Any]", call))
        function = fields.get("function")
        for key, value in fields.items():
            if key == "function" and isinstance(function, Mapping):
                items = cast("Mapping[str, Any]", function).items()
                fields[key] = {name: map_text(item, change) for name, item in items}
            else:
                fields[key] = map_text(value, change)
        changed.append(fields)
    return changed


def with_arguments(message: Message, form: str) -> Message:
    """`message` with the arguments of its tool calls as JSON text (`"text"`) or as an object (`"object"`).

    Text that is not a JSON object stays text: the template then prints, or refuses, what the model wrote.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed: list[Any] = []
    for call in calls:
        function = call.get("function")
        holder = cast("Mapping[str, Any]", function if isinstance(function, Mapping) else call)
        arguments = _arguments(holder.get("arguments"), form)
        if isinstance(function, Mapping):
            changed.append({**call, "function": {**holder, "arguments": arguments}})
        else:
            changed.append({**call, "arguments": arguments})
    return {**message, "tool_calls": changed}


def _arguments(arguments: Any, form: str) -> Any:
    if form == "text" and isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    if form == "object" and isinstance(arguments, str):
        return _object_or_text(arguments)
    return arguments


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return cast("Any", value) if isinstance(value, dict) else text


def same(left: Message, right: Message) -> bool:
    """Whether two messages say the same.

    A field that is absent, None, an empty string or an empty list is one and the same; tool-call arguments
    are compared as JSON values, so that a harness may hand back an object where the model wrote text.
    """
    return left == right or _canonical(left) == _canonical(right)


def _canonical(message: Message) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value not in (None, "", [], ())}
    if "tool_calls" in fields:
        fields["tool_calls"] = with_arguments(message, "object")["tool_calls"]
    return fields


def common_prefix(left: Sequence[Message], right: Sequence[Message]) -> int:
    """How many messages at the start of both lists are the same."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if not same(a, b):
            return index
    return min(len(left), len(right))
