"""Secrets of a configuration, hidden in what is shown. Nothing here decides what a secret is used for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import msgspec

from agent_flow.config import ConfigFile

_SECRET_KEY = re.compile(
    r"(?:^|[_-])(?:secret|password|passwd|credentials?|api[_-]?key|key|token|auth|authorization|cookie)s?"
    r"(?:[_-]|$)",
    re.I,
)
_HEADERS = frozenset({"headers", "extra_headers", "default_headers"})
"""Tables of HTTP headers, in which anything may be a secret."""
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SHORTEST = 6
"""Characters. What is shorter would hide ordinary words."""
_LONGEST_FILE = 1 << 16
MASK = "***"
_OPTIONS = "options"
"""The table of an agent's section that goes to a library as it is."""


class Redactor:
    """Knows the secrets of a configuration.

    They are the values of keys that sound like it (`api_key`, `auth_token`), those of HTTP headers, the lines
    of the files that such keys name (`api_key_file`), and the variables that they name (`token_env`).
    """

    def __init__(self, file: ConfigFile) -> None:
        sections = (file.run.engine, file.run.flow, file.run.agent, file.run.environment, file.run.runtime)
        sections = (*sections, file.run.eval.agent)
        found = {secret for section in sections for secret in _secrets(section, file)}
        self._secrets = sorted(
            (secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True
        )

    def hide(self, text: str) -> str:
        """The text with every secret replaced by `***`, and with no user or password in a URL."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return hide_user(text)


def hide_user(text: str) -> str:
    """The text with no user or password in a URL."""
    return _USER_IN_URL.sub(MASK, text)


def masked(options: Mapping[str, object]) -> dict[str, object]:
    """The same with `***` in the place of what sounds like a secret, and of every HTTP header's value."""
    return {key: _masked(value, key) for key, value in options.items()}


def masked_file(file: ConfigFile) -> ConfigFile:
    """The configuration as a run folder keeps it: an agent's `options` masked. Nothing else is changed."""
    run = file.run
    agent, other = (
        {key: _masked_options(value) if key == _OPTIONS else value for key, value in section.items()}
        for section in (run.agent, run.eval.agent)
    )
    changed = msgspec.structs.replace(run, agent=agent, eval=msgspec.structs.replace(run.eval, agent=other))
    return msgspec.structs.replace(file, run=changed)


def option_secrets(options: Mapping[str, object]) -> list[str]:
    """What `masked` masks, and the part of a header's value that follows a word such as `Bearer`."""
    found: list[str] = []
    for key, value in options.items():
        if isinstance(value, dict):
            inner = cast("dict[str, object]", value)
            found += [str(each) for each in inner.values()] if key in _HEADERS else option_secrets(inner)
        elif isinstance(value, str) and _SECRET_KEY.search(key):
            found.append(value)
    found += [text.partition(" ")[2] for text in found]
    return [text for text in found if len(text) >= _SHORTEST]


def _masked_options(value: object) -> object:
    return masked(cast("dict[str, object]", value)) if isinstance(value, dict) else value


def _masked(value: object, key: str) -> object:
    if isinstance(value, dict):
        inner = cast("dict[str, object]", value)
        return dict.fromkeys(inner, MASK) if key in _HEADERS else masked(inner)
    return MASK if isinstance(value, str) and _SECRET_KEY.search(key) else value


def _secrets(section: Mapping[str, object], file: ConfigFile) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict) and key in _HEADERS:
            yield from option_secrets({key: cast("object", value)})
        elif isinstance(value, dict):
            yield from _secrets(cast("dict[str, object]", value), file)
        elif isinstance(value, list):
            for item in cast("list[object]", value):
                yield from _secrets({key: item}, file)
        elif isinstance(value, str) and _SECRET_KEY.search(key):
            if key.endswith("_env"):
                yield os.environ.get(value, "")
            elif not (key.endswith("_file") or key.endswith("_path")):
                yield value
            yield from _lines(file.resolve(value))


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.is_file() and path.stat().st_size <= _LONGEST_FILE:
            yield from (line.strip() for line in path.read_text("utf-8", "replace").splitlines())
    except (OSError, ValueError):  # no path after all
        return
