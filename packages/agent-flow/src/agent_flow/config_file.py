"""Configuration files as they are read: TOML or YAML, plain values, and where each key stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import cast

from agent_flow.errors import ConfigError
from agent_flow.toml_lines import Keys, toml_lines
from agent_flow.yaml_lines import YamlError, load_yaml, yaml_line

_YAML = (".yaml", ".yml")
_TOML_PLACE = re.compile(r" \(at line (\d+), column \d+\)\Z")


def read_text(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: there is no such file, it cannot be read, or the current folder is gone.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError("no such file", where=str(path), fix="agent-flow init, which writes one") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration: {error}", where=str(path)) from error
    try:
        path.resolve()  # a relative path means nothing where the current folder was removed
    except OSError as error:
        raise ConfigError(f"the current folder is gone: {error.strerror}", where=str(path)) from error
    return text


def parse(path: Path, text: str) -> dict[str, object]:
    """The values of a text; `path` says the language (`.yaml` and `.yml`: YAML, all others: TOML).

    Raises:
        ConfigError: the text is not of that language; says the line.
    """
    if path.suffix.lower() in _YAML:
        return _parse_yaml(path, text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _TOML_PLACE.search(str(error))
        where = f"{path}:{place.group(1)}" if place else str(path)
        raise ConfigError(f"not TOML: {error}", where=where) from error
    except RecursionError as error:
        raise ConfigError("not TOML: nested too deeply", where=str(path)) from error


def _parse_yaml(path: Path, text: str) -> dict[str, object]:
    try:
        values = load_yaml(text)
    except YamlError as error:
        where = str(path) if error.line is None else f"{path}:{error.line}"
        raise ConfigError(error.what, where=where, fix=error.fix) from error
    if not isinstance(values, dict):
        raise ConfigError("not a mapping of sections", where=str(path), fix="begin with `name: run`")
    return cast("dict[str, object]", values)


def place(path: Path, text: str, way: Keys) -> str:
    """`file:line` of a key, or of the nearest table around it; the file alone if none of them stands there.

    Args:
        path: As it is shown.
        text: The file's text. Empty: the values came from elsewhere, and there are no lines.
        way: From the outermost table to the key.
    """
    if text:
        lines = {} if path.suffix.lower() in _YAML else toml_lines(text)
        for end in range(len(way), 0, -1):
            line = lines.get(way[:end]) if lines else yaml_line(text, way[:end])
            if line is not None:
                return f"{path}:{line}"
    return str(path)
