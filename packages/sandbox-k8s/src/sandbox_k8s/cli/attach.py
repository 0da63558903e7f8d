"""``sandbox-k8s attach HANDLE``: become a sandbox's owner, work in a session of it, and leave it again."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from sandbox_k8s.config import LocalConfig
from sandbox_k8s.errors import ConfigError, SandboxLostError, SandboxNotFoundError
from sandbox_k8s.handle import LocalPlace, SandboxHandle
from sandbox_k8s.sandbox import Sandbox

from . import lines
from .where import Cluster, chooses_cluster, cluster_of, opened_client, parent, seconds

_LEAVE_S = 5.0
_EPILOG = """
Whoever owned the sandbox gets FencedError. Standard input is one command per line, each run in the
session, whose directory, variables and background jobs stay; a line that is exit, exit N or logout leaves,
and the shell stays, too. A terminal gets a prompt, where ctrl-C ends the running command and ctrl-D leaves.
Then the sandbox is detached, as it was, for its detached
lease, and its new handle is the last line printed. The handle says where the sandbox is; options say how
to get there.
"""


def register(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "attach", parents=[parent()], help="own a sandbox and work in its session", epilog=_EPILOG
    )
    command.add_argument(
        "handle",
        metavar="HANDLE",
        help="JSON of a SandboxHandle, or its file; - is standard input's first line",
    )
    command.add_argument("--session", default="default", metavar="NAME", help="(default: default)")
    command.add_argument("--timeout", type=seconds, metavar="SECONDS", help="of each command")
    command.add_argument("--stop", action="store_true", help="end the sandbox afterwards")
    command.add_argument("--out", type=Path, metavar="FILE", help="write the new handle there")
    command.set_defaults(action=_attach)


def _attach(options: argparse.Namespace) -> int:
    handle = _read_handle(options.handle)
    return anyio.run(partial(_work, _place_of(handle, options), handle, options))


async def _work(place: LocalConfig | Cluster, handle: SandboxHandle, options: argparse.Namespace) -> int:
    async with opened_client(place) as client:
        try:
            sandbox = await client.attach(handle)
        except SandboxNotFoundError as problem:
            where = f"; looked in {place.at}" if isinstance(place, Cluster) else ""
            raise SandboxNotFoundError(f"{problem.args[0]}{where}") from problem
        try:
            code = await lines.work(sandbox, options.session, options.timeout)
        finally:
            with anyio.CancelScope(shield=True):
                if options.stop:
                    await sandbox.stop()
                else:
                    _print_handle(await _detached(sandbox), options.out)
    return code


async def _detached(sandbox: Sandbox) -> SandboxHandle:
    """Leave it running: a way that is cut for a moment must not end it."""
    with anyio.move_on_after(_LEAVE_S):
        while True:
            try:
                return await sandbox.detach()
            except SandboxLostError as problem:
                if problem.diagnosis is not None:
                    raise
                await anyio.sleep(_LEAVE_S / 10)
    return await sandbox.detach()


def _print_handle(handle: SandboxHandle, out: Path | None) -> None:
    line = handle.to_json() + b"\n"
    problem: OSError | None = None
    if out is not None:
        try:
            out.write_bytes(line)
            return
        except OSError as refused:
            problem = refused
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
    if problem is not None:
        raise ConfigError(
            f"cannot write {out}: {problem.strerror}; the handle is on standard output"
        ) from problem


def _read_handle(said: str) -> SandboxHandle:
    """The handle that the argument is or names.

    Raises:
        ConfigError: It cannot be read; the message says what was read.
    """
    where = f"file {said}"
    try:
        if said.lstrip().startswith("{"):
            where, data = "the argument", said.encode()
        elif said == "-":
            where, data = "the first line of standard input", lines.first_line()
        else:
            data = Path(said).read_bytes()
        return SandboxHandle.from_json(data)
    except OSError as problem:
        raise ConfigError(
            f"cannot read handle {where}: {problem.strerror}; HANDLE is JSON, a file of it, or -"
        ) from problem
    except ConfigError as problem:
        raise ConfigError(
            f"{where}: {problem.args[0]}; see Sandbox.detach and SandboxHandle.to_json"
        ) from problem


def _place_of(handle: SandboxHandle, options: argparse.Namespace) -> LocalConfig | Cluster:
    """Where the handle says the sandbox is, reached as the options say.

    Raises:
        ConfigError: The options are about another place.
    """
    place = handle.place
    if isinstance(place, LocalPlace):
        if chooses_cluster(options):
            raise ConfigError(f"sandbox {handle.sandbox_id} is on this machine, in {place.root}; no cluster")
        root: Path = options.root or Path(place.root)
        if not root.is_dir():
            raise SandboxNotFoundError(f"sandbox {handle.sandbox_id} has ended: {root} is no folder")
        return LocalConfig(root=root, isolation="process")
    if options.root is not None:
        raise ConfigError(
            f"sandbox {handle.sandbox_id} is in cluster {place.cluster!r}; --root is of a machine"
        )
    found = cluster_of(options)
    for name, said, wanted in (
        ("cluster", options.cluster, place.cluster),
        ("namespace", options.namespace, place.namespace),
    ):
        if said is not None and said != wanted:
            raise ConfigError(
                f"sandbox {handle.sandbox_id} is in {name} {wanted!r}, as its handle says, not {said!r}; "
                f"leave out --{name}"
            )
    config = msgspec.structs.replace(found.config, cluster=place.cluster, namespace=place.namespace)
    return msgspec.structs.replace(found, config=config)
