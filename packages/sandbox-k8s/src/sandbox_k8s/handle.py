"""The name of a sandbox, for another process to find it by."""

from typing import Literal

import msgspec

from .errors import ConfigError

HANDLE_VERSION = 2

Isolation = Literal["bubblewrap", "process"]


class LocalPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="local"):
    """A sandbox on this machine.

    Attributes:
        root: The local back end's folder.
        isolation: What stands between the sandbox and the machine.
    """

    root: str
    isolation: Isolation


class PodPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="kubernetes"):
    """A sandbox in a pod.

    Attributes:
        cluster: The name that its workers give the cluster (`KubernetesConfig.cluster`).
        uid: Of the pod. Another pod of the same name is another sandbox.
        restart_count: Of the container when the sandbox was started; more means that its shells are gone.
        image_digest: What the image's name stood for on the node; empty when the node did not say.
    """

    cluster: str
    namespace: str
    pod: str
    uid: str
    restart_count: int = 0
    image_digest: str = ""


class SandboxHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a sandbox is and who owned it when this was written. Holds no secret; good for any file.

    Attributes:
        version: Of this structure.
        place: Which back end it belongs to, and where it is there.
        sandbox_id: 16 hex characters.
        epoch: The owner's number; the next owner's is higher.
        key_id: Which run key the token is derived from.
        workdir: Where commands start.
        detached_lease_s: How long it lives without an owner.
        created_ns: Unix nanoseconds.
    """

    version: int = HANDLE_VERSION
    place: LocalPlace | PodPlace
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
            version = msgspec.json.decode(data, type=_Version).version
            if version == HANDLE_VERSION:
                return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as problem:
            raise ConfigError(f"not a sandbox handle: {problem}") from problem
        raise ConfigError(f"sandbox handle of version {version}; this release reads {HANDLE_VERSION}")


class _Version(msgspec.Struct, frozen=True):
    version: int
