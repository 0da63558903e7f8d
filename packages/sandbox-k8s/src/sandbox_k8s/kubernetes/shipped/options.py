"""What the shipped manifests can be asked for."""

import ipaddress
import re
from typing import Any, Literal

import msgspec

from sandbox_k8s.errors import ConfigError
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.config import DataPath

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
METADATA = ("169.254.0.0/16", "fd00:ec2::254/128", "168.63.129.16/32", "100.100.100.200/32")
"""Where clouds give credentials to whoever asks: link-local, AWS by IPv6, Azure, Alibaba."""

WORKER_LABELS = {"sandbox-k8s/worker": "true"}
_SANDBOX_LABELS = {records.MANAGED_BY, records.RUN, records.SANDBOX, records.NETWORK}
_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_TARGET = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:./]+)\]|(?P<v4>[0-9./]+)|(?P<bare>[0-9A-Fa-f:./]+?))"
    r"(?::(?P<port>[0-9]{1,5})(?:/(?P<protocol>tcp|udp))?)?"
)


class Target(msgspec.Struct, frozen=True):
    """Where sandboxes may connect to.

    Attributes:
        network: Addresses.
        port: None is every port and protocol.
    """

    network: Network
    port: int | None = None
    protocol: Literal["TCP", "UDP"] = "TCP"


class ManifestOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `manifests`.

    Attributes:
        namespace: Where the sandboxes are.
        run: The network policies and the reaper are about this run's sandboxes alone, and several runs can
            have their own; None is all sandboxes of the namespace.
        image: The reaper's: any image in which ``sandbox-k8s`` is a program, with the extra ``kubernetes``.
        image_pull_policy: Of that image; None leaves it to Kubernetes.
        data_paths: How workers reach launchers; a Role has no more verbs than these need.
        read_nodes: Workers may also read nodes and runtime classes of the cluster, and quotas of the
            namespace: for ``prefetch``, ``doctor`` and ``explain``. Sandboxes do without.
        port: The launcher's, as `KubernetesConfig.port`.
        allow: Where sandboxes with ``SandboxSpec(network=True)`` may connect to: ``CIDR``, ``CIDR:PORT`` or
            ``CIDR:PORT/udp``, IPv6 as ``[CIDR]:PORT``. Nothing is allowed by default; sandboxes without
            that setting reach nothing in any case.
        deny: CIDRs that are taken out of wider ones in ``allow``. By default where clouds give credentials
            to whoever asks.
        dns: The same sandboxes may also ask the cluster's DNS.
        worker_labels: Pods with these labels may connect to launchers.
        worker_namespace: Where those pods are; None is the sandboxes' namespace.
        worker_cidrs: Who else may: workers outside the cluster, and API servers where workers come through
            their pod proxy.
        schedule: When the reaper sweeps, as cron writes it.
    """

    namespace: str = "default"
    run: str | None = None
    image: str | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    data_paths: tuple[DataPath, ...] = ("pod_ip", "api_proxy", "port_forward")
    read_nodes: bool = False
    port: int = 8000
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = METADATA
    dns: bool = False
    worker_labels: dict[str, str] = msgspec.field(default_factory=lambda: dict(WORKER_LABELS))
    worker_namespace: str | None = None
    worker_cidrs: tuple[str, ...] = ()
    schedule: str = "* * * * *"

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name, value in (("namespace", self.namespace), ("worker_namespace", self.worker_namespace)):
            if value is not None and not _NAME.fullmatch(value):
                raise ConfigError(f"ManifestOptions.{name} {value!r} is no name of a namespace")
        if self.run is not None and not _LABEL.fullmatch(self.run):
            raise ConfigError(f"ManifestOptions.run {self.run!r} is no label (see KubernetesConfig.run)")
        if not 0 < self.port < 65536:
            raise ConfigError(f"ManifestOptions.port must lie between 1 and 65535, got {self.port}")
        if not self.worker_labels.keys() - _SANDBOX_LABELS:
            # An empty selector selects every pod, the sandboxes too.
            raise ConfigError("ManifestOptions.worker_labels must name a label that only workers have")
        if len(self.schedule.split()) != 5 or not self.schedule.isprintable():
            raise ConfigError(f"ManifestOptions.schedule {self.schedule!r} has not cron's five fields")
        self.denied()
        self.targets()
        self.worker_networks()

    def targets(self) -> tuple[Target, ...]:
        """What ``allow`` says.

        Raises:
            ConfigError: It cannot be read, or ``deny`` leaves nothing of it.
        """
        found = tuple(_target(text) for text in self.allow)
        for target in found:
            for denied in self.denied():
                if _is_within(target.network, denied):
                    raise ConfigError(
                        f"ManifestOptions.allow {target.network} lies within {denied}, which "
                        "ManifestOptions.deny takes out; allow something else or deny less"
                    )
        return found

    def denied(self) -> tuple[Network, ...]:
        """What ``deny`` says."""
        return tuple(_network(text, "deny") for text in self.deny)

    def worker_networks(self) -> tuple[Network, ...]:
        """What ``worker_cidrs`` says."""
        return tuple(_network(text, "worker_cidrs") for text in self.worker_cidrs)


def _is_within(inner: Any, outer: Any) -> bool:
    return inner.version == outer.version and inner.subnet_of(outer)


def except_within(network: Network, denied: tuple[Network, ...]) -> list[str]:
    """The denied networks that lie within a wider one: all that Kubernetes takes as an exception of it."""
    return [str(one) for one in denied if _is_within(one, network)]


def _network(text: str, option: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as problem:
        raise ConfigError(f"ManifestOptions.{option} {text!r}: {problem}") from problem


def _target(text: str) -> Target:
    found = _TARGET.fullmatch(text)
    if found is None:
        raise ConfigError(f"ManifestOptions.allow {text!r} is not CIDR, CIDR:PORT or CIDR:PORT/udp")
    # Without brackets the last part of an IPv6 network is no port.
    whole = found["bare"] is not None
    network = _network(text if whole else found["v4"] or found["v6"], "allow")
    if whole or found["port"] is None:
        return Target(network)
    port = int(found["port"])
    if not 0 < port < 65536:
        raise ConfigError(f"ManifestOptions.allow {text!r}: there is no port {port}")
    return Target(network, port, "UDP" if found["protocol"] == "udp" else "TCP")
