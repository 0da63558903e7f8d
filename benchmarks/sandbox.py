"""What a sandbox costs: this package beside stock SWE-ReX, and a thousand of them on a cluster.

    python benchmarks/sandbox.py [--quick] [--pairs 200] [--kube KUBECONFIG]

Needs Linux with bubblewrap and the extras kubernetes and swerex. Machines are shared and noisy: read the
ratios and the quartiles of one run, not one figure of two.

    command      `echo hi` in a persistent session, over TCP on this machine, in turns of changing order: ours
                 (a pod of the fake cluster with a process, and the launcher of a tree that `build-tools`
                 made), stock SWE-ReX 1.4 (its own server process and its `RemoteRuntime`), and its client on
                 our launcher. `command_vs_swerex` is the median of ours / SWE-ReX, turn by turn.
    sleeps       three `sleep 2` at once, and how long SWE-ReX's `is_alive` takes meanwhile, at most.
    upload       600 MB (100 MB with --quick) into the sandbox: by how much the peak of this process and of
                 the launcher is above what they had before; the larger of the two counts.
    launcher     from its start to its first answer, and the most memory that it had in all of the above.
    attach       from `detach` to the first answer of the same shell to another client, variables kept.
    thousand     1000 sandboxes started and stopped on the fake cluster, in a process of its own, whose pods
                 have a status and no process: requests to the API server per sandbox by its own count,
                 watches, and the longest stall of the event loop while they start. A machine with more to do
                 than it has cores stalls loops too: `loop_stall_cpu_ms` is the longest by the processor time
                 of the loop's own thread. What was imported before is kept out of garbage collections
                 (`gc.freeze`), whose length is that of all modules of a process; `objects_per_sandbox` is how
                 much a started sandbox adds to them.
    --kube       the same on a real API server, printed apart: its nodes must be simulated ones of kwok (label
                 type=kwok), and a stub of this script answers for the launchers, which those do not have.

The last line of the output is one JSON object; a figure that could not be taken is null.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This folder's scripts are named like packages, which would be imported in their place.
HERE = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry).resolve() != HERE), str(HERE)]

import argparse
import hashlib
import json
import logging
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
from sandbox_k8s import KubernetesConfig, Sandbox, SandboxClient
from sandbox_k8s.kubernetes.backend import KubernetesBackend
from sandbox_k8s.testing import FakeClusterConfig, why_no_process_pods
from sandbox_k8s.tools import build, launcher_command
from sandbox_parts.figures import Figures, quartiles, rounded, show
from sandbox_parts.processes import MB, TOOLS, Process, fake_cluster, free_port, server, settings
from sandbox_parts.thousand import on_fake_cluster, on_real_server
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest, UploadRequest
from swerex.runtime.abstract import Command as RexCommand
from swerex.runtime.remote import RemoteRuntime

HEADLINES = (
    "command_vs_swerex", "is_alive_ms_during_command", "parallel_sleeps_s", "upload_extra_mb",
    "launcher_rss_mb", "launcher_ready_s", "fake1000_watches", "fake1000_calls_per_sandbox", "loop_stall_ms",
    "loop_stall_cpu_ms", "attach_ms",
)  # fmt: skip
MANY = 1000
WARM = 3
SLEEP_S = 2.0
Call = Callable[[], Awaitable[object]]


def swerex_server(folder: Path) -> tuple[list[str], int]:
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--auth-token", "key"]
    return [sys.executable, "-m", "swerex.server", *where], port


def launcher_ready(tree: Path, folder: Path) -> list[float]:
    seconds: list[float] = []
    for _ in range(5):
        port = free_port()
        token_hash = hashlib.sha256(b"key").hexdigest()
        argv = launcher_command(
            tree, listen=f"127.0.0.1:{port}", state=folder, token_hash=token_hash, lease_s=60, sandbox_id="b"
        )
        with server(argv, port, "key", folder) as (_, ready_s):
            seconds.append(ready_s)
    return seconds


async def timed(call: Call) -> float:
    begin = time.perf_counter()
    await call()
    return time.perf_counter() - begin


async def commands(ours: Sandbox, key: str, rex: RemoteRuntime, pairs: int) -> Figures:
    """Commands in a session, one of each in turn."""
    session = await ours.session()
    stock = rex_on(ours, key)
    await stock.create_session(CreateBashSessionRequest(session="stock"))
    await rex.create_session(CreateBashSessionRequest())
    ways: dict[str, Call] = {
        "ours": lambda: session.run("echo hi"),
        "swerex": lambda: rex.run_in_session(BashAction(command="echo hi")),
        "its_client_on_ours": lambda: stock.run_in_session(BashAction(command="echo hi", session="stock")),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for pair in range(WARM + pairs):
        for name in ways if pair % 2 == 0 else reversed(ways):
            took[name].append(await timed(ways[name]))
    took = {name: one[WARM:] for name, one in took.items()}
    for name, seconds in took.items():
        vs = quartiles([a / b for a, b in zip(seconds, took["swerex"], strict=True)])
        show("command", way=name, ms=quartiles([s * 1000 for s in seconds]), vs_swerex=vs, pairs=pairs)
    ratios = {
        name: statistics.median(a / b for a, b in zip(took[name], took["swerex"], strict=True))
        for name in ("ours", "its_client_on_ours")
    }
    return {
        "command_vs_swerex": ratios["ours"],
        "command_ms": statistics.median(took["ours"]) * 1000,
        "swerex_client_on_ours_vs_swerex": ratios["its_client_on_ours"],
    }


def rex_on(sandbox: Sandbox, key: str) -> RemoteRuntime:
    """SWE-ReX's own client on a launcher of ours."""
    host, port = sandbox.launcher._route.base_url.removesuffix("/").rsplit(":", 1)
    return RemoteRuntime(host=host, port=int(port), auth_token=key, timeout=30.0)


