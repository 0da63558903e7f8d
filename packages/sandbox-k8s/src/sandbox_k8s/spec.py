"""What a sandbox should be."""

from pathlib import Path, PurePosixPath

import msgspec

from .checks import check_fields
from .errors import ConfigError


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sandbox to start.

    Attributes:
        image: Pods: the sandbox's image. None is `KubernetesConfig.image`. The local back end has none.
        cpu: Pods: cores, as request and limit. None is `KubernetesConfig.cpu`.
        disk_bytes: Pods: what it may write, as request and limit. None is `KubernetesConfig.disk_bytes`.
        env: Environment of everything that runs inside, on top of PATH, HOME, TMPDIR, LANG and TERM. Nothing
            of the caller's own environment gets in.
        workdir: Where commands start. None is the sandbox's own empty folder (``/workspace`` under
            bubblewrap); another path is made inside where it is missing. A plain process has no inside: the
            folder is made on this machine, and stays.
        lease_s: The sandbox ends itself when nobody renews it for so long. An open client renews.
        detached_lease_s: The same after `Sandbox.detach`.
        network: Whether the network is there. Without bubblewrap it always is. A pod's label
            ``sandbox-k8s/network`` says it (``open`` or ``closed``); a NetworkPolicy that selects the label
            has to enforce it (``sandbox-k8s manifests network-policy``).
        read_only_paths: Folders and files of the host that are visible inside at the same path, beside
            ``/usr`` and the libraries. The user's home, the sandboxes' root and whatever holds them are
            refused. Pods have none.
        memory_bytes: Locally the address space of each process inside; None is no limit. In a pod the
            memory of the container, as request and limit; None is `KubernetesConfig.memory_bytes`.
        labels: Shown by `list`; short, no secrets.
    """

    image: str | None = None
    cpu: float | None = None
    disk_bytes: int | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    lease_s: float = 60.0
    detached_lease_s: float = 3600.0
    network: bool = False
    read_only_paths: tuple[Path, ...] = ()
    memory_bytes: int | None = None
    labels: dict[str, str] = {}

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        check_fields(self)
        for name, value in (("lease_s", self.lease_s), ("detached_lease_s", self.detached_lease_s)):
            if not 1.0 <= value <= 30 * 86400:
                raise ConfigError(f"SandboxSpec.{name} must lie between 1 second and 30 days, got {value}")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(f"SandboxSpec.env: {name!r} is not a variable (empty, or holds '=' or NUL)")
        for path in self.read_only_paths:
            if not path.is_absolute():
                raise ConfigError(f"SandboxSpec.read_only_paths: {path} is not absolute")
        if self.workdir is not None and not PurePosixPath(self.workdir).is_absolute():
            raise ConfigError(f"SandboxSpec.workdir {self.workdir!r} is not absolute")
        if self.cpu is not None and not 0.01 <= self.cpu <= 1024:
            raise ConfigError(f"SandboxSpec.cpu must lie between 0.01 and 1024 cores, got {self.cpu}")
        if self.disk_bytes is not None and self.disk_bytes < 1 << 20:
            raise ConfigError(f"SandboxSpec.disk_bytes must be at least 1 MiB, got {self.disk_bytes}")
        if self.memory_bytes is not None and self.memory_bytes < 64 << 20:
            raise ConfigError(f"SandboxSpec.memory_bytes must be at least 64 MiB, got {self.memory_bytes}")
