"""Sandboxes for tests, in every kind of place, and the check that none of them leaves anything behind."""

import fcntl
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import pytest
from sandbox_k8s import ClientConfig, LocalConfig, Sandbox, SandboxClient, Session, bubblewrap
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.kubernetes.records import selector
from sandbox_k8s.local import PYTHON_PREFIX
from sandbox_k8s.tools import build, libraries, read_record, write_archive
from sandbox_k8s.tools.image import write_image

KUBECONFIG = os.environ.get("SANDBOX_K8S_KUBECONFIG", "")
LOAD = os.environ.get("SANDBOX_K8S_LOAD_IMAGE", "")
PROGRAMS = """bash sh basename cat chmod cp cut date dd dirname env find grep head id kill ln ls mkdir mkfifo
    mv od pkill printf ps pwd readlink rm sed seq setsid sha256sum sleep sort stat tail touch tr true wc"""
WHY_NO_BUBBLEWRAP = bubblewrap.why_unusable(PYTHON_PREFIX)


def why_no_cluster() -> str:
    if not KUBECONFIG:
        return "SANDBOX_K8S_KUBECONFIG names no cluster"
    if not LOAD and not {"SANDBOX_K8S_IMAGE", "SANDBOX_K8S_TOOLS_IMAGE"} <= os.environ.keys():
        return (
            "the cluster has no images: set SANDBOX_K8S_LOAD_IMAGE to the command that brings an archive to "
            "its nodes, or SANDBOX_K8S_IMAGE and SANDBOX_K8S_TOOLS_IMAGE to images that it can pull"
        )
    return "" if find_spec("kubernetes") else "the extra sandbox-k8s[kubernetes] is not installed"


