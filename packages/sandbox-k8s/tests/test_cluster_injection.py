"""Every way of bringing the launcher in, into an image that has busybox and a Python that does not work."""

import io
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sandbox_k8s import ClientConfig, SandboxClient, SandboxSpec, SandboxStartError
from sandbox_k8s.kubernetes.config import TOOLS_PATH, Injection, KubernetesConfig
from sandbox_k8s.local import LAUNCHER, base_python
from sandbox_k8s.tools import libraries

BUSYBOX = Path("/bin/busybox")
WORDS = ("cat", "chmod", "echo", "env", "id", "ls", "mkdir", "ps", "sh", "sleep", "touch", "true")
BARE, BAKED = "localhost/sandbox-k8s-test-bare:1", "localhost/sandbox-k8s-test-baked:1"
PIP, WHEEL = "localhost/sandbox-k8s-test-pip:1", "/wheels/sandbox_k8s-0.0.1-py3-none-any.whl"
PYTHON = b"#!/bin/sh\necho 'this Python does not work' >&2\nexit 66\n"
WAYS: dict[str, dict[str, Any]] = {
    "as-root": {},
    "read-only-root": {"read_only_root": True},
    "user": {"run_as_user": 1234},
    "user-and-read-only-root": {"run_as_user": 1234, "read_only_root": True},
}
SLOW = ("read-only-root", "user")  # the last has both

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.timeout(120),
    pytest.mark.parametrize("place", ["kubernetes"], indirect=True),
    pytest.mark.skipif(
        not BUSYBOX.exists(), reason=f"{BUSYBOX} is missing (Debian: apt install busybox-static)"
    ),
]


