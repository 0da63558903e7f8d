"""What a pod's specification needs to say so that a tree runs in it."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from . import layout

CONTAINER_REQUIREMENTS: dict[str, Any] = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""For the container: a loader of another architecture dies with its reason in the log alone."""


_FORCED_ON_THE_LOADER = ("LD_AUDIT", "LD_PRELOAD")


def _is_of_the_loader(name: str) -> bool:
    return name.startswith("LD_") or name == "GLIBC_TUNABLES"


def container_environment(env: Mapping[str, str]) -> list[dict[str, str]]:
    """The container's ``env``, such that the launcher starts whatever the image has in its own.

    A library that an image preloads (ENV LD_PRELOAD) may need another C library than the tree's, and the
    launcher would not start; so the image's is taken away. Variables of the loader that ``env`` has go to
    commands alone, through `launcher_command`.

    Args:
        env: What the sandbox's commands should see.
    """
    kept = {name: value for name, value in env.items() if not _is_of_the_loader(name)}
    kept |= dict.fromkeys(_FORCED_ON_THE_LOADER, "")
    return [{"name": name, "value": _as_it_is(value)} for name, value in sorted(kept.items())]


def _as_it_is(value: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in a pod's variables and words, and makes one dollar of two."""
    return value.replace("$", "$$")


def node_requirements(tree: Path | layout.ToolsRecord) -> dict[str, Any]:
    """The part of a pod's ``spec`` that brings it to a node on which a tree runs: its ``nodeSelector``.

    Raises:
        ConfigError: There is no tree at that path.
    """
    record = layout.read_record(tree) if isinstance(tree, Path) else tree
    return {"nodeSelector": {"kubernetes.io/os": record.os, "kubernetes.io/arch": record.architecture}}


def tree_command(mount: PurePosixPath | str) -> list[str]:
    """The argument list that starts the launcher of a tree; the program's name and arguments come after it.

    Args:
        mount: Where the tree is in the container.
    """
    root = PurePosixPath(mount)
    loader = [str(root / layout.LOADER), "--inhibit-cache", "--library-path", str(root / layout.LIBRARIES)]
    # -X utf8: text must not depend on the image's locale. The libraries are named in an argument and not in
    # an environment variable, which every command would inherit.
    python = [str(root / layout.INTERPRETER), "-I", "-S", "-B", "-X", "utf8", str(root / layout.LAUNCHER)]
    return [*loader, *python]


def install_command(target: PurePosixPath | str) -> list[str]:
    """The command of an init container of the tools image that copies the tree to ``target``."""
    return [_as_it_is(word) for word in (*tree_command(layout.IMAGE_TREE), "install", str(target))]


def pip_install_command(target: PurePosixPath | str, requirement: str | None) -> list[str]:
    """The command of an init container that installs the launcher to ``target`` with the image's own pip.

    Args:
        target: An empty folder.
        requirement: What is installed; None is sandbox-k8s of this version. What it depends on is left out:
            the launcher needs nothing of it.
    """
    pip = ["python3", "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = requirement or f"sandbox-k8s=={version('sandbox-k8s')}"
    return [
        _as_it_is(word) for word in (*pip, "--no-cache-dir", "--no-deps", "--target", str(target), wanted)
    ]


def pip_command(mount: PurePosixPath | str) -> list[str]:
    """Like `tree_command`, for what `pip_install_command` installed."""
    launcher = PurePosixPath(mount) / "sandbox_k8s" / layout.LAUNCHER
    return ["python3", "-I", "-S", "-B", "-X", "utf8", str(launcher)]


def launcher_command(
    mount: PurePosixPath | str,
    *,
    listen: str,
    state: PurePosixPath | str,
    token_hash: str,
    lease_s: float,
    sandbox_id: str,
    env: Mapping[str, str] = {},
    workdir: PurePosixPath | str | None = None,
    memory_bytes: int | None = None,
    pip: bool = False,
) -> list[str]:
    """The command of a sandbox's main container; it needs no shell.

    Args:
        mount: Where the tree is mounted.
        listen: ``HOST:PORT``.
        state: A folder that the container's user can write to, for example an emptyDir.
        token_hash: Hex SHA-256 of the token.
        env: What was given to `container_environment`.
        lease_s: Seconds until the launcher ends when nobody comes.
        workdir: Where commands start; None for the image's working directory.
        memory_bytes: Address space of each process of a command; None for no limit.
        sandbox_id: What SANDBOX_ID shows to commands.
        pip: What is mounted was installed by `pip_install_command` and is no tree.
    """
    words = ["pod", "--listen", listen, "--state", str(state), "--token-hash", token_hash]
    words += ["--lease", f"{lease_s:g}", "--sandbox-id", sandbox_id]
    for name, value in sorted(env.items()):
        if _is_of_the_loader(name) or name == "HOME":  # a home that was asked for is not replaced
            words += ["--env", f"{name}={value}"]
    if workdir is not None:
        words += ["--workdir", str(workdir)]
    if memory_bytes is not None:
        words += ["--memory-bytes", str(memory_bytes)]
    return [_as_it_is(word) for word in (*(pip_command(mount) if pip else tree_command(mount)), *words)]
