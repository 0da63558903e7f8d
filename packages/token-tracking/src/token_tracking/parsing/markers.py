"""`Markers`: what a template writes around reasoning and tool calls, learnt by probing."""

from __future__ import annotations

from typing import Literal

import msgspec

from token_tracking.parsing.call_forms import CallForm, JsonForm

Layout = Literal["none", "tokens", "bare", "headers"]
"""Where calls stand: nowhere that is known; between two tokens; a whole turn without any marker (Llama 3.1);
in messages of their own, named by a header (gpt-oss)."""


class Headers(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of several messages with headers that say what they are: `HEADER body-token TEXT end-token`.

    The generation prompt begins the first header; a further message begins with `start` and `role`. A header
    is read as its words, in any order: gpt-oss's template prints `to=functions.f` before the channel's name,
    the model samples it after.
    """

    start: int
    role: str
    """Stands between `start` and a header of this turn."""
    body: int
    """Stands between a header and its text."""
    reasoning: frozenset[str]
    """Words that the header of reasoning has and that of content has not. Empty: no reasoning is printed."""
    content: frozenset[str]
    """Words of the header of content."""
    before_name: str
    """Begins the word that names a call's tool (`to=functions.`)."""
    call_ends: frozenset[int]
    """The tokens that the template prints after a call's text."""
    ends: frozenset[int]
    """The tokens that it prints after any message's text."""


class Markers(msgspec.Struct, frozen=True, kw_only=True):
    """What a template writes around reasoning and tool calls, as ids of added tokens."""

    reasoning_open: int | None = None
    """None: the template prints no reasoning, or not between single tokens."""
    reasoning_head: str = ""
    """Words between the opening token and the reasoning (Gemma's `thought`)."""
    reasoning_close: int | None = None
    reasoning_closing_text: str = ""
    """From the end of the reasoning to the start of the content, blanks included."""
    prefilled: bool = False
    """The generation prompt ends inside the reasoning: a completion starts there."""
    call_open: int | None = None
    """None: no token opens a call."""
    call_close: int | None = None
    section_open: int | None = None
    """Stands before the first call. None: nothing does."""
    section_close: int | None = None
    """Stands after the last call."""
    before_calls: str = "\n"
    """Between the content and the first marker of the calls."""
    content_after_calls: bool = False
    """The template prints a turn's content after its calls (Gemma 4)."""
    bare: bool = False
    """A turn that is nothing but `form` is a call."""
    headers: Headers | None = None
    """None: the turn is one message."""
    form: CallForm = JsonForm()
    """What stands between the markers of a call, or is the text of a message that is a call."""

    @property
    def layout(self) -> Layout:
        """Where calls stand."""
        if self.headers is not None:
            return "headers"
        return "bare" if self.bare else "none" if self.call_open is None else "tokens"