WHY_NO_CLUSTER = why_no_cluster()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["bubblewrap", "process"], scope="session")
def isolation(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap" and WHY_NO_BUBBLEWRAP:
        pytest.skip(WHY_NO_BUBBLEWRAP)
    return request.param


@contextmanager
def checked_root() -> Iterator[Path]:
    """A folder for sandboxes; at the end there must be none, nor a process of one."""
    # Not tmp_path: its names are too long for a unix socket.
    folder = Path(tempfile.mkdtemp(prefix="sbx-")).resolve() / "r"
    yield folder
    left = leftovers(folder)
    shutil.rmtree(folder.parent)
    assert left == [], "a sandbox left something behind"


@pytest.fixture
def root() -> Iterator[Path]:
    with checked_root() as folder:
        yield folder


def leftovers(folder: Path) -> list[str]:
    """Folders of sandboxes under a root, and processes that speak of it."""
    sandboxes = folder / "sandboxes"
    left = [str(entry) for entry in sandboxes.iterdir()] if sandboxes.exists() else []
    table = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return left + [line for line in table.splitlines() if f"{folder}/sandboxes" in line]


@pytest.fixture
def local_config(root: Path, isolation: str) -> LocalConfig:
    return LocalConfig(root=root, isolation=isolation, grace_s=0.3)  # type: ignore[arg-type]


@pytest.fixture
async def local_client(local_config: LocalConfig) -> AsyncIterator[SandboxClient]:
    async with SandboxClient.local(local_config) as client:
        yield client


@pytest.fixture(
    params=["bubblewrap", "process", pytest.param("kubernetes", marks=pytest.mark.cluster)], scope="session"
)
def place(request: pytest.FixtureRequest) -> str:
    """Where the contract is tried out; all places keep the same one."""
    if request.param == "bubblewrap" and WHY_NO_BUBBLEWRAP:
        pytest.skip(WHY_NO_BUBBLEWRAP)
    if request.param == "kubernetes" and WHY_NO_CLUSTER:
        pytest.skip(WHY_NO_CLUSTER)
    return request.param


class ClusterImages(NamedTuple):
    """Names of images that the nodes of the cluster have or can pull."""

    sandbox: str
    tools: str


@pytest.fixture(scope="session")
def cluster_images(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ClusterImages:
    """Those that the environment names, or images of this machine's programs, brought to the nodes."""
    if not LOAD:
        return ClusterImages(os.environ["SANDBOX_K8S_IMAGE"], os.environ["SANDBOX_K8S_TOOLS_IMAGE"])
    images = ClusterImages(
        "localhost/sandbox-k8s-test-contract:1", "localhost/sandbox-k8s-test-contract-tools:1"
    )
    tree: Path = request.getfixturevalue("tree")
    done = tree.with_name("contract-images-are-loaded")
    with tree.with_name("images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder = tmp_path_factory.mktemp("images")
            platform = {"architecture": read_record(tree).architecture, "os": "linux"}
            layer = machine_layer()
            write_image(folder / "sandbox.tar", images.sandbox, layer, {"Env": ["PATH=/usr/bin"]}, platform)
            write_archive(tree, folder / "tools.tar", name=images.tools)
            for name in ("sandbox.tar", "tools.tar"):
                subprocess.run([*shlex.split(LOAD), str(folder / name)], check=True, capture_output=True)
            done.touch()
    return images


def machine_layer() -> bytes:
    """A root folder with this machine's shell and the programs that the contract's commands call."""
    words = PROGRAMS.split()
    paths = [Path(found) for word in words if (found := shutil.which(word))]
    carried = libraries.needed_by([path.resolve() for path in paths])
    files = {f"usr/bin/{path.name}": path for path in paths}
    files |= {f"usr/lib/{name}": path for name, path in carried.files.items()}
    files[f"usr/lib/{carried.loader.name}"] = carried.loader
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", dereference=True) as archive:
        for name, path in files.items():
            archive.add(path, name)
        for name, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for name, mode in (("tmp", 0o1777), ("root", 0o700)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            archive.addfile(folder)
        users = b"root:x:0:0::/root:/bin/bash\n"
        passwd = tarfile.TarInfo("etc/passwd")
        passwd.size = len(users)
        archive.addfile(passwd, io.BytesIO(users))
    return out.getvalue()


@contextmanager
def checked_config(place: str, request: pytest.FixtureRequest) -> Iterator[ClientConfig]:
    """Settings of a place of one's own; at the end nothing may be left there."""
    if place != "kubernetes":
        with checked_root() as root:
            yield LocalConfig(root=root, isolation=place, grace_s=0.3)  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory(prefix="sbx-") as folder:
        config = cluster_config(Path(folder), request.getfixturevalue("cluster_images"))
        yield config
        assert pods_of(config) == [], "a sandbox left a pod behind"


def cluster_config(folder: Path, images: ClusterImages) -> KubernetesConfig:
    """A run of one's own on the cluster that the environment names."""
    return KubernetesConfig(
        injection=Injection(kind="image_volume", image=images.tools),
        kubeconfig=Path(KUBECONFIG),
        namespace=os.environ.get("SANDBOX_K8S_NAMESPACE", "default"),
        run=f"test-{os.urandom(6).hex()}",
        run_key_file=folder / "run.key",
        image=images.sandbox,
        image_pull_policy="IfNotPresent",
        cpu=0.3,
        memory_bytes=256 << 20,
        disk_bytes=200 << 20,
        grace_s=0.3,
        start_timeout_s=60.0,
    )


def pods_of(config: KubernetesConfig) -> list[str]:
    """The pods of a run that nobody is deleting, asked for without a client of ours."""
    access = ApiAccess(config)
    query = {"labelSelector": selector(config.run)}
    path = f"api/v1/namespaces/{config.namespace}/pods"
    answer = Request("GET", path, query).send(access.new_pool(), access, 20.0)
    assert answer.status == 200, answer.data
    found = [pod["metadata"] for pod in json.loads(answer.data)["items"]]
    return [one["name"] for one in found if "deletionTimestamp" not in one]


def client_of(config: ClientConfig) -> SandboxClient:
    """A client, not open yet."""
    if isinstance(config, KubernetesConfig):
        return SandboxClient.kubernetes(config)
    assert isinstance(config, LocalConfig)
    return SandboxClient.local(config)


@pytest.fixture
def config(place: str, request: pytest.FixtureRequest) -> Iterator[ClientConfig]:
    with checked_config(place, request) as config:
        yield config


@pytest.fixture
def make_client(config: ClientConfig) -> Callable[[], SandboxClient]:
    """Clients of one place, as in several processes."""
    return lambda: client_of(config)


@pytest.fixture
async def client(make_client: Callable[[], SandboxClient]) -> AsyncIterator[SandboxClient]:
    async with make_client() as client:
        yield client


@pytest.fixture(scope="module")
async def shared_sandbox(place: str, request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    with checked_config(place, request) as config:
        async with client_of(config) as client:
            yield await client.start()


@pytest.fixture
async def sandbox(shared_sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    """One sandbox for all tests of a file, empty and without sessions for each."""
    yield shared_sandbox
    for name in (await shared_sandbox.info())["sessions"]:
        await Session(shared_sandbox, name).close()
    emptied = await shared_sandbox.execute("chmod -R u+rwX . && find . -mindepth 1 -delete")
    assert emptied.exit_code == 0


@pytest.fixture
def nobody_left() -> Callable[[Sandbox, str], object]:
    """Wait, inside, until no process has a variable of that name in its environment."""

    async def wait(sandbox: Sandbox, variable: str) -> None:
        quiet = await sandbox.execute(
            f"while grep -qsz '^{variable}=' /proc/[0-9]*/environ; do sleep 0.02; done", timeout_s=5
        )
        assert quiet.exit_code == 0, f"processes with {variable} live on"

    return wait


@pytest.fixture
def keeper_ended() -> Callable[[Path], object]:
    """Wait until the keeper of a sandbox's folder has ended: its lock becomes free."""

    async def wait(folder: Path, within_s: float = 15) -> None:
        def take_lock() -> None:
            try:
                descriptor = os.open(folder / "keeper.lock", os.O_RDWR)
            except FileNotFoundError:
                return
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.close(descriptor)

        with anyio.fail_after(within_s):
            await anyio.to_thread.run_sync(take_lock, abandon_on_cancel=True)

    return wait


@pytest.fixture
def script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run Python in another process; what it prints is read line by line. Killed at the end."""
    started: list[subprocess.Popen[str]] = []

    # What a shell starts in the background ignores SIGINT, and so would this.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"

    def run(code: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", heard + code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launcher tree, built once for all workers of a test run."""
    if sys.platform != "linux":
        pytest.skip("launcher trees are for Linux")
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (folder / "tree.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tree").exists():
            build(folder / "tree")
    return folder / "tree"
