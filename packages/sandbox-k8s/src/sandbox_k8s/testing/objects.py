"""Create, change and delete objects as the API server does; no HTTP."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import deletion, pods
from .answers import (
    Cause,
    RefusalError,
    bad_request,
    invalid,
    modified,
    not_found,
    unsupported_patch,
)
from .patches import json_patch, merge, strategic
from .store import RESOURCES, Object, Store

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_IMMUTABLE = ("uid", "creationTimestamp", "namespace", "generation", "deletionTimestamp")


class Target(NamedTuple):
    """What a path names; an empty name is the collection, an empty ``sub`` the object itself."""

    plural: str
    namespace: str
    name: str
    sub: str = ""


class Objects:
    """The objects of a cluster, as requests see them.

    Attributes:
        refusals: Answers given in the place of the next creates of pods, for tests of quotas and the like.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.refusals: list[RefusalError] = []

    def get(self, target: Target) -> Object:
        """An object."""
        return deletion.current(self.store, target.plural, target.namespace, target.name)

    def create(self, target: Target, query: Mapping[str, str], body: Object) -> Object:
        """Add an object.

        Raises:
            RefusalError: It may not be, or its name is taken.
        """
        resource = RESOURCES[target.plural]
        metadata: dict[str, Any] = dict(body.get("metadata") or {})
        if resource.namespaced:
            if metadata.get("namespace", target.namespace) != target.namespace:
                raise bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request"
                )
            metadata["namespace"] = target.namespace
        if body.get("kind", resource.kind) != resource.kind:
            raise bad_request(
                f'{body["kind"]} in version "v1" cannot be handled as a {resource.kind}: converting '
                f"(v1.{body['kind']}) to (core.{resource.kind}): unknown conversion"
            )
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + self._suffix()
        new = {**body, "metadata": metadata}
        self._admit(target, new)
        if target.plural == "pods":
            new = pods.completed(new)
            metadata["generation"] = 1
        if target.plural == "namespaces":
            labels = {"kubernetes.io/metadata.name": metadata["name"], **metadata.get("labels", {})}
            metadata["labels"] = labels
            new |= {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
        if query.get("dryRun"):
            return {**new, "metadata": {**metadata, "uid": self.store.new_uid()}}
        return self.store.create(target.plural, new)

    def update(self, target: Target, query: Mapping[str, str], body: Object) -> Object:
        """PUT: the whole object anew."""
        return self._changed(target, query, body)

    def patch(self, target: Target, query: Mapping[str, str], media_type: str, data: bytes) -> Object:
        """PATCH: a part of an object.

        Raises:
            RefusalError: The patch cannot be read or applied, or what comes out may not be.
        """
        kinds = {"merge-patch": merge, "strategic-merge-patch": strategic, "json-patch": json_patch}
        apply = kinds.get(media_type.removeprefix("application/").removesuffix("+json"))
        if apply is None:
            raise unsupported_patch()
        found = self.get(target)
        try:
            patch = json.loads(data)
        except ValueError as problem:
            raise bad_request(f"error decoding patch: {problem}") from problem
        return self._changed(target, query, apply(found, patch))

    def delete(self, target: Target, query: Mapping[str, str], options: Object) -> Object:
        """DELETE of one object: the pod as it is now, or a Status."""
        found = self.get(target)
        deletion.check_conditions(target.plural, found, options)
        if query.get("dryRun") or options.get("dryRun"):
            return found
        asked = query.get("gracePeriodSeconds", options.get("gracePeriodSeconds"))
        if target.plural == "namespaces":
            return self._delete_namespace(found)
        gone = deletion.begin(self.store, target.plural, found, None if asked is None else int(asked))
        if target.plural == "pods":
            return gone
        details = {"name": target.name, "kind": target.plural, "uid": found["metadata"]["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def evict(self, target: Target, query: Mapping[str, str], body: Object) -> Object:
        """POST of an eviction: a mark that says who it was, then a delete."""
        found = self.get(target)
        options: Object = body.get("deleteOptions") or {}
        deletion.check_conditions("pods", found, options)
        if not (query.get("dryRun") or options.get("dryRun")):
            mark = {
                "type": "DisruptionTarget",
                "status": "True",
                "lastProbeTime": None,
                "lastTransitionTime": self.store.now(),
                "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting",
            }
            status = strategic(found.get("status", {}), {"conditions": [mark]})
            found = self.store.replace("pods", found, {**found, "status": status})
            deletion.begin(self.store, "pods", found, options.get("gracePeriodSeconds"))
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _changed(self, target: Target, query: Mapping[str, str], new: Object) -> Object:
        old = self.get(target)
        kind = RESOURCES[target.plural].kind
        given: dict[str, Any] = dict(new.get("metadata") or {})
        if given.get("name", target.name) != target.name:
            raise bad_request(
                f"the name of the object ({given['name']}) does not match the name on the URL ({target.name})"
            )
        if given.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            message = f'Invalid value: "{given["uid"]}": field is immutable'
            raise invalid(kind, target.name, [Cause("FieldValueInvalid", message, "metadata.uid")] * 2)
        if given.get("resourceVersion", "") not in ("", old["metadata"]["resourceVersion"]):
            raise modified(target.plural, target.name)
        kept = {name: old["metadata"][name] for name in _IMMUTABLE if name in old["metadata"]}
        version = {"resourceVersion": old["metadata"]["resourceVersion"]}
        result = {**new, "kind": kind, "apiVersion": "v1", "metadata": {**given, **kept, **version}}
        self._separate(target, old, result)
        pods.check_metadata(kind, result)
        self._check_finalizers(kind, old, result)
        if query.get("dryRun"):
            return result
        if "deletionTimestamp" in kept and not given.get("finalizers") and self._only_waits(old):
            self.store.remove(target.plural, old)
            return result
        return self.store.replace(target.plural, old, result)

    def _separate(self, target: Target, old: Object, result: Object) -> None:
        """A change of the status changes nothing else of the spec, and the other way round."""
        other = "spec" if target.sub == "status" else "status"
        if target.plural in ("pods", "nodes", "namespaces"):
            result.pop(other, None)
            if other in old:
                result[other] = old[other]
        if target.plural == "pods" and target.sub != "status":
            pods.check_change(old, result)
            if result["spec"] != old["spec"]:
                result["metadata"]["generation"] = old["metadata"]["generation"] + 1

    def _check_finalizers(self, kind: str, old: Object, new: Object) -> None:
        if "deletionTimestamp" not in old["metadata"]:
            return
        before: list[str] = old["metadata"].get("finalizers", [])
        after: list[str] = new["metadata"].get("finalizers") or []
        added = [one for one in after if one not in before]
        if added:
            names = ", ".join(f'"{one}"' for one in added)
            message = (
                "Forbidden: no new finalizers can be added if the object is being deleted, found new "
                f"finalizers []string{{{names}}}"
            )
            cause = Cause("FieldValueForbidden", message, "metadata.finalizers")
            raise invalid(kind, new["metadata"]["name"], [cause] * 2)

    def _only_waits(self, found: Object) -> bool:
        return found["metadata"].get("deletionGracePeriodSeconds") == 0

    def _admit(self, target: Target, new: Object) -> None:
        pods.check_size(new)
        pods.check_metadata(RESOURCES[target.plural].kind, new)
        if RESOURCES[target.plural].namespaced:
            namespace = self.store.get("namespaces", "", target.namespace)
            if namespace is None:
                raise not_found("namespaces", target.namespace)
            if "deletionTimestamp" in namespace["metadata"]:
                raise self._terminating(target, new["metadata"]["name"])
        if target.plural == "pods" and self.refusals:
            raise self.refusals.pop(0)

    def _terminating(self, target: Target, name: str) -> RefusalError:
        said = f"namespace {target.namespace} is being terminated"
        causes = [{"reason": "NamespaceTerminating", "message": said, "field": "metadata.namespace"}]
        return RefusalError(
            403,
            "Forbidden",
            f'{target.plural} "{name}" is forbidden: unable to create new content in namespace '
            f"{target.namespace} because it is being terminated",
            details={"name": name, "kind": target.plural, "causes": causes},
        )

    def _delete_namespace(self, found: Object) -> Object:
        """Mark it and delete what is in it; `Kubelet` takes it away with its last pod."""
        name = found["metadata"]["name"]
        metadata = {"deletionTimestamp": self.store.now(), **found["metadata"]}
        marked = {**found, "metadata": metadata, "status": {"phase": "Terminating"}}
        marked = self.store.replace("namespaces", found, marked)
        for pod in self.store.all("pods", name):
            deletion.begin(self.store, "pods", pod, None)
        if not self.store.all("pods", name):
            self.store.remove("namespaces", marked)
        return marked

    def _suffix(self) -> str:
        digits = int(self.store.clock.new_id(), 16)
        return "".join(_ALPHABET[(digits >> 8 * place) % len(_ALPHABET)] for place in range(5))