def bare_layer(tree: Path | None = None) -> bytes:
    """busybox, two Pythons that fail, and perhaps a tools tree where injection would put it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", dereference=True) as archive:
        archive.add(BUSYBOX, "usr/bin/busybox")
        links = {f"usr/bin/{word}": "busybox" for word in WORDS} | {"bin": "usr/bin"}
        for name, target in links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for name in ("usr/bin/python3", "usr/bin/python"):
            program = tarfile.TarInfo(name)
            program.size, program.mode = len(PYTHON), 0o755
            archive.addfile(program, io.BytesIO(PYTHON))
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(folder)
        if tree is not None:
            archive.add(tree, TOOLS_PATH.removeprefix("/"))
    return out.getvalue()


@pytest.fixture
def settings(
    config: ClientConfig, bring_image: Callable[[str, Callable[[], bytes]], None], tree: Path
) -> KubernetesConfig:
    assert isinstance(config, KubernetesConfig)
    bring_image(BARE, bare_layer)
    bring_image(BAKED, lambda: bare_layer(tree))
    return msgspec.structs.replace(config, image=BARE, cpu=0.2)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way in SLOW else ()) for way in WAYS]
)
@pytest.mark.parametrize("kind", ["image_volume", "init_copy", "baked"])
async def test_an_image_that_helps_with_nothing(
    settings: KubernetesConfig, kind: str, way: str, tmp_path: Path
) -> None:
    injection = settings.injection
    if kind == "init_copy":
        injection = Injection(kind="init_copy", image=injection.image)
    elif kind == "baked":
        injection = Injection(kind="baked")
    config = msgspec.structs.replace(
        settings, injection=injection, **WAYS[way], image=BAKED if kind == "baked" else BARE
    )
    user = WAYS[way].get("run_as_user", 0)
    await shows_nothing_of_its_own(config, user, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["as-root", "user-and-read-only-root"])
async def test_pip_of_the_image_on_request(
    config: ClientConfig,
    bring_image: Callable[[str, Callable[[], bytes]], None],
    contract_layer: Callable[..., bytes],
    tmp_path: Path,
    way: str,
) -> None:
    assert isinstance(config, KubernetesConfig)
    bring_image(PIP, lambda: contract_layer(python_with_pip(tmp_path)))
    injection = Injection(kind="pip", requirement=WHEEL)
    config = msgspec.structs.replace(config, injection=injection, image=PIP, cpu=0.5, **WAYS[way])
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start()
        assert (await sandbox.execute("exit 3")).exit_code == 3
        launcher = await sandbox.execute("tr '\\0' ' ' < /proc/1/cmdline")
        assert launcher.stdout.startswith(
            b"python3 -I -S -B -X utf8 /opt/sandbox-k8s/sandbox_k8s/launcher pod"
        )
        session = await sandbox.session()
        await session.run("cd /tmp; X=kept")
        assert (await session.run("echo $X in $PWD")).stdout == b"kept in /tmp\n"


async def test_an_image_without_python_cannot_have_pip_and_is_told_so(settings: KubernetesConfig) -> None:
    config = msgspec.structs.replace(settings, injection=Injection(kind="pip"))
    async with SandboxClient.kubernetes(config) as client:
        with pytest.raises(SandboxStartError, match="this Python does not work") as failed:
            await client.start()
    assert failed.value.diagnosis is not None
    assert (failed.value.diagnosis.failure, failed.value.retryable) == ("init_failed", False)


def python_with_pip(folder: Path) -> dict[str, Path]:
    """This Python as /usr/bin/python3 with the pip that it bundles, and a wheel of the launcher."""
    library = Path(sysconfig.get_path("stdlib"))
    bundled = list(library.glob("ensurepip/_bundled/pip-*.whl"))
    if not bundled:
        pytest.skip("this Python bundles no pip")
    left_out = ("test", "idlelib", "lib2to3", "tkinter", "turtledemo", "site-packages", "ensurepip")
    sources = [
        path
        for path in library.rglob("*.py")
        if path.relative_to(library).parts[0] not in left_out and not path.parts[-2].startswith("test")
    ]
    modules = [
        path
        for path in library.glob("lib-dynload/*.so")
        if not path.name.startswith(("_tkinter", "_test", "_ctypes_test", "_xx", "xx"))
    ]
    python = base_python().resolve()
    carried = libraries.needed_by([python, *modules])
    standard = f"usr/lib/python{sys.version_info.major}.{sys.version_info.minor}"
    files = {f"{standard}/{path.relative_to(library)}": path for path in (*sources, *modules)}
    files |= {f"usr/lib/{name}": path for name, path in carried.files.items()} | {"usr/bin/python3": python}
    with zipfile.ZipFile(bundled[0]) as pip:
        pip.extractall(folder / "pip")
    files |= {f"{standard}/site-packages/{path.name}": path for path in (folder / "pip").iterdir()}
    return files | {WHEEL.removeprefix("/"): wheel(folder)}


def wheel(folder: Path) -> Path:
    """The launcher as a wheel, as far as pip looks at it."""
    path = folder / Path(WHEEL).name
    about = "sandbox_k8s-0.0.1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for source in LAUNCHER.glob("*.py"):
            archive.write(source, f"sandbox_k8s/launcher/{source.name}")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: sandbox-k8s\nVersion: 0.0.1\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


async def shows_nothing_of_its_own(config: KubernetesConfig, user: int, folder: Path) -> None:
    """A sandbox works, as that user, and its commands see the image's Python and none of ours."""
    kind, read_only = config.injection.kind, config.read_only_root
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start(SandboxSpec(env={"GIVEN": "yes"}))
        shown = await sandbox.execute("id -u; echo $PATH $GIVEN; echo ${LD_LIBRARY_PATH-none}")
        assert shown.stdout == b"%d\n/usr/bin yes\nnone\n" % user
        failed = await sandbox.execute(["python3", "-c", "print(1)"])
        assert (failed.exit_code, failed.stdout) == (66, b"")
        assert (await sandbox.execute("touch /tmp/x mine; echo $?; touch /usr/x")).stdout == b"0\n"
        written = await sandbox.execute(f"touch /usr/x; touch {TOOLS_PATH}/x")
        assert (written.exit_code != 0) == (kind != "baked" or user != 0 or read_only)
        assert (await sandbox.execute("touch ~/.gitconfig && ls -A ~")).stdout == b".gitconfig\n"
        session = await sandbox.session()
        await session.run("cd /tmp; X=kept")
        assert (await session.run("echo $X in $PWD")).stdout == b"kept in /tmp\n"
        (folder / "up").mkdir()
        (folder / "up" / "run").write_bytes(bytes(range(256)))
        (folder / "up" / "run").chmod(0o755)
        await sandbox.upload(folder / "up", "copied")
        await sandbox.download("copied", folder / "down")
        assert (folder / "down" / "run").read_bytes() == bytes(range(256))
        assert (folder / "down" / "run").stat().st_mode & 0o777 == 0o755
