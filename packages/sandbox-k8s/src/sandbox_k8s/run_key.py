"""The run key: what every sandbox's token is derived from, known to the workers of one run."""

import hashlib
import hmac
import os
from contextlib import suppress
from pathlib import Path

from .errors import ConfigError

_KEY_BYTES = 32


class RunKey:
    """The key from which tokens are derived: a file of mode 0600, made when it is missing."""

    def __init__(self, path: Path) -> None:
        self._key = _read_or_make_key(path)
        self.key_id = hashlib.sha256(b"id\0" + self._key).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"RunKey(key_id={self.key_id!r}, key=***)"

    def token(self, *place: str) -> str:
        """The token of the sandbox at that place; it is derived each time and stored nowhere.

        Args:
            place: ``local`` and its id, or ``kubernetes``, cluster, namespace and pod.
        """
        return hmac.new(self._key, "\0".join(place).encode(), hashlib.sha256).hexdigest()


def _read_or_make_key(path: Path) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    if not path.exists():
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(aside, path)  # atomic and never over a key that somebody else just made
        aside.unlink()
    found = path.stat()
    # Kubernetes mounts a Secret as root's, for a group of the pod's own to read (fsGroup).
    others = 0o077 if found.st_uid == os.geteuid() else 0o037
    if found.st_mode & others:
        raise ConfigError(f"run key file {path} can be read by others; do: chmod 600 {path}")
    try:
        key = path.read_bytes().strip(b"\n")
    except PermissionError as problem:
        raise ConfigError(
            f"run key file {path} cannot be read by this user; a Secret that is mounted needs "
            "securityContext.fsGroup and defaultMode 0440"
        ) from problem
    if len(key) < 16:
        raise ConfigError(f"run key file {path} holds {len(key)} bytes; at least 16 are needed")
    return key
