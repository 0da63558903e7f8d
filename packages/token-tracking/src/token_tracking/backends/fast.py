# pyright: basic, reportMissingImports=false
"""The `fastokens` back end, used where it was proven to give the ids of `tokenizers`.

No other file imports it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from token_tracking.backends import corpus
from token_tracking.backends.cache import write_atomic

log = logging.getLogger(__name__)

INSTALL = "pip install 'token-tracking[fast]'"


class FastEncoder:
    """A `fastokens.Tokenizer` that gives ids as arrays: no Python object is made per token."""

    def __init__(self, source: str):
        """Build from the text of a `tokenizer.json`.

        Raises:
            Exception: `fastokens` does not know this tokenizer; it names no type of its own.
        """
        import fastokens

        self._engine = fastokens.Tokenizer.from_json_str(source)
        # Ids of a part of a text are no ids: both are the caller's business, never the file's.
        self._engine.no_truncation()
        self._engine.no_padding()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of `text`, control tokens recognised; read-only."""
        return np.frombuffer(self._engine.encode_batch_flat([text])[0], np.int32)

    def encode_plain(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of `text`, control tokens as ordinary text; read-only."""
        return np.frombuffer(self._engine.encode_batch_flat([text], split_special_tokens=True)[0], np.int32)


class Choice(msgspec.Struct, frozen=True):
    """Which back end encodes, and why."""

    encoder: FastEncoder | None
    """None: `tokenizers` encodes."""
    why: str


class Verdict(msgspec.Struct, frozen=True):
    """What a proof found, as it is kept on disk."""

    equal: bool
    why: str


Encode = Callable[[str], list[int]]


def prove(
    encoder: FastEncoder, whole: Encode, plain: Encode, texts: list[str], control: list[str]
) -> Verdict:
    """Compare the ids of every text, with control tokens recognised and without.

    Args:
        encoder: what is to be proven.
        whole: the reference, control tokens recognised.
        plain: the reference, control tokens as text.
        texts: see `corpus.texts`.
        control: the control tokens. For a text that holds none the reference is asked once.
    """
    for text in texts:
        reference = whole(text)
        as_text = plain(text) if any(token in text for token in control) else reference
        for how, ours, wanted in (
            ("with control tokens", encoder.encode, reference),
            ("as plain text", encoder.encode_plain, as_text),
        ):
            try:
                found = ours(text).tolist()
            except Exception as error:  # a back end that fails on a text is not equal to one that does not
                return Verdict(False, f"fastokens fails on {text[:40]!r} {how}: {error}")
            if found != wanted:
                at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), -1)
                at = min(len(found), len(wanted)) if at < 0 else at
                return Verdict(
                    False,
                    f"fastokens differs from tokenizers on {text[:40]!r} ({len(text)} characters, {how}) "
                    f"at token {at}: {found[at : at + 3]}, not {wanted[at : at + 3]}",
                )
    return Verdict(True, f"the ids of {len(texts)} hard texts, encoded both ways, equal those of tokenizers")


def choose(
    source: str,
    *,
    name: str,
    fingerprint: str,
    whole: Encode,
    plain: Encode,
    control: list[str],
    markup: list[str],
    cache_dir: Path,
) -> Choice:
    """Build `fastokens`, prove it, and say which back end to use.

    The verdict is kept in `cache_dir`, by the tokenizer's fingerprint, both packages' versions and the
    corpus. A verdict of "not equal" that is read there spares building `fastokens`.

    Args:
        source: text of the `tokenizer.json`.
        name: of the tokenizer, for messages.
        fingerprint: of the tokenizer.
        whole: the reference, control tokens recognised.
        plain: the reference, control tokens as text.
        control: the control tokens.
        markup: the other added tokens.
        cache_dir: where verdicts are kept.
    """
    if util.find_spec("fastokens") is None:
        return Choice(None, f"fastokens is not installed: {INSTALL}")
    path = cache_dir / f"fast-{_key(fingerprint)}.json"
    verdict = _read(path)
    encoder: FastEncoder | None = None
    if verdict is None or verdict.equal:
        try:
            encoder = FastEncoder(source)
        except Exception as error:  # the Rust side raises ValueError, RuntimeError and more
            verdict = Verdict(False, f"fastokens cannot build this tokenizer: {error}")
    if verdict is None and encoder is not None:
        verdict = prove(encoder, whole, plain, corpus.texts(control, markup), control)
        _write(path, verdict)
    if verdict is None or not verdict.equal:
        why = "not proven" if verdict is None else verdict.why
        log.warning("tokenizer %s: encoding with tokenizers, %s", name, why)
        return Choice(None, why)
    return Choice(encoder, verdict.why)


def _key(fingerprint: str) -> str:
    parts = [fingerprint, metadata.version("fastokens"), metadata.version("tokenizers"), corpus.digest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> Verdict | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Verdict)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        log.warning("%s cannot be read (%s): the tokenizer back end is proven again", path, error)
        return None


def _write(path: Path, verdict: Verdict) -> None:
    try:
        write_atomic(path, msgspec.json.encode(verdict))
    except OSError as error:
        log.warning("cannot keep the proof in %s (%s): it is made at each load", path, error)
