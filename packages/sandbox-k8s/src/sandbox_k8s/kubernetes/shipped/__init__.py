"""What a cluster's administrator applies once: accounts and roles, network policies, the reaper.

``sandbox-k8s manifests KIND | kubectl apply -f -``.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

from sandbox_k8s.kubernetes import permissions
from sandbox_k8s.kubernetes.permissions import Permission

from . import network_policy, rbac, reaper_job
from .names import REAPER, WORKER
from .options import METADATA, ManifestOptions
from .yaml import document

Kind = Literal["rbac", "network-policy", "reaper", "all"]
KINDS: tuple[str, ...] = get_args(Kind)

__all__ = ["KINDS", "METADATA", "REAPER", "WORKER", "Kind", "ManifestOptions", "manifests", "objects"]


def objects(kind: Kind, options: ManifestOptions) -> list[dict[str, Any]]:
    """The objects of `manifests` as plain data."""
    return [one for one, _ in _commented(kind, options)]


def manifests(kind: Kind, options: ManifestOptions) -> str:
    """The YAML that ``kubectl apply -f -`` takes.

    Args:
        kind: ``rbac``: ServiceAccount, Role and RoleBinding for workers and for the reaper.
            ``network-policy``: no way out but the allow-list, no way in but for workers.
            ``reaper``: the CronJob; it runs as the reaper's account, so it needs ``rbac``.
        options: Namespace, run, addresses.

    Raises:
        ConfigError: The reaper is asked for without an image.
    """
    return "".join(document(one, comments) for one, comments in _commented(kind, options))


def _commented(kind: Kind, options: ManifestOptions) -> list[tuple[dict[str, Any], list[str]]]:
    made: list[tuple[dict[str, Any], list[str]]] = []
    if kind in ("rbac", "all"):
        made += _account(WORKER, options, rbac.worker_permissions(options), "Workers")
        made += _account(REAPER, options, permissions.REAPER, "The reaper")
        if options.read_nodes:
            also = [*permissions.NAMESPACE_READER, *permissions.CLUSTER_READER]
            first, *others = rbac.reader(options)
            made += [(first, _why(also)), *((one, []) for one in others)]
    if kind in ("network-policy", "all"):
        made.append((network_policy.closed(options), _CLOSED))
        made.append((network_policy.allowed(options), _ALLOWED))
    if kind in ("reaper", "all"):
        made.append((reaper_job.cron_job(options), _REAPER))
    return made


def _account(
    name: str, options: ManifestOptions, needed: Iterable[Permission], who: str
) -> list[tuple[dict[str, Any], list[str]]]:
    account, role, binding = rbac.account(name, options, needed)
    return [(account, [f"{who}."]), (role, _why(needed)), (binding, [])]


def _why(needed: Iterable[Permission]) -> list[str]:
    return ["What for:", *(f"  {one.name}: {one.why}" for one in needed)]


_CLOSED = [
    "Every sandbox: nothing out; in from workers alone, to the launcher.",
    "Needs a network plugin that enforces NetworkPolicy; many let a node reach its own pods in any case.",
]
_ALLOWED = ["Sandboxes with SandboxSpec(network=True): what they may reach besides."]
_REAPER = ["Deletes sandboxes that ended or that nobody renewed.", "Needs the account of `manifests rbac`."]
