"""The API of a cluster on the wire: the fake one, and a real one where SANDBOX_K8S_KUBECONFIG names one.

All tests in this folder that take ``wire`` run on both: what the fake one does, a real one does.
"""

import base64
import io
import json
import os
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anyio
import pytest
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, why_no_process_pods

KUBECONFIG = os.environ.get("SANDBOX_K8S_KUBECONFIG", "")
# Has sh, sleep and /usr/bin/python3; made and brought to the nodes where SANDBOX_K8S_LOAD_IMAGE says how.
IMAGE = os.environ.get("SANDBOX_K8S_IMAGE", "localhost/sandbox-k8s-test-python:1")
MERGE = "application/merge-patch+json"


class Answer(NamedTuple):
    status: int
    headers: Any
    body: Any


class Wire:
    """Requests to a cluster, in a namespace of one's own."""

    def __init__(self, http: aiohttp.ClientSession, namespace: str) -> None:
        self.http = http
        self.namespace = namespace
        self.base = f"/api/v1/namespaces/{namespace}"

    async def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        """Paths that do not begin with a slash are below the namespace."""
        media_type = options.pop("media_type", "application/json")
        data = body if isinstance(body, bytes) or body is None else io.BytesIO(json.dumps(body).encode())
        headers = options.pop("headers", {})
        if data is not None:
            headers = {"Content-Type": media_type, **headers}
        where = path if path.startswith("/") else f"{self.base}/{path}"
        async with self.http.request(method, where, data=data, headers=headers, **options) as response:
            text = await response.read()
            kind = response.headers.get("Content-Type", "")
            return Answer(response.status, response.headers, json.loads(text) if "/json" in kind else text)

    async def create(self, name: str, spec: Any = None, **metadata: Any) -> Any:
        answer = await self("POST", "pods", pod(name, spec, **metadata))
        assert answer.status == 201, answer.body
        return answer.body

    @asynccontextmanager
    async def watching(self, path: str = "pods", **query: Any) -> AsyncIterator[Callable[[], Any]]:
        """A function that waits for the next event; None is the end."""
        params = {"watch": "1", "timeoutSeconds": "20", **query}
        async with self.http.get(f"{self.base}/{path}", params=params) as response:
            assert response.status == 200, await response.read()

            async def following() -> Any:
                with anyio.fail_after(25):
                    line = await response.content.readline()
                return json.loads(line) if line else None

            yield following

    async def says(self, name: str, wanted: bytes) -> None:
        """Wait until a pod's log holds something."""
        with anyio.fail_after(30):
            while wanted not in (said := (await self("GET", f"pods/{name}/log")).body):
                assert not isinstance(said, bytes) or b"Error" not in said, said
                await anyio.sleep(0.05)

    async def until(self, name: str, holds: Callable[[Any], bool]) -> Any:
        """Follow a pod until something holds; the pod then. A pod that is gone has the phase "gone"."""
        async with self.watching(fieldSelector=f"metadata.name={name}") as following:
            while (event := await following()) is not None:
                found = event["object"]
                if event["type"] == "DELETED":
                    found = {**found, "status": {**found["status"], "phase": "gone"}}
                if holds(found):
                    return found
        raise AssertionError(f"it never held for {name}")


def pod(name: str, spec: Any = None, **metadata: Any) -> Any:
    """A pod that no node takes, unless a spec is given."""
    nowhere = {"nodeSelector": {"no": "where"}, "containers": [{"name": "main", "image": "x:1"}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **metadata},
        "spec": spec or nowhere,
    }


def program(*command: str, **spec: Any) -> Any:
    """The spec of a pod that runs a program."""
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "IfNotPresent", "command": [*command]}
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    defaults = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
    }
    return {**defaults, "containers": [container], **spec}


@pytest.fixture(scope="session")
def make_pod() -> Callable[..., Any]:
    return pod


@pytest.fixture(scope="session")
def run() -> Callable[..., Any]:
    return program


class Access(NamedTuple):
    server: str
    headers: dict[str, str]
    tls: ssl.SSLContext | None
    tls_of_a_stranger: ssl.SSLContext | None


def real_access() -> Access:
    """What the kubeconfig of a real cluster says, read by kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which reads the kubeconfig, is not installed")
    words = [
        "kubectl",
        "--kubeconfig",
        KUBECONFIG,
        "config",
        "view",
        "--raw",
        "--minify",
        "--flatten",
        "-o",
        "json",
    ]
    said = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    cluster, user = said["clusters"][0]["cluster"], said["users"][0]["user"]
    headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
    if not cluster["server"].startswith("https"):
        return Access(cluster["server"], headers, None, None)
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    tls, tls_of_a_stranger = [ssl.create_default_context(cadata=authority) for _ in range(2)]
    if "client-certificate-data" in user:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, name) for name in ("certificate", "key")]
            for path, field in zip(paths, ("client-certificate-data", "client-key-data"), strict=True):
                path.write_bytes(base64.b64decode(user[field]))
            tls.load_cert_chain(*paths)
    return Access(cluster["server"], headers, tls, tls_of_a_stranger)


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.cluster)])
def access(request: pytest.FixtureRequest) -> Iterator[Access]:
    if request.param == "real":
        if not KUBECONFIG:
            pytest.skip("SANDBOX_K8S_KUBECONFIG names no cluster")
        if "SANDBOX_K8S_IMAGE" not in os.environ:
            if "SANDBOX_K8S_LOAD_IMAGE" not in os.environ:
                pytest.skip(
                    "set SANDBOX_K8S_LOAD_IMAGE to the command that brings an archive to the nodes, or "
                    "SANDBOX_K8S_IMAGE to an image with sh, sleep and /usr/bin/python3"
                )
            request.getfixturevalue("bring_python")(IMAGE)
        yield real_access()
        return
    kind = "status" if why_no_process_pods() else "process"
    with FakeCluster(FakeClusterConfig(pods=kind, speed=10)) as cluster:
        yield Access(cluster.url, {"Authorization": f"Bearer {cluster.token}"}, None, None)


@pytest.fixture
async def wire(access: Access) -> AsyncIterator[Wire]:
    connector = aiohttp.TCPConnector(ssl=access.tls or True)
    async with aiohttp.ClientSession(access.server, headers=access.headers, connector=connector) as http:
        namespace = f"sandbox-k8s-api-{os.urandom(4).hex()}"
        made = Wire(http, namespace)
        answer = await made("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        assert answer.status == 201, answer.body
        yield made
        await made("DELETE", "pods", {"gracePeriodSeconds": 0})
        for left in (await made("GET", "pods")).body["items"]:
            name, nothing = left["metadata"]["name"], {"metadata": {"finalizers": None}}
            await made("PATCH", f"pods/{name}", nothing, media_type=MERGE)
        await made("DELETE", f"/api/v1/namespaces/{namespace}")


@pytest.fixture
def needs_processes(access: Access) -> None:
    why = why_no_process_pods()
    if access.tls is None and why:
        pytest.skip(why)
