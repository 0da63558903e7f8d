# pyright: basic
"""The `tokenizers` back end: the one file that imports it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from token_tracking.backends.fast import FastEncoder, choose
from token_tracking.backends.hub import load_auto
from token_tracking.errors import TokenizerError
from token_tracking.tokenizer import Backend

log = logging.getLogger(__name__)

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_SPLIT_PROBES = (
    "{s}system\nYou are terse.{s}\n{s}user\n  indented {s}\n\n{s}",
    "a{s}b{s} c{s}\n{s}{s}  \t{s}é e\u0301 \u4e16\u754c {s}🙂{s}1234 {s}'s{s}",
    ' lead{s} don\'t {s}\r\n{s}{{"k": 1}}{s}\n\n\n{s} ',
)


class HFTokenizer:
    """A `tokenizers.Tokenizer` that never adds tokens and keeps control tokens apart from text.

    Text is split at control tokens here and each piece is encoded with control tokens switched off, so that
    one back end serves both `encode` and `encode_plain` from many threads without changing state. That this
    equals the back end's own result is checked on construction (`splits_at_specials`); where it does not hold
    (a SentencePiece model that marks the start of the text), `encode` calls the back end on the whole text.

    `accelerate` hands encoding to `fastokens` where it was proven to give the same ids. Decoding stays here.
    """

    def __init__(self, backend, *, name: str, fingerprint: str, named_tokens: Mapping[str, str]):
        self.name = name
        self.fingerprint = fingerprint
        self.named_tokens = dict(named_tokens)
        added = backend.get_added_tokens_decoder()
        # Not the number of ids: added tokens may leave gaps below them.
        self.vocab_size = 1 + max(int(backend.get_vocab_size(with_added_tokens=False)) - 1, *added, -1)
        self.added_tokens = {token.content: index for index, token in added.items()}
        self._specials = {token.content: (index, token) for index, token in added.items() if token.special}
        self.special_tokens = {text: index for text, (index, _) in self._specials.items()}
        self.special_ids = frozenset(self.special_tokens.values())
        self._pattern = _special_pattern(self._specials)
        # A tokenizer.json may declare both (the settings of its last training run); ids cut short are no ids.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._whole = None
        self._fast: FastEncoder | None = None
        self.backend: Backend = "tokenizers"
        self.backend_reason = "fastokens was not tried: this tokenizer was not made by load_tokenizer"
        self.fast_failures = 0
        self.splits_at_specials = self._prove_split()

    def _prove_split(self) -> bool:
        if self._pattern is None:
            return True
        tokens = list(self._specials)
        texts = [probe.replace("{s}", token) for probe in _SPLIT_PROBES for token in tokens[:3]]
        self._backend.encode_special_tokens = False
        whole = [self._backend.encode(text, add_special_tokens=False).ids for text in texts]
        self._backend.encode_special_tokens = True
        if all(self._encode_split(text) == ids for text, ids in zip(texts, whole, strict=True)):
            return True
        self._whole = type(self._backend).from_str(self._backend.to_str())
        return False

    def accelerate(self, source: str, *, cache_dir: Path) -> None:
        """Encode with `fastokens` from now on, if it gives the ids of this back end on a hard corpus.

        `backend` and `backend_reason` then say what was chosen and why.

        Args:
            source: the `tokenizer.json` text that this tokenizer was read from.
            cache_dir: where the verdict is kept.
        """
        control = set(self.special_tokens)
        choice = choose(
            source,
            name=self.name,
            fingerprint=self.fingerprint,
            whole=self._encode_reference,
            plain=self.encode_plain,
            control=list(self.special_tokens),
            markup=[token for token in self.added_tokens if token not in control],
            cache_dir=cache_dir,
        )
        self._fast, self.backend_reason = choice.encoder, choice.why
        self.backend = "tokenizers" if choice.encoder is None else "fastokens"

    def _encode_reference(self, text: str) -> list[int]:
        """Ids as `tokenizers` itself gives them for a whole text; to be called before threads share this."""
        self._backend.encode_special_tokens = False
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        finally:
            self._backend.encode_special_tokens = True

    def _failed(self, error: Exception, text: str) -> None:
        if not self.fast_failures:
            log.warning(
                "tokenizer %s: fastokens failed on a text of %d characters (%s); such texts are encoded with "
                "tokenizers and counted in fast_failures",
                self.name,
                len(text),
                error,
            )
        self.fast_failures += 1

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        if self._fast is not None:
            return self.encode_array(text).tolist()
        return self._encode_whole(text)

    def encode_array(self, text: str) -> npt.NDArray[np.int32]:
        """See `Tokenizer.encode_array`."""
        if self._fast is not None:
            try:
                return self._fast.encode(text)
            except Exception as error:  # a limit of its regular expressions; the Rust side names no type
                self._failed(error, text)
        ids = self._encode_whole(text)
        return np.fromiter(ids, np.int32, len(ids))

    def _encode_whole(self, text: str) -> list[int]:
        if self._whole is not None:
            return self._whole.encode(text, add_special_tokens=False).ids
        return self._encode_split(text)

    def _encode_split(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece, control in self.split(text):
            ids += self._encode_slow(piece)
            if control is not None:
                ids.append(control)
        return ids

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """See `Tokenizer.split`."""
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            yield text[at : match.start()], self.special_tokens[match[1]]
            at = match.end()
        yield text[at:], None

    def encode_plain(self, text: str) -> list[int]:
        """See `Tokenizer.encode_plain`."""
        if self._fast is not None:
            try:
                return self._fast.encode_plain(text).tolist()
            except Exception as error:  # as in encode_array
                self._failed(error, text)
        return self._encode_slow(text)

    def _encode_slow(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        """The `tokenizer.json` text."""
        return self._backend.to_str()

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        return self._backend.token_to_id(token)


def with_added_tokens(
    tokenizer: HFTokenizer, *, control: Sequence[str] = (), markup: Sequence[str] = ()
) -> HFTokenizer:
    """A copy with further added tokens, in id order, for a model family whose own tokenizer is not at hand.

    Args:
        tokenizer: stays as it is.
        control: new control tokens (special).
        markup: new added tokens that are not special.
    """
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.to_json())
    tokens = [*((text, True) for text in control), *((text, False) for text in markup)]
    backend.add_tokens([AddedToken(text, normalized=False, special=special) for text, special in tokens])
    return HFTokenizer(
        backend,
        name=f"{tokenizer.name} + {len(tokens)} tokens",
        fingerprint=hashlib.sha256(backend.to_str().encode()).hexdigest(),
        named_tokens=tokenizer.named_tokens,
    )


def _special_pattern(specials) -> re.Pattern[str] | None:
    """Leftmost-longest over all control tokens, with the blanks that `lstrip`/`rstrip` tokens swallow."""
    if not specials:
        return None
    longest_first = sorted(specials, key=len, reverse=True)
    left = [re.escape(text) for text in longest_first if specials[text][1].lstrip]
    right = [rf"(?<={re.escape(text)})" for text in longest_first if specials[text][1].rstrip]
    before = rf"(?:\s+(?={'|'.join(left)}))?" if left else ""
    after = rf"(?:(?:{'|'.join(right)})\s+)?" if right else ""
    return re.compile(rf"{before}({'|'.join(map(re.escape, longest_first))}){after}")


def from_file(
    path: Path, *, name: str, data: bytes | None = None, cache_dir: Path | None = None
) -> HFTokenizer:
    """Read a `tokenizer.json`; `bos_token` and the like come from `tokenizer_config.json` beside it.

    Args:
        path: the file.
        name: for messages.
        data: the file's bytes, if they are at hand.
        cache_dir: where the verdict on `fastokens` is kept. None: it is not tried.

    Raises:
        TokenizerError: it is not a `tokenizer.json`.
    """
    from tokenizers import Tokenizer as Backend

    data = path.read_bytes() if data is None else data
    try:
        backend = Backend.from_buffer(data)
    except Exception as error:  # the Rust side raises bare Exception
        raise TokenizerError(f"{path} is not a tokenizer.json that `tokenizers` reads: {error}") from error
    tokenizer = HFTokenizer(
        backend,
        name=name,
        fingerprint=hashlib.sha256(data).hexdigest(),
        named_tokens=_named_tokens(path.parent / "tokenizer_config.json"),
    )
    if cache_dir is not None:
        tokenizer.accelerate(data.decode(), cache_dir=cache_dir)
    return tokenizer


def _named_tokens(config: Path) -> dict[str, str]:
    if not config.is_file():
        return {}
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{config} is not JSON: {error}") from error
    found = {name: values.get(name) for name in NAMED}
    return {
        name: value["content"] if isinstance(value, dict) else str(value)
        for name, value in found.items()
        if value is not None
    }


def from_transformers(source: str, *, cache_dir: Path | None = None) -> HFTokenizer:
    """Load through `transformers.AutoTokenizer`; a slow tokenizer without a `tokenizers` form is refused.

    `cache_dir` is as in `from_file`.
    """
    loaded = load_auto(source)
    backend = loaded.backend_tokenizer if loaded.is_fast else None
    if backend is None:
        raise TokenizerError(f"{source!r} has no `tokenizers` form (tokenizer.json): convert it first")
    text = backend.to_str()
    named = {key: str(value) for key, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    tokenizer = HFTokenizer(
        type(backend).from_str(text),
        name=source,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        named_tokens=named,
    )
    if cache_dir is not None:
        tokenizer.accelerate(text, cache_dir=cache_dir)
    return tokenizer
