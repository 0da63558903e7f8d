"""The launcher tree in pods of a real cluster: by image volume and by init container, in two kinds of image.

Needs SANDBOX_K8S_KUBECONFIG, and SANDBOX_K8S_LOAD_IMAGE: the command that brings an image archive to the
nodes; the archive's path comes after it (``kind load image-archive``, ``ctr -n k8s.io images import``). The
pods are reached by their addresses.
"""

import http.client
import io
import json
import os
import shlex
import shutil
import subprocess
import sysconfig
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from sandbox_k8s.kubernetes import classify
from sandbox_k8s.tools import (
    CONTAINER_REQUIREMENTS,
    ImageArchive,
    container_environment,
    install_command,
    launcher_command,
    libraries,
    node_requirements,
    read_record,
    write_archive,
)
from sandbox_k8s.tools.image import write_image

KUBECONFIG = os.environ.get("SANDBOX_K8S_KUBECONFIG")
LOAD = os.environ.get("SANDBOX_K8S_LOAD_IMAGE")
BUSYBOX = Path("/bin/busybox")
TOKEN = "a token that only the owner has"
TREE, STATE, PORT, USER = "/opt/sandbox-k8s", "/run/sandbox-k8s", 8000, 1234
ENV = {"GIVEN": "yes", "LD_LIBRARY_PATH": "/given"}
WORDS = ("cat", "env", "head", "id", "kill", "ls", "pkill", "ps", "sh", "sleep", "touch", "true")
# An ELF file for a processor that no cluster of these tests has (EM_IA_64).
FOREIGN = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\x32\x00\x01" + bytes(4075)


def why_not() -> str:
    for name, value in (("SANDBOX_K8S_KUBECONFIG", KUBECONFIG), ("SANDBOX_K8S_LOAD_IMAGE", LOAD)):
        if not value:
            return f"{name} is not set"
    if shutil.which("kubectl") is None:
        return "kubectl is not installed"
    return "" if BUSYBOX.exists() else f"{BUSYBOX} is missing (Debian: apt install busybox-static)"


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(180),
]


