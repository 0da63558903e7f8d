"""What the API server knows: objects, one rising version for all of them, and the changes that led there.

No I/O and no clock of its own, so that a simulation in virtual time can use it too. An object that is in the
store is never changed in place.
"""

from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

from sandbox_k8s.clock import Clock

from .answers import already_exists

Object: TypeAlias = dict[str, Any]
_FIRST_VERSION = 1000
_KEPT_CHANGES = 100_000


class Resource(NamedTuple):
    """A kind of object."""

    plural: str
    kind: str
    namespaced: bool
    short: str


RESOURCES = {
    one.plural: one
    for one in (
        Resource("pods", "Pod", True, "po"),
        Resource("events", "Event", True, "ev"),
        Resource("nodes", "Node", False, "no"),
        Resource("namespaces", "Namespace", False, "ns"),
    )
}


class Change(NamedTuple):
    """One change; ``old`` is None for a create, ``new`` for a removal.

    ``last`` is what watchers of a removal are shown: the last state with the removal's version.
    """

    version: int
    plural: str
    old: Object | None
    new: Object | None
    last: Object


Key: TypeAlias = tuple[str, str]


def labels_of(found: Object) -> dict[str, str]:
    """An object's labels; one without any has no such field."""
    return found["metadata"].get("labels") or {}


def key_of(found: Object) -> Key:
    """Namespace (empty for objects without) and name; lists are in this order."""
    return found["metadata"].get("namespace", ""), found["metadata"]["name"]


class Store:
    """Objects of one cluster."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.version = _FIRST_VERSION
        self.oldest = _FIRST_VERSION
        self.skew_s = 0.0
        self.on_change: list[Callable[[Change], None]] = []
        self._objects: dict[str, dict[Key, Object]] = {plural: {} for plural in RESOURCES}
        self._changes: deque[Change] = deque()

    def now(self, after_s: float = 0.0, *, precise: bool = False) -> str:
        """A time stamp; the cluster's clock may be wrong by ``skew_s``."""
        at = datetime.fromtimestamp(self.clock.now_ns() / 1e9 + self.skew_s + after_s, UTC)
        return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if precise else "%Y-%m-%dT%H:%M:%SZ")

    def new_uid(self) -> str:
        """A uid."""
        text = self.clock.new_id()
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        """An object, or None."""
        return self._objects[plural].get((namespace, name))

    def all(self, plural: str, namespace: str | None = None) -> list[Object]:
        """Objects in the order of lists; of one namespace unless that is None."""
        return _listed(self._objects[plural].values(), namespace)

    def create(self, plural: str, new: Object) -> Object:
        """Add an object, whose metadata is completed.

        Raises:
            RefusalError: The name is taken.
        """
        key = key_of(new)
        if key in self._objects[plural]:
            raise already_exists(plural, key[1])
        metadata = {**new["metadata"], "uid": self.new_uid(), "creationTimestamp": self.now()}
        resource = RESOURCES[plural]
        stored = {"kind": resource.kind, "apiVersion": "v1", **new, "metadata": metadata}
        return self._change(plural, None, stored)

    def replace(self, plural: str, old: Object, new: Object) -> Object:
        """Put a new state in the place of the present one; the same state again makes no new version."""
        return old if new == old else self._change(plural, old, new)

    def remove(self, plural: str, old: Object) -> None:
        """Take an object away."""
        self._change(plural, old, None)

    def changes_since(self, version: int) -> Iterable[Change]:
        """Changes after a version that is not forgotten, the oldest first."""
        first = len(self._changes) - (self.version - version)
        return (self._changes[index] for index in range(max(first, 0), len(self._changes)))

    def at(self, plural: str, version: int, namespace: str | None) -> list[Object]:
        """Objects as they were at a version that is not forgotten."""
        then = dict(self._objects[plural])
        for change in reversed(list(self.changes_since(version))):
            if change.plural == plural:
                if change.old is None:
                    del then[key_of(change.last)]
                else:
                    then[key_of(change.last)] = change.old
        return _listed(then.values(), namespace)

    def forget(self) -> None:
        """Forget all changes, as an API server that was restarted."""
        self._changes.clear()
        self.oldest = self.version

    def _change(self, plural: str, old: Object | None, new: Object | None) -> Object:
        self.version += 1
        shown = new if new is not None else old
        assert shown is not None
        last = {**shown, "metadata": {**shown["metadata"], "resourceVersion": str(self.version)}}
        objects = self._objects[plural]
        if new is None:
            del objects[key_of(last)]
        else:
            objects[key_of(last)] = last
        change = Change(self.version, plural, old, None if new is None else last, last)
        self._changes.append(change)
        if len(self._changes) > _KEPT_CHANGES:
            self.oldest = self._changes.popleft().version
        for tell in self.on_change:
            tell(change)
        return last


def _listed(objects: Iterable[Object], namespace: str | None) -> list[Object]:
    return sorted((one for one in objects if namespace in (None, key_of(one)[0])), key=key_of)
