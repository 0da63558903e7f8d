"""A new run.toml, written from the types themselves: every key with its docstring and its default.

A line that begins with `#` and no space holds a default and works when the `#` is taken away; `# ` begins
prose.
"""

from __future__ import annotations

import ast
import inspect as python
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import msgspec
import tomli_w
from msgspec import inspect

from agent_flow.config import FILL_IN, RunConfig
from agent_flow.decoding import bare
from agent_flow.providers import BRINGS_MODEL, BUILTIN_PROVIDERS, Kind, provider_class

_WIDTH = 100
_HEAD = """\
# Configuration of agent-flow. Check it: agent-flow doctor {name}. {start}
# A line that begins with # and no space holds a default: take the # away to change it.
# A key that is marked FILL IN has none.
"""
_STARTS = {"run": "Run it", "eval": "For evaluation only"}
_KINDS: dict[str, Kind] = {
    "engine": "engine",
    "flow": "flow",
    "agent": "agent",
    "environment": "environment",
    "runtime": "runtime",
}
_NONE: Mapping[str, object] = MappingProxyType({})
_NO_FOLDERS: Mapping[str, Path] = MappingProxyType({})
_WORDS: tuple[tuple[type[inspect.Type], str], ...] = (
    (inspect.StrType, "text"),
    (inspect.BoolType, "true or false"),
    (inspect.IntType, "a whole number"),
    (inspect.FloatType, "a number"),
    (inspect.DictType, "a table"),
    (inspect.StructType, "a table"),
    (inspect.CollectionType, "a list"),
    (inspect.TupleType, "a list"),
)


def starter(
    providers: Mapping[Kind, str],
    *,
    name: str = "run.toml",
    python_path: Mapping[str, Path] = _NO_FOLDERS,
) -> str:
    """The text of a configuration for these providers.

    Args:
        providers: A name or `module:Class` for each kind. A kind that is left out has no section.
        name: Of the file, for its first lines.
        python_path: Folders in which modules are sought, by what the file says of each.

    Raises:
        ProviderError: one of them cannot be loaded.
    """
    info = cast("inspect.StructType", inspect.type_info(RunConfig))
    docs = field_docs(RunConfig)
    plain = [field for field in info.fields if field.encode_name not in _KINDS and _struct(field) is None]
    command = "eval" if providers.get("agent") in BRINGS_MODEL else "run"
    lines = [_HEAD.format(name=name, start=f"{_STARTS[command]}: agent-flow {command} {name}")]
    given = {"python_path": list(python_path)} if python_path else {}
    lines += [line for field in plain for line in _key(field, docs, given)]
    folders = tuple(python_path.values())
    for field in info.fields:
        kind = _KINDS.get(field.encode_name)
        if kind is not None and kind in providers:
            lines += _provider_section(kind, providers[kind], folders)
        elif kind is None and (struct := _struct(field)) is not None:
            lines += _section(field, struct)
    return "\n".join(lines).rstrip("\n") + "\n"


def field_docs(kind: type) -> dict[str, str]:
    """The docstrings below a class's fields, inherited ones included, in one line each."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        try:
            source = textwrap.dedent(python.getsource(owner))
        except (OSError, TypeError):  # msgspec's own base; a class without source
            continue
        found |= dict(_docs_in(ast.parse(source).body[0]))
    return found


def _docs_in(owner: ast.stmt) -> Iterator[tuple[str, str]]:
    body = owner.body if isinstance(owner, ast.ClassDef) else []
    for field, below in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield field.target.id, " ".join(str(below.value.value).split())


def _section(field: inspect.Field, struct: inspect.StructType) -> list[str]:
    """A table of the configuration's own. One that may be absent is prose altogether."""
    name = field.encode_name
    optional = not field.required and field.default is None
    lines = [*_title(name, _purpose(struct.cls)), f"[{name}]"]
    lines += _keys(struct, name)
    return _as_prose(lines) if optional else lines


def _provider_section(kind: Kind, name: str, folders: tuple[Path, ...]) -> list[str]:
    found = provider_class(kind, name, python_path=folders)
    others = [other for other in sorted(BUILTIN_PROVIDERS[kind]) if other != name]
    known = ", ".join(others) or "none"
    lines = [
        *_title(kind, _purpose(found)),
        *_prose(f"Other {kind} providers: {known}; or 'module:Class'."),
        f"[{kind}]",
        f"provider = {_toml(name)}",
    ]
    info = cast("inspect.StructType", inspect.type_info(found.Config))
    return lines + _keys(info, kind)


