"""The forms in which templates print a tool call, each with its reader for what a model wrote in that form.

A form is learnt by rendering (`token_tracking.compiler.probe_calls`). Readers take the text between the
markers of one call. They are strict about the form's words and lenient about the blanks between them, which
models vary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from token_tracking.parsing import strict_json
from token_tracking.parsing.argument_types import ArgumentTypes, decode
from token_tracking.parsing.literal_form import LiteralForm
from token_tracking.parsing.read_call import MalformedCallError, ReadCall

_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?", re.DOTALL)


class JsonForm(msgspec.Struct, frozen=True, kw_only=True, tag="json"):
    """One JSON object, such as `{"name": …, "arguments": {…}}` (Hermes)."""

    name_field: str = "name"
    arguments_field: str = "arguments"
    id_field: str | None = None

    def read(self, text: str, types: ArgumentTypes) -> ReadCall:
        """Read a call; the arguments' text is kept as it stands, whatever a schema declares.

        Raises:
            MalformedCallError: it is no such object.
        """
        try:
            members = strict_json.members(text)
        except ValueError as error:
            raise MalformedCallError(f"the tool call is not a JSON object: {error}") from error
        name = members.get(self.name_field, (None, ""))[0]
        value, verbatim = members.get(self.arguments_field, (None, ""))
        name = name if isinstance(name, str) and strict_json.encodable(name) else ""
        known = {self.name_field, self.arguments_field, self.id_field}
        call_id = members.get(self.id_field or "", (None, ""))[0]
        if not name:
            problem = "the tool call has no name"
        elif not isinstance(value, dict):
            problem = "the tool call's arguments are not an object"
        elif extra := sorted(members.keys() - known):
            problem = f"the tool call has unknown fields: {', '.join(extra)}"
        else:
            usable = isinstance(call_id, str) and strict_json.encodable(call_id)
            return ReadCall(name=name, arguments=verbatim, id=call_id if usable else None)
        raise MalformedCallError(problem, name=name, arguments=verbatim or None)


class NamedForm(msgspec.Struct, frozen=True, kw_only=True, tag="named"):
    """The tool's name, then a JSON object of the arguments (DeepSeek, Kimi)."""

    before_name: str
    after_name: str
    after_arguments: str
    name_is_id: bool = False
    """The call's id stands where others print the name (`functions.NAME:0`)."""

    def read(self, text: str, types: ArgumentTypes) -> ReadCall:
        """Read a call; id and arguments are kept as they stand.

        Raises:
            MalformedCallError: it is not in this form.
        """
        start = _expect(self.before_name, text, 0)
        found = re.compile(_words(self.after_name) or r"(?=\{)").search(text, start)
        if found is None:
            _fail(f"{self.after_name.strip()!r} is missing after the name")
        written = text[start : found.start()].strip()
        match = _CALL_ID.fullmatch(written) if self.name_is_id else None
        name = _name(match["name"] if match else written)
        try:
            begin = strict_json.blank(text, found.end())
            arguments, end = strict_json.read_at(text, begin)
        except ValueError as error:
            raise MalformedCallError(f"the arguments are not JSON: {error}", name=name) from error
        if not isinstance(arguments, dict):
            raise MalformedCallError("the tool call's arguments are not an object", name=name)
        _expect_end(self.after_arguments, text, end, name)
        return ReadCall(name=name, arguments=text[begin:end], id=written if self.name_is_id else None)


class ArgumentsForm(msgspec.Struct, frozen=True, kw_only=True, tag="arguments"):
    """A JSON object of the arguments alone; the name stands in the header of the message (gpt-oss)."""

    def read(self, text: str, types: ArgumentTypes) -> ReadCall:
        """Read a call without its name; the arguments' text is kept as it stands.

        Raises:
            MalformedCallError: it is not a JSON object.
        """
        begin = strict_json.blank(text, 0)
        try:
            value, end = strict_json.read_at(text, begin)
        except ValueError as error:
            raise MalformedCallError(f"the arguments are not JSON: {error}") from error
        if not isinstance(value, dict):
            raise MalformedCallError("the tool call's arguments are not an object")
        _expect_end("", text, end, "")
        return ReadCall(name="", arguments=text[begin:end])


