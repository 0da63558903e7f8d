"""Where layers come from."""

import tomllib
from collections.abc import Mapping
from typing import Any

from layerconf.merge import Layer


def toml_layer(text: str) -> Layer:
    """Read a TOML document. ``name+`` needs quotes there: ``"plugins+" = ["audit"]``."""
    return tomllib.loads(text)


def environment_layer(prefix: str, variables: Mapping[str, str]) -> Layer:
    """Collect the variables that begin with ``prefix__``; further ``__`` separate tables.

    Names become lower case. A variable that names a table which another one sets as a value (or the
    other way round) loses to the one that comes later in alphabetical order.
    """
    layer: Layer = {}
    for name in sorted(variables):
        head, *path = name.split("__")
        if head != prefix or not path or not all(path):
            continue
        *tables, key = (part.lower() for part in path)
        table = layer
        for part in tables:
            inner = table.get(part)
            if not isinstance(inner, dict):
                inner = table[part] = {}
            table = inner
        table[key] = _value(variables[name])
    return layer


def _value(text: str) -> Any:
    """Read a TOML value; what is not one is text, so that nobody has to quote a host name."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text
