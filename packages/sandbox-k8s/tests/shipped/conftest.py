"""The shipped manifests, applied to a namespace of a real cluster that admits restricted pods alone.

Needs kubectl, and SANDBOX_K8S_LOAD_IMAGE for the reaper's image, which is made of this machine's Python.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import sandbox_k8s
from packaging.requirements import Requirement
from sandbox_k8s import ClientConfig, KubernetesConfig, Sandbox, SandboxClient, SandboxSpec
from sandbox_k8s.kubernetes.shipped import WORKER, ManifestOptions, manifests
from sandbox_k8s.local import base_python
from sandbox_k8s.tools import libraries

KUBECONFIG = os.environ.get("SANDBOX_K8S_KUBECONFIG", "")
WHY_NOT = (
    ("" if shutil.which("kubectl") else "kubectl is not installed")
    or ("" if KUBECONFIG else "SANDBOX_K8S_KUBECONFIG names no cluster")
    or ("" if os.environ.get("SANDBOX_K8S_LOAD_IMAGE") else "SANDBOX_K8S_LOAD_IMAGE is not set")
)
Kubectl = Callable[..., str]


def run_kubectl(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        ["kubectl", "--kubeconfig", KUBECONFIG, *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    """What kubectl prints; an error of it fails the test."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    return run_kubectl


@pytest.fixture(scope="session")
def apply(kubectl: Kubectl) -> Callable[[Any], str]:
    """Apply YAML, or plain objects."""

    def apply_it(what: str | list[Any]) -> str:
        text = (
            what if isinstance(what, str) else json.dumps({"apiVersion": "v1", "kind": "List", "items": what})
        )
        return kubectl("apply", "-f", "-", stdin=text)

    return apply_it


@pytest.fixture(scope="session")
def reaper_name() -> str:
    """The reaper's image; the fixture `reaper_image` brings it."""
    return "localhost/sandbox-k8s-test-reaper:1"


@pytest.fixture(scope="session")
def namespace(place: str, kubectl: Kubectl, apply: Callable[[Any], str], reaper_name: str) -> Iterator[str]:
    """Of these tests' own, with the accounts and the reaper, which sweeps when it is asked to."""
    name = f"sandbox-k8s-manifests-{os.urandom(3).hex()}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}])
    options = ManifestOptions(namespace=name, image=reaper_name, schedule="0 0 1 1 *")
    apply(manifests("rbac", options) + manifests("reaper", options))
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def kubeconfig_of(namespace: str, tmp_path: Path, kubectl: Kubectl) -> Callable[[str], Path]:
    """A kubeconfig with a token of a service account and nothing else."""

    def make(account: str) -> Path:
        token = kubectl("create", "token", account, "-n", namespace, "--duration=20m").strip()
        seen = json.loads(kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json"))
        seen["users"] = [{"name": account, "user": {"token": token}}]
        seen["contexts"][0]["context"] = {"cluster": seen["clusters"][0]["name"], "user": account}
        path = tmp_path / f"{account}.kubeconfig"
        path.write_text(json.dumps(seen))
        return path

    return make


@pytest.fixture
def worker(config: ClientConfig, namespace: str, kubeconfig_of: Callable[[str], Path]) -> KubernetesConfig:
    """Settings of a worker with the shipped account."""
    assert isinstance(config, KubernetesConfig)
    kubeconfig = kubeconfig_of(WORKER)
    return msgspec.structs.replace(config, namespace=namespace, kubeconfig=kubeconfig, run_as_user=1000)


@pytest.fixture
def start_all() -> Callable[..., Any]:
    """Sandboxes in the order of their specs, started at once."""

    async def start_them(client: SandboxClient, *specs: SandboxSpec) -> list[Sandbox]:
        found: dict[int, Sandbox] = {}

        async def start(number: int, spec: SandboxSpec) -> None:
            found[number] = await client.start(spec)

        async with anyio.create_task_group() as tasks:
            for number, spec in enumerate(specs):
                tasks.start_soon(start, number, spec)
        return [found[number] for number in sorted(found)]

    return start_them


def reaper_layer() -> bytes:
    """An image with ``sandbox-k8s`` as a program: this Python, this package and all that it needs."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    standard, site = f"usr/lib/{version}", f"usr/lib/{version}/site-packages"
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = {
        f"{standard}/{path.relative_to(stdlib)}": path for path in _files(stdlib, "site-packages", "test")
    }
    package = Path(sandbox_k8s.__file__).parent
    files |= {f"{site}/sandbox_k8s/{path.relative_to(package)}": path for path in _files(package)}
    # The client's models are most of it; newer ones load each when it is used, and none is.
    lazy = "kubernetes.client.models.v1_pod" not in sys.modules
    for name in _needed_packages():
        for path in metadata.distribution(name).files or ():
            generated = (
                path.parent.name in ("api", "models") and path.stem != "__init__"
            ) or "aio" in path.parts
            if ".." not in path.parts and path.suffix != ".pyc" and not (lazy and generated):
                files[f"{site}/{path}"] = Path(str(path.locate()))
    python = base_python().resolve()
    compiled = [path for path in files.values() if path.suffix == ".so" and "_tkinter" not in path.name]
    carried = libraries.needed_by([python, *compiled])
    files |= {f"usr/lib/{name}": path for name, path in carried.files.items()}
    files |= {f"usr/lib/{carried.loader.name}": carried.loader, "usr/bin/python3": python}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", dereference=True) as archive:
        for name, path in sorted(files.items()):
            archive.add(path, name)
        program = b"#!/usr/bin/python3\nimport sys\nfrom sandbox_k8s.cli import main\nsys.exit(main())\n"
        entry = tarfile.TarInfo("usr/bin/sandbox-k8s")
        entry.mode, entry.size = 0o755, len(program)
        archive.addfile(entry, io.BytesIO(program))
        for name in ("lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "usr/lib"
            archive.addfile(link)
    return out.getvalue()


def _files(folder: Path, *without: str) -> Iterator[Path]:
    unused = {*without, "__pycache__", "idlelib", "tkinter", "lib2to3", "ensurepip", "turtledemo"}
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - unused
        yield from (Path(parent, name) for name in names if not name.endswith(".a"))


def _needed_packages() -> set[str]:
    """Distributions that ``sandbox-k8s[kubernetes]`` installs, itself left out."""
    wanted, found = ["sandbox-k8s[kubernetes]"], set[str]()
    while wanted:
        requirement = Requirement(wanted.pop())
        for text in metadata.requires(requirement.name) or ():
            needs = Requirement(text)
            extras = requirement.extras or {""}
            if any(needs.marker is None or needs.marker.evaluate({"extra": extra}) for extra in extras):
                if needs.name not in found:
                    wanted.append(f"{needs.name}[{','.join(needs.extras)}]" if needs.extras else needs.name)
                found.add(needs.name)
    return found


@pytest.fixture
def reaper_image(reaper_name: str, bring_image: Callable[[str, Callable[[], bytes]], None]) -> None:
    """Bring the reaper's image to the nodes."""
    bring_image(reaper_name, reaper_layer)
