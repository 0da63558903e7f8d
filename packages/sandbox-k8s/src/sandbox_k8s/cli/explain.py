"""``sandbox-k8s explain``: what is wrong with a pod, from the cluster or from what kubectl printed."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from sandbox_k8s.clock import SystemClock
from sandbox_k8s.errors import ClusterError, ConfigError
from sandbox_k8s.kubernetes.api import PodApi, Request
from sandbox_k8s.kubernetes.classify import classify
from sandbox_k8s.kubernetes.explain import explain_files, explanation, in_words
from sandbox_k8s.kubernetes.pod_state import read_event

from .pods import events_of, find_pod
from .problems import EXIT_NOT_FOUND
from .text import duration, printable
from .where import Cluster, chooses_cluster, cluster_of, opened_api, parent

_EPILOG = """
A name without a slash that is no file here is a pod's: it, its events and its node are read from the cluster
that kubectl would ask, or that the options name.
"""


def register(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "explain", parents=[parent()], help="say what is wrong with a pod, and what to do", epilog=_EPILOG
    )
    command.add_argument(
        "pods",
        metavar="POD|ID|FILE",
        help="a pod's name; a sandbox's id; a file of `kubectl get pod NAME -o json`, - for standard input",
    )
    command.add_argument("--events", type=Path, metavar="FILE", help="of `kubectl get events -o json`")
    command.add_argument("--node", type=Path, metavar="FILE", help="of `kubectl get node NAME -o json`")
    command.set_defaults(action=_explain)


def _explain(options: argparse.Namespace) -> int:
    named: str = options.pods
    has_files = options.events is not None or options.node is not None
    if not chooses_cluster(options) and (has_files or named == "-" or "/" in named or Path(named).exists()):
        sys.stdout.write(explain_files(named, options.events, options.node))
        return 0
    if has_files:
        raise ConfigError("--events and --node are for a FILE; of a pod in a cluster they are read there")
    return anyio.run(partial(_explain_live, cluster_of(options), named))


async def _explain_live(place: Cluster, named: str) -> int:
    namespace = place.config.namespace
    async with opened_api(place) as api:
        pod = await api.find(named)
        if pod is None:
            try:
                pod = await find_pod(api, place, named)
            except ConfigError as problem:
                sys.stderr.write(f"sandbox-k8s: {await _gone(api, place, named)}; {problem.args[0]}\n")
                return EXIT_NOT_FOUND
        hints: list[str] = []
        name: str = pod["metadata"]["name"]
        events = await _or_hint(events_of(api, namespace, name), hints, "its events")
        node_name = pod["spec"].get("nodeName")
        read = Request("GET", f"api/v1/nodes/{node_name}")
        node = await _or_hint(api.ask(read, "reading its node"), hints, "its node") if node_name else None
    found = classify(pod, events or (), node)
    sys.stdout.write(explanation(f"pod {namespace}/{name}", found, hints))
    return 0


async def _or_hint(request: Any, hints: list[str], what: str) -> Any:
    """The answer, or None with a hint that it is missing: the pod alone tells much."""
    try:
        return await request
    except ClusterError as problem:
        hints.append(f"without {what}, which may tell more: {in_words(problem)}")
        return None


async def _gone(api: PodApi, place: Cluster, named: str) -> str:
    """What is left of a pod that is not there: its events live for an hour."""
    what = f"there is no pod {named!r}"
    name = named if named.startswith("sbx-") else f"sbx-{named}"
    events: list[dict[str, Any]] = []
    hints: list[str] = []
    for one in dict.fromkeys((named, name)):
        events += await _or_hint(events_of(api, place.config.namespace, one), hints, "its events") or []
    if not events:
        return "; ".join([f"{what} (deleted, or never there)", *hints[:1]])
    last = max(map(read_event, events), key=lambda event: event.order)
    ago = duration(SystemClock().now_ns() / 1e9 - last.order[0])
    said = printable(f"{last.reason}: {last.message}")
    return f"{what} any more; its last event, {ago} ago: {said}"
