"""Images that a registry does not give, on a real cluster: each has its class, the permanent ones in seconds.

The registry is this process's own, on loopback and without TLS, so the node must be this machine.
SANDBOX_K8S_REGISTRIES is the folder in which its containerd looks for the settings of registries
(``config_path`` of ``io.containerd.cri.v1.images``); a running one notices what is written there.
"""

import gzip
import hashlib
import http.server
import io
import itertools
import json
import os
import shutil
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from sandbox_k8s import ClientConfig, SandboxClient, SandboxSpec, SandboxStartError
from sandbox_k8s.kubernetes import FailureName
from sandbox_k8s.kubernetes.config import KubernetesConfig
from sandbox_k8s.tools.layout import this_architecture

REGISTRIES = os.environ.get("SANDBOX_K8S_REGISTRIES", "")
REFUSALS: dict[str, tuple[int, str, dict[str, str]]] = {
    "unknown": (404, "MANIFEST_UNKNOWN", {}),
    "unauthorized": (401, "UNAUTHORIZED", {"WWW-Authenticate": 'Basic realm="test"'}),
    "forbidden": (403, "DENIED", {}),
    "limited": (429, "TOOMANYREQUESTS", {"Retry-After": "30"}),
    "broken": (500, "UNKNOWN", {}),
}
PERMANENT: dict[str, FailureName] = {
    "unknown": "image_not_found",
    "unauthorized": "image_auth",
    "forbidden": "image_auth",
    "distrusted": "image_registry_tls",
}
PASSING: dict[str, FailureName] = {
    "limited": "image_rate_limit",
    "broken": "image_registry_error",
    "cut": "image_pull_cut",
}
_FLAKY = 3  # so many requests are refused: more than one pull makes
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.timeout(180),
    pytest.mark.parametrize("place", ["kubernetes"], indirect=True),
    pytest.mark.skipif(not REGISTRIES, reason="SANDBOX_K8S_REGISTRIES names no folder of a containerd"),
]


