"""``sandbox-k8s manifests``: what an administrator applies once, as YAML for ``kubectl apply -f -``."""

import argparse
import sys
from typing import Any, get_args

from sandbox_k8s.errors import ConfigError
from sandbox_k8s.kubernetes.config import DataPath
from sandbox_k8s.kubernetes.shipped import KINDS, METADATA, ManifestOptions, manifests

_EPILOG = """
rbac: service accounts and roles for workers and for the reaper. network-policy: sandboxes reach nothing but
--allow, and workers alone reach sandboxes. reaper: a CronJob that deletes what is over; needs --image and the
account of rbac.
"""


def register(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "manifests", help="print roles, network policies and the reaper for kubectl apply", epilog=_EPILOG
    )
    command.add_argument("kind", nargs="?", choices=KINDS, default="all", help="(default: all)")
    command.add_argument("--namespace", "-n", metavar="NAME", help="of the sandboxes (default: default)")
    command.add_argument("--run", metavar="NAME", help="policies and reaper for this run alone")
    command.add_argument("--image", metavar="IMAGE", help="of the reaper: has sandbox-k8s[kubernetes]")
    command.add_argument("--image-pull-policy", choices=("Always", "IfNotPresent", "Never"))
    command.add_argument("--schedule", metavar="CRON", help="of the reaper (default: each minute)")
    command.add_argument(
        "--data-path", dest="data_paths", action="append", choices=get_args(DataPath),
        help="how workers reach sandboxes, for the role's verbs (default: all; repeatable)",
    )  # fmt: skip
    command.add_argument(
        "--read-nodes", action="store_true", help="workers may read nodes too: prefetch, doctor, explain"
    )
    command.add_argument("--port", type=int, metavar="N", help="of the launcher (default: 8000)")
    command.add_argument(
        "--allow", action="append", metavar="CIDR[:PORT[/udp]]",
        help="where sandboxes with network=True may connect to (repeatable)",
    )  # fmt: skip
    command.add_argument(
        "--deny", action="append", metavar="CIDR",
        help="taken out of wider ones that are allowed, beside the clouds' metadata servers (repeatable)",
    )  # fmt: skip
    command.add_argument("--dns", action="store_true", help="they may ask the cluster's DNS")
    command.add_argument(
        "--worker-label", dest="worker_labels", action="append", type=_label, metavar="KEY=VALUE",
        help="pods that are workers (default: sandbox-k8s/worker=true)",
    )  # fmt: skip
    command.add_argument("--worker-namespace", metavar="NAME", help="where they are")
    command.add_argument(
        "--worker-cidr", dest="worker_cidrs", action="append", metavar="CIDR",
        help="workers outside the cluster, and API servers for --data-path api_proxy (repeatable)",
    )  # fmt: skip
    command.set_defaults(action=_manifests)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _manifests(options: argparse.Namespace) -> int:
    given: dict[str, Any] = {name: value for name, value in vars(options).items() if value is not None}
    for name in ("action", "kind"):
        del given[name]
    given["deny"] = (*METADATA, *given.get("deny", ()))
    if "worker_labels" in given:
        given["worker_labels"] = dict(given["worker_labels"])
    for name in ("allow", "data_paths", "worker_cidrs"):
        given[name] = tuple(given[name]) if name in given else ()
    if not given["data_paths"]:
        del given["data_paths"]
    if options.kind == "all" and options.image is None:
        raise ConfigError("`manifests all` makes the reaper too and needs --image; or ask for one kind")
    sys.stdout.write(manifests(options.kind, ManifestOptions(**given)))
    return 0
