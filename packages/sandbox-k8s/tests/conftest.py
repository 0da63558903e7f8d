"""Sandboxes for tests, in every kind of place, and the check that none of them leaves anything behind."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from sandbox_k8s import ClientConfig, LocalConfig, Sandbox, SandboxClient, Session, bubblewrap
from sandbox_k8s.local import PYTHON_PREFIX
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, why_no_process_pods
from sandbox_k8s.tools import build, write_archive
from sandbox_k8s.tools.image import write_image
from sandbox_k8s.tools.layout import this_architecture

from .images import LOAD, load_image, machine_layer, once, python_files, shared_folder
from .runs import KUBECONFIG, ClusterImages, client_of, cluster_config, fake_config, pods_of

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Under nohup, and in the background of a script: no shell that a test starts could be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
WHY_NO_FAKE = "" if find_spec("kubernetes") else "the extra sandbox-k8s[kubernetes] is not installed"

QUICK_ON_FAKE = {
    "test_streams_are_apart_and_the_exit_code_is_the_commands",
    "test_output_that_is_not_utf8_is_bytes",
    "test_time_out_kills_grandchildren_that_ignore_sigterm",
    "test_cancelling_the_task_kills_the_command",
    "test_folder_variables_functions_and_status_persist",
    "test_late_output_does_not_turn_up_in_the_next_answer",
    "test_read_and_write_are_byte_exact",
    "test_a_tree_goes_in_and_comes_out_the_same",
    "test_stopping_twice_does_nothing_and_a_stopped_sandbox_says_so",
    "test_cancellation_while_starting_leaves_nothing",
    "test_the_older_owner_is_fenced_and_its_command_ends",
    "test_a_guest_runs_beside_the_owner_and_cannot_stop",
    "test_the_launchers_own_file_in_a_pod_is_written_again",
}
"""Tests of the contract that run on the fake cluster each time, one or two of a kind. The launcher is the
same everywhere: what differs is how sandboxes begin, change owners and end. The others are slow there."""
WAIT_LONG = (
    "test_60_lives_in_pods_of_a_real_cluster",
    "test_a_full_disk_evicts_its_own_sandbox_and_no_other",
)
"""They come first: other workers go through the rest meanwhile."""
OF_PODS = ("test_cluster.py", "test_reports.py", "test_cli_cluster.py", "test_cli_attach.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the default tests short."""
    items.sort(key=lambda item: item.name.partition("[")[0] not in WAIT_LONG)
    for item in items:
        ours = Path(__file__).parent in item.path.parents  # the hook is given the tests of all packages
        if not ours or not isinstance(item, pytest.Function) or "place" not in item.fixturenames:
            continue
        of_pods = item.path.name in OF_PODS
        if item.callspec.params["place"] == "fake" and not of_pods and item.originalname not in QUICK_ON_FAKE:
            item.add_marker(pytest.mark.slow)


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
    table = subprocess.run(["ps", "-wweo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return left + [line for line in table.splitlines() if f"{folder}/sandboxes" in line]


@pytest.fixture
def local_config(root: Path, isolation: str) -> LocalConfig:
    return LocalConfig(root=root, isolation=isolation, grace_s=0.3)  # type: ignore[arg-type]


@pytest.fixture
async def local_client(local_config: LocalConfig) -> AsyncIterator[SandboxClient]:
    async with SandboxClient.local(local_config) as client:
        yield client


@pytest.fixture(
    params=["bubblewrap", "process", "fake", pytest.param("kubernetes", marks=pytest.mark.cluster)],
    scope="session",
)
def place(request: pytest.FixtureRequest) -> str:
    """Where the contract is tried out; all places keep the same one."""
    why_not = {
        "bubblewrap": WHY_NO_BUBBLEWRAP,
        "fake": WHY_NO_FAKE or why_no_process_pods(),
        "kubernetes": WHY_NO_CLUSTER,
    }
    if why := why_not.get(request.param):
        pytest.skip(why)
    return request.param


@pytest.fixture(scope="session")
def fake() -> Iterator[FakeCluster]:
    """One fake cluster for all tests of the contract; each has a run of its own there."""
    with FakeCluster(FakeClusterConfig(pods="process", speed=20)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster_images(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ClusterImages:
    """Those that the environment names, or images of this machine's programs, brought to the nodes."""
    if not LOAD:
        return ClusterImages(os.environ["SANDBOX_K8S_IMAGE"], os.environ["SANDBOX_K8S_TOOLS_IMAGE"])
    images = ClusterImages(
        "localhost/sandbox-k8s-test-contract:1", "localhost/sandbox-k8s-test-contract-tools:1"
    )
    tree: Path = request.getfixturevalue("tree")
    archive = tmp_path_factory.mktemp("images") / "tools.tar"
    with once(shared_folder(tmp_path_factory), "contract-tools") as first:
        if first:
            write_archive(tree, archive, name=images.tools)
            load_image(archive)
    request.getfixturevalue("bring_image")(images.sandbox, machine_layer)
    return images


@pytest.fixture(scope="session")
def bring_image(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], bytes]], None]:
    """Bring an image of one layer to the nodes: its name, and what makes the layer."""

    def bring(name: str, layer: Callable[[], bytes]) -> None:
        with once(shared_folder(tmp_path_factory), name.replace("/", "-")) as first:
            if first:
                archive = tmp_path_factory.mktemp("image") / "image.tar"
                platform = {"architecture": this_architecture(), "os": "linux"}
                write_image(archive, name, layer(), {"Env": ["PATH=/usr/bin"]}, platform)
                load_image(archive)

    return bring


@pytest.fixture(scope="session")
def bring_python(
    bring_image: Callable[[str, Callable[[], bytes]], None], tree: Path
) -> Callable[[str], None]:
    """Bring an image that also has this machine's Python, as far as an HTTP server needs it."""
    return lambda name: bring_image(name, lambda: machine_layer(python_files(tree)))


@pytest.fixture(scope="session")
def contract_layer() -> Callable[[], bytes]:
    """What makes the one layer of the image that the contract's sandboxes have."""
    return machine_layer


@contextmanager
def checked_config(place: str, request: pytest.FixtureRequest) -> Iterator[ClientConfig]:
    """Settings of a place of one's own; at the end nothing may be left there."""
    if place not in ("fake", "kubernetes"):
        with checked_root() as root:
            yield LocalConfig(root=root, isolation=place, grace_s=0.3)  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory(prefix="sbx-") as folder:
        if place == "fake":
            config = fake_config(Path(folder), request.getfixturevalue("fake"))
        else:
            config = cluster_config(Path(folder), request.getfixturevalue("cluster_images"))
        yield config
        assert pods_of(config) == [], "a sandbox left a pod behind"


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
    folder = shared_folder(tmp_path_factory)
    with once(folder, "tree") as first:
        if first:
            build(folder / "tree")
    return folder / "tree"
