"""``sandbox-k8s doctor | ps | exec | reap`` for the local back end; ``explain`` for what kubectl prints.

``build-tools`` makes what pods run the launcher from.
"""

import argparse
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio

from . import bubblewrap
from .client import SandboxClient
from .clock import SystemClock
from .config import LocalConfig
from .errors import ConfigError, SandboxError
from .handle import LocalPlace, SandboxHandle
from .kubernetes.explain import explain_files
from .local import PYTHON_PREFIX
from .spec import SandboxSpec

EXIT_USAGE = 2
EXIT_TIMED_OUT = 124
_EXIT_INFRA = 3


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the result is the exit code.

    0 is success, 2 a mistake in what was asked (one line says which), 3 a sandbox that failed. ``exec`` gives
    the command's own code, 124 when it timed out.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="sandbox-k8s: %(message)s")
    try:
        if options.action in (_explain, _build_tools):
            return options.action(options)
        config = LocalConfig(root=options.root, isolation=options.isolation)
        action: Callable[[SandboxClient, argparse.Namespace], Awaitable[int]] = options.action
        return anyio.run(partial(_with_client, config, action, options))
    except SandboxError as problem:
        sys.stderr.write(f"sandbox-k8s: error: {problem}\n")
        return EXIT_USAGE if problem.fault == "task" or not problem.retryable else _EXIT_INFRA
    except KeyboardInterrupt:
        return 130


async def _with_client(
    config: LocalConfig,
    action: Callable[[SandboxClient, argparse.Namespace], Awaitable[int]],
    options: argparse.Namespace,
) -> int:
    async with SandboxClient.local(config) as client:
        return await action(client, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sandbox-k8s", description="Look at and tidy up sandboxes.")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--root", type=Path, help="the folder of the sandboxes (default: LocalConfig's)")
    shared.set_defaults(isolation="auto")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("doctor", parents=[shared], help="start a sandbox and say what works")
    command.set_defaults(action=_doctor)
    command = commands.add_parser("ps", parents=[shared], help="list the sandboxes")
    command.set_defaults(action=_ps, isolation="process")
    command = commands.add_parser("exec", parents=[shared], help="run a command beside a sandbox's owner")
    command.add_argument("id", help="as ps shows it, or the beginning of it")
    command.add_argument("--timeout", type=float, default=None, metavar="SECONDS")
    command.add_argument("--session", metavar="NAME", help="in this session instead of on its own")
    command.add_argument("command", nargs="+", metavar="-- COMMAND", help="one word: for bash; several: argv")
    command.set_defaults(action=_exec, isolation="process")
    command = commands.add_parser("reap", parents=[shared], help="remove what killed keepers left behind")
    command.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    command.set_defaults(action=_reap, isolation="process")
    command = commands.add_parser("explain", help="say what is wrong with a pod, from what kubectl prints")
    command.add_argument(
        "pods", metavar="FILE", help="of `kubectl get pod NAME -o json`; - is standard input"
    )
    command.add_argument("--events", type=Path, metavar="FILE", help="of `kubectl get events -o json`")
    command.add_argument("--node", type=Path, metavar="FILE", help="of `kubectl get node NAME -o json`")
    command.set_defaults(action=_explain)
    command = commands.add_parser("build-tools", help="make the tree that runs the launcher in any image")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="missing or empty")
    command.add_argument("--archive", type=Path, metavar="FILE.tar", help="its OCI image archive as well")
    command.add_argument("--name", metavar="REPOSITORY:TAG", help="what the archive's image is called")
    command.set_defaults(action=_build_tools)
    return parser


