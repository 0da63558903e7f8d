"""Network policies: sandboxes reach nothing but what is allowed, and workers alone reach launchers.

Policies add up, and a pod that none selects is open. So one selects every sandbox and allows nothing but
workers, whatever its other labels say; the other adds what sandboxes with a network may reach.
"""

from typing import Any

from sandbox_k8s.kubernetes import records

from .names import PARTS, resource_name
from .options import ManifestOptions, Network, Target, except_within

_DNS_PORT = 53


def closed(options: ManifestOptions) -> dict[str, Any]:
    """Nothing out, and in from workers to the launcher's port."""
    body = {
        "podSelector": {"matchLabels": _labels(options)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": _workers(options), "ports": [{"protocol": "TCP", "port": options.port}]}],
        "egress": [],
    }
    return _policy("sandbox-k8s", options, body)


def allowed(options: ManifestOptions) -> dict[str, Any]:
    """What sandboxes with a network may reach."""
    targets, denied = options.targets(), options.denied()
    egress = [_egress(target, denied) for target in targets]
    if options.dns:
        ports = [{"protocol": protocol, "port": _DNS_PORT} for protocol in ("UDP", "TCP")]
        dns = {"namespaceSelector": _namespace("kube-system"), "podSelector": _label("k8s-app", "kube-dns")}
        egress.append({"to": [dns], "ports": ports})
    body = {
        "podSelector": {"matchLabels": {**_labels(options), records.NETWORK: "open"}},
        "policyTypes": ["Egress"],
        "egress": egress,
    }
    return _policy("sandbox-k8s-open", options, body)


def _policy(name: str, options: ManifestOptions, body: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": resource_name(name, options), "namespace": options.namespace, "labels": PARTS}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": body}


def _labels(options: ManifestOptions) -> dict[str, str]:
    run = {} if options.run is None else {records.RUN: options.run}
    return {records.MANAGED_BY: "sandbox-k8s", **run}


def _workers(options: ManifestOptions) -> list[dict[str, Any]]:
    pods: dict[str, Any] = {"podSelector": {"matchLabels": options.worker_labels}}
    if options.worker_namespace is not None:
        pods["namespaceSelector"] = _namespace(options.worker_namespace)
    return [pods, *({"ipBlock": _block(network, ())} for network in options.worker_networks())]


def _egress(target: Target, denied: tuple[Network, ...]) -> dict[str, Any]:
    rule: dict[str, Any] = {"to": [{"ipBlock": _block(target.network, denied)}]}
    if target.port is not None:
        rule["ports"] = [{"protocol": target.protocol, "port": target.port}]
    return rule


def _block(network: Network, denied: tuple[Network, ...]) -> dict[str, Any]:
    without = except_within(network, denied)
    return {"cidr": str(network), **({"except": without} if without else {})}


def _namespace(name: str) -> dict[str, Any]:
    return _label("kubernetes.io/metadata.name", name)


def _label(key: str, value: str) -> dict[str, Any]:
    return {"matchLabels": {key: value}}
