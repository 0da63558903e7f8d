"""``sandbox-k8s reap``: remove what is over, or say what would be removed and why."""

import argparse
import sys
from functools import partial
from typing import Any

import anyio

from sandbox_k8s.clock import SystemClock
from sandbox_k8s.config import LocalConfig
from sandbox_k8s.kubernetes.reaper import sweep

from .problems import of_cluster
from .text import printable
from .where import Cluster, opened_client, parent, place_of

_EPILOG = """
In a cluster: pods whose launcher ended, and pods that nobody renewed until the time in their record. On this
machine: what killed keepers left behind; sandboxes that live end by their leases.
"""


def register(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "reap", parents=[parent()], help="remove sandboxes that are over", epilog=_EPILOG
    )
    command.add_argument("--dry-run", action="store_true", help="only say what would be removed, and why")
    command.set_defaults(action=_reap)


def _reap(options: argparse.Namespace) -> int:
    return anyio.run(partial(_remove, place_of(options), dry_run=options.dry_run))


async def _remove(place: LocalConfig | Cluster, *, dry_run: bool) -> int:
    verb = "would remove" if dry_run else "removed"
    if isinstance(place, LocalConfig):
        async with opened_client(place) as client:
            reaped = await client.reap(dry_run=dry_run)
        for one in reaped:
            sys.stdout.write(f"{verb} {one.sandbox_id} ({one.why}, {one.processes} processes)\n")
        where = ""
    else:
        with of_cluster(place.at):
            every_run = place.run is None
            reaped = await sweep(place.config, SystemClock(), every_run=every_run, dry_run=dry_run)
        for one in reaped:
            sys.stdout.write(f"{verb} {one.sandbox_id} ({printable(one.why)})\n")
        where = f"{place.of_run} in namespace {place.config.namespace}"
    sys.stdout.write(f"{verb} {len(reaped)} dead sandboxes{where}\n")
    return 0