class ElementForm(msgspec.Struct, frozen=True, kw_only=True, tag="elements"):
    """The tool's name, then one element per argument (Qwen3-Coder, GLM-4.5); text stands without quotes."""

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    """Blanks at its end and at the start of `after_value` belong to the form, further ones to the value."""
    after_value: str
    end: str
    words: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    """Values that the template prints in words of its own, and their JSON (`True`: `true`)."""

    def read(self, text: str, types: ArgumentTypes) -> ReadCall:
        """Read a call, its values decoded by the types that the tool's schema declares.

        Raises:
            MalformedCallError: it is not in this form, or has a parameter twice.
        """
        at = _expect(self.before_name, text, 0)
        if ends := _words(self.after_name):
            found = re.compile(ends).search(text, at)
        else:
            marks = filter(None, (_words(self.before_key), _words(self.end), r"\Z"))
            found = re.compile(f"(?={'|'.join(marks)})").search(text, at)
        if found is None:
            _fail(f"{self.after_name.strip()!r} is missing after the name")
        name = _name(text[at : found.start()].strip())
        values, at = self._values(text, found.end(), name)
        _expect_end(self.end, text, at, name)
        parts: list[str] = []
        problem: str | None = None
        for key, value in values.items():
            decoded, wrong = decode(value, types.of(name, key), self.words)
            parts.append(f"{json.dumps(key, ensure_ascii=False)}: {decoded}")
            if wrong is not None:
                problem = problem or f"parameter {key!r} {wrong}"
        return ReadCall(name=name, arguments="{" + ", ".join(parts) + "}", error=problem)

    def _values(self, text: str, at: int, name: str) -> tuple[dict[str, str], int]:
        before_key = re.compile(r"\s*" + _words(self.before_key))
        after_key = re.compile(_words(self.after_key) + _optional(_trailing(self.after_key)))
        close = _optional(_leading(self.after_value)) + _words(self.after_value)
        end = rf"{_words(self.end)}\s*\Z" if self.end.strip() else r"\Z"
        # A value may hold the closing words: they close it where the form goes on after them.
        closes = re.compile(rf"{close}(?=\s*(?:{_words(self.before_key)}|{end}|\Z))"), re.compile(close)
        values: dict[str, str] = {}
        while opened := before_key.match(text, at):
            keyed = after_key.search(text, opened.end())
            if keyed is None:
                raise MalformedCallError("a parameter's name is not closed", name=name)
            key = text[opened.end() : keyed.start()].strip()
            closed = closes[0].search(text, keyed.end()) or closes[1].search(text, keyed.end())
            if closed is None:
                raise MalformedCallError(f"parameter {key[:40]!r} is not closed", name=name)
            if key in values:
                raise MalformedCallError(f"parameter {key[:40]!r} stands twice", name=name)
            values[key] = text[keyed.end() : closed.start()]
            at = closed.end()
        return values, at


CallForm = JsonForm | NamedForm | ArgumentsForm | ElementForm | LiteralForm


def read(form: CallForm, text: str, types: ArgumentTypes) -> ReadCall:
    """Read one call; a malformed one says why and keeps its text. Never raises on what a model wrote."""
    try:
        return form.read(text, types)
    except MalformedCallError as error:
        arguments = text if error.arguments is None else error.arguments
        return ReadCall(name=error.name, arguments=arguments, error=str(error), whole=False)


def _words(literal: str) -> str:
    """Pattern for the words of a literal, any blanks or none between them."""
    return r"\s*".join(map(re.escape, literal.split()))


def _leading(literal: str) -> str:
    return literal[: len(literal) - len(literal.lstrip())] if literal.strip() else ""


def _trailing(literal: str) -> str:
    return literal[len(literal.rstrip()) :]


def _optional(blanks: str) -> str:
    return f"(?:{re.escape(blanks)})?" if blanks else ""


def _expect(literal: str, text: str, at: int) -> int:
    found = re.compile(r"\s*" + _words(literal)).match(text, at)
    if found is None:
        _fail(f"the tool call does not begin with {literal.strip()!r}")
    return found.end()


def _expect_end(literal: str, text: str, at: int, name: str) -> None:
    if not re.compile(rf"\s*{_words(literal)}\s*\Z").match(text, at):
        wanted = literal.strip()
        there = text[strict_json.blank(text, at) :][:20]
        why = f"the tool call does not end with {wanted!r}" if wanted else "text stands after the arguments"
        raise MalformedCallError(f"{why}: {there!r}", name=name)


def _name(written: str) -> str:
    if not written or any(char in written for char in "<>\n"):
        _fail("the tool call has no name")
    return written


def _fail(why: str) -> NoReturn:
    raise MalformedCallError(why)
