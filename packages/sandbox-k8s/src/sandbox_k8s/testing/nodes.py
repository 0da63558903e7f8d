"""Nodes: which one takes a pod, and how one is lost."""

import platform
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from .deletion import current
from .patches import strategic
from .states import condition
from .store import Object, Store

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_UNITS = {
    **{f"{unit}i": Decimal(1 << 10 * power) for power, unit in enumerate("KMGT", 1)},
    **{unit: Decimal(1000**power) for power, unit in enumerate("kMGT", 1)},
    "m": Decimal("0.001"),
}
_PRESSURES = {
    "MemoryPressure": ("KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    "DiskPressure": ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    "PIDPressure": ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
}
_LOST = ("NodeStatusUnknown", "Kubelet stopped posting node status.")
UNREACHABLE = "node.kubernetes.io/unreachable"
DEFAULT_ALLOCATABLE = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "110"}


def quantity(text: str | float) -> Decimal:
    """The number that a quantity of Kubernetes means."""
    words = str(text)
    for unit, factor in _UNITS.items():
        if words.endswith(unit):
            return Decimal(words.removesuffix(unit)) * factor
    return Decimal(words)


class Nodes:
    """The nodes of a cluster; a pod gets the first one that may take it.

    Requests are compared with what a node has, not with what is left of it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lost: set[str] = set()

    def add(self, name: str, allocatable: Mapping[str, str] = DEFAULT_ALLOCATABLE) -> Object:
        """A new node, ready at once."""
        labels = {
            "kubernetes.io/arch": _ARCHITECTURES.get(platform.machine(), "amd64"),
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
        }
        status = {
            "capacity": dict(allocatable),
            "allocatable": dict(allocatable),
            "conditions": self._healthy(),
        }
        node = {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}
        return self._store.create("nodes", node)

    def place(self, pod: Object) -> tuple[str, str]:
        """A node's name, or an empty one and the recorded cause that tells why there is none."""
        causes: list[str] = []
        for node in self._store.all("nodes"):
            cause = _objection(node, pod["spec"])
            if not cause:
                return node["metadata"]["name"], ""
            causes.append(cause)
        return "", causes[0] if causes else "unschedulable-node-not-ready"

    def report_lost(self, name: str) -> None:
        """What the node controller says about a node that it has not heard of for its grace time."""
        node = self._node(name)
        conditions = [
            {**one, "status": "Unknown", "reason": _LOST[0], "message": _LOST[1]}
            for one in node["status"]["conditions"]
        ]
        taint = {"key": UNREACHABLE, "effect": "NoSchedule", "timeAdded": self._store.now()}
        spec = {**node["spec"], "taints": [*node["spec"].get("taints", []), taint]}
        self._put(node, spec, conditions)

    def report_found(self, name: str) -> None:
        """The node is heard of again."""
        node = self._node(name)
        spec = {
            **node["spec"],
            "taints": [one for one in node["spec"].get("taints", []) if one["key"] != UNREACHABLE],
        }
        if not spec["taints"]:
            del spec["taints"]
        self._put(node, spec, self._healthy())

    def cordon(self, name: str, *, back: bool = False) -> None:
        """Take no new pods, or take them again."""
        node = self._node(name)
        spec = {name: value for name, value in node["spec"].items() if name != "unschedulable"}
        if not back:
            spec["unschedulable"] = True
        self._store.replace("nodes", node, {**node, "spec": spec})

    def tell(self, name: str, told: Object) -> None:
        """What a course says of a node."""
        node = self._node(name)
        self._put(node, told["spec"], strategic(node["status"], told["status"])["conditions"])

    def _node(self, name: str) -> Object:
        return current(self._store, "nodes", "", name)

    def _put(self, node: Object, spec: Object, conditions: list[Object]) -> None:
        status = {**node["status"], "conditions": conditions}
        self._store.replace("nodes", node, {**node, "spec": spec, "status": status})

    def _healthy(self) -> list[Object]:
        now = self._store.now()
        made = [condition(kind, False, now, *words) for kind, words in _PRESSURES.items()]
        made.append(condition("Ready", True, now, "KubeletReady", "kubelet is posting ready status"))
        for one in made:
            one["lastHeartbeatTime"] = one.pop("lastProbeTime") or now
        return made


def _selector(spec: Mapping[str, Any]) -> dict[str, str]:
    return spec.get("nodeSelector") or {}


def _is_wanted(name: str, spec: Mapping[str, Any]) -> bool:
    """Whether the required affinity to nodes by name, as that of DaemonSets, lets that one be."""
    affinity: Any = spec.get("affinity", {}).get("nodeAffinity", {})
    required: Any = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    fields: list[Any] = []
    for term in required.get("nodeSelectorTerms", ()):
        fields += term.get("matchFields", ())
    return not fields or any(name in field["values"] for field in fields)


def _objection(node: Object, spec: Mapping[str, Any]) -> str:
    """Why a node cannot take a pod: the name of a recorded cause; empty when it can."""
    labels = node["metadata"]["labels"]
    if any(labels.get(name) != value for name, value in _selector(spec).items()):
        return "unschedulable-node-selector"
    if not _is_wanted(node["metadata"]["name"], spec):
        return "unschedulable-node-selector"
    if node["spec"].get("unschedulable"):
        return "unschedulable-cordon"
    if node["spec"].get("taints"):
        return "unschedulable-node-not-ready"
    for what in ("cpu", "memory", "ephemeral-storage"):
        asked = sum(
            quantity(one["resources"].get("requests", {}).get(what, "0")) for one in spec["containers"]
        )
        if asked > quantity(node["status"]["allocatable"][what]):
            return f"unschedulable-{what}"
    return ""
