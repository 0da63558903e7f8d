"""The page of a rollout whose tokens nobody saw, since its agent brought a model of its own: its messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import cast

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; }} dd {{ margin: 0; }}
dt, h2 {{ opacity: .7; font-size: 1rem; font-weight: 600; margin: 0; }}
article {{ border: 1px solid #8884; border-radius: 6px; margin: 1rem 0; padding: .6rem .9rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; }}
.call {{ border-left: 3px solid #4a90d9; padding-left: .8rem; }}
</style>
<h1>{title}</h1>
<dl>{facts}</dl>
<p>The agent brought a model of its own: no token was sampled here.</p>
{messages}
</html>
"""


def render_messages(messages: Sequence[Mapping[str, object]], *, title: str, facts: Mapping[str, str]) -> str:
    """One HTML page that loads nothing.

    Args:
        messages: As chat completions have them; of others, what is like it is shown.
        title: Heading of the page.
        facts: Shown in a table on top, in order.
    """
    rows = "".join(f"<dt>{escape(name)}<dd>{escape(value)}" for name, value in facts.items())
    return _PAGE.format(title=escape(title), facts=rows, messages="\n".join(map(_article, messages)))


def _article(message: Mapping[str, object]) -> str:
    parts = [f"<h2>{escape(str(message.get('role', 'message')))}</h2>"]
    # What reasoning models said before their answer, as litellm gives it.
    for key in ("reasoning_content", "content"):
        text = _text(message.get(key))
        if text:
            parts.append(f"<pre>{escape(text)}</pre>")
    calls = message.get("tool_calls")
    made = cast("list[object]", calls) if isinstance(calls, list) else []
    parts += [f'<pre class="call">{escape(_call(call))}</pre>' for call in made]
    return f"<article>{''.join(parts)}</article>"


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(_part(part) for part in cast("list[object]", content))
    return _json(content)


def _part(part: object) -> str:
    text = _table(part).get("text")
    return text if isinstance(text, str) else _json(part)


def _call(call: object) -> str:
    function = _table(_table(call).get("function"))
    if not function:
        return _json(call)
    name, written = function.get("name"), function.get("arguments")
    try:
        arguments = cast("object", json.loads(str(written)))
    except ValueError:
        return f"{name} {written}"
    given = _table(arguments)
    lone = given.get("command") if len(given) == 1 else None
    return f"{name}: {lone if isinstance(lone, str) else _json(arguments)}"


def _table(value: object) -> dict[str, object]:
    """The value if it is one; empty: it is none."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)
