"""Plain values into frozen types; an error says where the key stands and what is known there."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar, cast

import msgspec
from msgspec import inspect

from agent_flow.errors import AgentFlowError, ConfigError
from agent_flow.toml_lines import Keys

T = TypeVar("T")

_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<place>\d+)\]|(?P<any>\[\.\.\.\])")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_GOT = re.compile(r"Expected `(?P<kind>[^`]+)`.*, got `(?P<got>\w+)`")
_NUMBERS = ("int", "float")


def decode(
    raw: Mapping[str, object], kind: type[T], *, where: Callable[[Keys], str], section: Keys = ()
) -> T:
    """Convert a table to its type. `raw` stays as it is, and nothing of it is shared with the result.

    A key that the type does not name is refused on every level, whether or not the type forbids it.

    Args:
        raw: Values as a parser gives them.
        kind: A msgspec Struct.
        where: Says `file:line` of a key.
        section: The way from the file's top to `raw`.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type.
        AgentFlowError: what the type's own `__post_init__` raised.
    """
    values = copy.deepcopy(dict(raw))
    info = inspect.type_info(kind)
    for way, known in _unknown(values, info, ()):
        raise _unknown_key((*section, *way), known, info, where)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, AgentFlowError):
            raise error.__cause__ from None
        raise _explain(str(error), values, kind, where, section) from None


def dotted(way: Keys) -> str:
    """A way as a person writes it, such as `engine.replicas[1].url`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in way).lstrip(".")


def nearest(name: str, known: Iterable[str]) -> str:
    """What to try in the place of a name: the nearest known one, else all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"one of {', '.join(names)}" if names else "take it out: there is nothing to set here"


def bare(info: inspect.Type) -> inspect.Type:
    """A type without what is only said about it."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    return info


def _unknown(value: object, info: inspect.Type, way: Keys) -> Iterator[tuple[Keys, list[str]]]:
    """Every key that its table's type does not name, with those that it does."""
    info = _chosen(value, bare(info))
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        if isinstance(info, inspect.StructType):
            fields = {field.encode_name: field.type for field in info.fields}
            tag = {} if info.tag_field is None else {info.tag_field: inspect.AnyType()}
            for key, inner in table.items():
                if key not in fields and key not in tag:
                    yield (*way, key), [*fields, *tag]
                else:
                    yield from _unknown(inner, {**tag, **fields}[key], (*way, key))
        elif isinstance(info, inspect.DictType):
            for key, inner in table.items():
                yield from _unknown(inner, info.value_type, (*way, key))
    elif isinstance(value, list):
        for number, inner in enumerate(cast("list[object]", value)):
            yield from _unknown(inner, _item(info, number), (*way, number))


def _item(info: inspect.Type, number: int) -> inspect.Type:
    if isinstance(info, inspect.CollectionType):
        return info.item_type
    if isinstance(info, inspect.TupleType) and number < len(info.item_types):
        return info.item_types[number]
    return inspect.AnyType()


def _chosen(value: object, info: inspect.Type) -> inspect.Type:
    """Of a union, the member that a table would become; where that is open, nothing is said about it."""
    if not isinstance(info, inspect.UnionType):
        return info
    wanted = dict if isinstance(value, dict) else list
    kinds = (
        (inspect.StructType, inspect.DictType)
        if wanted is dict
        else (inspect.CollectionType, inspect.TupleType)
    )
    members = [member for member in map(bare, info.types) if isinstance(member, kinds)]
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        tagged = [
            member
            for member in members
            if isinstance(member, inspect.StructType)
            and member.tag_field is not None
            and table.get(member.tag_field) == member.tag
        ]
        members = tagged or members
    return members[0] if len(members) == 1 else inspect.AnyType()


def _unknown_key(
    way: Keys, known: list[str], info: inspect.Type, where: Callable[[Keys], str]
) -> ConfigError:
    key = str(way[-1])
    fix = nearest(key, known)
    elsewhere = [
        f"{field.encode_name}.{key}"
        for field in (info.fields if isinstance(info, inspect.StructType) else ())
        if isinstance(table := bare(field.type), inspect.StructType)
        and any(inner.encode_name == key for inner in table.fields)
    ]
    if elsewhere and not fix.startswith("did you mean"):
        fix = f"did you mean {elsewhere[0]!r}?"
    return ConfigError(f"unknown key {dotted(way)!r}", where=where(way), fix=fix)


