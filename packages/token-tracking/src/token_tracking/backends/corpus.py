"""The hard texts that decide whether a second tokenizer back end may stand in for the first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

TEXTS: tuple[str, ...] = (
    "",
    " ",
    "\n",
    "a",
    "  leading, trailing  ",
    "\r\n\t mixed\n\n\n  blanks \u00a0\u2003\u3000\u200b\u2028x\u0085y",
    "line one\r\nline two\r\n\r\n\r\n  line three\r\rfour\n\r five\n \n  \n   \n",
    "don't I'LL we've they'RE 'S 's o''clock rock'n'roll \u2019s",
    "1 12 123 1234 12345 1234567890123456789 3.14e-10 1,000,000 0xDEADbeef 1_000 ٣٤٥ १२३ ４２ ² ½ Ⅷ",
    "def f(x: int) -> str:\n    return f'{x!r}'  # ok\n\n\nclass A(B):\n\tdef __init__(self): ...\n",
    "for (int i = 0; i < n; ++i) { a[i] &= ~(1u << (i % 32)); } /* ** */ #define X(a,b) a##b\n",
    "diff --git a/x b/x\n@@ -1,7 +1,7 @@ def f():\n-    a  =  1\n+    a = 1  \n\\ No newline at end of file",
    '{"a": [1, null, true, -0.5], "\\u0041\\n": {"b": "\\\\\\"c\\""}}<b class="x">&amp;&#39;</b><!-- -->',
    "/usr/lib/python3.11/site-packages/a_b-c.d/__init__.py:123:45: E501 https://a.b/c?d=e&f=%20#g",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case XMLHttpRequest iOS2x",
    "\u4e16\u754c\u4f60\u597d\uff0c\u8fd9\u662f\u4e00\u4e2a\u6d4b\u8bd5\u3002 "
    "日本語のテキスト、カタカナ ﾊﾝｶｸ 한국어 텍스트",
    "\u1112\u1161\u11ab\u1100\u1173\u11af \ud55c\uae00 \uf900 \u2f00 \U00020000 \U0002f800",
    "\u0645\u0631\u062d\u0628\u0627 بالعالم، كيف حالك؟ \u0640\u064b\u0651 "
    "\u05e9\u05dc\u05d5\u05dd \u05e9\u05bc\u05c1 \u200fx\u200e",
    "नमस्ते दुनिया \u0915\u093c \u0958 ไทยสวัสดี ဗမာ \u0f71\u0f72 \u0f73 தமிழ்",
    "e\u0301 \u00e9 \u1e9b\u0323 \ufb01 "
    "a\u0323\u0302 a\u0302\u0323 \u1ead \u212b \u00c5 \u0344 \u0308\u0301 \u2126 \u1fef \u037e",
    "q\u0307\u0323q\u0323\u0307" + "z\u0351\u036b\u0343" * 12 + " \u0301starts with a mark",
    "\U0001f469\u200d\U0001f680 \U0001f1e9\U0001f1ea\U0001f1eb \U0001f642\ufe0f "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 "
    "\U0001f44d\U0001f3fd \u2764\ufe0f\u200d\U0001f525 1\ufe0f\u20e3 \u26a0",
    "\x00\x01\x07\x08\x0b\x0c\x1b[31mred\x1b[0m\x7f\x80\x9f\ufeff\ufffd\ufdd0\ufdd1\uffff\U0010ffff",
    "\u0430\u0431\u0432 Привет, мир! Ελληνικά ΣΊΣΥΦΟΣ ς İıſ ß ẞ ǅ Straße naïve façade œuvre",
    " " * 7 + "x" + " " * 64 + "y" + " " * 1500,
    "\n" * 7 + "x" + "\n" * 64 + " \n" * 40 + "\t" * 33 + "\r\n" * 50,
    "a" * 3000,
    "ab" * 900 + "Zz" * 400,
    "=" * 500 + "-" * 333 + "#" * 99 + "." * 257 + "!?" * 70,
    "é" * 400 + "e\u0301" * 400,
    "\u4e00" * 300 + "\U0001f600" * 100,
    "9" * 700,
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 20 + "QUJDREVGR0g+/aGVsbG8gd29ybGQ=" * 20,
    "< | im_end | > <|im_end <|im_end|  |im_end|> "
    "<|IM_END|> <｜end｜> <|im_\u200bend|> <|\u0069m_end|> <| <<|| |>>",
    "<think></think> < think > </ think> <tool_call>\n{}\n</tool_call> "
    "[INST] <<SYS>> <s> </s> <unk> [MASK] <0x0A>",
)
"""Code, scripts that take more than one byte a letter, both Unicode normal forms, blanks, digits, long words,
control characters, and texts that look like control tokens."""

BLANKS = ("", " ", "\n", "  \t", "\r\n\n", "'s", "e\u0301", "\u4e16", "1234", "x ")
"""Stand at the borders of control tokens, where merges and blank-swallowing differ first."""

LONG = 50_000
"""Characters of the longest text."""


def long_text() -> str:
    """All texts in turn, in changing order, up to `LONG` characters."""
    parts: list[str] = []
    size, step = 0, 1
    while size < LONG:
        text = TEXTS[(step * 7) % len(TEXTS)][:90]
        parts.append(text + (" ", "\n", "", "\n\n    ")[step % 4] + str(step * 7919))
        size += len(parts[-1])
        step += 1
    return "".join(parts)[:LONG]


def texts(control: Sequence[str], markup: Sequence[str]) -> list[str]:
    """The corpus for a tokenizer.

    Args:
        control: its control tokens.
        markup: its other added tokens.
    """
    found = [*TEXTS, long_text()]
    added = [*control[:24], *markup[:24]]
    for number, token in enumerate(added):
        left, right = BLANKS[number % len(BLANKS)], BLANKS[(number * 3 + 1) % len(BLANKS)]
        found.append(
            f"{left}{token}{right}{token}{token} {token}\n{left}{token[:-1]} {token[1:]}{token.upper()}"
        )
    for number, blank in enumerate(BLANKS):
        picked = added[number :: len(BLANKS)]
        found.append(blank.join(["don't", *picked, "1234", *reversed(picked), "\u4e16\u754c"]))
        found.append(
            "".join(f"{token}{text[:40]}" for token, text in zip(picked, TEXTS[number:], strict=False))
        )
    return found


def digest() -> str:
    """SHA-256 (hex) of the texts that do not depend on a tokenizer: a verdict holds for one corpus."""
    whole = "\x1e".join([*TEXTS, *BLANKS, long_text()])
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()
