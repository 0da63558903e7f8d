"""Where sandboxes find room: nodes, runtime classes, quotas, limit ranges; what closes their network."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sandbox_k8s.errors import ClusterError
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.api import PodApi, Request
from sandbox_k8s.kubernetes.config import KubernetesConfig
from sandbox_k8s.kubernetes.pod_state import read_node

from .finding import Finding, advice, broken, refused, works

_SUFFIXES = {
    "": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_OLDEST_CONTAINERD = (2, 1)


async def capacity(api: PodApi, config: KubernetesConfig) -> list[Finding]:
    """Findings about nodes, runtime classes, quotas, limit ranges and network policies."""
    namespace = f"namespaces/{config.namespace}"
    looked = (
        ("nodes", "api/v1/nodes", of_nodes),
        ("runtime classes", "apis/node.k8s.io/v1/runtimeclasses", of_runtime_classes),
        ("quota", f"api/v1/{namespace}/resourcequotas", of_quotas),
        ("limit ranges", f"api/v1/{namespace}/limitranges", of_limit_ranges),
        ("network", f"apis/networking.k8s.io/v1/{namespace}/networkpolicies", of_network_policies),
    )
    found: list[Finding] = []
    for what, path, read in looked:
        try:
            items = (await api.ask(Request("GET", path), f"listing {what}"))["items"]
        except ClusterError as problem:
            found.append(refused(what, problem))
            continue
        found += read(items, config)
    return found


def quantity(text: str) -> float:
    """A number of Kubernetes: ``1500m``, ``16Gi``, ``1e3``."""
    parsed = re.fullmatch(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)([A-Za-z]*)", text)
    if parsed is None or parsed[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is no quantity of Kubernetes")
    return float(parsed[1]) * _SUFFIXES[parsed[2]]


def of_nodes(nodes: Iterable[Mapping[str, Any]], config: KubernetesConfig) -> list[Finding]:
    """How many sandboxes fit on those that may take them, when nothing else is there."""
    nodes = list(nodes)
    wanted = {"kubernetes.io/arch": config.architecture, **config.node_selector}
    fitting = [one for one in nodes if wanted.items() <= (one["metadata"].get("labels") or {}).items()]
    open_ones = [one for one in fitting if _takes_pods(one, config)]
    room = sum(_room(one["status"]["allocatable"], config) for one in open_ones)
    labels = ", ".join(f"{key}={value}" for key, value in wanted.items())
    says = (
        f"{len(nodes)} nodes, {len(fitting)} with {labels}, {len(open_ones)} of them ready and open; "
        f"room for {room} sandboxes when empty"
    )
    verdict = works if room else broken
    found = [
        verdict("nodes", says if room else f"{says}: see KubernetesConfig.cpu, .memory_bytes, .disk_bytes")
    ]
    if config.injection.kind == "image_volume":
        found += _runtimes(open_ones)
    return found


def _runtimes(nodes: Iterable[Mapping[str, Any]]) -> list[Finding]:
    told = (one["status"].get("nodeInfo", {}).get("containerRuntimeVersion") for one in nodes)
    versions = sorted({version for version in told if version})
    says = f"nodes run {', '.join(versions)}"
    if any(_is_old_containerd(one) for one in versions):
        return [
            broken("image volumes", f"{says}; they need containerd 2.1: Injection(kind='init_copy') works")
        ]
    return [works("image volumes", says)] if versions else []


def _is_old_containerd(version: str) -> bool:
    parsed = re.match(r"containerd://v?(\d+)\.(\d+)", version)
    return parsed is not None and (int(parsed[1]), int(parsed[2])) < _OLDEST_CONTAINERD


def of_runtime_classes(classes: Iterable[Mapping[str, Any]], config: KubernetesConfig) -> list[Finding]:
    """Whether the one that is asked for is there."""
    names = sorted(one["metadata"]["name"] for one in classes)
    there = ", ".join(names) or "none"
    if config.runtime_class is None:
        text = f"there are: {there}" if names else "none: sandboxes share the nodes' kernel"
        return [advice("runtime classes", f"{text}; KubernetesConfig.runtime_class chooses one")]
    if config.runtime_class in names:
        return [works("runtime classes", f"{config.runtime_class} is there")]
    return [broken("runtime classes", f"there is no {config.runtime_class!r}; there are: {there}")]


def of_quotas(quotas: Iterable[Mapping[str, Any]], config: KubernetesConfig) -> list[Finding]:
    """How many more sandboxes each quota allows."""
    found: list[Finding] = []
    for quota in quotas:
        status = quota.get("status", {})
        hard, used = status.get("hard", {}), status.get("used", {})
        left = {
            name: (quantity(hard[name]) - quantity(used.get(name, "0"))) / amount
            for name, amount in _counted(config).items()
            if name in hard
        }
        if not left:
            continue
        name = quota["metadata"]["name"]
        tightest = min(left, key=lambda one: left[one])
        room = max(0, int(left[tightest] + 1e-9))
        limit = f"{tightest}: {used.get(tightest, '0')} of {hard[tightest]} used"
        verdict = works if room else broken
        found.append(verdict("quota", f"{name}: room for {room} more sandboxes ({limit})"))
    return found or [works("quota", "none that limits sandboxes")]


def of_limit_ranges(ranges: Iterable[Mapping[str, Any]], config: KubernetesConfig) -> list[Finding]:
    """What a container may ask for, against what sandboxes ask for."""
    asked = {"cpu": config.cpu, "memory": config.memory_bytes, "ephemeral-storage": config.disk_bytes}
    wrong: list[str] = []
    names: list[str] = []
    for one in ranges:
        names.append(one["metadata"]["name"])
        for limit in one["spec"]["limits"]:
            if limit["type"] not in ("Container", "Pod"):
                continue
            for name, amount in asked.items():
                most, least = limit.get("max", {}).get(name), limit.get("min", {}).get(name)
                if most is not None and amount > quantity(most):
                    wrong.append(f"{names[-1]} allows at most {most} {name} per {limit['type']}")
                if least is not None and amount < quantity(least):
                    wrong.append(f"{names[-1]} wants at least {least} {name} per {limit['type']}")
    if wrong:
        return [broken("limit ranges", f"{'; '.join(wrong)}; see KubernetesConfig")]
    return [works("limit ranges", f"sandboxes keep to {', '.join(names)}" if names else "none")]


def of_network_policies(policies: Iterable[Mapping[str, Any]], config: KubernetesConfig) -> list[Finding]:
    """Whether one selects the sandboxes that asked for no network; whether it is enforced is not known."""
    pod = {
        records.MANAGED_BY: "sandbox-k8s",
        records.RUN: config.run,
        records.NETWORK: "closed",
    }
    closing = [
        one["metadata"]["name"]
        for one in policies
        if "Egress" in one["spec"].get("policyTypes", ())
        and (one["spec"].get("podSelector", {}).get("matchLabels") or {}).items() <= pod.items()
    ]
    if closing:
        return [works("network", f"{', '.join(closing)} selects sandboxes without network=True")]
    text = "no NetworkPolicy selects sandboxes: their network is open; sandbox-k8s manifests network-policy"
    return [advice("network", text)]


def _takes_pods(node: Mapping[str, Any], config: KubernetesConfig) -> bool:
    read = read_node(node)
    barred = any(one.effect in ("NoSchedule", "NoExecute") for one in read.spec.taints or ())
    return not read.is_lost and not read.spec.unschedulable and (not barred or bool(config.tolerations))


def _room(allocatable: Mapping[str, str], config: KubernetesConfig) -> int:
    asked = {
        "cpu": config.cpu,
        "memory": config.memory_bytes,
        "ephemeral-storage": config.disk_bytes,
        "pods": 1,
    }
    return min(
        int(quantity(allocatable[name]) / amount) for name, amount in asked.items() if name in allocatable
    )


def _counted(config: KubernetesConfig) -> dict[str, float]:
    """What one sandbox takes of a quota, by the names that quotas have for it."""
    sizes = {"cpu": config.cpu, "memory": config.memory_bytes, "ephemeral-storage": config.disk_bytes}
    return {
        "pods": 1.0,
        "count/pods": 1.0,
        **sizes,
        **{f"{kind}.{name}": amount for kind in ("requests", "limits") for name, amount in sizes.items()},
    }
