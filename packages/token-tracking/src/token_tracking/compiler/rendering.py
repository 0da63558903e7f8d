"""Jinja chat templates, rendered exactly as `transformers` renders them in `apply_chat_template`."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from token_tracking.errors import TemplateError

Message = Mapping[str, Any]


class Constants:
    """The constants in a template's expressions: what it may compare messages with."""

    def __init__(self, tree: nodes.Template):
        """Collect them from a parsed source."""
        found = [*_walk(tree)]
        constants = [node for node in found if isinstance(node, nodes.Const)]
        strings = [c for c in constants if isinstance(c.value, str)]
        outputs = (node for node in found if isinstance(node, nodes.Output))
        printed = {id(c) for output in outputs for c in _printed(output.nodes)}
        keys = {id(node.arg) for node in found if isinstance(node, nodes.Getitem)}
        known = printed | keys
        attributes = {node.attr for node in found if isinstance(node, nodes.Getattr)}
        self.words = frozenset({*attributes, *(c.value for c in strings)})
        """Every string constant and attribute name."""
        self.literals = tuple(sorted({c.value for c in strings if id(c) not in known}))
        """String constants that are more than printed and more than a field's name."""
        self.pairs = tuple(
            sorted(
                {
                    (a.value, b.value)
                    for both in found
                    if isinstance(both, nodes.And)
                    for a, b in itertools.permutations(_texts(both), 2)
                    if a.value != b.value
                }
            )
        )
        """Pairs of string constants that stand in one condition."""
        self.numbers = tuple(sorted({abs(c.value) for c in constants if type(c.value) is int}))
        """Every integer constant, without its sign."""


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    for child in node.iter_child_nodes():
        yield child
        yield from _walk(child)


def _texts(node: nodes.Node) -> list[nodes.Const]:
    return [c for c in node.find_all(nodes.Const) if isinstance(c.value, str) and c.value]


def _printed(items: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    """The parts of printed sums and concatenations."""
    for item in items:
        if isinstance(item, (nodes.Add, nodes.Concat)):
            yield from _printed(item.iter_child_nodes())
        else:
            yield item


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`: marks what the model writes, and prints it as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag, in place of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of `transformers`, quicker on what templates ask for most: fields of messages and counters.

    It gives what the slow way gives: a dictionary's own attributes and whatever can be called still take it.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See `jinja2.sandbox.SandboxedEnvironment.getattr`."""
        if type(obj) is dict:
            if attribute in obj and attribute not in _DICT:
                return cast("dict[str, Any]", obj)[attribute]
        elif type(obj) in _COUNTERS and not attribute.startswith("_"):
            try:
                value = getattr(obj, attribute)
            except AttributeError:
                return super().getattr(obj, attribute)
            if not callable(value):
                return value
        return super().getattr(obj, attribute)


_DICT = frozenset(dir(dict))
_COUNTERS = frozenset[Any]({Namespace, LoopContext})


class JinjaTemplate:
    """One template source, compiled once in a sandbox."""

    def __init__(self, source: str, *, now: datetime):
        """Compile.

        Args:
            source: text of the template.
            now: what `strftime_now` formats. It is fixed, so that a conversation renders alike across
                midnight.

        Raises:
            TemplateError: the source is not a Jinja template.
        """
        self.source = source
        self.fingerprint = hashlib.sha256(source.encode()).hexdigest()
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        environment.filters["tojson"] = _tojson
        functions = cast("dict[str, Any]", environment.globals)
        functions["raise_exception"] = _raise_exception
        functions["strftime_now"] = _strftime(now)
        try:
            tree = environment.parse(source)
            self.constants = Constants(tree)
            """What the source spells out."""
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The text for `messages`.

        Raises:
            TemplateError: the template refused the messages (its own `raise_exception`), or failed on them.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            roles = ", ".join(str(message.get("role")) for message in messages[-6:])
            raise TemplateError(
                f"the chat template refused {len(messages)} messages (last roles: {roles}): "
                f"{type(error).__name__}: {error}"
            ) from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime(now: datetime) -> Callable[[str], str]:
    def strftime_now(pattern: str) -> str:
        return now.strftime(pattern)

    return strftime_now
