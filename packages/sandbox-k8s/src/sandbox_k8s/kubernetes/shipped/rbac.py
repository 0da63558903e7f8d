"""Who may do what: service accounts for workers and for the reaper, each with the verbs that it uses."""

from collections.abc import Iterable
from typing import Any, Literal

from sandbox_k8s.kubernetes import permissions
from sandbox_k8s.kubernetes.permissions import Permission

from .names import PARTS, READER, WORKER
from .options import ManifestOptions

_GROUP = "rbac.authorization.k8s.io"


def worker_permissions(options: ManifestOptions) -> tuple[Permission, ...]:
    """What workers need that reach launchers by these data paths."""
    needed = permissions.WORKER
    if "api_proxy" in options.data_paths:
        needed += permissions.API_PROXY
    if "port_forward" in options.data_paths:
        needed += permissions.PORT_FORWARD
    return needed


def account(name: str, options: ManifestOptions, needed: Iterable[Permission]) -> list[dict[str, Any]]:
    """A ServiceAccount, its Role and what binds them."""
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": name, "namespace": options.namespace, "labels": PARTS},
            # Pods that want the token say so; nobody gets it by being in the namespace.
            "automountServiceAccountToken": False,
        },
        *_role("", name, options, needed, name),
    ]


def reader(options: ManifestOptions) -> list[dict[str, Any]]:
    """What workers like to read besides, in the namespace and in the whole cluster."""
    return [
        *_role("", READER, options, permissions.NAMESPACE_READER, WORKER),
        *_role("Cluster", READER, options, permissions.CLUSTER_READER, WORKER),
    ]


def _role(
    scope: Literal["", "Cluster"], name: str, options: ManifestOptions, needed: Iterable[Permission], who: str
) -> list[dict[str, Any]]:
    place = {} if scope else {"namespace": options.namespace}
    # Bindings of the whole cluster have one name space, and other namespaces have a worker of that name.
    binding = f"{name}-{options.namespace}" if scope else name
    return [
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": f"{scope}Role",
            "metadata": {"name": name, **place, "labels": PARTS},
            "rules": permissions.rules(needed),
        },
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": f"{scope}RoleBinding",
            "metadata": {"name": binding, **place, "labels": PARTS},
            "roleRef": {"apiGroup": _GROUP, "kind": f"{scope}Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": who, "namespace": options.namespace}],
        },
    ]
