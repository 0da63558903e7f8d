"""What a client asks before it asks for anything: versions and the list of resources."""

from typing import Any

from .store import RESOURCES

SERVER_VERSION = "v1.36.3"
"""Of the cluster whose behaviour was recorded."""
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
    return None


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
