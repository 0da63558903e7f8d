"""Addresses: which are allowed, and what is likely wrong with one that nobody answers at."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

from trainer_bridge.errors import AddressError

_TCP = re.compile(r"tcp://(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d{1,5})\Z")
_ANY = ("*", "0.0.0.0", "::")


def check_address(address: str, *, insecure: bool, keys: bool, binding: bool) -> None:
    """Refuse an address that is malformed, or that leaves this machine without keys.

    Args:
        address: `tcp://HOST:PORT` (port 0, or HOST `*`, `0.0.0.0` or `[::]`, only when binding) or
            `ipc://PATH`.
        insecure: the caller accepts plain text and no authentication.
        keys: the connection is encrypted and both ends know each other's key.
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
    if host in _ANY and not binding:
        raise AddressError(f"{address!r}: {host!r} can be bound, not connected to; name the receiver's host")
    if not insecure and not keys and not is_loopback(host):
        verb = "binding" if binding else "connecting"
        raise AddressError(
            f"{address!r}: {verb} beyond this machine needs CURVE keys. Make them with "
            "`trainer-bridge keygen` and pass keys=CurveKeys.load(...) (--key, --peer); or use a loopback "
            "address through an ssh tunnel or a service mesh; or, on a network where every host is trusted, "
            "write insecure=True (--insecure)"
        )


def is_loopback(host: str) -> bool:
    """True if the host can only be this machine. Names but `localhost` are not resolved: they may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def leaves_machine(address: str) -> bool:
    """True if other machines can reach what is bound there."""
    match = _TCP.match(address)
    return match is not None and not is_loopback(match["v6"] or match["host"])


def to_connect(address: str) -> str:
    """A bound address as whoever connects writes it: bound to all addresses, it has this machine's name."""
    match = _TCP.match(address)
    if match is None or (match["v6"] or match["host"]) not in _ANY:
        return address
    return f"tcp://{socket.gethostname()}:{match['port']}"


def absence_hint(address: str) -> str:
    """What to look at when nobody answers at an address; asks the resolver.

    A default of `localhost` on several machines has made workers wait for themselves for ever
    (PrimeIntellect-ai/prime-rl#3149).
    """
    match = _TCP.match(address)
    if match is None:
        path = Path(address.removeprefix("ipc://"))
        return "nothing listens there" if path.exists() else f"{path} does not exist"
    host = match["v6"] or match["host"]
    if is_loopback(host):
        return f"check host and port, {host} is this very machine: a trainer elsewhere has another name"
    try:
        socket.getaddrinfo(host, int(match["port"]), type=socket.SOCK_STREAM)
    except OSError as error:
        return f"host {host!r} cannot be resolved ({error.strerror or error})"
    return "check host and port"


def _check_ipc(path: Path) -> None:
    if not path.is_absolute():
        raise AddressError(f"ipc://{path}: the path must be absolute")
    if len(str(path).encode()) > 100:
        raise AddressError(f"ipc://{path}: a socket path may have at most 100 bytes, choose a shorter folder")
