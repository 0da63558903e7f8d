"""Images of this machine's programs, made without a container program and brought to a cluster's nodes."""

import fcntl
import io
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from sandbox_k8s.local import base_python
from sandbox_k8s.tools import libraries, stdlib

LOAD = os.environ.get("SANDBOX_K8S_LOAD_IMAGE", "")
PROGRAMS = """bash sh basename cat chmod cp cut date dd dirname env find git grep head id kill ln ls
    mkdir mkfifo mv od pkill printf prlimit ps pwd readlink renice rm sed seq setsid sha256sum sleep sort
    stat tail touch tr true wc"""


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of this test run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextmanager
def once(folder: Path, name: str) -> Iterator[bool]:
    """Whether this worker is the first to do something; the others wait until it is done."""
    done = folder / f"{name}.done"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not done.exists()
        done.touch()


def load_image(archive: Path) -> None:
    """Bring an image archive to the nodes."""
    subprocess.run([*shlex.split(LOAD), str(archive)], check=True, capture_output=True)


def python_files(tree: Path) -> dict[str, Path]:
    """This Python as /usr/bin/python3: paths below the root, and what is to be there.

    Its libraries are those of the tree, which have no debugging symbols.
    """
    modules = stdlib.used_by(Path("no-launcher/none"), ["http.server", "site"])
    python = base_python().resolve()
    carried = libraries.needed_by([python, *modules.extensions.values()])
    standard = f"usr/lib/python{sys.version_info.major}.{sys.version_info.minor}"
    files = {f"{standard}/{name}": path for name, path in modules.sources.items()}
    files |= {f"{standard}/lib-dynload/{name}": path for name, path in modules.extensions.items()}
    for name, path in carried.files.items():
        stripped = tree / "lib" / name
        files[f"usr/lib/{name}"] = stripped if stripped.exists() else path
    return files | {"usr/bin/python3": python}


def machine_layer(more: Mapping[str, Path] | None = None) -> bytes:
    """A root folder with this machine's shell and the programs that the contract's commands call."""
    words = PROGRAMS.split()
    paths = [Path(found) for word in words if (found := shutil.which(word))]
    carried = libraries.needed_by([path.resolve() for path in paths])
    files = {f"usr/bin/{path.name}": path for path in paths}
    files |= {f"usr/lib/{name}": path for name, path in carried.files.items()} | dict(more or {})
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
