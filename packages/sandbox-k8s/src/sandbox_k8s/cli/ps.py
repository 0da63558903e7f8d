"""``sandbox-k8s ps``: one line per sandbox."""

import argparse
import sys
from datetime import UTC, datetime
from functools import partial
from typing import Any

import anyio
import msgspec

from sandbox_k8s.clock import SystemClock
from sandbox_k8s.config import LocalConfig
from sandbox_k8s.handle import LocalPlace
from sandbox_k8s.stats import SandboxInfo

from .pods import PodView, overview
from .text import duration, table
from .where import Cluster, opened_api, opened_client, parent, place_of

_EPILOG = """
EPOCH counts its owners. LEASE: how long its record says that it lives on; a detached sandbox ends then,
one that is owned is renewed all the time, and ends within its own, shorter lease when its owner is gone;
reap removes what is over. WHY: what is wrong, or what is waited for; see explain.
"""


def register(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser("ps", parents=[parent()], help="list the sandboxes", epilog=_EPILOG)
    command.add_argument("--json", action="store_true", help="as a JSON list")
    command.set_defaults(action=_ps)


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A sandbox as ``--json`` prints it; what does not apply to its place is left out.

    Attributes:
        state: ``starting``, ``running``, ``detached`` or ``dead``.
        created: RFC 3339.
        lease_left_s: Seconds until the record says that it is over, negative afterwards; left out for an
            owned sandbox of this machine, whose keeper alone knows.
        condition: Of a pod, see `sandbox_k8s.kubernetes.diagnosis.State`.
        failure: Class of what is wrong.
        why: What is wrong or waited for.
    """

    id: str
    state: str
    epoch: int
    created: str
    age_s: float
    lease_left_s: float | None = None
    isolation: str | None = None
    pod: str | None = None
    namespace: str | None = None
    run: str | None = None
    node: str | None = None
    image: str | None = None
    image_digest: str | None = None
    condition: str | None = None
    failure: str | None = None
    why: str | None = None
    labels: dict[str, str] = {}


def _ps(options: argparse.Namespace) -> int:
    return anyio.run(partial(_list, place_of(options), as_json=options.json))


async def _list(place: LocalConfig | Cluster, *, as_json: bool) -> int:
    if isinstance(place, LocalConfig):
        async with opened_client(place) as client:
            found = await client.list()
        now_ns = SystemClock().now_ns()
        rows = [_local_row(info, now_ns) for info in found]
        shown = _LOCAL
    else:
        async with opened_api(place) as api:
            views = await overview(api, place)
        now_ns = SystemClock().now_ns()
        rows = [_pod_row(view, now_ns) for view in views]
        shown = _PODS
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
        return 0
    sys.stdout.write(table([shown, *([_cell(row, name) for name in shown] for row in rows)]))
    if isinstance(place, Cluster) and not rows:
        sys.stderr.write(f"sandbox-k8s: no sandboxes{place.of_run}; {place.at}\n")
    return 0


_LOCAL = ("ID", "STATE", "ISOLATION", "EPOCH", "AGE", "LEASE", "LABELS")
_PODS = ("ID", "POD", "RUN", "STATE", "EPOCH", "AGE", "LEASE", "NODE", "IMAGE", "WHY", "LABELS")


def _cell(row: Row, name: str) -> str:
    if name == "AGE":
        return duration(row.age_s)
    if name == "LEASE":
        left_s = row.lease_left_s
        return "-" if left_s is None else "over" if left_s <= 0 else duration(left_s)
    if name == "LABELS":
        return " ".join(f"{key}={value}" for key, value in sorted(row.labels.items()))
    if name == "WHY":
        said = ": ".join(filter(None, (row.failure, row.why)))
        return "-" if row.condition == "ready" else said
    value: object = {
        "ID": row.id, "POD": row.pod, "RUN": row.run, "STATE": row.state, "ISOLATION": row.isolation,
        "EPOCH": row.epoch, "NODE": row.node, "IMAGE": row.image,
    }[name]  # fmt: skip
    return str(value or "-")


def _local_row(info: SandboxInfo, now_ns: int) -> Row:
    handle = info.handle
    isolation = handle.place.isolation if isinstance(handle.place, LocalPlace) else None
    return Row(
        id=handle.sandbox_id,
        state=info.state,
        epoch=handle.epoch,
        created=_instant(handle.created_ns),
        age_s=_seconds(now_ns - handle.created_ns),
        lease_left_s=None if info.expires_ns is None else _seconds(info.expires_ns - now_ns),
        isolation=isolation,
        labels=handle.labels,
    )


def _pod_row(view: PodView, now_ns: int) -> Row:
    held, metadata = view.record, view.pod["metadata"]
    return Row(
        id=held.handle.sandbox_id,
        state=view.state,
        epoch=held.handle.epoch,
        created=_instant(held.handle.created_ns),
        age_s=_seconds(now_ns - held.handle.created_ns),
        lease_left_s=_seconds(held.expires_ns - now_ns),
        pod=metadata["name"],
        namespace=metadata["namespace"],
        run=view.run,
        node=view.node,
        image=view.image,
        image_digest=held.handle.place.image_digest
        if not isinstance(held.handle.place, LocalPlace)
        else None,
        condition=view.diagnosis.state,
        failure=view.diagnosis.failure,
        why=view.diagnosis.why,
        labels=held.handle.labels,
    )


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 3)


def _instant(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).isoformat().replace("+00:00", "Z")
