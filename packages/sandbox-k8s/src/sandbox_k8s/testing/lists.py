"""LIST: versions, pages, and pages that have expired."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from .answers import Cause, bad_request, expired_page, invalid, version_too_large
from .selectors import Matcher
from .store import RESOURCES, Object, Store, key_of


def listed(
    store: Store, plural: str, namespace: str | None, query: Mapping[str, str], selected: Matcher
) -> Object:
    """The answer to a LIST.

    Raises:
        RefusalError: The query cannot be read, or its version or page has expired.
    """
    limit = _number(query.get("limit", ""), "limit")
    if query.get("continue"):
        version, start = _read_token(query["continue"])
        if version != -1 and version < store.oldest:
            raise expired_page(_token(-1, start))
    else:
        version, start = _version(store, query), None
    at = store.version if version == -1 else version
    objects = store.at(plural, at, namespace) if at != store.version else store.all(plural, namespace)
    if start is not None:
        objects = [one for one in objects if key_of(one) > start]
    objects = [one for one in objects if selected(one)]
    metadata: dict[str, Any] = {"resourceVersion": str(at)}
    if limit and len(objects) > limit:
        metadata["continue"] = _token(at, key_of(objects[limit - 1]))
        if not query.get("labelSelector") and not query.get("fieldSelector"):
            metadata["remainingItemCount"] = len(objects) - limit
        objects = objects[:limit]
    items = [{name: one[name] for name in one if name not in ("kind", "apiVersion")} for one in objects]
    return {
        "kind": f"{RESOURCES[plural].kind}List",
        "apiVersion": "v1",
        "metadata": metadata,
        "items": items,
    }


def read_version(store: Store, text: str) -> int | None:
    """A resourceVersion of a query; None for unset and for 0, which any version satisfies.

    Raises:
        RefusalError: It is no number.
    """
    if text in ("", "0"):
        return None
    if not text.isdecimal():
        raise bad_request(
            f'invalid resource version: resourceVersion: Invalid value: "{text}": strconv.ParseUint: '
            f'parsing "{text}": invalid syntax'
        )
    return int(text)


def _version(store: Store, query: Mapping[str, str]) -> int:
    """The version that is listed: that of now, or an exact one."""
    asked = read_version(store, query.get("resourceVersion", ""))
    match = query.get("resourceVersionMatch", "")
    if match and "resourceVersion" not in query:
        message = "Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided"
        refusal = invalid("ListOptions", "", [Cause("FieldValueForbidden", message, "resourceVersionMatch")])
        raise refusal
    if asked is not None and asked > store.version:
        raise version_too_large(asked, store.version)
    if asked is None or match != "Exact":
        return store.version
    if asked < store.oldest:
        raise expired_page(None)
    return asked


def _number(text: str, name: str) -> int:
    if text and not text.removeprefix("-").isdecimal():
        raise bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
    return int(text or 0)


def _token(version: int, after: tuple[str, str]) -> str:
    words = {"v": "meta.k8s.io/v1", "rv": version, "start": "/".join(after) + "\0"}
    return base64.urlsafe_b64encode(json.dumps(words).encode()).decode().rstrip("=")


def _read_token(text: str) -> tuple[int, tuple[str, str]]:
    try:
        words = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        namespace, name = words["start"].removesuffix("\0").split("/")
        return words["rv"], (namespace, name)
    except (ValueError, KeyError, TypeError) as problem:
        raise bad_request(f"invalid continue token: continue key is not valid: {problem}") from problem