async def sleeps(run: Call, alive: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Three commands of 2 s at once: seconds until all have ended, and the slowest answer of `alive`, ms."""
    slowest = 0.0
    begin = time.perf_counter()

    async def ask() -> None:
        nonlocal slowest
        while time.perf_counter() - begin < SLEEP_S - 0.2:
            await anyio.sleep(0.05)
            asked = time.perf_counter()
            assert await alive()
            slowest = max(slowest, time.perf_counter() - asked)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        for _ in range(3):
            tasks.start_soon(run)
    return time.perf_counter() - begin, slowest * 1000


async def parallel(ours: Sandbox, key: str, rex: RemoteRuntime | None) -> Figures:
    """The same of SWE-ReX, which takes the three one after the other, unless that is None."""
    our_s, our_ms = await sleeps(lambda: ours.execute(f"sleep {SLEEP_S}"), rex_on(ours, key).is_alive)
    show("sleeps", seconds=round(our_s, 2), is_alive_ms=round(our_ms, 1))
    found: Figures = {"is_alive_ms_during_command": our_ms, "parallel_sleeps_s": our_s}
    if rex is not None:
        asleep = RexCommand(command=f"sleep {SLEEP_S}", shell=True)
        their_s, their_ms = await sleeps(lambda: rex.execute(asleep), rex.is_alive)
        show("sleeps", way="swerex", seconds=round(their_s, 2), is_alive_ms=round(their_ms, 1))
        found |= {"swerex_is_alive_ms": their_ms, "swerex_sleeps_s": their_s}
    return found


async def upload(ours: Sandbox, launcher: Process, rex: RemoteRuntime, their_pid: int, size: int) -> Figures:
    here, theirs = Process(os.getpid()), Process(their_pid)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "big", Path(folder) / "copy"
        with source.open("wb") as file:
            file.truncate(size)
        before = {process: process.begin() for process in (here, launcher)}
        seconds = await timed(lambda: ours.upload(source, "big"))
        extra = {process: process.peak_mb - mb for process, mb in before.items()}
        checked = await ours.execute("wc -c < big && rm big")
        assert int(checked.stdout) == size
        before_mb = theirs.begin()
        request = UploadRequest(source_path=str(source), target_path=str(target))
        their_seconds = await timed(lambda: rex.upload(request))
        their_extra = theirs.peak_mb - before_mb
    show(
        "upload", mb=size // MB, client_extra_mb=round(extra[here], 1), seconds=round(seconds, 2),
        launcher_extra_mb=round(extra[launcher], 1),
    )  # fmt: skip
    theirs_mb = round(their_extra, 1)
    show("upload", way="swerex", server_extra_mb=theirs_mb, seconds=round(their_seconds, 2))
    return {"upload_extra_mb": max(extra.values()), "swerex_upload_extra_mb": their_extra}


async def attach(config: KubernetesConfig, rounds: int) -> Figures:
    """Detach here, attach there, and ask the shell."""
    took: list[float] = []
    async with SandboxClient.kubernetes(config) as first, SandboxClient.kubernetes(config) as second:
        sandbox = await first.start()
        clients = [first, second]
        for number in range(rounds):
            await (await sandbox.session()).run(f"export KEPT={number}; cd /tmp")
            begin = time.perf_counter()
            handle = await sandbox.detach()
            sandbox = await clients[(number + 1) % 2].attach(handle)
            said = await (await sandbox.session()).run("echo $KEPT $PWD")
            took.append((time.perf_counter() - begin) * 1000)
            assert said.stdout == f"{number} /tmp\n".encode()
    show("attach", ms=quartiles(took, 1), rounds=rounds)
    return {"attach_ms": statistics.median(took)}


async def run(pairs: int, size: int, kube: Path | None, *, quick: bool) -> Figures:
    found: Figures = {}
    with tempfile.TemporaryDirectory(prefix="sbx-bench-") as name:
        folder = Path(name)
        tree = folder / "tree"
        begin = time.perf_counter()
        build(tree)
        show("tools", build_s=round(time.perf_counter() - begin, 1))
        ready = launcher_ready(tree, folder)
        show("launcher", ready_s=quartiles(ready), starts=len(ready))
        found["launcher_ready_s"] = statistics.median(ready)
        argv, port = swerex_server(folder)
        pods = FakeClusterConfig(pods="process", speed=20.0, images={TOOLS: tree})
        with server(argv, port, "key", folder) as (their_pid, ready_s), fake_cluster(pods) as cluster:
            show("swerex", ready_s=round(ready_s, 2), rss_mb=round(Process(their_pid).peak_mb, 1))
            rex = RemoteRuntime(host="http://127.0.0.1", port=port, auth_token="key", timeout=30.0)
            config = settings(cluster.kubeconfig, folder, data_path="pod_ip")
            async with SandboxClient.kubernetes(config) as client:
                sandbox = await client.start()
                backend = client._backend
                assert isinstance(backend, KubernetesBackend)
                key = backend.token(f"sbx-{sandbox.id}")
                launcher = launcher_of(sandbox)
                found |= await commands(sandbox, key, rex, pairs)
                found |= await parallel(sandbox, key, None if quick else rex)
                peak_mb = launcher.peak_mb
                found |= await upload(sandbox, launcher, rex, their_pid, size)
                found["launcher_rss_mb"] = max(peak_mb, launcher.peak_mb)
            found |= await attach(config, 9)
        found |= await on_fake_cluster(folder, MANY)
        if kube is not None:
            await on_real_server(kube, folder, MANY)
    return found


def launcher_of(sandbox: Sandbox) -> Process:
    """The launcher's process, as numbered on this machine: the innermost one with its words."""
    words = f"--sandbox-id {sandbox.id}"
    table = subprocess.run(["ps", "-wweo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=1) for line in table.splitlines() if words in line]
    return Process(next(int(pid) for pid, args in rows if "bwrap" not in args.split()[0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer pairs, a smaller upload, under 50 s")
    parser.add_argument("--pairs", type=int, default=200, help="commands of each way (at least 20)")
    parser.add_argument("--kube", type=Path, help="a kubeconfig: the thousand on a real API server as well")
    args = parser.parse_args()
    if why := why_no_process_pods():
        parser.error(f"pods of the fake cluster need bubblewrap: {why}")
    logging.disable(logging.WARNING)
    pairs, size = (24, 100 * MB) if args.quick else (max(args.pairs, 20), 600 * MB)
    found = anyio.run(partial(run, pairs, size, args.kube, quick=args.quick))
    print(json.dumps(rounded(dict.fromkeys(HEADLINES) | found)))


if __name__ == "__main__":
    main()
