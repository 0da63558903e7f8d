"""How pods and other objects go away: grace, conditions, finalizers."""

from typing import Any

from .answers import not_found, precondition
from .store import RESOURCES, Object, Store


def check_conditions(plural: str, found: Object, options: Object) -> None:
    """Refuse a delete of another object, or of another version of it, than the caller meant.

    Raises:
        RefusalError: 409 Conflict.
    """
    wanted: dict[str, str] = options.get("preconditions") or {}
    metadata = found["metadata"]
    kind = RESOURCES[plural].kind
    for field, what in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if wanted.get(field) is not None and wanted[field] != metadata[field]:
            raise precondition(kind, metadata["name"], what, wanted[field], metadata[field])


def begin(store: Store, plural: str, found: Object, grace_s: int | None) -> Object:
    """Do what a DELETE does; what is left to do is the kubelet's.

    Args:
        store: Where it is.
        plural: What it is.
        found: The object as it is now.
        grace_s: None for the pod's own. A longer one than that of an earlier DELETE does not count.

    Returns:
        The object as the answer shows it.
    """
    grace = _grace_of(found, grace_s) if plural == "pods" else 0
    metadata = found["metadata"]
    if "deletionTimestamp" in metadata:
        left: int = metadata["deletionGracePeriodSeconds"]
        if grace >= left:
            return found
    marked = _marked(store, found, grace)
    marked = store.replace(plural, found, marked)
    if grace == 0:
        finish(store, plural, marked)
    return marked


def finish(store: Store, plural: str, found: Object) -> None:
    """Take an object away, or wait with it for its finalizers."""
    if found["metadata"].get("deletionGracePeriodSeconds") != 0:
        found = store.replace(plural, found, _marked(store, found, 0))
    if not found["metadata"].get("finalizers"):
        store.remove(plural, found)


def current(store: Store, plural: str, namespace: str, name: str) -> Object:
    """The object.

    Raises:
        RefusalError: 404.
    """
    found = store.get(plural, namespace, name)
    if found is None:
        raise not_found(plural, name)
    return found


def _grace_of(pod: Object, asked_s: int | None) -> int:
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    if ended or "nodeName" not in pod["spec"]:
        return 0
    return pod["spec"]["terminationGracePeriodSeconds"] if asked_s is None else asked_s


def _marked(store: Store, found: Object, grace_s: int) -> Object:
    metadata: dict[str, Any] = dict(found["metadata"])
    metadata.setdefault("deletionTimestamp", store.now(grace_s))
    if metadata.get("deletionGracePeriodSeconds", grace_s + 1) > grace_s:
        metadata["deletionTimestamp"] = store.now(grace_s)
    metadata["deletionGracePeriodSeconds"] = grace_s
    if "generation" in metadata and "deletionTimestamp" not in found["metadata"]:
        metadata["generation"] += 1
    return {**found, "metadata": metadata}
