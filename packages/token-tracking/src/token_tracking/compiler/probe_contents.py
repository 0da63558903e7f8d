"""In which form a template prints the contents of messages: strings, lists of text parts, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from token_tracking.errors import TemplateError
from token_tracking.messages import Message, texts

if TYPE_CHECKING:
    from token_tracking.compiler.probe import Prober

_TEXT, _OTHER = "qzpartq", "qzbowlq"
"""Contents that a template prints, stripped, in capitals or otherwise, if it prints them at all."""
ROLES = ("user", "assistant", "tool", "system")
"""Roles whose contents are learnt when a template is compiled; others are tried when they come."""
_WRAPPED = tuple(map(frozenset[str], ((), ("user",), ("system",), ("user", "system"))))


def learn_first(prober: Prober) -> None:
    """Learn whether a system message is accepted first and printed, and the form of its and a user's content.

    Raises:
        TemplateError: the template renders not even one user message (its own words are in the message), or
            without its text.
    """
    for system, wrapped in itertools.product((True, False), _WRAPPED):
        prober.system, prober.wrapped = system, wrapped
        text = prober.text(prober.start())
        others = (prober.start(user=_OTHER), prober.start(system=_OTHER) if system else [])
        if text is not None and text not in map(prober.text, others):
            return
    prober.wrapped = _WRAPPED[0]
    prober.render(prober.start())
    raise TemplateError(
        "the chat template renders a user message without its text, given as a string or as a list of text "
        "parts: a model would not see it"
    )


def learn(prober: Prober, role: str, *, calls: bool) -> bool | None:
    """Learn the form of the content of a role's messages, strings first.

    Args:
        prober: learns it.
        role: of the messages.
        calls: whether the template prints tool calls.

    Returns:
        Whether it is printed in either. None: the template refuses the role.
    """
    histories, known = _histories(prober, role, calls=calls), prober.wrapped
    as_text = _printed(prober, role, histories)
    if as_text:
        return True
    prober.wrapped = known | {role}
    as_parts = _printed(prober, role, histories)
    if as_parts:
        return True
    prober.wrapped = known
    return None if as_text is None and as_parts is None else False


def takes_parts(prober: Prober, *, calls: bool) -> frozenset[str]:
    """Roles of which two text parts are printed, and one prints as its text does.

    Other templates drop the second part, or print Python.
    """
    found: set[str] = set()
    for role in ROLES:
        for history in _histories(prober, role, calls=calls):
            text = prober.text(history)
            if text is None or _TEXT not in text:
                continue
            one, two = (_with_content(history, role, _parts(*words)) for words in ((_TEXT,), (_TEXT, _OTHER)))
            both = prober.text(two) or ""
            if prober.text(one) == text and both.count(_TEXT) == both.count(_OTHER) == 1:
                found.add(role)
    return frozenset(found)


def unprinted(
    messages: Sequence[Message], first: int, text: str, render: Callable[[Sequence[Message]], str | None]
) -> int | None:
    """The first of `messages[first:]` whose content the template left out. None: none.

    A content that does not stand in the text as it is may be printed otherwise (as JSON, without a switch
    such as `/nothink`), so that two words are tried in its place.

    Args:
        messages: a whole history; contents marked, as in `text`.
        first: assistant messages from here on are passed over, their tokens are the record.
        text: a render that should have the contents.
        render: renders a history; None: the template refuses it.
    """
    at = 0
    for index in range(first, len(messages)):
        message = messages[index]
        for content in texts(message) if message["role"] != "assistant" else ():
            words = content.strip()
            found = text.find(words, at)
            at = found if found >= 0 else at
            if found < 0 and words not in text:
                tried = ({**message, "content": word} for word in (_TEXT, _OTHER))
                one, other = (render([*messages[:index], m, *messages[index + 1 :]]) for m in tried)
                if one is not None and one == other:
                    return index
    return None


def refusal(index: int, role: str, *, here: bool) -> TemplateError:
    """The error of a message whose content would be lost."""
    where = "at this place of the conversation" if here else "as a string or as a list of text parts"
    return TemplateError(
        f"message {index} ({role}): the chat template does not print its content {where}; the model would "
        "not see it: send it in another role or place, or change the template"
    )


def _parts(*words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": word} for word in words]


def _with_content(history: Sequence[Message], role: str, content: Any) -> list[Message]:
    return [{**m, "content": content} if m["role"] == role and m["content"] == _TEXT else m for m in history]


def _histories(prober: Prober, role: str, *, calls: bool) -> Sequence[Sequence[Message]]:
    """Histories with one message of the role whose content is `_TEXT`, in the places where it may stand."""
    user = {"role": "user", "content": "qzlaterq"}
    message = {"role": role, "content": _TEXT}
    match role:
        case "assistant":
            said = prober.assistant(_TEXT)
            return [[*prober.start(), said], [*prober.start(), said, user]]
        case "tool":
            turn = prober.assistant("", arguments=("qzvalueq",)) if calls else prober.assistant("qzcontentq")
            return [[*prober.start(), turn, prober.tool(_TEXT)]]
        case "user":
            later = [*prober.start(), prober.assistant("qzcontentq"), message]
            return [[*prober.start()[:-1], message], later]
        case _:
            return [[message, user], [*prober.start(), message]]


def _printed(prober: Prober, role: str, histories: Sequence[Sequence[Message]]) -> bool | None:
    shown: list[bool] = []
    for history in histories:
        text = prober.text(history)
        if text is not None:
            shown.append(text != prober.text(_with_content(history, role, _OTHER)))
    return any(shown) if shown else None
