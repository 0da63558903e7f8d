"""What a client asks before it asks for anything: versions and the list of resources."""

from collections.abc import Iterator
from typing import Any

from .store import RESOURCES

SERVER_VERSION = "v1.36.3"
"""Of the cluster whose behaviour was recorded."""
_INFO = {"title": "Kubernetes", "version": SERVER_VERSION}
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_SUBRESOURCES = {
    "pods/eviction": ("Eviction", ["create"]),
    "pods/exec": ("PodExecOptions", ["create", "get"]),
    "pods/log": ("Pod", ["get"]),
    "pods/portforward": ("PodPortForwardOptions", ["create", "get"]),
    "pods/proxy": ("PodProxyOptions", ["create", "delete", "get", "patch", "update"]),
    "pods/status": ("Pod", ["get", "patch", "update"]),
}


def answer(path: str) -> dict[str, Any] | None:
    """The answer for a path of discovery; None for any other path."""
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": SERVER_VERSION, "platform": "linux/amd64"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
    if path == "/api/v1":
        return {"kind": "APIResourceList", "groupVersion": "v1", "resources": _resources()}
    if path == "/openapi/v3":
        return {"paths": {"api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}}
    if path == "/openapi/v3/api/v1":
        return {"openapi": "3.0.0", "info": _INFO, "paths": dict(_patches())}
    return None


def _patches() -> Iterator[tuple[str, dict[str, Any]]]:
    """That patches can be validated here: otherwise ``kubectl apply`` wants the schemas, to do it itself."""
    for one in RESOURCES.values():
        place = "/api/v1/namespaces/{namespace}/" if one.namespaced else "/api/v1/"
        kind = {"group": "", "version": "v1", "kind": one.kind}
        patch = {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "responses": {},
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": kind,
        }
        yield f"{place}{one.plural}/{{name}}", {"patch": patch}


def _resources() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "name": one.plural,
            "singularName": one.kind.lower(),
            "namespaced": one.namespaced,
            "kind": one.kind,
            "verbs": _VERBS,
            "shortNames": [one.short],
        }
        for one in RESOURCES.values()
    ]
    for name, (kind, verbs) in _SUBRESOURCES.items():
        found.append({"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs})
    return found
