"""What a sandbox should be."""

from pathlib import Path, PurePosixPath

import msgspec

from .errors import ConfigError


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sandbox to start.

    Attributes:
        env: Environment of everything that runs inside, on top of PATH, HOME, TMPDIR, LANG and TERM. Nothing
            of the caller's own environment gets in.
        workdir: Where commands start. None is the sandbox's own empty folder (``/workspace`` under
            bubblewrap); another path must exist inside.
        lease_s: The sandbox ends itself when nobody renews it for so long. An open client renews.
        detached_lease_s: The same after `Sandbox.detach`.
        network: Whether the host's network is there. Without bubblewrap it always is.
        read_only_paths: Folders and files of the host that are visible inside at the same path, beside
            ``/usr`` and the libraries. The user's home, the sandboxes' root and whatever holds them are
            refused.
        memory_bytes: Address space of each process inside; None is no limit.
        labels: Shown by `list`; short, no secrets.
    """

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
        if self.memory_bytes is not None and self.memory_bytes < 64 << 20:
            raise ConfigError(f"SandboxSpec.memory_bytes must be at least 64 MiB, got {self.memory_bytes}")