class Image:
    """A base layer and one of its own, which no node can have yet."""

    def __init__(self, base: bytes) -> None:
        layers = [base, noise()]
        packed = [gzip.compress(one, 1, mtime=0) for one in layers]
        config = encode(
            {
                "architecture": this_architecture(),
                "os": "linux",
                "config": {"Env": ["PATH=/usr/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [digest(one) for one in layers]},
            }
        )
        self.blobs = {digest(one): one for one in (config, *packed)}
        self.own_layer = digest(packed[1])
        self.manifest = encode(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": described(_CONFIG, config),
                "layers": [described(_LAYER, one) for one in packed],
            }
        )
        self.blobs[digest(self.manifest)] = self.manifest


class Registry(http.server.ThreadingHTTPServer):
    """Serves an image of its own under every name; the name's first part says what goes wrong.

    Attributes:
        released: Lets the slow pulls go on.
        asked_for: Numbers the requests for the flaky image.
    """

    daemon_threads = True

    def __init__(self, base: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.released = threading.Event()
        self.asked_for = itertools.count()
        self.images = {way: Image(base) for way in ("cut", "slow", "flaky")}

    def image(self, way: str) -> str:
        """The name of an image that goes that way."""
        host = "localhost" if way == "distrusted" else "127.0.0.1"
        return f"{host}:{self.server_port}/{way}/box:1"


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        _, _, way, *rest = self.path.split("?")[0].split("/")
        if way in REFUSALS:
            code, name, headers = REFUSALS[way]
            self.say(code, encode({"errors": [{"code": name, "message": "made by a test"}]}), headers)
        elif way == "flaky" and next(self.server.asked_for) < _FLAKY:
            self.say(503, encode({"errors": [{"code": "UNAVAILABLE", "message": "made by a test"}]}))
        elif "manifests" in rest:
            said = self.server.images[way].manifest
            self.say(200, said, {"Content-Type": _MANIFEST, "Docker-Content-Digest": digest(said)})
        elif "blobs" in rest:
            self.give(way, rest[-1])
        else:
            self.say(200, b"{}")

    def give(self, way: str, name: str) -> None:
        """A blob; of the image's own layer perhaps only a part."""
        image = self.server.images[way]
        blob = image.blobs[name]
        if name != image.own_layer or way == "flaky" or self.command == "HEAD":
            self.say(200, blob, {"Content-Type": "application/octet-stream"})
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(blob)))
        self.end_headers()
        self.wfile.write(blob[: len(blob) // 2])
        if way == "slow":
            self.wfile.flush()
            self.server.released.wait()
        self.close_connection = True

    def say(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def noise() -> bytes:
    """A layer with a file of random bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("noise")
        info.size = 1 << 16
        archive.addfile(info, io.BytesIO(os.urandom(info.size)))
    return out.getvalue()


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def described(kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest(data), "size": len(data)}


@pytest.fixture(scope="module")
def registry(contract_layer: Callable[[], bytes]) -> Iterator[Registry]:
    with Registry(contract_layer()) as served:
        host = f"127.0.0.1:{served.server_port}"
        settings = Path(REGISTRIES, host)
        settings.mkdir()
        (settings / "hosts.toml").write_text(f'server = "http://{host}"\n')
        thread = threading.Thread(target=served.serve_forever, args=(0.05,))
        thread.start()
        yield served
        served.released.set()
        served.shutdown()
        thread.join()
        shutil.rmtree(settings)


@pytest.fixture
def cluster(config: ClientConfig) -> KubernetesConfig:
    """Small sandboxes: those of one test are still ending when the next begins."""
    assert isinstance(config, KubernetesConfig)
    return msgspec.structs.replace(config, cpu=0.05)


async def failures(
    client: SandboxClient, registry: Registry, ways: dict[str, FailureName]
) -> dict[str, tuple[SandboxStartError, float]]:
    """Start a sandbox of each way at once: how each failed, and after how many seconds."""
    found: dict[str, tuple[SandboxStartError, float]] = {}

    async def start(way: str) -> None:
        begun_s = time.monotonic()
        with pytest.raises(SandboxStartError) as failed:
            await client.start(SandboxSpec(image=registry.image(way)))
        found[way] = (failed.value, time.monotonic() - begun_s)

    async with anyio.create_task_group() as tasks:
        for way in ways:
            tasks.start_soon(start, way)
    return found


async def test_what_never_heals_is_named_within_15_seconds(
    cluster: KubernetesConfig, registry: Registry
) -> None:
    async with SandboxClient.kubernetes(cluster) as client:
        found = await failures(client, registry, PERMANENT)
    for way, (problem, seconds) in found.items():
        assert problem.diagnosis is not None
        assert (problem.diagnosis.failure, problem.diagnosis.guess) == (PERMANENT[way], False), problem
        assert not problem.retryable
        assert seconds < 15, f"{way} took {seconds:.1f} s"


async def test_what_may_heal_is_given_up_in_time_with_its_class(
    cluster: KubernetesConfig, registry: Registry
) -> None:
    config = msgspec.structs.replace(cluster, failing_timeout_s=1.0, cpu=0.01)  # the node may be nearly full
    async with SandboxClient.kubernetes(config) as client:
        found = await failures(client, registry, PASSING)
    for way, (problem, _) in found.items():
        assert problem.diagnosis is not None
        assert (problem.diagnosis.failure, problem.diagnosis.guess) == (PASSING[way], False), problem
        assert (problem.fault, problem.retryable) == ("infra", True)


@pytest.mark.slow
async def test_a_registry_that_comes_back_is_waited_for(
    cluster: KubernetesConfig, registry: Registry
) -> None:
    """The kubelet tries again some 10 s after its first failure."""
    async with SandboxClient.kubernetes(cluster) as client:
        sandbox = await client.start(SandboxSpec(image=registry.image("flaky")))
        assert (await sandbox.execute("echo up")).stdout == b"up\n"
    assert next(registry.asked_for) > _FLAKY


async def test_a_pull_without_end_is_given_up_as_one(cluster: KubernetesConfig, registry: Registry) -> None:
    """The last of this file: it holds up the node's other pulls until the registry lets go."""
    config = msgspec.structs.replace(cluster, start_timeout_s=8.0)
    async with SandboxClient.kubernetes(config) as client:
        with pytest.raises(SandboxStartError) as failed:
            await client.start(SandboxSpec(image=registry.image("slow")))
    registry.released.set()
    assert failed.value.diagnosis is not None
    assert failed.value.diagnosis.failure == "image_pull_slow"
    assert (failed.value.fault, failed.value.retryable) == ("infra", True)
