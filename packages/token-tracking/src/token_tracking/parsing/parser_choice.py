"""Which parser takes a template's completions apart, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from token_tracking.errors import TemplateError
from token_tracking.parsing.parse import CompletionParser, ParsedCompletion
from token_tracking.tokenizer import Tokenizer

PREFIX = "renderers"


class Parser(Protocol):
    """Takes completions apart."""

    def parse(self, ids: Sequence[int]) -> ParsedCompletion:
        """Never raises on what a model wrote."""
        ...

    def in_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a completion ends inside its reasoning."""
        ...


class ParserChoice(msgspec.Struct, frozen=True):
    """The parser of a template."""

    parser: Parser
    name: str
    """`template`, or `renderers:` and the name of a family."""
    why: str


def choose(
    asked: str,
    tokenizer: Tokenizer,
    template: CompletionParser,
    *,
    prints_calls: bool,
    tools: Sequence[Mapping[str, Any]],
    prompt: str,
) -> ParserChoice:
    """Choose a parser.

    Args:
        asked: `template`; `renderers` (it finds the family by the tokenizer's name) or `renderers:FAMILY`;
            `auto`: `template`, unless the template prints calls in a form that was not learnt and
            `renderers` is installed and knows the tokenizer's name.
        tokenizer: of the model.
        template: the parser that was learnt.
        prints_calls: whether the template prints tool calls.
        tools: schemas.
        prompt: a rendered prompt with the generation prompt at its end.

    Raises:
        TemplateError: `asked` is none of these, or `renderers` was asked for and cannot be had.
    """
    source, _, family = asked.partition(":")
    if source not in {"auto", "template", PREFIX} or (family and source != PREFIX):
        raise TemplateError(
            f"no parser {asked!r}: it is one of auto, template, {PREFIX}, {PREFIX}:FAMILY (such as qwen3)"
        )
    if source == "template":
        return ParserChoice(template, "template", "it was asked for")
    learnt = template.markers.layout != "none"
    if source == "auto" and (learnt or not prints_calls):
        why = "the form of its calls was learnt" if learnt else "the template prints no tool calls"
        return ParserChoice(template, "template", why)
    from token_tracking.parsing import renderers_parser

    family = family or renderers_parser.family_of(tokenizer.name) or ""
    if not family:
        why = f"`renderers` is not installed, or has no family for {tokenizer.name}"
        if source == PREFIX:
            raise TemplateError(f"no parser: {why}; name it as {PREFIX}:FAMILY")
        return ParserChoice(template, "template", f"the form of its calls was not learnt, and {why}")
    parser = renderers_parser.RenderersParser(
        tokenizer, family, template, tools=tools, prompt_ids=tokenizer.encode(prompt)
    )
    why = "the form of its calls was not learnt" if source == "auto" else "it was asked for"
    return ParserChoice(parser, f"{PREFIX}:{family}", why)
