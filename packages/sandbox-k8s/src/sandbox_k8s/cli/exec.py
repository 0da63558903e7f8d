"""``sandbox-k8s exec``: one command beside a sandbox's owner, who notices nothing."""

import argparse
import os
import stat
import sys
from fcntl import ioctl
from functools import partial
from termios import FIONREAD
from typing import Any

import anyio

from sandbox_k8s.client import SandboxClient
from sandbox_k8s.config import LocalConfig
from sandbox_k8s.errors import ConfigError
from sandbox_k8s.handle import SandboxHandle
from sandbox_k8s.kubernetes import records
from sandbox_k8s.result import CommandResult
from sandbox_k8s.sandbox import Sandbox

from .pods import find_pod, unknown_id
from .problems import EXIT_INFRA, EXIT_TIMED_OUT
from .text import printable
from .where import Cluster, opened_api, opened_client, parent, place_of, seconds

_STDIN = 0
_EPILOG = """
There is no terminal, and standard input is empty without --stdin: for an interactive shell see attach.
"""


def register(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "exec", parents=[parent()], help="run a command beside a sandbox's owner", epilog=_EPILOG,
        usage="%(prog)s [OPTIONS] ID -- COMMAND [ARGUMENT ...]",
    )  # fmt: skip
    command.add_argument("id", metavar="ID", help="as ps shows it, the beginning of it, or the pod's name")
    command.add_argument("--timeout", type=seconds, default=None, metavar="SECONDS")
    command.add_argument(
        "--stdin", "-i", action="store_true", help="pass standard input on, which is read to its end first"
    )
    command.add_argument("--session", metavar="NAME", help="in this session instead of on its own")
    command.add_argument("command", nargs="+", metavar="COMMAND", help="one word: for bash; several: argv")
    command.set_defaults(action=_exec)


def _exec(options: argparse.Namespace) -> int:
    if options.stdin and options.session is not None:
        raise ConfigError("--stdin is for a command on its own: those of a session have no standard input")
    stdin = sys.stdin.buffer.read() if options.stdin else None
    run = partial(
        _run_beside,
        place_of(options),
        options.id,
        options.command,
        session=options.session,
        timeout_s=options.timeout,
        stdin=stdin,
    )
    code = anyio.run(run)
    if stdin is None and _input_waits():
        sys.stderr.write("sandbox-k8s: standard input was not passed on; --stdin (-i) does that\n")
    return code


def _input_waits() -> bool:
    """Whether somebody piped something to the command, which would be dropped in silence."""
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(_STDIN).st_mode)
        return is_pipe and int.from_bytes(ioctl(_STDIN, FIONREAD, bytes(4)), sys.byteorder) > 0
    except OSError:  # it is closed
        return False


async def _run_beside(
    place: LocalConfig | Cluster,
    wanted: str,
    words: list[str],
    *,
    session: str | None,
    timeout_s: float | None,
    stdin: bytes | None,
) -> int:
    found = None if isinstance(place, LocalConfig) else await _in_cluster(place, wanted)
    async with opened_client(place) as client:
        handle = found or await _on_this_machine(client, wanted)
        async with await client.attach(handle, take_ownership=False) as sandbox:
            result = await _run(sandbox, words, session, timeout_s, stdin)
    print_output(result)
    return exit_code_of(result)


async def _run(
    sandbox: Sandbox, words: list[str], session: str | None, timeout_s: float | None, stdin: bytes | None
) -> CommandResult:
    if session is not None:
        return await (await sandbox.session(session)).run(" ".join(words), timeout_s=timeout_s)
    command = words[0] if len(words) == 1 else words
    return await sandbox.execute(command, timeout_s=timeout_s, stdin=stdin)


def print_output(result: CommandResult) -> None:
    """Print what a command printed, byte for byte."""
    for descriptor, data in ((1, result.stdout), (2, result.stderr)):
        while data:
            data = data[os.write(descriptor, data) :]


def exit_code_of(result: CommandResult) -> int:
    """The command's own code, or what stands for it; then a line on standard error says what happened."""
    if result.exit_code is not None:
        return result.exit_code
    if result.timed_out:
        sys.stderr.write(f"sandbox-k8s: timed out after {result.duration_s:.1f} s\n")
        return EXIT_TIMED_OUT
    what = result.infra_error or f"the command was cut off: {result.cancelled}"
    sys.stderr.write(f"sandbox-k8s: error: {printable(what)}\n")
    return EXIT_INFRA


async def _on_this_machine(client: SandboxClient, wanted: str) -> SandboxHandle:
    known = {info.handle.sandbox_id: info.handle for info in await client.list()}
    found = [handle for sandbox_id, handle in known.items() if sandbox_id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"{unknown_id(wanted, sorted(known))}; see: sandbox-k8s ps, or --kubernetes for a cluster"
    )


async def _in_cluster(place: Cluster, wanted: str) -> SandboxHandle:
    async with opened_api(place) as api:
        return records.read_record(await find_pod(api, place, wanted), place.config.cluster).handle