def _explain(
    message: str, values: Mapping[str, object], kind: type[object], where: Callable[[Keys], str], at: Keys
) -> ConfigError:
    problem, _, steps = message.partition(" - at `")
    inner = _way(message, steps, values, kind)
    way = (*at, *inner)
    missing = _MISSING.match(problem)
    if missing:
        key = dotted((*way, missing.group(1)))
        info = _type_at(inspect.type_info(kind), (*inner, missing.group(1)))
        table = isinstance(info, inspect.StructType | inspect.DictType)
        fix = f"add a table [{key}]" if table else f"add {key}"
        return ConfigError(f"missing key {key!r}", where=where(way), fix=fix)
    value = _value_at(values, inner)
    info = _type_at(inspect.type_info(kind), inner)
    if problem.startswith("Invalid enum value") and isinstance(info, inspect.LiteralType):
        names = [str(name) for name in info.values]
        return ConfigError(
            f"{dotted(way)}: no such choice: {value!r}", where=where(way), fix=nearest(str(value), names)
        )
    said = problem.replace("`object`", "a table").replace("`array`", "a list")
    said = f"{said[:1].lower()}{said[1:]}"
    if steps.startswith("key`"):
        said = f"a key: {said}"
    return ConfigError(f"{dotted(way)}: {said}" if way else said, where=where(way), fix=_fix(problem, value))


def _fix(problem: str, value: object) -> str:
    """What usually is the matter where a type is wrong."""
    match = _GOT.match(problem)
    kinds = match.group("kind").split(" | ") if match else []
    if isinstance(value, str) and not {*kinds}.isdisjoint(_NUMBERS):
        try:
            float(value)
        except ValueError:
            return ""
        return "write the number without quotes (in YAML with a point and a sign: 1.0e-3)"
    if kinds == ["str"] and isinstance(value, bool | int | float):
        return "put the value in quotes"
    return ""


def _way(message: str, steps: str, values: Mapping[str, object], kind: type[object]) -> Keys:
    """The way that a message of msgspec names. Of a mapping it does not say which key: that one is sought."""
    way: Keys = ()
    for step in _STEP.finditer(steps.rpartition("`$")[2] if "`$" in steps else steps):
        if step["name"] is not None:
            way = (*way, step["name"].rstrip("`"))
        elif step["place"] is not None:
            way = (*way, int(step["place"]))
        else:
            table = _value_at(values, way)
            if not isinstance(table, dict):
                return way
            for key, value in cast("dict[str, object]", table).items():
                if _message(_with(values, way, {key: value}), kind) == message:
                    way = (*way, key)
                    break
    return way


def _message(values: object, kind: type[object]) -> str:
    try:
        msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _with(values: object, way: Keys, table: object) -> object:
    """A copy in which another value stands at a way."""
    if not way:
        return table
    if isinstance(values, dict):
        outer = cast("dict[str | int, object]", values)
        return {**outer, way[0]: _with(outer[way[0]], way[1:], table)}
    items = cast("list[object]", values)
    number = cast("int", way[0])
    return [*items[:number], _with(items[number], way[1:], table), *items[number + 1 :]]


def _value_at(values: object, way: Keys) -> object:
    if not way:
        return values
    if isinstance(values, dict):
        return _value_at(cast("dict[str | int, object]", values).get(way[0]), way[1:])
    if isinstance(values, list) and isinstance(way[0], int):
        return _value_at(cast("list[object]", values)[way[0]], way[1:])
    return None


def _type_at(info: inspect.Type, way: Keys) -> inspect.Type:
    info = bare(info)
    for key in way:
        if isinstance(info, inspect.StructType):
            fields = {field.encode_name: field.type for field in info.fields}
            info = bare(fields.get(str(key), inspect.AnyType()))
        elif isinstance(info, inspect.DictType):
            info = bare(info.value_type)
        else:
            info = bare(_item(info, key if isinstance(key, int) else 0))
    return info