def kubectl(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        ["kubectl", "--kubeconfig", str(KUBECONFIG), *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def layer(files: dict[str, bytes | str]) -> bytes:
    """A layer of files (bytes: with mode 755) and links (text: where to)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def busybox_files() -> dict[str, bytes | str]:
    (preloaded,) = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("_ssl.*.so")
    return {
        "bin/busybox": BUSYBOX.read_bytes(),
        "lib/preloaded.so": preloaded.read_bytes(),  # needs libssl, which is not there
        **dict.fromkeys((f"bin/{word}" for word in WORDS), "busybox"),
    }


def debian_files() -> dict[str, bytes | str]:
    """bash and a few programs with this machine's C library, and a Python of long ago."""
    paths = [Path(found) for word in ("bash", *WORDS) if (found := shutil.which(word))]
    carried = libraries.needed_by([path.resolve() for path in paths])
    files: dict[str, bytes | str] = {f"usr/bin/{path.name}": path.read_bytes() for path in paths}
    files |= {f"usr/lib/{name}": path.read_bytes() for name, path in carried.files.items()}
    loader = carried.loader
    files[f"usr/lib/{loader.name}"] = loader.read_bytes()
    files |= {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib"}
    files["usr/bin/python3"] = b"#!/bin/sh\necho Python 3.6.8\n"
    files["etc/passwd"] = b"root:x:0:0::/root:/bin/bash\n"
    return files


@pytest.fixture(scope="module")
def images(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names of the images that were brought to the nodes."""
    folder = tmp_path_factory.mktemp("images")
    platform = {"architecture": read_record(tree).architecture, "os": "linux"}

    def image(name: str, files: dict[str, bytes | str], env: list[str]) -> ImageArchive:
        full = f"localhost/sandbox-k8s-test-{name}:1"
        return write_image(
            folder / f"{name}.tar", full, layer(files), {"Env": env, "WorkingDir": "/"}, platform
        )

    made = {
        "tools": write_archive(tree, folder / "tools.tar", name="localhost/sandbox-k8s-test-tools:1"),
        "busybox": image("busybox", busybox_files(), ["PATH=/bin", "LD_PRELOAD=/lib/preloaded.so"]),
        "debian": image("debian", debian_files(), ["PATH=/usr/local/bin:/usr/bin", "PYTHONHOME=/nonsense"]),
        "foreign": image("foreign", {"lib/ld.so": FOREIGN, "sandbox-k8s": "."}, []),
    }
    for archive in made.values():
        subprocess.run([*shlex.split(str(LOAD)), str(archive.path)], check=True, capture_output=True)
    return {kind: archive.name for kind, archive in made.items()}


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"sandbox-k8s-tools-{os.urandom(3).hex()}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def manifest(
    tree: Path,
    name: str,
    image: str,
    tools: str,
    way: str,
    *,
    user: int | None = USER,
    lease_s: float = 120.0,
) -> dict[str, Any]:
    tools_volume: dict[str, Any] = {"emptyDir": {}}
    if way == "image_volume":
        tools_volume = {"image": {"reference": tools, "pullPolicy": "Never"}}
    command = launcher_command(
        TREE, listen=f"0.0.0.0:{PORT}", state=STATE, token_hash=sha256(TOKEN.encode()).hexdigest(),
        lease_s=lease_s, sandbox_id=name, env=ENV,
    )  # fmt: skip
    main = {
        "name": "main", "image": image, "imagePullPolicy": "Never", "command": command,
        "env": container_environment(ENV),
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        **CONTAINER_REQUIREMENTS,
        "volumeMounts": [
            {"name": "tools", "mountPath": TREE, "readOnly": True}, {"name": "state", "mountPath": STATE},
        ],
    }  # fmt: skip
    spec: dict[str, Any] = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 60, "automountServiceAccountToken": False,
        "enableServiceLinks": False, **node_requirements(tree), "containers": [main],
        "volumes": [{"name": "tools", **tools_volume}, {"name": "state", "emptyDir": {}}],
    }  # fmt: skip
    if user is not None:
        spec["securityContext"] = {
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "runAsNonRoot": True,
        }
    if way == "init_copy":
        spec["initContainers"] = [{
            "name": "tools", "image": tools, "imagePullPolicy": "Never",
            "command": install_command("/target"),
            "volumeMounts": [{"name": "tools", "mountPath": "/target"}], **CONTAINER_REQUIREMENTS,
        }]  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


KINDS = [
    (image, way, user)
    for image in ("busybox", "debian")
    for way in ("image_volume", "init_copy")
    for user in (USER, None)
]


def name_of(image: str, way: str, user: int | None) -> str:
    return f"{image}-{way.replace('_', '-')}-{'root' if user is None else 'user'}"


@pytest.fixture(scope="module")
def pods(tree: Path, images: dict[str, str], namespace: str) -> dict[str, str]:
    """All pods, started together and ready: addresses by name."""
    items = [
        manifest(tree, name_of(image, way, user), images[image], images["tools"], way, user=user)
        for image, way, user in KINDS
    ]
    items.append(manifest(tree, "short", images["busybox"], images["tools"], "image_volume", lease_s=1))
    items += [
        manifest(tree, f"foreign-{way.replace('_', '-')}", images["busybox"], images["foreign"], way)
        for way in ("image_volume", "init_copy")
    ]
    everything = {"apiVersion": "v1", "kind": "List", "items": items}
    kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(everything))
    names = [name_of(*kind) for kind in KINDS]
    kubectl(
        "wait", "-n", namespace, "--for=condition=Ready", "--timeout=90s", *(f"pod/{name}" for name in names)
    )
    seen = json.loads(kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    return {one["metadata"]["name"]: one["status"]["podIP"] for one in seen if "podIP" in one["status"]}


def ask(host: str, path: str, body: dict[str, Any] | None = None, token: str = TOKEN) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(host, PORT, timeout=20)
    data = None if body is None else json.dumps(body)
    connection.request("GET" if data is None else "POST", path, data, {"X-API-Key": token})
    answer = connection.getresponse()
    result = json.loads(answer.read())
    connection.close()
    return answer.status, result


def run(host: str, command: str) -> str:
    status, result = ask(host, "/execute", {"command": command, "shell": True})
    assert status == 200, result
    return result["stdout"] + result["stderr"]


def state_of(namespace: str, name: str) -> dict[str, Any]:
    return json.loads(kubectl("get", "pod", "-n", namespace, name, "-o", "json"))["status"]


@pytest.mark.parametrize(("image", "way", "user"), KINDS, ids=[name_of(*kind) for kind in KINDS])
def test_a_pod(pods: dict[str, str], namespace: str, image: str, way: str, user: int | None) -> None:
    name = name_of(image, way, user)
    host = pods[name]
    assert ask(host, "/is_alive", token="wrong")[0] == 401
    info = ask(host, "/sbx/info")[1]
    assert (info["pid"], info["shell"]) == (1, "sh" if image == "busybox" else "bash")
    assert run(host, "id -u") == f"{user or 0}\n"
    shown = dict(line.split("=", 1) for line in run(host, "env").splitlines())
    ours = {"SANDBOX_ID", "TERM", "LANG"} | ({"BASH_ENV"} & shown.keys())
    of_shell_and_kubelet = {"PWD", "SHLVL", "_", "HOME", "HOSTNAME", "OLDPWD"}
    left = {key for key in shown if not key.startswith("KUBERNETES_")} - ours - of_shell_and_kubelet
    assert left == {"PATH", *ENV} | ({"PYTHONHOME"} if image == "debian" else set())
    assert ENV.items() <= shown.items()
    assert shown["PATH"] == ("/bin" if image == "busybox" else "/usr/local/bin:/usr/bin")
    assert "Read-only file system" in run(host, "touch /x")
    assert "Read-only file system" in run(host, f"touch {TREE}/x")
    assert run(host, "cat /proc/1/environ; head -c 1 /proc/1/mem").count("ermission denied") == 2
    if image == "debian":
        assert run(host, "python3") == "Python 3.6.8\n"
    for command in ("kill 0", "kill -TERM 1", "kill -9 1", "pkill -f launcher", "kill -9 -1"):
        ask(host, "/execute", {"command": command, "shell": True})
    assert ask(host, "/create_session", {})[0] == 200
    assert ask(host, "/run_in_session", {"command": "cd /bin; X=kept"})[1]["exit_code"] == 0
    assert ask(host, "/run_in_session", {"command": "echo $X in $PWD"})[1]["output"] == "kept in /bin\n"
    (status,) = state_of(namespace, name)["containerStatuses"]
    assert (status["restartCount"], status["ready"]) == (0, True)


def test_a_pod_that_nobody_uses_ends_itself_and_says_why(pods: dict[str, str], namespace: str) -> None:
    kubectl("wait", "-n", namespace, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=30s", "pod/short")
    (status,) = state_of(namespace, "short")["containerStatuses"]
    end = status["state"]["terminated"]
    assert end["exitCode"] == 0
    assert end["message"].startswith("sandbox-k8s: the lease ran out at 20"), end["message"]


@pytest.mark.parametrize("way", ["image-volume", "init-copy"])
def test_a_tree_of_another_architecture_is_named(pods: dict[str, str], namespace: str, way: str) -> None:
    name = f"foreign-{way}"
    kubectl("wait", "-n", namespace, "--for=jsonpath={.status.phase}=Failed", "--timeout=30s", f"pod/{name}")
    pod = json.loads(kubectl("get", "pod", "-n", namespace, name, "-o", "json"))
    events = json.loads(
        kubectl(
            "get", "events", "-n", namespace, "--field-selector", f"involvedObject.name={name}", "-o", "json"
        )
    )["items"]
    found = classify(pod, events, None)
    assert (found.failure, found.guess) == ("image_architecture", False), found


def test_deleting_a_pod_ends_it_long_before_its_grace(pods: dict[str, str], namespace: str) -> None:
    """Also while something runs that ignores SIGTERM: the grace is 60 s, and it takes about one."""
    name = name_of("debian", "image_volume", USER)
    run(pods[name], "(trap '' TERM; sleep 1000; sleep 1000) >/dev/null 2>&1 &")
    kubectl("delete", "pod", "-n", namespace, name, "--timeout=20s")
