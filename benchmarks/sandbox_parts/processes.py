"""The processes that are measured: servers, clusters, and what memory they have."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sandbox_k8s import Injection, KubernetesConfig
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig

MB = 1 << 20
TOOLS = "example.com/tools:1"


class Process(NamedTuple):
    """A process whose memory is looked at."""

    pid: int

    def kb(self, name: str) -> int:
        """A line of its status, for example ``VmRSS`` or ``VmHWM``."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name))

    def begin(self) -> float:
        """Let its peak begin anew; MB that it has now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self.kb("VmRSS") / 1024

    @property
    def peak_mb(self) -> float:
        return self.kb("VmHWM") / 1024


def serve_cluster(config: FakeClusterConfig, pipe: Connection) -> None:
    with FakeCluster(config) as cluster:
        pipe.send(cluster.kubeconfig)
        while pipe.recv() is not None:
            pipe.send(cluster.requests)


class OtherProcess(NamedTuple):
    """A fake cluster in a process of its own, so that it shares no interpreter with the client."""

    kubeconfig: Path
    pipe: Connection

    def requests(self) -> dict[str, int]:
        self.pipe.send("requests")
        return self.pipe.recv()


@contextmanager
def fake_cluster(config: FakeClusterConfig) -> Iterator[OtherProcess]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_cluster, args=(config, there), daemon=True
    )
    process.start()
    try:
        yield OtherProcess(here.recv(), here)
    finally:
        here.send(None)
        process.join()


def settings(kubeconfig: Path, folder: Path, **changes: Any) -> KubernetesConfig:
    config = KubernetesConfig(
        injection=Injection(kind="image_volume", image=TOOLS),
        kubeconfig=kubeconfig,
        run=f"benchmark-{os.urandom(4).hex()}",
        run_key_file=folder / "run.key",
        image="example.com/any:1",
        stop_timeout_s=120.0,
        watch_s=300.0,
    )
    return msgspec.structs.replace(config, **changes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def answers(port: int, key: str) -> bool:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/is_alive", headers={"X-API-Key": key})
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextmanager
def server(argv: Sequence[str], port: int, key: str, folder: Path) -> Iterator[tuple[int, float]]:
    """A server process: its pid, and seconds from its start to its first answer."""
    begin = time.perf_counter()
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    process = subprocess.Popen(
        argv, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not answers(port, key):
            if process.poll() is not None:
                raise RuntimeError(f"{argv[0]} ended with {process.returncode}")
            time.sleep(0.002)
        yield process.pid, time.perf_counter() - begin
    finally:
        process.kill()
        process.wait()
