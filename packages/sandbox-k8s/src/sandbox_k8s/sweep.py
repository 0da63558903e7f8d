"""The reaper of the local back end: removes what a killed keeper could not."""

import signal

from .errors import SandboxNotFoundError
from .launcher import archive, processes
from .launcher.keeper import MARK
from .stats import ReapedSandbox
from .store import Store

_YOUNG_NS = 10_000_000_000


def sweep(store: Store, now_ns: int, dry_run: bool) -> tuple[ReapedSandbox, ...]:
    """Remove sandboxes without a keeper; one that is just being made has its lock held or is young."""
    reaped: list[ReapedSandbox] = []
    for sandbox_id in store.ids():
        try:
            if store.kept(sandbox_id):
                continue  # without its lock: whoever attaches at this moment must not take us for a rival
            with store.locked(sandbox_id, wait=False) as free:
                if not free or store.kept(sandbox_id):
                    continue
                folder = store.folder(sandbox_id)
                if not (folder / "state.json").exists() and now_ns - folder.stat().st_mtime_ns < _YOUNG_NS:
                    continue
                left = processes.marked(MARK, sandbox_id)
                if not dry_run:
                    processes.send(left, signal.SIGKILL)
                    archive.remove_tree(folder)
                reaped.append(
                    ReapedSandbox(sandbox_id=sandbox_id, why="its keeper was killed", processes=len(left))
                )
        except (SandboxNotFoundError, FileNotFoundError):
            continue  # its keeper was quicker
    return tuple(reaped)
