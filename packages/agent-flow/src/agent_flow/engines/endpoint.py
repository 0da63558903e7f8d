"""How a server is reached: its address, its API key, and who signs its certificate."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from agent_flow.errors import UsageError


def base_url(address: str) -> str:
    """The address without a slash at its end.

    Raises:
        UsageError: no base URL, or one with credentials, which would be seen in every message.
    """
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError:  # its message would repeat the address
        raise UsageError("an engine's address is no URL", fix="http://host:30000") from None
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"credentials in the address of {parts.hostname}",
            fix="put the server's API key into a file and name it as the token file",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError("not the base URL of a server", where=repr(address), fix="http://host:30000")
    return address.rstrip("/")


def proxy_of(address: str) -> str | None:
    """The proxy that `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY` name for an address. None: there is none."""
    parts = urlsplit(address)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


def read_token(path: Path) -> str:
    """The API key in a file, without the line's end.

    Raises:
        UsageError: there is none; says which file, never what is in it.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UsageError(f"cannot read the token file: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError:
        raise UsageError("the token file is not plain text", where=str(path)) from None
    if not token or not token.isprintable() or " " in token:
        raise UsageError("the token file must hold one API key: a line without blanks", where=str(path))
    return token


def tls_context(ca_file: Path) -> ssl.SSLContext:
    """Trusts these authorities and no others.

    Raises:
        UsageError: the file is missing or holds no certificate.
    """
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:  # an SSLError too
        raise UsageError(
            f"not a PEM file of certificates: {error.strerror or error}", where=str(ca_file)
        ) from None
