"""Control tokens that stand in message text: marked before a render, so that they stay text after it.

A template copies message text into its output, where `<|im_end|>` written by a tool would become the control
token (huggingface/transformers#29279). The text of a message is therefore *marked*: inside every control
token's text, after its first character, stands U+FDD0 (a Unicode noncharacter), and a U+FDD0 of the text
itself is followed by U+FDD1. Text that ends with the first part of a control token, or begins with the last
part of one, has U+FDD0 U+FDD2 at that end: templates print content parts side by side, and `<|im_` and
`end|>` must not meet. Rendered text then holds real control tokens and marked ones; `encode` gives the first
their id and encodes the second as the ordinary text they are, and `unmark` takes all marks away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from token_tracking.errors import ControlTokenError
from token_tracking.messages import Message, map_message
from token_tracking.tokenizer import Tokenizer

ControlPolicy = Literal["escape", "keep", "error"]
"""`escape`: control tokens in message text stay text. `keep`: they become control ids, as in an engine's own
chat endpoint. `error`: `ControlTokenError`, except in assistant messages, where they are escaped."""

MARK = "\ufdd0"
LITERAL = "\ufdd1"
SEAL = "\ufdd2"
_MARKS = re.compile(f"{MARK}([{LITERAL}{SEAL}])?")


class ControlTokens:
    """Marks, unmarks and encodes text under one policy for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, policy: ControlPolicy = "escape"):
        """Bind.

        Raises:
            ControlTokenError: the policy is `escape` and this tokenizer cannot encode text piece by piece.
        """
        if policy == "escape" and not tokenizer.splits_at_specials:
            raise ControlTokenError(
                f"tokenizer {tokenizer.name}: encoding the pieces between control tokens differs from "
                "encoding the whole, so control tokens in message text cannot be escaped; "
                "choose 'keep' or 'error'"
            )
        self.policy: ControlPolicy = policy
        self.tokenizer = tokenizer
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        # Two characters tell markup that is common in tool output ("<module>") from a control token, and a
        # pattern finds two characters faster than `in` does.
        self._starts = re.compile("|".join(sorted({re.escape(token[:2]) for token in longest_first})))
        self._longest = len(longest_first[0]) if longest_first else 0
        self._firsts = tuple({token[0] for token in longest_first})
        self._lasts = tuple({token[-1] for token in longest_first})
        self._begun = tuple({token[:cut] for token in longest_first for cut in range(1, len(token))})
        self._ended = tuple({token[cut:] for token in longest_first for cut in range(1, len(token))})

    def mark(self, text: str) -> str:
        """Message text, ready to be rendered.

        Raises:
            ControlTokenError: the policy is `error` and the text spells a control token.
        """
        if self.policy == "error" and self._pattern and (found := self._pattern.search(text)):
            raise ControlTokenError(f"the text spells the control token {found[0]!r} at {found.start()}")
        return self._escape(text)

    def _escape(self, text: str) -> str:
        if self.policy == "keep" or self._pattern is None:
            return text
        if MARK in text:
            text = text.replace(MARK, MARK + LITERAL)
        if self._starts.search(text):
            text = self._pattern.sub(lambda match: match[0][0] + MARK + match[0][1:], text)
        return self._seal(text)

    def _seal(self, text: str) -> str:
        """Part a control token that goes on in what is printed beside `text`."""
        # A template may strip blanks: the seal stands inside them.
        words = text.rstrip()
        if any(map(words[-self._longest :].__contains__, self._firsts)) and words.endswith(self._begun):
            text = words + MARK + SEAL + text[len(words) :]
        words = text.lstrip()
        if any(map(words[: self._longest].__contains__, self._lasts)) and words.startswith(self._ended):
            text = text[: len(text) - len(words)] + MARK + SEAL + words
        return text

    def mark_message(self, message: Message) -> dict[str, Any]:
        """`message` with every string in it marked.

        What the model wrote is never refused: an assistant message is escaped under `error` too.
        """
        return map_message(message, self._escape if message.get("role") == "assistant" else self.mark)

    def mark_messages(self, messages: Sequence[Message], first: int = 0) -> list[dict[str, Any]]:
        """As `mark_message`, of each message of a history from its message `first` on.

        Raises:
            ControlTokenError: as `mark`; it names the message.
        """
        marked: list[dict[str, Any]] = []
        for index, message in enumerate(messages, first):
            try:
                marked.append(self.mark_message(message))
            except ControlTokenError as error:
                raise ControlTokenError(f"message {index} ({message['role']}): {error}") from error
        return marked

    def find(self, text: str, start: int = 0) -> Iterator[tuple[int, int]]:
        """Start and end of every unmarked control token in rendered text, from `start` on."""
        return (match.span() for match in self._pattern.finditer(text, start)) if self._pattern else iter(())

    def unmark(self, text: str) -> str:
        """Rendered text as a reader should see it, marks taken away."""
        if MARK not in text or self.policy == "keep":
            return text
        return _MARKS.sub(lambda match: MARK if match[1] == LITERAL else "", text)

    def encode_array(self, text: str) -> npt.NDArray[np.int32]:
        """As `encode`, int32 `[n]`, perhaps read-only."""
        if MARK not in text or self.policy == "keep" or self._pattern is None:
            return self.tokenizer.encode_array(text)
        return np.array(self.encode(text), np.int32)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text."""
        if MARK not in text or self.policy == "keep" or self._pattern is None:
            return self.tokenizer.encode(text)
        ids: list[int] = []
        for piece, control in self.tokenizer.split(text):
            ids += self.tokenizer.encode_plain(self.unmark(piece))
            if control is not None:
                ids.append(control)
        return ids
