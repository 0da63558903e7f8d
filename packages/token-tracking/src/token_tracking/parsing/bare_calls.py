"""Tool calls of templates that print a call as a whole turn, without any marker (Llama 3.1 and 3.2)."""

from __future__ import annotations

import re

import msgspec

from token_tracking.parsing import call_forms, strict_json
from token_tracking.parsing.argument_types import ArgumentTypes
from token_tracking.parsing.call_forms import JsonForm
from token_tracking.parsing.call_scan import tool_call
from token_tracking.parsing.pieces import Pieces
from token_tracking.parsing.read_call import ReadCall
from token_tracking.parsing.tool_call import NOT_CLOSED, ToolCall
from token_tracking.tokenizer import Tokenizer

_BETWEEN = re.compile(r"[ \t\r\n]*;?[ \t\r\n]*")
"""Models write several calls one under the other, or with semicolons (Llama 3.2)."""


class BareScanner:
    """Reads a turn that is one JSON object after another."""

    def __init__(self, tokenizer: Tokenizer, form: JsonForm, types: ArgumentTypes):
        self._tokenizer = tokenizer
        self._form = form
        self._types = types
        fields = f"(?:{re.escape(form.name_field)}|{re.escape(form.arguments_field)})"
        self._begins = re.compile(rf'\{{[ \t\r\n]*"{fields}"')

    def scan(self, ids: list[int], start: int) -> tuple[list[ToolCall], str | None]:
        """The calls from `start` on, and what is wrong with the text around them; none: it is text.

        JSON that is well-formed and has no name or no arguments is an answer, not a call. One control token
        may stand before the first call (Llama's `<|python_tag|>`) and after the last (`<|eom_id|>`).
        """
        control = self._tokenizer.special_ids
        first = start + (start < len(ids) and ids[start] in control)
        if len(ids) > first and ids[-1] in control:
            ids = ids[:-1]
        if not self._tokenizer.decode(ids[first:]).lstrip().startswith("{"):
            return [], None
        pieces = Pieces(self._tokenizer, ids[first:])
        text, calls = pieces.text, list[ToolCall]()
        at, begin, written = strict_json.blank(text, 0), start, 0
        while (found := self._read(text, at)) is not None:
            read, end = found
            after = max(begin, first + pieces.id_after(end))
            calls.append(tool_call(read, len(calls), (begin, after)))
            between = _BETWEEN.match(text, end)
            at, begin, written = between.end() if between else end, after, end
        stray = "text after the tool calls" if calls and text[written:].strip() else None
        return calls, stray

    def _read(self, text: str, at: int) -> tuple[ReadCall, int] | None:
        """The call that begins at `at` and where it ends; None: none does."""
        if not text.startswith("{", at):
            return None
        end = strict_json.balanced_end(text, at)
        written = text[at:] if end < 0 else text[at:end]
        try:
            members = strict_json.members(written)
        except ValueError:
            if not self._begins.match(written):
                return None
        else:
            if not {self._form.name_field, self._form.arguments_field} <= members.keys():
                return None
        read = call_forms.read(self._form, written, self._types)
        if end < 0:
            return msgspec.structs.replace(read, error=NOT_CLOSED, whole=False), len(text)
        return read, end
