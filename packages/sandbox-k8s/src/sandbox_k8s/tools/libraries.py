"""The shared libraries and the loader of programs, as this machine's own loader finds them."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_k8s.errors import BackendUnavailableError

_FOUND = re.compile(r"\s+(\S+) => (/.*) \(0x[0-9a-f]+\)")
_LOADER = re.compile(r"\s+(/\S*/ld-\S+) \(0x[0-9a-f]+\)")
_MISSING = re.compile(r"\s+(\S+) => not found")
# Opened by name while a program runs, so that ldd does not see them: ending a thread, looking a user up.
_OPENED_LATER = ("libgcc_s.so.1", "libnss_files.so.2")


@dataclass(frozen=True)
class Libraries:
    """What programs need to be loaded.

    Attributes:
        loader: glibc's.
        files: The libraries, by the name they are asked for.
    """

    loader: Path
    files: dict[str, Path]


def needed_by(programs: Sequence[Path]) -> Libraries:
    """The libraries of programs and modules, found by ``ldd``.

    Raises:
        BackendUnavailableError: ldd is missing, a library is missing, or they are not linked against glibc.
    """
    try:
        told = subprocess.run(
            ["ldd", *map(str, programs)],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C"},
        ).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        raise BackendUnavailableError(f"ldd cannot say which libraries Python needs: {problem}") from problem
    if missing := sorted(set(_MISSING.findall(told))):
        raise BackendUnavailableError(f"ldd does not find {', '.join(missing)}, which this Python needs")
    loaders = {Path(path) for path in _LOADER.findall(told)}
    if len(loaders) != 1 or not next(iter(loaders)).name.startswith("ld-linux"):
        raise BackendUnavailableError(
            f"this Python is not linked against glibc (its loaders: {sorted(map(str, loaders))}); "
            "run build-tools with one that is"
        )
    files = {name: Path(path) for name, path in _FOUND.findall(told)}
    for name in _OPENED_LATER:
        path = files["libc.so.6"].with_name(name)
        if path.is_file():
            files[name] = path
    return Libraries(loaders.pop(), dict(sorted(files.items())))
