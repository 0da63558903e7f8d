"""YAML text as plain values, and the line of a key in it. PyYAML's safe loader alone is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import yaml

from agent_flow.toml_lines import Keys

_PREFIX = "tag:yaml.org,2002:"
_MERGE = f"{_PREFIX}merge"
_TAGS = tuple(
    _PREFIX + name for name in ("map", "seq", "str", "int", "float", "bool", "timestamp", "merge", "value")
)
_MOST_VALUES = 100_000
"""Of a text with every alias written out: a few lines of aliases of aliases fill any memory."""


class YamlError(Exception):
    """What is wrong with a YAML text, and in which line (None: of the text as a whole)."""

    def __init__(self, what: str, line: int | None, fix: str = "") -> None:
        super().__init__(what, line, fix)
        self.what = what
        self.line = line
        self.fix = fix


def load_yaml(text: str) -> object:
    """The one document of a text, of values that TOML has too. An empty text is an empty mapping.

    Raises:
        YamlError: it is not YAML, a key is given twice or is no text, or a value is null, a set, binary, or
            of a tag that the safe loader does not know.
    """
    try:
        return _load(yaml.SafeLoader(text))
    except yaml.MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        raise YamlError(f"not YAML: {error.problem}", line) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as the date 2026-13-45
        raise YamlError(f"not YAML: {error}".splitlines()[0], None) from error


def _load(loader: yaml.SafeLoader) -> object:
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        _Check().node(root)
        return cast("object", loader.construct_document(root))  # pyright: ignore[reportUnknownMemberType]
    finally:
        loader.dispose()


def yaml_line(text: str, way: Keys) -> int | None:
    """The line of a key, from one; None: it stands nowhere, or the text is not YAML."""
    try:
        node = yaml.SafeLoader(text).get_single_node()
    except yaml.YAMLError:
        return None
    mark = node
    for key in way:
        found = _child(node, key)
        if found is None:
            return None
        mark, node = found
    return None if mark is None else mark.start_mark.line + 1


class _Check:
    """Visits every node once and sees what the safe loader lets pass."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def node(self, node: yaml.Node) -> int:
        """Check a node and everything below; returns how many values it is, aliases written out."""
        if id(node) in self._open:
            raise YamlError("an alias stands inside what it names", _line(node))
        if id(node) not in self._sizes:
            self._open.add(id(node))
            self._sizes[id(node)] = 1 + sum(map(self.node, self._inner(node)))
            self._open.discard(id(node))
        if self._sizes[id(node)] > _MOST_VALUES:
            raise YamlError(f"more than {_MOST_VALUES} values once its aliases are written out", _line(node))
        return self._sizes[id(node)]

    def _inner(self, node: yaml.Node) -> Iterable[yaml.Node]:
        if node.tag == f"{_PREFIX}null":
            raise YamlError("null is no value here", _line(node), "leave the key out")
        if node.tag not in _TAGS:
            raise YamlError(f"a value of the kind {node.tag.removeprefix(_PREFIX)!r}", _line(node))
        if isinstance(node, yaml.MappingNode):
            pairs = _pairs(node)
            self._keys(pairs)
            return [value for _, value in pairs]
        return cast("list[yaml.Node]", node.value) if isinstance(node, yaml.SequenceNode) else ()

    def _keys(self, pairs: list[tuple[yaml.Node, yaml.Node]]) -> None:
        seen: dict[str, int] = {}
        for node, _ in pairs:
            key = "<<" if node.tag == _MERGE else self._key(node)
            if key in seen:
                raise YamlError(f"the key {key!r} was already given in line {seen[key]}", _line(node))
            seen[key] = _line(node)

    def _key(self, node: yaml.Node) -> str:
        text: object = node.value
        if node.tag != f"{_PREFIX}str" or not isinstance(text, str):
            kind = node.tag.removeprefix(_PREFIX)
            raise YamlError(f"a key of the kind {kind!r}", _line(node), "put the key in quotes")
        return text


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _pairs(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    return cast("list[tuple[yaml.Node, yaml.Node]]", node.value)


def _child(node: yaml.Node | None, key: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """What stands at a key: the node that names it, and its value."""
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int):
        items = cast("list[yaml.Node]", node.value)
        return (items[key], items[key]) if key < len(items) else None
    if not isinstance(node, yaml.MappingNode):
        return None
    own = next(((name, value) for name, value in _pairs(node) if name.value == key), None)
    return own or next((found for merged in _merged(node) if (found := _child(merged, key))), None)


def _merged(node: yaml.MappingNode) -> Iterator[yaml.Node]:
    for name, value in _pairs(node):
        if name.tag == _MERGE:
            yield from (
                cast("list[yaml.Node]", value.value) if isinstance(value, yaml.SequenceNode) else [value]
            )
