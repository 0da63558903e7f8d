"""What the back end asks of the API server: one list, for the shipped RBAC manifest and for ``doctor``."""

from collections.abc import Iterable
from typing import NamedTuple


class Permission(NamedTuple):
    """One verb on one resource, as RBAC rules name them.

    Attributes:
        group: The API group; empty is the core one.
        resource: Plural; a subresource follows a slash.
        verb: Of RBAC, which names a proxied GET ``get``, a POST ``create`` and a PUT ``update``.
        why: What does not work without it.
    """

    group: str
    resource: str
    verb: str
    why: str

    @property
    def name(self) -> str:
        """Verb and resource, for people."""
        return f"{self.verb} {self.resource}" + (f" ({self.group})" if self.group else "")


WORKER: tuple[Permission, ...] = (
    Permission("", "pods", "create", "start"),
    Permission("", "pods", "get", "attach, renew and stop; a create whose answer was lost"),
    Permission("", "pods", "list", "list, and where the watch begins"),
    Permission("", "pods", "watch", "when a pod is ready or fails"),
    Permission("", "pods", "patch", "changes of owner and renewal"),
    Permission("", "pods", "delete", "stop"),
    Permission("", "events", "list", "where the watch of events begins"),
    Permission("", "events", "watch", "why a pod does not come up, early"),
)
"""What a worker needs in the namespace of its sandboxes, whatever way it takes to the launchers."""

API_PROXY: tuple[Permission, ...] = (
    Permission("", "pods/proxy", "get", "info and files out, through the API server"),
    Permission("", "pods/proxy", "create", "commands, through the API server"),
    Permission("", "pods/proxy", "update", "files in, through the API server"),
)
"""What a worker needs besides for the data path ``api_proxy``."""

PORT_FORWARD: tuple[Permission, ...] = (
    Permission("", "pods/portforward", "get", "port-forward by WebSocket"),
    Permission("", "pods/portforward", "create", "port-forward, of API servers since 1.35 also by WebSocket"),
)
"""What a worker needs besides for the data path ``port_forward``."""

REAPER: tuple[Permission, ...] = (
    Permission("", "pods", "list", "find what ended or outlived its lease"),
    Permission("", "pods", "delete", "remove it"),
)
"""What the reaper of a run needs."""

CLUSTER_READER: tuple[Permission, ...] = (
    Permission("", "nodes", "get", "explain and ps: a node that is lost"),
    Permission("", "nodes", "list", "doctor: architecture and room"),
    Permission("node.k8s.io", "runtimeclasses", "list", "doctor: runtime classes"),
)
"""What people's tools like to read in the whole cluster; nothing that runs sandboxes needs it."""

NAMESPACE_READER: tuple[Permission, ...] = (
    Permission("", "resourcequotas", "list", "doctor: room within the quota"),
    Permission("", "limitranges", "list", "doctor: what a container may ask for"),
    Permission("", "namespaces", "get", "doctor: whether it is there"),
    Permission("networking.k8s.io", "networkpolicies", "list", "doctor: what closes the network"),
)
"""What people's tools like to read in the namespace."""


def rules(permissions: Iterable[Permission]) -> list[dict[str, list[str]]]:
    """The permissions as ``rules`` of a Role: one rule per resource, its verbs in order of first mention."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for one in permissions:
        known = verbs.setdefault((one.group, one.resource), [])
        if one.verb not in known:
            known.append(one.verb)
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": known}
        for (group, resource), known in verbs.items()
    ]
