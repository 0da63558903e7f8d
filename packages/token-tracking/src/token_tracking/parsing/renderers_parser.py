# pyright: basic, reportMissingImports=false
"""Completions parsed by the package `renderers` (extra `[renderers]`), as `ParsedCompletion`.

No other file imports it, and this one on use: it takes a second to load.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import msgspec

from token_tracking.errors import TemplateError
from token_tracking.parsing.parse import CompletionParser, ParsedCompletion
from token_tracking.parsing.strict_json import encodable
from token_tracking.parsing.tool_call import ToolCall
from token_tracking.tokenizer import Tokenizer

log = logging.getLogger(__name__)

INSTALL = "pip install 'token-tracking[renderers]'"


class RenderersTokenizer:
    """Our tokenizer with the face that `renderers` wants."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name
        self.unk_token_id = self._named("unk_token")
        self.eos_token_id = self._named("eos_token")
        self.eos_token = tokenizer.named_tokens.get("eos_token")
        self.bos_token_id = self._named("bos_token")

    def _named(self, name: str) -> int | None:
        token = self._tokenizer.named_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids; nothing is added."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Text, control tokens included unless they are to be skipped."""
        numbers = [ids] if isinstance(ids, int) else list(ids)
        special = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        return self._tokenizer.decode([number for number in numbers if number not in special])

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token; ids of several. None: there is no such token."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


class RenderersParser:
    """The parser of one family."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: str,
        template: CompletionParser,
        *,
        tools: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
    ):
        """Make the parser of a family.

        Args:
            tokenizer: of the model.
            family: a name in `renderers` (`qwen3`, `glm-4.5`).
            template: gives the reasoning's span and the verbatim text, which `renderers` does not.
            tools: schemas, by which it types values.
            prompt_ids: a prompt that ends with the template's generation prompt.

        Raises:
            TemplateError: `renderers` is not installed, does not know the family, or lacks a token of it.
        """
        if util.find_spec("renderers") is None:
            raise TemplateError(f"the parser of `renderers` was asked for, which is not installed: {INSTALL}")
        from renderers import create_renderer
        from renderers.base import ToolCallParseStatus
        from renderers.configs import config_from_name

        try:
            config: Any = config_from_name(family)
            self._renderer = create_renderer(RenderersTokenizer(tokenizer), config)
        except Exception as error:  # an unknown name, a missing token, a vocabulary that it cannot download
            message = f"`renderers` has no parser {family!r} for {tokenizer.name}: {error}"
            raise TemplateError(message) from error
        self._ok = ToolCallParseStatus.OK
        self._template = template
        self._tools: Any = [dict(tool.get("function", tool)) for tool in tools] or None
        self._prompt_ids = list(prompt_ids)
        self.failures = 0
        """Completions on which `renderers` raised; the template's own parser took them apart."""

    def parse(self, ids: Sequence[int]) -> ParsedCompletion:
        """Take a completion apart. Never raises on what a model wrote."""
        ids = [int(i) for i in ids]
        ours = self._template.parse(ids)
        try:
            found = self._renderer.parse_response(ids, tools=self._tools, prompt_ids=self._prompt_ids)
            calls = tuple(self._call(call, index) for index, call in enumerate(found.tool_calls))
        except Exception as error:  # on a text that it does not foresee; it names no type of its own
            if not self.failures:
                log.warning("renderers failed on a completion of %d ids: %r", len(ids), error)
            self.failures += 1
            return msgspec.structs.replace(ours, error=ours.error or f"renderers failed: {error!r:.200}")
        error = next((call.error for call in calls if call.error), None)
        if found.reasoning_complete is False:
            error = error or "the reasoning was not closed"
        return ParsedCompletion(
            reasoning=found.reasoning_content,
            content=found.content,
            tool_calls=calls,
            error=error,
            reasoning_span=ours.reasoning_span,
            text=ours.text,
        )

    def in_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a completion ends inside its reasoning, by the template's own markers."""
        return self._template.in_reasoning(ids)

    def _call(self, call: Any, index: int) -> ToolCall:
        error = None if call.status == self._ok else f"{call.status} (renderers)"
        arguments, fault = _json_object(call.arguments)
        name = _text(call.name)
        if name is None:
            fault = f"the tool call's name is no text: {call.name!r:.60}"
        error = error or fault
        return ToolCall(
            id=_text(call.id) or f"call_{index}",
            name=name or "",
            arguments=arguments if error is None else call.raw,
            error=error,
            span=tuple(call.token_span) if call.token_span else (0, 0),
        )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value and encodable(value) else None


def _json_object(arguments: Any) -> tuple[str, str | None]:
    """The JSON text of a call's arguments, and what is wrong with them."""
    if not isinstance(arguments, Mapping):
        return "", "the tool call's arguments are not an object"
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # NaN and infinity, which its reader takes and JSON has not
        return "", f"the tool call's arguments are not JSON: {error}"
    return text, None if encodable(text) else "the tool call's arguments have a lone surrogate"


def family_of(name: str) -> str | None:
    """The family that `renderers` has for a model of the hub; None: none, or it is not installed."""
    spec = util.find_spec("renderers")
    folders = (spec.submodule_search_locations if spec else None) or ()
    quoted = f'"{name}"'.encode()
    # To import the package takes seconds: a name that its source does not spell is not in its table.
    if not any(quoted in path.read_bytes() for folder in folders for path in Path(folder).glob("*.py")):
        return None
    from renderers.base import MODEL_RENDERER_MAP

    return MODEL_RENDERER_MAP.get(name)
