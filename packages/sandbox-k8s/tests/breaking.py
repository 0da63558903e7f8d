"""A cluster that tests may break.

SANDBOX_K8S_BREAK is a command: ``COMMAND kill PART`` kills (SIGKILL) one of etcd, kube-apiserver, kubelet and
containerd, and ``COMMAND up`` starts what is missing and returns when the node is ready.
"""

import os
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

BREAK = os.environ.get("SANDBOX_K8S_BREAK", "")
BREAKABLE = pytest.mark.skipif(not BREAK, reason="SANDBOX_K8S_BREAK names no command that breaks a cluster")


async def command(*words: str) -> None:
    done = await anyio.run_process([*shlex.split(BREAK), *words], check=False)
    assert done.returncode == 0, done.stderr.decode()


@asynccontextmanager
async def without(part: str) -> AsyncIterator[None]:
    """A part of the cluster is dead inside the block, and whole again after it."""
    await command("kill", part)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await command("up")
