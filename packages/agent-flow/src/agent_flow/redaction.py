"""Secrets of a configuration, hidden in what is shown. Nothing here decides what a secret is used for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from agent_flow.config import ConfigFile

_SECRET_KEY = re.compile(
    r"(?:^|_)(?:secret|password|passwd|credentials?|api_?key|key|token|auth)s?(?:_|$)", re.I
)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SHORTEST = 6
"""Characters. What is shorter would hide ordinary words."""
_LONGEST_FILE = 1 << 16
MASK = "***"


class Redactor:
    """Knows the secrets of a configuration.

    They are the values of keys that sound like it (`api_key`, `auth_token`), the lines of the files that such
    keys name (`api_key_file`), and the variables that they name (`token_env`).
    """

    def __init__(self, file: ConfigFile) -> None:
        sections = (file.run.engine, file.run.flow, file.run.agent, file.run.environment, file.run.runtime)
        found = {secret for section in sections for secret in _secrets(section, file)}
        self._secrets = sorted(
            (secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True
        )

    def hide(self, text: str) -> str:
        """The text with every secret replaced by `***`, and with no user or password in a URL."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return _USER_IN_URL.sub(MASK, text)


def _secrets(section: Mapping[str, object], file: ConfigFile) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict):
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
