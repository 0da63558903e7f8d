"""Which ids stand for an image, a video or sound: no model may sample them, some do (verl#7038)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from token_tracking.tokenizer import Tokenizer

PLACEHOLDERS = (
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_pad|>",
    "<|audio_pad|>",
    "<|media_pad|>",
    "<|image|>",
    "<|video|>",
    "<|audio|>",
    "<|AUDIO|>",
    "<|patch|>",
    "<image>",
    "<video>",
    "<audio>",
    "<image_soft_token>",
    "<audio_soft_token>",
    "<IMG_CONTEXT>",
    "[IMG]",
)
"""Tokens that processors of Qwen-VL, Kimi-VL, GLM-V, Llama 4, Gemma 3, InternVL, Pixtral, LLaVA and the like
replace by embeddings. They count only where the tokenizer holds them as added tokens."""


def media_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The placeholder ids of a tokenizer; send them to the engine as a ban (`logit_bias`, `bad_words`)."""
    added = tokenizer.added_tokens
    return frozenset(added[text] for text in PLACEHOLDERS if text in added)


class MediaIds:
    """The placeholder ids of one tokenizer, ready to be looked for in what was sampled."""

    def __init__(self, tokenizer: Tokenizer):
        self.ids = media_ids(tokenizer)
        self._table = np.zeros(tokenizer.vocab_size, bool)
        self._table[sorted(self.ids)] = True

    def among(self, sampled: npt.NDArray[np.int32]) -> tuple[int, ...]:
        """The placeholder ids among sampled ids of the tokenizer, each once, rising."""
        hits = self._table[sampled]
        return tuple(sorted(set(sampled[hits].tolist()))) if hits.any() else ()
