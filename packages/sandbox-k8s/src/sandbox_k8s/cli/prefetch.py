"""``sandbox-k8s prefetch``: bring images to the nodes of a cluster before sandboxes need them."""

import argparse
import sys
from functools import partial
from typing import Any

import anyio

from sandbox_k8s.client import SandboxClient
from sandbox_k8s.errors import ConfigError
from sandbox_k8s.kubernetes.prefetch import PrefetchedImage

from .problems import EXIT_INFRA, of_cluster
from .text import printable
from .where import Cluster, add_injection, cluster_of, parent, with_injection

_EPILOG = """
One short-lived pod per node and eight images; a reaper removes those of a prefetch that was killed. With
--tools-image, or --config, the tools image is brought, too. Without --node the nodes are listed, which a Role
of one namespace does not allow. Exit code 0: each node has each image.
"""


def register(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "prefetch", parents=[parent(local=False)], help="bring images to nodes", epilog=_EPILOG
    )
    command.add_argument("images", nargs="+", metavar="IMAGE")
    command.add_argument(
        "--node", action="append", default=[], metavar="NAME", help="this one alone; repeatable"
    )
    command.add_argument(
        "--label", action="append", default=[], metavar="NAME=VALUE", help="nodes with that label; repeatable"
    )
    add_injection(command)
    command.set_defaults(action=_prefetch)


def _prefetch(options: argparse.Namespace) -> int:
    labels = dict(_label(one) for one in options.label)
    if labels and options.node:
        raise ConfigError("--node and --label exclude each other")
    place = with_injection(cluster_of(options), options)
    return anyio.run(partial(_bring, place, options.images, options.node or labels or None))


def _label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--label {text!r} is not NAME=VALUE")
    return name, value


async def _bring(place: Cluster, images: list[str], nodes: list[str] | dict[str, str] | None) -> int:
    with of_cluster(place.at):
        async with SandboxClient.kubernetes(place.config) as client:
            found = await client.prefetch(images, nodes, progress=_say)
    there = sum(one.diagnosis is None for one in found)
    sys.stdout.write(f"{there} of {len(found)} are there\n")
    if not found:
        sys.stderr.write(f"sandbox-k8s: no node fits; {place.at}\n")
    return 0 if found and there == len(found) else EXIT_INFRA


def _say(one: PrefetchedImage, done: int, total: int) -> None:
    why = one.diagnosis
    said = "there" if why is None else f"{why.failure or why.state}: {printable(why.why)}"
    sys.stdout.write(f"[{done}/{total}] {one.node} {printable(one.image)}: {said}\n")
    sys.stdout.flush()
