"""Who may do what: the one user may do everything but what a test forbids."""

from collections.abc import Mapping
from typing import Any

from .answers import RefusalError
from .objects import Target
from .store import Object

REVIEW_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
USER = "fake"
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
# Kinds of which this cluster has none, and takes none.
_EMPTY = {
    "resourcequotas": ("v1", "ResourceQuotaList"),
    "limitranges": ("v1", "LimitRangeList"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicyList"),
    "runtimeclasses": ("node.k8s.io/v1", "RuntimeClassList"),
}


class Rights:
    """What is forbidden, as RBAC would.

    Attributes:
        forbidden: Verbs and resources; a subresource follows a slash.
    """

    def __init__(self) -> None:
        self.forbidden: set[tuple[str, str]] = set()

    def check(self, method: str, target: Target, *, watches: bool) -> None:
        """Let a request pass.

        Raises:
            RefusalError: 403.
        """
        resource = f"{target.plural}/{target.sub}" if target.sub else target.plural
        verb = _VERBS.get(method, "get")
        if verb == "get" and not target.name:
            verb = "watch" if watches else "list"
        if (verb, resource) not in self.forbidden:
            return
        scope = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
        named = f' "{target.name}"' if target.name else ""
        message = (
            f'{target.plural}{named} is forbidden: User "{USER}" cannot {verb} resource "{resource}" '
            f'in API group "" {scope}'
        )
        details = {"name": target.name, "kind": target.plural} if target.name else {"kind": target.plural}
        raise RefusalError(403, "Forbidden", message, details=details)

    def review(self, body: Mapping[str, Any]) -> Object:
        """Answer a ``SelfSubjectAccessReview``."""
        asked: dict[str, str] = body["spec"]["resourceAttributes"]
        resource = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        allowed = (asked["verb"], resource) not in self.forbidden
        return {
            "kind": "SelfSubjectAccessReview",
            "apiVersion": "authorization.k8s.io/v1",
            "metadata": {},
            "spec": {"resourceAttributes": {name: value for name, value in asked.items() if value}},
            "status": {"allowed": allowed},
        }


def empty_list(path: str, version: int) -> Object | None:
    """The list of a kind of which there are none; None for other paths."""
    known = _EMPTY.get(path.rpartition("/")[2])
    if known is None:
        return None
    api_version, kind = known
    metadata = {"resourceVersion": str(version)}
    return {"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": []}
