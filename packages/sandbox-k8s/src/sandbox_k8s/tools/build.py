"""Making a tree from the Python that runs this."""

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from sandbox_k8s.errors import BackendUnavailableError, ConfigError
from sandbox_k8s.launcher.__main__ import PROGRAMS
from sandbox_k8s.launcher.install import content_hash, files_of
from sandbox_k8s.local import LAUNCHER as LAUNCHER_SOURCE
from sandbox_k8s.local import base_python

from . import layout, libraries, stdlib

_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def build(out: Path) -> layout.ToolsRecord:
    """Make a tree at ``out``; the same input gives the same bytes.

    Args:
        out: A folder that is missing or empty.

    Raises:
        ConfigError: There is something at ``out``, or it cannot be made.
        BackendUnavailableError: This machine's Python cannot be carried, or is too large.
    """
    architecture = layout.this_architecture()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} is not an empty folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent)
    except OSError as problem:
        raise ConfigError(f"--out {out} cannot be made: {problem.strerror}") from problem
    with folder as temporary:
        tree = Path(temporary, "tree")
        _fill(tree)
        record = layout.ToolsRecord(
            architecture=architecture,
            python=platform.python_version(),
            libc=" ".join(platform.libc_ver()),
            release=version("sandbox-k8s"),
            content=content_hash(tree),
            size=sum((tree / name).stat().st_size for name, _ in files_of(tree)),
        )
        layout.write_record(tree, record)
        if record.size > layout.LARGEST_TREE:
            raise BackendUnavailableError(
                f"the tree has {record.size >> 20} MB, the limit is {layout.LARGEST_TREE >> 20} MB; "
                "is `strip` (package binutils) missing?"
            )
        out.mkdir(exist_ok=True)
        out.rmdir()
        tree.rename(out)
    return record


def _fill(tree: Path) -> None:
    modules = stdlib.used_by(LAUNCHER_SOURCE, [*PROGRAMS.values()])
    python = base_python().resolve()
    carried = libraries.needed_by([python, *modules.extensions.values()])
    standard = tree / layout.LIBRARIES / _PYTHON
    dynload = standard / "lib-dynload"
    for folder in (tree / "bin", dynload, tree / layout.LAUNCHER):
        folder.mkdir(parents=True)
    binaries = [_copy(python, tree / layout.INTERPRETER, 0o755)]
    binaries += [_copy(path, dynload / name) for name, path in modules.extensions.items()]
    for name, path in carried.files.items():
        copied = _copy(path, tree / layout.LIBRARIES / name)
        if name.startswith("libpython"):
            binaries.append(copied)
    _copy(carried.loader, tree / layout.LOADER, 0o755)
    for name, path in modules.sources.items():
        _copy(path, standard / name)
    for path in sorted(LAUNCHER_SOURCE.iterdir()):
        if path.is_file():
            _copy(path, tree / layout.LAUNCHER / path.name)
    _strip(binaries)
    _compile(tree, standard)
    _compile(tree, tree / layout.LAUNCHER)
    for path in _python_files(standard):
        path.unlink()  # the compiled file does; it stands where the source stood


def _python_files(folder: Path) -> Iterable[Path]:
    return sorted(folder.rglob("*.py"))


def _copy(source: Path, target: Path, mode: int = 0o644) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)
    return target


def _strip(binaries: Sequence[Path]) -> None:
    """Leave out debugging symbols, which are three quarters of a Python that was built from source."""
    strip = shutil.which("strip")
    if strip is not None:
        subprocess.run([strip, "--strip-unneeded", *map(str, binaries)], check=True, capture_output=True)


def _compile(tree: Path, folder: Path) -> None:
    """Compile with the interpreter that will read it, in a process of its own.

    What stands beside it in memory changes how constants are written; in a fresh process that is always the
    same. Nothing in the result depends on times or on where the tree was made.
    """
    words = ["-m", "compileall", "-q", "-b", "--invalidation-mode", "unchecked-hash", "-s", str(tree)]
    done = subprocess.run(
        [str(base_python()), "-I", "-S", "-B", *words, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BackendUnavailableError("the standard library cannot be compiled", evidence=done.stdout)
