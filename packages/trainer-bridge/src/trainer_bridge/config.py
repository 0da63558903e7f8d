"""Settings of both ends, and the rules for addresses."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

import msgspec

from trainer_bridge.errors import AddressError, ConfigError

Durability = Literal["none", "async", "sync"]
"""When `send` returns. `none`: in the memory of this process, or written without ever asking the disk.
`async`: written to the spool file; the disk is asked within 5 ms, so that a crash of the process loses
nothing and a crash of the machine at most those 5 ms. `sync`: on the disk."""

SettleLevel = Literal["received", "stored", "committed"]
"""The acknowledgement after which a sender may forget a sample."""

MAX_HEAD_BYTES = 1 << 20
"""Upper bound of a head frame, metadata of all parts included."""
MAX_PAYLOAD_BYTES = 1 << 29
"""Default upper bound of a payload frame (512 MiB)."""
MAX_PARTS = 1024
"""Upper bound of the parts of one rollout in one message."""

_TCP = re.compile(r"tcp://(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d{1,5})\Z")


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of the protocol, in seconds. The defaults suit a cluster; tests shorten them."""

    heartbeat_s: float = 1.0
    """CONTROL, CREDIT and ACK are repeated at this interval, REPORT is sent at it."""
    peer_timeout_s: float = 30.0
    """A peer that was silent for so long counts as lost. Long, because a trainer may hold the GIL for
    seconds."""
    greet_again_s: float = 1.0
    """HELLO is repeated at this interval until WELCOME or ERROR comes."""
    resend_s: float = 10.0
    """A sample that was sent and not acknowledged as received is sent again after this time (same
    identity)."""


class SenderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a `SampleSender` that are rarely changed."""

    settle: SettleLevel = "committed"
    max_unsettled: int = 4096
    """Without a spool: messages kept in memory for resending; `send` waits when there are more."""
    max_unsettled_bytes: int = 1 << 30
    """Without a spool: the same in bytes."""
    spool_quota_bytes: int = 64 << 30
    """With a spool: `send` waits when the unsettled part of the spool is larger."""
    segment_bytes: int = 128 << 20
    """A spool segment is closed, and the next begun, when it is this large."""
    keep_segments: bool = False
    """True: segments stay on disk after everything in them is settled."""
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    insecure: bool = False
    """True: allow a peer that is not on this machine, without encryption or authentication."""
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        _positive(self, ("max_unsettled", "max_unsettled_bytes", "spool_quota_bytes", "segment_bytes"))


class ReceiverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a `SampleReceiver` that are rarely changed."""

    window: int = 256
    """Messages that a producer may keep on the wire; the smaller of this and the sender's own window
    holds."""
    queue_messages: int = 256
    """Per producer: rollouts that may wait for `next()`; credit for more is given as they are taken."""
    queue_bytes: int = 256 << 20
    """Per producer: the same in bytes."""
    observer_copies: int = 64
    """Copies on the way to one observer; further ones are skipped and counted."""
    remember_rollouts: int = 1 << 20
    """Rollout ids kept for deduplication; the oldest are forgotten first, and counted."""
    segment_bytes: int = 128 << 20
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    insecure: bool = False
    """True: allow a bind that other machines can reach, without encryption or authentication."""
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        _positive(self, ("window", "queue_messages", "queue_bytes", "remember_rollouts", "segment_bytes"))


def _positive(config: SenderConfig | ReceiverConfig, names: tuple[str, ...]) -> None:
    values = msgspec.structs.asdict(config)
    for name in names:
        if values[name] < 1:
            raise ConfigError(f"{name} must be at least 1, got {values[name]}")


def check_address(address: str, *, insecure: bool, binding: bool) -> None:
    """Refuse an address that is malformed, or that leaves this machine without keys.

    Args:
        address: `tcp://HOST:PORT` (port 0 or HOST `*` only when binding) or `ipc://PATH`.
        insecure: the caller accepts plain text and no authentication.
        binding: the address is bound, not connected to.

    Raises:
        AddressError: with the reason and the remedy.
    """
    if address.startswith("ipc://"):
        _check_ipc(Path(address.removeprefix("ipc://")))
        return
    match = _TCP.match(address)
    if match is None:
        raise AddressError(f"{address!r} is not an address: write tcp://HOST:PORT or ipc:///absolute/path")
    port = int(match["port"])
    if port > 65535 or (port == 0 and not binding):
        raise AddressError(f"{address!r}: port {port} is not valid here, give one from 1 to 65535")
    host = match["v6"] or match["host"]
    if host == "*" and not binding:
        raise AddressError(f"{address!r}: '*' can be bound, not connected to; name the receiver's host")
    if not insecure and not is_loopback(host):
        verb = "binding" if binding else "connecting"
        raise AddressError(
            f"{address!r}: {verb} beyond this machine needs encryption and authentication (CURVE keys), "
            "which this version does not offer yet. Use a loopback address, through an ssh tunnel or a "
            "service mesh if the peer is elsewhere; or, on a network where every host is trusted, write "
            "insecure=True (--insecure)"
        )


def is_loopback(host: str) -> bool:
    """True if the host can only be this machine. Names but `localhost` are not resolved: they may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_ipc(path: Path) -> None:
    if not path.is_absolute():
        raise AddressError(f"ipc://{path}: the path must be absolute")
    if len(str(path).encode()) > 100:
        raise AddressError(f"ipc://{path}: a socket path may have at most 100 bytes, choose a shorter folder")
