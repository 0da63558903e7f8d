"""Chat messages as plain mappings: checks, comparison, and a map over the text inside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from token_tracking.errors import ConversationError, TemplateError, UnsupportedContentError
from token_tracking.scalars import plain_bool, plain_text

Message = Mapping[str, Any]

_PRINTED_BITS = 2000
"""Bits of numbers that Python prints under every setting; beyond, `sys.set_int_max_str_digits` decides."""


def check(messages: Sequence[Message], first: int = 0) -> None:
    """Refuse what would be rendered wrongly in silence.

    Raises:
        TemplateError: a message has no role, content that is neither text, parts, nor None, or tool calls
            that are not a list of mappings.
        UnsupportedContentError: a content part is not text.
    """
    for index, message in enumerate(messages, first):
        if not isinstance(message.get("role"), str):
            raise TemplateError(f"message {index} has no role: {dict(message)!r:.200}")
        calls = message.get("tool_calls") or ()
        if calls and not (
            isinstance(calls, (list, tuple)) and all(isinstance(c, Mapping) for c in cast("Any", calls))
        ):
            raise TemplateError(f"message {index}: tool_calls must be a list of mappings: {calls!r:.120}")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise TemplateError(
                f"message {index} ({message['role']}): content must be a string, a list of parts or None, "
                f"got {type(content).__name__}"
            )
        for part in cast("list[Any]", content):
            if not _is_text_part(part):
                raise UnsupportedContentError(
                    f"message {index} ({message['role']}) has a part that is not text: {part!r:.120}; "
                    "images and audio are not supported"
                )


def _is_text_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    fields = cast("Mapping[str, Any]", part)
    return fields.get("type", "text") == "text" and isinstance(fields.get("text"), str)


def own(messages: Sequence[Message], first: int = 0) -> list[dict[str, Any]]:
    """Copies that nobody else can change, of messages that are safe to hold.

    Args:
        messages: from a harness.
        first: index of the first of them in its history, for error messages.

    Raises:
        TemplateError: a message is not JSON-like, its text has no UTF-8 form, or its shape is wrong.
        UnsupportedContentError: a content part is not text.
    """
    held = [_owned_message(message, index) for index, message in enumerate(messages, first)]
    check(held, first)
    return held


def _owned_message(message: Message, index: int) -> dict[str, Any]:
    # The first question is the cheap one: this runs on every turn.
    if type(cast("Any", message)) is not dict and not isinstance(cast("Any", message), Mapping):
        raise TemplateError(f"message {index} must be a mapping, got a {type(message).__name__}")
    try:
        return _owned_fields(message)
    except _NotJSONError as error:
        raise TemplateError(f"message {index} ({message.get('role')!s:.40}): {error}") from error
    except RecursionError as error:
        raise TemplateError(f"message {index} ({message.get('role')!s:.40}) is nested too deeply") from error


def own_assistant(message: Message, index: int) -> dict[str, Any]:
    """As `own`, of the message of an assistant turn.

    Raises:
        ConversationError: it is not an assistant message.
    """
    (held,) = own([message], index)
    if held["role"] != "assistant":
        raise ConversationError(f"the message of a turn must be an assistant message, got {held!r:.120}")
    return held


def _owned_fields(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """As `_owned`; most fields of most messages are ASCII text, which cannot change and has a UTF-8 form."""
    return {
        key if type(key) is str and key.isascii() else _owned_key(key): value
        if type(value) is str and value.isascii()
        else _owned(value)
        for key, value in fields.items()
    }


def _owned_key(key: Any) -> str:
    if not isinstance(key, str):
        raise _NotJSONError(f"the key {key!r:.80} is not a string")
    return _owned(key)


class _NotJSONError(Exception):
    pass


def _owned(value: Any) -> Any:
    """A copy made of exact types: a template prints an enum member or a `Markup` otherwise than its text."""
    kind = cast("type[object]", type(value))
    if kind is str:
        return value if value.isascii() else _encodable_or_refused(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind is int:
        return _printable(value)
    if kind is dict or isinstance(value, Mapping):
        return _owned_fields(cast("Mapping[Any, Any]", value))
    if isinstance(value, (list, tuple)):
        return [_owned(item) for item in cast("Sequence[Any]", value)]
    return _exact(value)


def _exact(value: Any) -> str | bool | int | float:
    """The plain value of a scalar that is none itself."""
    if (text := plain_text(value)) is not None:
        return _owned(text)
    if (truth := plain_bool(value)) is not None:
        return truth
    if isinstance(value, int):
        return _printable(int.__int__(value))
    if isinstance(value, np.integer):
        return int(cast("int", value))
    if isinstance(value, (float, np.floating)):
        return float(cast("float", value))
    raise _NotJSONError(
        f"holds a {type(value).__name__}; pass plain values (for example the object's model_dump())"
    )


def _encodable_or_refused(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _NotJSONError(
            f"U+{ord(text[error.start]):04X} at {error.start} of {text[:40]!r} is a lone surrogate, "
            'which no tokenizer takes; decode bytes with errors="replace"'
        ) from error
    return text


def _printable(number: int) -> int:
    if number.bit_length() > _PRINTED_BITS:
        try:
            str(number)
        except ValueError as error:
            raise _NotJSONError(f"holds a number of {number.bit_length()} bits: {error}") from error
    return number


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


def with_string_content(message: Message, index: int) -> Message:
    """`message` with a list of one text part as that text.

    Raises:
        UnsupportedContentError: there are several parts; how to join them is not this package's to say.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = texts(message)
    if len(parts) > 1:
        raise UnsupportedContentError(
            f"message {index} ({message['role']}) has {len(parts)} content parts, and the template does not "
            "print content parts: pass the content as one string"
        )
    return {**message, "content": "".join(parts)}


def with_parts(message: Message) -> Message:
    """`message` with its text as a list of one text part."""
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


def with_arguments(message: Message, form: str, *, fallback: Callable[[str], None] | None = None) -> Message:
    """`message` with the arguments of its tool calls as JSON text (`"text"`) or as an object (`"object"`).

    A template that walks over an object fails on anything else, or prints it letter by letter (AReaL#1420).
    So in the object form no arguments are an empty object, and what is no JSON object becomes the one value
    of an object, under the key `arguments`; `fallback` is told of it.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed: list[Any] = []
    for call in calls:
        function = call.get("function")
        holder = cast("Mapping[str, Any]", function if isinstance(function, Mapping) else call)
        arguments = _arguments(holder.get("arguments"), form, fallback)
        if isinstance(function, Mapping):
            changed.append({**call, "function": {**holder, "arguments": arguments}})
        else:
            changed.append({**call, "arguments": arguments})
    return {**message, "tool_calls": changed}


def _arguments(arguments: Any, form: str, fallback: Callable[[str], None] | None) -> Any:
    if form == "text":
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
    if isinstance(arguments, Mapping):
        return cast("Mapping[str, Any]", arguments)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    value = _object(arguments) if isinstance(arguments, str) else None
    if value is None and fallback is not None:
        fallback(f"{arguments!r:.120}")
    return {"arguments": arguments} if value is None else value


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # JSON can spell a lone surrogate ("\ud800"), which a render would print and no tokenizer takes.
    return map_text(value, _encodable) if isinstance(value, dict) else None


def _encodable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
