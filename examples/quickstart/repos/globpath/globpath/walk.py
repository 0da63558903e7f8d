"""Walking a tree through a filter."""

import os
from collections.abc import Callable, Iterator


def walk(root: str | os.PathLike[str], selected: Callable[[str], bool]) -> Iterator[str]:
    """Yield the selected files below ``root`` as relative paths with ``/``, sorted.

    Symbolic links to directories are not followed.
    """
    yield from _walk(os.fspath(root), "", selected)


def _walk(root: str, prefix: str, selected: Callable[[str], bool]) -> Iterator[str]:
    with os.scandir(os.path.join(root, prefix)) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, f"{path}/", selected)
        elif selected(path):
            yield path
