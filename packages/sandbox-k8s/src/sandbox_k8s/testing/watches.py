"""WATCH: what a watcher is shown of changes, and when."""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from .answers import expired
from .lists import read_version
from .selectors import Matcher
from .store import RESOURCES, Change, Object, Store, key_of

_LONGEST_S = 1800.0
_BOOKMARK_EVERY_S = 60.0
_LAST_BOOKMARKS_S = (2.05, 1.03)
"""Before the end; seen at 5.93 and 6.97 s of a watch of 8 s."""


async def watched(
    store: Store, plural: str, namespace: str | None, query: Mapping[str, str], selected: Matcher
) -> AsyncGenerator[bytes]:
    """The lines of the answer to a WATCH; it ends normally when its time is over.

    Raises:
        RefusalError: The version cannot be read.
    """
    wanted = read_version(store, query.get("resourceVersion", ""))
    if wanted is not None and wanted < store.oldest:
        yield _line("ERROR", expired(wanted, store.oldest).body())
        return
    loop = asyncio.get_running_loop()
    lasts_s = float(query.get("timeoutSeconds") or _LONGEST_S)
    ends_s = loop.time() + lasts_s
    bookmarks = _bookmark_times(ends_s, lasts_s) if _is_true(query.get("allowWatchBookmarks", "")) else []
    moved = wanted is not None and any(one.plural == plural for one in store.changes_since(wanted))
    with _changes_of(store) as queue:
        for line in _first(store, plural, namespace, query, selected, wanted):
            yield line
        while (now_s := loop.time()) < ends_s:
            until_s = min([ends_s, *(at_s for at_s in bookmarks if at_s > now_s)])
            try:
                async with asyncio.timeout_at(until_s):
                    change = await queue.get()
            except TimeoutError:
                if until_s < ends_s and moved:
                    yield _bookmark(store, plural)
                continue
            moved = moved or change.plural == plural
            if wanted is not None and change.version <= wanted:
                continue  # a version from the future: silence until it is reached
            line = _shown(change, plural, namespace, selected)
            if line is not None:
                yield line


@contextmanager
def _changes_of(store: Store) -> Generator[asyncio.Queue[Change]]:
    queue: asyncio.Queue[Change] = asyncio.Queue()
    store.on_change.append(queue.put_nowait)
    try:
        yield queue
    finally:
        store.on_change.remove(queue.put_nowait)


def _first(
    store: Store,
    plural: str,
    namespace: str | None,
    query: Mapping[str, str],
    selected: Matcher,
    wanted: int | None,
) -> list[bytes]:
    """What comes at once: changes since a version, or all objects as ADDED."""
    initial = _is_true(query.get("sendInitialEvents", ""))
    if wanted is not None and not initial:
        changes = store.changes_since(wanted) if wanted <= store.version else ()
        lines = (_shown(change, plural, namespace, selected) for change in changes)
        return [line for line in lines if line is not None]
    lines = [_line("ADDED", one) for one in store.all(plural, namespace) if selected(one)]
    if initial:
        lines.append(_bookmark(store, plural, {"annotations": {"k8s.io/initial-events-end": "true"}}))
    return lines


def _shown(change: Change, plural: str, namespace: str | None, selected: Matcher) -> bytes | None:
    """The line for a change; an object that leaves the selector is DELETED with its old labels."""
    if change.plural != plural or namespace not in (None, key_of(change.last)[0]):
        return None
    before = change.old is not None and selected(change.old)
    after = change.new is not None and selected(change.new)
    if after:
        return _line("MODIFIED" if before else "ADDED", change.last)
    if not before or change.old is None:
        return None
    if change.new is None:
        return _line("DELETED", change.last)
    metadata = {**change.old["metadata"], "resourceVersion": str(change.version)}
    return _line("DELETED", {**change.old, "metadata": metadata})


def _bookmark_times(ends_s: float, lasts_s: float) -> list[float]:
    minutes = [ends_s - lasts_s + at_s for at_s in _steps(lasts_s)]
    return minutes + [ends_s - before_s for before_s in _LAST_BOOKMARKS_S if before_s < lasts_s]


def _steps(lasts_s: float) -> list[float]:
    return [_BOOKMARK_EVERY_S * count for count in range(1, int(lasts_s / _BOOKMARK_EVERY_S) + 1)]


def _bookmark(store: Store, plural: str, more: Mapping[str, Any] = {}) -> bytes:
    shown: Object = {
        "kind": RESOURCES[plural].kind,
        "apiVersion": "v1",
        "metadata": {"resourceVersion": str(store.version), **more},
    }
    if plural == "pods":
        shown |= {"spec": {"containers": None}, "status": {}}
    return _line("BOOKMARK", shown)


def _line(kind: str, shown: Object) -> bytes:
    return json.dumps({"type": kind, "object": shown}).encode() + b"\n"


def _is_true(text: str) -> bool:
    return text.lower() not in ("", "0", "false")
