"""The name of a sandbox, for another process to find it by."""

from typing import Literal

import msgspec

from .errors import ConfigError

HANDLE_VERSION = 1

Isolation = Literal["bubblewrap", "process"]


class SandboxHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a sandbox is and who owned it when this was written. Holds no secret; good for any file.

    Attributes:
        version: Of this structure.
        backend: Which kind of place ``root`` and ``sandbox_id`` belong to.
        isolation: What stands between the sandbox and the machine.
        root: The local back end's folder.
        sandbox_id: 16 hex characters.
        epoch: The owner's number; the next owner's is higher.
        key_id: Which run key the token is derived from.
        workdir: Where commands start.
        detached_lease_s: How long it lives without an owner.
        created_ns: Unix nanoseconds.
    """

    version: int = HANDLE_VERSION
    backend: Literal["local"] = "local"
    isolation: Isolation
    root: str
    sandbox_id: str
    epoch: int
    key_id: str
    workdir: str
    lease_s: float
    detached_lease_s: float
    created_ns: int
    labels: dict[str, str] = {}

    def to_json(self) -> bytes:
        """The handle as one line of JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> "SandboxHandle":
        """Read a handle.

        Raises:
            ConfigError: It is malformed, or of a version that this release does not know.
        """
        try:
            handle = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as problem:
            raise ConfigError(f"not a sandbox handle: {problem}") from problem
        if handle.version != HANDLE_VERSION:
            raise ConfigError(
                f"sandbox handle of version {handle.version}; this release reads {HANDLE_VERSION}"
            )
        return handle
