# pyright: basic
"""Tokenizers by their name on the Hugging Face hub, through `transformers`: the only file that loads it."""

from __future__ import annotations

import logging
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from token_tracking.errors import TokenizerError

log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_CACHED = ("tokenizer.json", "tokenizer_config.json")
_FILES = ("tokenizer*", "vocab*", "*.model", "tekken.json")


def check_name(source: str) -> None:
    """Refuse what can be no name on the hub, which would be asked for again and again before it fails.

    Raises:
        TokenizerError: it is a folder without a tokenizer, a path to nothing, or no `OWNER/NAME`.
    """
    path = Path(source)
    if path.is_dir():
        if not any(any(path.glob(pattern)) for pattern in _FILES):
            raise TokenizerError(f"{source} holds no tokenizer.json: give the tokenizer with --tokenizer")
        return
    if source.startswith((".", "/", "~")) or source.endswith("/") or source.count("/") > 1:
        raise TokenizerError(f"{source}: No such file or folder")
    if "/" not in source:
        raise TokenizerError(f"no file or folder {source!r} here, and a name on the hub is OWNER/NAME")
    if path.parent.is_dir():
        raise TokenizerError(f"{source}: No such file or folder (there is a folder {path.parent})")


def load_auto(source: str):
    """`AutoTokenizer.from_pretrained`; where the hub cannot be reached, from the cache alone.

    Raises:
        TokenizerError: `transformers` is not installed, or there is no such tokenizer.
    """
    try:
        from huggingface_hub import constants, try_to_load_from_cache

        local = Path(source).is_dir()
        # Without network the hub's client tries each file for half a minute.
        missing = None if local else _unreachable(constants.ENDPOINT)
        cached = missing is not None and any(
            isinstance(try_to_load_from_cache(source, name), str) for name in _CACHED
        )
        if missing is not None and not cached:
            raise TokenizerError(
                f"{source!r} is not in the cache, and {constants.ENDPOINT} cannot be reached ({missing})"
            )
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(
            f"{source!r} is not a file or folder here, and `transformers` (for hub names) is not installed: "
            "pip install 'token-tracking[hf]'"
        ) from error
    if missing is not None:
        log.warning("%s cannot be reached (%s): %s comes from the cache", constants.ENDPOINT, missing, source)
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local or cached)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"transformers cannot load a tokenizer from {source!r}: {error}") from error


def hub_template(source: str) -> object:
    """The chat template of a tokenizer on the hub: text, named texts, or None.

    Raises:
        TokenizerError: `transformers` is not installed, or there is no such tokenizer.
    """
    return load_auto(source).chat_template


def _unreachable(endpoint: str) -> str | None:
    """Why no connection can be made; None: it can, or a proxy makes it."""
    url = urlsplit(endpoint)
    if urllib.request.getproxies():
        return None
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
