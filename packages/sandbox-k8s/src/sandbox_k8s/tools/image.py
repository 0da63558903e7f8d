"""A tree as an OCI image in a file: one layer, no registry, no container program.

The tree is the root of the image, so that an image volume's mount point is the tree.

The format is the OCI image layout (https://github.com/opencontainers/image-spec, image-layout.md) in a tar
file, which ``ctr images import``, ``docker load``, ``podman load`` and ``skopeo copy oci-archive:`` read.
"""

import errno
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import msgspec

from sandbox_k8s.errors import ConfigError
from sandbox_k8s.launcher.install import RECORD, files_of

from . import layout
from .pod import tree_command

_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_COMPRESSION = 6
_WORD = "[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_NAME = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_WORD}(?:/{_WORD})*:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}"
)
_NOBODY = "65534:65534"


class ImageArchive(msgspec.Struct, frozen=True, kw_only=True):
    """An image archive.

    Attributes:
        digest: ``sha256:...`` of its manifest: what a registry will call it.
        size: Bytes of the file.
    """

    path: Path
    name: str
    digest: str
    size: int


def default_name(record: layout.ToolsRecord) -> str:
    """The name of a tree's image when the user gives none: release and architecture in the tag."""
    return f"localhost/sandbox-k8s-tools:{record.release}-{record.architecture}"


def check_archive(path: Path, name: str | None) -> None:
    """Refuse what `write_archive` could not write, before there is a tree.

    Args:
        path: Of the archive.
        name: ``REPOSITORY:TAG``; None is `default_name`.

    Raises:
        ConfigError: The name is none of an image, or there can be no file of that path.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no image name: REPOSITORY:TAG, for example registry.example.com/tools:1, the "
            "repository in small letters"
        )
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"{path.parent} is no folder"
        raise ConfigError(f"the archive {path} cannot be written: {why}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"the archive {path} cannot be written: {os.strerror(errno.EACCES)}")


def write_archive(tree: Path, path: Path, *, name: str | None = None) -> ImageArchive:
    """Write the image of a tree; the same tree gives the same bytes.

    Args:
        tree: Made by `build`.
        path: Of the archive; a file there is replaced.
        name: ``REPOSITORY:TAG`` that it is imported under; None is `default_name`.

    Raises:
        ConfigError: There is no tree, the name is none of an image, or the archive cannot be written.
    """
    check_archive(path, name)
    record = layout.read_record(tree)
    config = {
        # A number, so that `runAsNonRoot` can be checked.
        "User": _NOBODY,
        "Entrypoint": tree_command(layout.IMAGE_TREE),
        "Labels": {
            "org.opencontainers.image.title": layout.KIND,
            "org.opencontainers.image.version": record.release,
        },
    }
    platform = {"architecture": record.architecture, "os": record.os}
    return write_image(path, name or default_name(record), _layer(tree), config, platform)


def write_image(
    path: Path, name: str, layer: bytes, config: dict[str, Any], platform: dict[str, str]
) -> ImageArchive:
    """Write an image of one layer.

    Args:
        path: Of the archive; a file there is replaced.
        name: ``REPOSITORY:TAG`` that it is imported under.
        layer: A tar file of the image's root.
        config: What the image says about running it: the ``config`` of the image's configuration.
        platform: Its ``architecture`` and ``os``.

    Raises:
        ConfigError: The file cannot be written.
    """
    blobs: dict[str, bytes] = {}
    root = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _put(blobs, _CONFIG, _json({**platform, "config": config, "rootfs": root})),
        "layers": [_put(blobs, _LAYER, gzip.compress(layer, _COMPRESSION, mtime=0))],
    }
    entry = _put(blobs, _MANIFEST, _json(manifest))
    entry["platform"] = platform
    entry["annotations"] = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]}
    try:
        with tarfile.open(path, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
            _add(archive, "index.json", _json(index))
            for digest, data in sorted(blobs.items()):
                _add(archive, f"blobs/sha256/{digest}", data)
    except OSError as problem:
        raise ConfigError(f"the archive {path} cannot be written: {problem.strerror}") from problem
    return ImageArchive(path=path, name=name, digest=entry["digest"], size=path.stat().st_size)


def _layer(tree: Path) -> bytes:
    out = io.BytesIO()
    folders: set[str] = set()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, mode in [*files_of(tree), (RECORD, 0o644)]:
            for parent in reversed(Path(name).parents[:-1]):
                if parent.as_posix() not in folders:
                    folders.add(parent.as_posix())
                    _add(archive, parent.as_posix(), None, 0o755)
            _add(archive, name, (tree / name).read_bytes(), mode)
        _add_link(archive, layout.IMAGE_TREE.removeprefix("/"), ".")
    return out.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes | None, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)  # owner and time are 0
    info.mode = mode
    if data is None:
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    else:
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))


def _add_link(archive: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
    archive.addfile(info)


def _put(blobs: dict[str, bytes], media_type: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
