"""Plain data as YAML for people to read; without a YAML library, which the base install does not have."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

_PLAIN = re.compile("[A-Za-z][A-Za-z0-9/._-]*")
# Words that YAML 1.1, which kubectl reads, takes for something else than text.
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def document(value: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """One YAML document with its ``---``.

    Args:
        value: Not empty; of mappings, sequences, text, int, bool and None.
        comments: Lines that stand above it.
    """
    lines = ["---", *(f"# {line}".rstrip() for line in comments), *_block(value)]
    return "\n".join(lines) + "\n"


def _block(value: Any) -> list[str]:
    """The lines of a mapping or a sequence that is not empty."""
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, Any]", value).items():
            name = _scalar(key)
            if _is_empty(inner):
                lines.append(f"{name}: {_scalar(inner)}")
            else:
                shift = "" if isinstance(inner, (list, tuple)) else "  "
                lines += [f"{name}:", *(shift + line for line in _block(inner))]
        return lines
    for inner in value:
        first, *rest = [_scalar(inner)] if _is_empty(inner) else _block(inner)
        lines += [f"- {first}", *(f"  {line}" for line in rest)]
    return lines


def _is_empty(value: Any) -> bool:
    return not isinstance(value, (dict, list, tuple)) or not value


def _scalar(value: Any) -> str:
    """Text without quotes where no reader can misunderstand it; everything else between quotes."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    # Not JSON: it writes what lies above U+FFFF as two halves, which YAML readers leave apart.
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if " " <= char <= "~" else f"\\U{ord(char):08x}"
