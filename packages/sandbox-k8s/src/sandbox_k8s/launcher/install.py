"""Copying the tree that this launcher runs from, as an init container does into an emptyDir.

::

    launcher install /tools

What else lies beside the tree (an image's ``/proc``) is not copied.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

RECORD = "tools.json"
FOLDERS = ("bin", "launcher", "lib")
_EXECUTABLE = 0o755
_PLAIN = 0o644


def files_of(tree: Path) -> Iterator[tuple[str, int]]:
    """Every file of a tree but its record: path relative to the root, and mode; in a fixed order."""
    for top in FOLDERS:
        for folder, folders, files in os.walk(tree / top):
            folders.sort()
            for name in sorted(files):
                path = Path(folder, name)
                mode = _EXECUTABLE if path.stat().st_mode & 0o100 else _PLAIN
                yield path.relative_to(tree).as_posix(), mode


def content_hash(tree: Path) -> str:
    """``sha256:...`` over the names, modes and bytes of all files of a tree but its record."""
    whole = hashlib.sha256()
    for name, mode in files_of(tree):
        with (tree / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{digest} {mode:o} {name}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def copy_tree(source: Path, target: Path) -> None:
    """Copy a tree; its record comes last, so a tree with a record is whole.

    Raises:
        OSError: Something cannot be read or written.
        ValueError: The copy is not what the record says.
    """
    for name, mode in files_of(source):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, path)
        path.chmod(mode)
    record = (source / RECORD).read_bytes()
    wanted, got = json.loads(record)["content"], content_hash(target)
    if wanted != got:
        raise ValueError(f"the copy in {target} has content {got}, but {RECORD} says {wanted}")
    (target / RECORD).write_bytes(record)


def main(arguments: list[str]) -> int:
    """Copy the own tree to the folder named."""
    parser = argparse.ArgumentParser(prog="launcher install")
    parser.add_argument("target", type=Path, help="an empty folder")
    options = parser.parse_args(arguments)
    own = Path(__file__).resolve().parent.parent
    if not (own / RECORD).is_file():
        sys.stderr.write(f"launcher install: {own} is no tree of `sandbox-k8s build-tools`: no {RECORD}\n")
        return 2
    try:
        copy_tree(own, options.target)
    except (OSError, ValueError) as problem:
        sys.stderr.write(f"launcher install: {problem}\n")
        return 1
    return 0