async def _doctor(client: SandboxClient, options: argparse.Namespace) -> int:
    clock = SystemClock()
    why = await anyio.to_thread.run_sync(bubblewrap.why_unusable, PYTHON_PREFIX)
    _say("root", str(LocalConfig(root=options.root).resolved_root()))
    _say("launcher", f"Python {sys.version.split()[0]} of {PYTHON_PREFIX}")
    _say("bubblewrap", why or "works")
    states = [info.state for info in await client.list()]
    _say("sandboxes", f"{len(states)}, {states.count('detached')} detached, {states.count('dead')} dead")
    begun = clock.monotonic_s()
    async with await client.start(SandboxSpec()) as sandbox:
        started = clock.monotonic_s()
        result = await sandbox.execute('type -P python3 || echo none; [ -r ~/.bashrc ] && echo "~/.bashrc"')
        session = await sandbox.session()
        first = clock.monotonic_s()
        await session.run("true")
        ended = clock.monotonic_s()
        lines = result.stdout_text.splitlines()
        _say("start", f"{(started - begun) * 1000:.0f} ms as {sandbox.backend_name} in {sandbox.workdir}")
        _say("command", f"{(ended - first) * 1000:.1f} ms in a session")
        _say("python3 inside", lines[0] if lines else "none")
        _say("start-up files", ", ".join(lines[1:]) or "none (~/.bashrc is read when there is one)")
    return 0 if result.exit_code is not None else _EXIT_INFRA


async def _ps(client: SandboxClient, options: argparse.Namespace) -> int:
    now_ns = SystemClock().now_ns()
    rows = [("ID", "STATE", "ISOLATION", "EPOCH", "AGE", "ENDS IN", "LABELS")]
    for info in await client.list():
        handle = info.handle
        left = "-" if info.expires_ns is None else f"{max(0, info.expires_ns - now_ns) // 10**9} s"
        labels = " ".join(f"{key}={value}" for key, value in sorted(handle.labels.items()))
        age = f"{(now_ns - handle.created_ns) // 10**9} s"
        rows.append((handle.sandbox_id, info.state, _isolation(handle), str(handle.epoch), age, left, labels))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
    return 0


def _isolation(handle: SandboxHandle) -> str:
    return handle.place.isolation if isinstance(handle.place, LocalPlace) else "kubernetes"


async def _exec(client: SandboxClient, options: argparse.Namespace) -> int:
    found = [info.handle for info in await client.list() if info.handle.sandbox_id.startswith(options.id)]
    if len(found) != 1:
        what = "no sandbox begins" if not found else f"{len(found)} sandboxes begin"
        raise ConfigError(f"{what} with {options.id!r}; see: sandbox-k8s ps")
    sandbox = await client.attach(found[0], take_ownership=False)
    words: list[str] = options.command
    try:
        if options.session is not None:
            session = await sandbox.session(options.session)
            result = await session.run(" ".join(words), timeout_s=options.timeout)
        else:
            command = words[0] if len(words) == 1 else words
            result = await sandbox.execute(command, timeout_s=options.timeout)
    finally:
        await sandbox.launcher.close()
    for descriptor, data in ((1, result.stdout), (2, result.stderr)):
        while data:
            data = data[os.write(descriptor, data) :]
    if result.timed_out:
        return EXIT_TIMED_OUT
    return _EXIT_INFRA if result.exit_code is None else result.exit_code


async def _reap(client: SandboxClient, options: argparse.Namespace) -> int:
    reaped = await client.reap(dry_run=options.dry_run)
    verb = "would remove" if options.dry_run else "removed"
    for one in reaped:
        sys.stdout.write(f"{verb} {one.sandbox_id} ({one.why}, {one.processes} processes)\n")
    sys.stdout.write(f"{verb} {len(reaped)} dead sandboxes\n")
    return 0


def _explain(options: argparse.Namespace) -> int:
    sys.stdout.write(explain_files(options.pods, options.events, options.node))
    return 0


def _build_tools(options: argparse.Namespace) -> int:
    from . import tools

    record = tools.build(options.out)
    _say("tree", f"{options.out}, {record.size / 1e6:.1f} MB")
    _say("runs on", f"{record.os}/{record.architecture}")
    _say("python", f"{record.python}, {record.libc}")
    _say("content", record.content)
    if options.archive is not None:
        archive = tools.write_archive(options.out, options.archive, name=options.name)
        _say("image", f"{archive.name} in {archive.path}, {archive.size / 1e6:.1f} MB")
        _say("digest", archive.digest)
    return 0


def _say(what: str, answer: str) -> None:
    sys.stdout.write(f"{what:15} {answer}\n")


if __name__ == "__main__":
    sys.exit(main())