def _keys(info: inspect.StructType, table: str) -> list[str]:
    """The keys of a table, those to fill in first, and then the tables inside it, which TOML wants last."""
    docs = field_docs(info.cls)
    inner = [(field, struct) for field in info.fields if (struct := _struct(field)) is not None]
    plain = [field for field in info.fields if _struct(field) is None]
    plain.sort(key=lambda field: not field.required)
    lines = [line for field in plain for line in _key(field, docs)]
    for field, struct in inner:
        way = f"{table}.{field.encode_name}"
        said = docs.get(field.name) or _purpose(struct.cls)
        part = ["", *_prose(said), f"[{way}]", *_keys(struct, way)]
        lines += _as_prose(part) if not field.required and field.default is None else part
    return lines


def _key(field: inspect.Field, docs: Mapping[str, str], given: Mapping[str, object] = _NONE) -> list[str]:
    name, said, hint = field.encode_name, docs.get(field.name, ""), _hint(field.type)
    lines = ["", *_prose(said)]
    if name in given:
        return [*lines, f"{name} = {_toml(given[name])}"]
    if field.required:
        marks = ", ".join(part for part in (FILL_IN, hint) if part)
        return [*lines, f"{name} = {_toml(_example(field.type))}  # {marks}"]
    default = _default(field)
    if default is None:
        return [*lines, f"# {name} = {_kind(field.type)}; left out by default"]
    return [*lines, f"#{name} = {_toml(default)}{f'  # {hint}' if hint else ''}"]


def _default(field: inspect.Field) -> object:
    made: object = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return msgspec.to_builtins(made)


def _struct(field: inspect.Field) -> inspect.StructType | None:
    """The Struct of a field that is a table, optional or not."""
    info = bare(field.type)
    members = [bare(member) for member in info.types] if isinstance(info, inspect.UnionType) else [info]
    structs = [member for member in members if isinstance(member, inspect.StructType)]
    others = [member for member in members if not isinstance(member, inspect.StructType | inspect.NoneType)]
    return structs[0] if len(structs) == 1 and not others else None


def _hint(info: inspect.Type) -> str:
    """What a value may be, where name and default do not say it."""
    info = bare(info)
    if isinstance(info, inspect.LiteralType) and len(info.values) > 1:
        return " | ".join(map(_toml, info.values))
    if isinstance(info, inspect.IntType | inspect.FloatType):
        limits = ((">", info.gt), (">=", info.ge), ("<", info.lt), ("<=", info.le))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
    return ""


def _kind(info: inspect.Type) -> str:
    """A type in words."""
    info = bare(info)
    if isinstance(info, inspect.UnionType):
        return " or ".join(_kind(member) for member in info.types if not isinstance(member, inspect.NoneType))
    if isinstance(info, inspect.LiteralType):
        return " or ".join(map(_toml, info.values))
    return next((word for kind, word in _WORDS if isinstance(info, kind)), "a value")


def _example(info: inspect.Type) -> object:
    """Something to stand where a value has to be filled in: the type's own example, else of its kind."""
    if isinstance(info, inspect.Metadata):
        schema = cast("dict[str, list[object]]", info.extra_json_schema or {})  # pyright: ignore[reportUnknownMemberType]
        examples = schema.get("examples")
        return examples[0] if examples else _example(info.type)
    if isinstance(info, inspect.UnionType):
        return _example(info.types[0])
    if isinstance(info, inspect.LiteralType):
        return info.values[0]
    if isinstance(info, inspect.BoolType):
        return False
    if isinstance(info, inspect.IntType | inspect.FloatType):
        least = info.ge if info.ge is not None else (info.gt + 1 if info.gt is not None else 1)
        return int(least) if isinstance(info, inspect.IntType) else float(least)
    if isinstance(info, inspect.DictType):
        return {}
    if isinstance(info, inspect.CollectionType):
        return [_example(info.item_type)]
    return FILL_IN


def _toml(value: object) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return (
            f"{{ {', '.join(f'{_name(key)} = {_toml(inner)}' for key, inner in pairs)} }}" if pairs else "{}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, cast('list[object]', value)))}]"
    return tomli_w.dumps({"k": value}).removeprefix("k = ").rstrip("\n")


def _name(key: str) -> str:
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _title(name: str, purpose: str) -> list[str]:
    return ["", "", *_prose(purpose or name)]


def _purpose(kind: type) -> str:
    """The first paragraph of a class's docstring, without the name of its section."""
    said = " ".join((python.getdoc(kind) or "").partition("\n\n")[0].split())
    if said.startswith("`["):
        said = said.partition(": ")[2]
    return f"{said[:1].upper()}{said[1:]}"


def _prose(text: str) -> list[str]:
    return [
        f"# {line}"
        for line in textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    ]


def _as_prose(lines: list[str]) -> list[str]:
    return [line if not line or line.startswith("# ") else f"# {line.removeprefix('#')}" for line in lines]
