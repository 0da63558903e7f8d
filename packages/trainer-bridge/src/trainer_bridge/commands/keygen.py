"""`trainer-bridge keygen`."""

from __future__ import annotations

from pathlib import Path

from trainer_bridge.commands.output import write_json, write_line
from trainer_bridge.errors import ConfigError
from trainer_bridge.keys import write_keys
from trainer_bridge.zmq_auth import new_keypair


def keygen(folder: Path, *, name: str | None, as_json: bool) -> int:
    """Make a CURVE key pair: NAME.pub for the other end, NAME.secret for this one. Overwrites nothing."""
    name = name or folder.resolve().name
    if not name:
        raise ConfigError(f"{folder} has no name that the key could take: give it one with --name")
    public, secret = new_keypair()
    shown, hidden = write_keys(folder, name, public, secret)
    if as_json:
        write_json({"event": "key", "public": str(shown), "secret": str(hidden)})
    else:
        write_line(f"{shown}: give it to the other end (a receiver's --allow folder, a sender's --peer);")
        write_line("  in the --allow folder, observers/ is for who looks on, ranks/ for who takes samples")
        write_line(f"{hidden}: keep it here (--key)")
    return 0
