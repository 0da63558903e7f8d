"""Settings of the back ends."""

import os
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from .checks import check_fields
from .errors import ConfigError

# A unix socket's path has 104 bytes on macOS and 108 on Linux; the root is followed by
# /sandboxes/<16>/stop.sock.
_LONGEST_ROOT = 65


def default_root() -> Path:
    """The folder that holds this user's local sandboxes."""
    return Path(tempfile.gettempdir()).resolve() / f"sandbox-k8s-{os.getuid()}"


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that every back end has.

    Attributes:
        start_timeout_s: How long a sandbox may take to come up.
        start_concurrency_max: How many starts are under way at once, at most.
        stop_timeout_s: How long leaving the client waits for its sandboxes to end. They end anyway.
        grace_s: Between SIGTERM and SIGKILL for a command that timed out.
        answer_margin_s: How much longer than a command's own time-out its answer is waited for.
        output_limit: Bytes kept of each output stream of a command: its first and its last half.
    """

    start_timeout_s: float = 30.0
    start_concurrency_max: int = 16
    stop_timeout_s: float = 2.0
    grace_s: float = 1.0
    answer_margin_s: float = 20.0
    output_limit: int = 8 << 20

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        check_fields(self)
        kind = type(self).__name__
        names = ("start_timeout_s", "start_concurrency_max", "stop_timeout_s", "answer_margin_s")
        for name in (*names, "output_limit"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{kind}.{name} must be positive, got {getattr(self, name)}")
        if self.grace_s < 0:
            raise ConfigError(f"{kind}.grace_s must not be negative, got {self.grace_s}")


class LocalConfig(ClientConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the local back end, beside those of `ClientConfig`.

    Attributes:
        root: Folder of all sandboxes, made with mode 0700. None means ``sandbox-k8s-UID`` in the temporary
            folder. Workers that hand sandboxes to each other share it. At most 65 bytes long (socket paths
            are short).
        isolation: ``auto`` takes bubblewrap when it works and else a plain process, with one warning;
            ``bubblewrap`` insists; ``process`` never isolates.
        run_key_file: File with the key from which every sandbox's token is derived, made with mode 0600 when
            it is missing. None means ``run.key`` in the root.
    """

    root: Path | None = None
    isolation: Literal["auto", "bubblewrap", "process"] = "auto"
    run_key_file: Path | None = None

    def resolved_root(self) -> Path:
        """The root as an absolute path without links.

        Raises:
            ConfigError: It is too long for a unix socket below it.
        """
        root = (self.root or default_root()).expanduser().absolute()
        if len(os.fsencode(root)) > _LONGEST_ROOT:
            raise ConfigError(
                f"LocalConfig.root {root} is {len(os.fsencode(root))} bytes long and leaves no room for a "
                f"unix socket; give one of at most {_LONGEST_ROOT} bytes"
            )
        return root
