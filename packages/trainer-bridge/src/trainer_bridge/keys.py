"""`CurveKeys`: who this end is, and whom it talks to; and the files that keys lie in.

A key pair is two files: `NAME.pub` may be shown to anyone, `NAME.secret` (mode 0600) to no one. A receiver's
folder of `.pub` files is its allow-list; the file's name is the peer's name in logs and counters, and its
place says what the key is for: the folder itself for workers, `observers/` for who looks on, `ranks/` for who
takes samples. The format is that of pyzmq's certificates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from trainer_bridge.errors import ConfigError
from trainer_bridge.messages import Role

_KEY = re.compile(r'^\s*(?P<half>public-key|secret-key)\s*=\s*"(?P<key>[^"]*)"\s*$', re.MULTILINE)
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")

UNNAMED: tuple[Role, ...] = ("producer",)
"""Roles of a peer that `CurveKeys.roles` does not name: a worker sends, and sees nobody else's samples."""
ROLE_FOLDERS: Mapping[str, Role] = {"observers": "observer", "ranks": "rank"}
"""Folders of an allow-list, by the role that they give."""


class SecretKey:
    """A secret that prints as `***` and that no encoder writes."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return "***"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a secret key is not copied or written; load it from its file")

    def reveal(self) -> str:
        """The key itself."""
        return self._text


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of one end of an encrypted connection; texts of 40 characters (Z85)."""

    public: str
    secret: SecretKey
    peers: Mapping[str, str]
    """Name -> public key. A sender has one, the receiver's. A receiver takes connections from these alone."""
    roles: Mapping[str, tuple[Role, ...]] = {}
    """Of a receiver's peers: name -> all that it may connect as. Who is not named here may be a producer, and
    nothing else: an observer is shown everyone's samples, a rank takes and commits them."""

    def __post_init__(self) -> None:
        for what, key in [("public key", self.public), ("secret key", self.secret.reveal())]:
            if not _Z85.match(key):
                raise ConfigError(f"the {what} is not a CURVE key (40 characters of Z85)")
        for name, key in self.peers.items():
            if not _Z85.match(key):
                raise ConfigError(f"the public key of {name} is not a CURVE key (40 characters of Z85)")
        if not self.peers:
            raise ConfigError(
                "keys without peers: name the receiver's public key, or the workers' (peers=...)"
            )
        names = {key: name for name, key in self.peers.items()}
        for name, key in self.peers.items():
            if names[key] != name:
                raise ConfigError(f"{name} and {names[key]} have the same public key: give it one name")
        for name, roles in self.roles.items():
            if name not in self.peers:
                raise ConfigError(f"roles name {name}, whose public key is not among the peers")
            if not roles or not set(roles) <= set(get_args(Role)):
                known = ", ".join(get_args(Role))
                raise ConfigError(f"roles of {name} are one or more of {known}, got {roles!r}")

    def roles_of(self, name: str) -> tuple[Role, ...]:
        """All that a peer may connect as; nothing for a name that is not among the peers."""
        return self.roles.get(name, UNNAMED) if name in self.peers else ()

    @classmethod
    def load(cls, secret: Path | str, *, peers: Path | str) -> CurveKeys:
        """Keys from files.

        Args:
            secret: this end's `NAME.secret`.
            peers: the other end's `NAME.pub`, or a receiver's allow-list: a folder of such files for workers,
                with folders `observers` and `ranks` for who may connect as such. A key that may be several
                things lies in several of them under one name.

        Raises:
            ConfigError: a file is missing, is no key, is readable by others (secret), the folder is empty, or
                a key has two names or a name two keys.
        """
        path = Path(secret)
        text = _read(path)
        if path.stat().st_mode & 0o077:
            raise ConfigError(
                f"{path} can be read by others: chmod 600 {path}, and make a new key if they did"
            )
        named, roles = _load_peers(Path(peers))
        return cls(
            public=_half(text, "public-key", path),
            secret=SecretKey(_half(text, "secret-key", path)),
            peers=named,
            roles=roles,
        )


def write_keys(folder: Path, name: str, public: str, secret: str) -> tuple[Path, Path]:
    """Write a key pair into `folder/NAME.pub` (mode 0644, less the umask) and `folder/NAME.secret` (0600).

    Raises:
        ConfigError: one of them exists (it is left as it is), the name cannot be a peer's, or the folder
            cannot be written.
    """
    if not _NAME.match(name):
        raise ConfigError(
            f"a key's name has letters, digits and . _ - (at most 64), got {name!r}: choose one with --name"
        )
    paths = (folder / f"{name}.pub", folder / f"{name}.secret")
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists and is not overwritten: choose another folder or --name")
    public_text = (
        f'# trainer-bridge key {name}: give this to the other end\n\ncurve\n    public-key = "{public}"\n'
    )
    secret_text = (
        f"# trainer-bridge key {name}: SECRET, it stays on this machine\n\n"
        f'curve\n    public-key = "{public}"\n    secret-key = "{secret}"\n'
    )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path, text, mode in zip(paths, (public_text, secret_text), (0o644, 0o600), strict=True):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(fd, "w") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write keys into {folder}: {error.strerror or error}") from error
    return paths


def _load_peers(path: Path) -> tuple[dict[str, str], dict[str, tuple[Role, ...]]]:
    if not path.is_dir():
        return {path.stem: _half(_read(path), "public-key", path)}, {}
    files = _key_files(path, "producer")
    for folder in sorted(path.iterdir()):
        # A mounted Kubernetes secret holds its files a second time in folders whose names begin with a dot.
        if folder.name.startswith("."):
            continue
        role = ROLE_FOLDERS.get(folder.name)
        if role is not None:
            files += _key_files(folder, role)
        elif _key_files(folder, "producer"):
            raise ConfigError(
                f"{folder} holds keys and is no role: in an allow-list, keys lie in the folder itself "
                f"(producers) or in {' or '.join(ROLE_FOLDERS)}"
            )
    if not files:
        raise ConfigError(f"{path} holds no .pub files: copy the public keys of the peers there")
    peers: dict[str, str] = {}
    roles: dict[str, tuple[Role, ...]] = {}
    for file, role in files:
        key = _half(_read(file), "public-key", file)
        if peers.setdefault(file.stem, key) != key:
            raise ConfigError(f"{file}: {file.stem} has another public key elsewhere in {path}")
        roles[file.stem] = (*roles.get(file.stem, ()), role)
    return peers, roles


def _key_files(folder: Path, role: Role) -> list[tuple[Path, Role]]:
    return [(file, role) for file in sorted(folder.glob("*.pub"))]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key {path}: {error}") from error


def _half(text: str, half: Literal["public-key", "secret-key"], path: Path) -> str:
    for match in _KEY.finditer(text):
        if match["half"] == half:
            return match["key"]
    kind = "a NAME.secret file" if half == "secret-key" else "a NAME.pub file"
    raise ConfigError(f"{path} has no {half}: give {kind}, as `trainer-bridge keygen` writes it")
