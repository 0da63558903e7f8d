"""``sandbox-k8s doctor``: what works here, or in a cluster, before a run finds out."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from sandbox_k8s import bubblewrap
from sandbox_k8s.client import SandboxClient
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.config import LocalConfig
from sandbox_k8s.errors import ClusterError, ConfigError
from sandbox_k8s.kubernetes.doctor import Finding, examine, probe
from sandbox_k8s.local import PYTHON_PREFIX
from sandbox_k8s.spec import SandboxSpec

from .problems import EXIT_INFRA, of_cluster, one_line
from .text import printable, say
from .where import Cluster, add_injection, opened_api, parent, place_of, with_injection

_START_S = 120.0
_EPILOG = """
In a cluster each line says "works", "does not" (a run needs it: exit code 3) or "advice". The sandbox that is
tried needs an image and the tools image, by --config or by --image and --tools-image.
"""


def register(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "doctor", parents=[parent()], help="say what works and what does not", epilog=_EPILOG
    )
    command.add_argument("--json", action="store_true", help="of a cluster: as a JSON list")
    command.add_argument("--no-start", action="store_true", help="of a cluster: start no sandbox")
    command.add_argument("--image", help="of a cluster: the image of the sandbox that is started")
    add_injection(command)
    command.set_defaults(action=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    place = place_of(options, makes_root=True)
    if isinstance(place, LocalConfig):
        if options.json or options.no_start or options.image or options.tools_image:
            raise ConfigError("these options of doctor are for a cluster; add --kubernetes")
        return anyio.run(_of_this_machine, LocalConfig(root=options.root))
    return anyio.run(partial(_of_cluster, _completed(place, options), options))


def _completed(place: Cluster, options: argparse.Namespace) -> Cluster:
    place = with_injection(place, options)
    if options.image is None:
        return place
    config = msgspec.structs.replace(place.config, image=options.image)
    return msgspec.structs.replace(place, config=config)


async def _of_cluster(place: Cluster, options: argparse.Namespace) -> int:
    found: list[Finding] = []

    def tell(finding: Finding) -> None:
        found.append(finding)
        if not options.json:
            _print(finding)

    tell(Finding(what="cluster", verdict="works", says=place.at))
    try:
        async with opened_api(place) as api:
            await examine(api, place.config, SystemClock(), tell, knows_injection=place.knows_injection)
        if not options.no_start:
            await _start(place, tell)
    except ClusterError as problem:
        tell(Finding(what="api server", verdict="does not", says=one_line(problem)))
    if options.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return EXIT_INFRA if any(one.verdict == "does not" for one in found) else 0


async def _start(place: Cluster, tell: Callable[[Finding], None]) -> None:
    config = place.config
    if config.image is None or not place.knows_injection:
        missing = "--image" if config.image is None else "--tools-image"
        text = f"not tried: a sandbox needs {missing}, or --config; --no-start leaves this out"
        tell(Finding(what="start", verdict="advice", says=text))
        return
    quick = msgspec.structs.replace(
        config,
        start_timeout_s=min(_START_S, config.start_timeout_s),
        failing_timeout_s=min(_START_S / 4, config.failing_timeout_s),
    )
    with of_cluster(place.at):
        await probe(quick, SystemClock(), tell)


def _print(finding: Finding) -> None:
    sys.stdout.write(f"{finding.verdict:9} {finding.what:24} {printable(finding.says)}\n")
    sys.stdout.flush()


async def _of_this_machine(config: LocalConfig) -> int:
    clock = SystemClock()
    why = await anyio.to_thread.run_sync(bubblewrap.why_unusable, PYTHON_PREFIX)
    say("root", str(config.resolved_root()))
    say("launcher", f"Python {sys.version.split()[0]} of {PYTHON_PREFIX}")
    say("bubblewrap", why or "works")
    async with SandboxClient.local(config) as client:
        states = [info.state for info in await client.list()]
        say("sandboxes", f"{len(states)}, {states.count('detached')} detached, {states.count('dead')} dead")
        begun = clock.monotonic_s()
        async with await client.start(SandboxSpec()) as sandbox:
            started = clock.monotonic_s()
            look = 'type -P python3 || echo none; [ -r ~/.bashrc ] && echo "~/.bashrc"'
            result = await sandbox.execute(look)
            session = await sandbox.session()
            first = clock.monotonic_s()
            await session.run("true")
            ended = clock.monotonic_s()
            lines = result.stdout_text.splitlines()
            say("start", f"{(started - begun) * 1000:.0f} ms as {sandbox.backend_name} in {sandbox.workdir}")
            say("command", f"{(ended - first) * 1000:.1f} ms in a session")
            say("python3 inside", lines[0] if lines else "none")
            say("start-up files", ", ".join(lines[1:]) or "none (~/.bashrc is read when there is one)")
    return 0 if result.exit_code is not None else EXIT_INFRA
