"""Where things are in a tree, and the record at its root.

::

    tools.json          the record: architecture, versions, content hash
    bin/launcher        the interpreter; named so that ``pkill python`` does not mean it
    lib/ld.so           the loader; started first, it is told where the libraries are
    lib/*.so*           every shared library that the interpreter and its modules need
    lib/python3.N/      the part of the standard library that the launcher can import, compiled
    launcher/           the launcher
"""

import platform
import sys
from pathlib import Path

import msgspec

from sandbox_k8s.errors import BackendUnavailableError, ConfigError
from sandbox_k8s.launcher.install import RECORD

KIND = "sandbox-k8s tools"
VERSION = 1
LOADER = "lib/ld.so"
LIBRARIES = "lib"
INTERPRETER = "bin/launcher"
LAUNCHER = "launcher"
IMAGE_TREE = "/sandbox-k8s"
"""Where containers of its own image find it: a link to the root, as Python looks for no library in ``/``."""
LARGEST_TREE = 60 << 20
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class ToolsRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tree is.

    Attributes:
        os: As Kubernetes' node label ``kubernetes.io/os`` names it.
        architecture: As ``kubernetes.io/arch`` names it.
        python: Version of the interpreter.
        libc: Name and version of the C library.
        release: Of sandbox-k8s.
        content: ``sha256:...`` over names, modes and bytes of everything else in the tree.
        size: Bytes of all files.
    """

    kind: str = KIND
    version: int = VERSION
    os: str = "linux"
    architecture: str
    python: str
    libc: str
    release: str
    content: str
    size: int


def this_architecture() -> str:
    """This machine's architecture in the words of Kubernetes and OCI.

    Raises:
        BackendUnavailableError: Trees are not made on such a machine.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        raise BackendUnavailableError(
            f"a launcher tree is made on Linux with {' or '.join(_ARCHITECTURES)}, "
            f"not on {sys.platform} with {machine}"
        )
    return _ARCHITECTURES[machine]


def read_record(tree: Path) -> ToolsRecord:
    """What the tree at this path is.

    Raises:
        ConfigError: There is none, or it is of a version that this release does not know.
    """
    path = tree / RECORD
    try:
        record = msgspec.json.decode(path.read_bytes(), type=ToolsRecord)
    except OSError as problem:
        raise ConfigError(f"{tree} is no launcher tree: {path}: {problem.strerror}") from problem
    except msgspec.MsgspecError as problem:
        raise ConfigError(f"{path} is not the record of a launcher tree: {problem}") from problem
    if (record.kind, record.version) != (KIND, VERSION):
        raise ConfigError(
            f"{path} is {record.kind!r} of version {record.version}; this release reads {KIND!r} {VERSION}"
        )
    return record


def write_record(tree: Path, record: ToolsRecord) -> None:
    """Put the record into a tree."""
    path = tree / RECORD
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    path.chmod(0o644)
