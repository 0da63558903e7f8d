"""Git repositories made of plain files, the same commit on every machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from agent_flow.errors import TaskRowError

_IDENTITY = {
    "GIT_AUTHOR_NAME": "agent-flow examples",
    "GIT_AUTHOR_EMAIL": "examples@agent-flow.invalid",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00+00:00",
    "GIT_COMMITTER_NAME": "agent-flow examples",
    "GIT_COMMITTER_EMAIL": "examples@agent-flow.invalid",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00+00:00",
}


def build_repository(source: Path, target: Path, name: str) -> str:
    """Make a git repository of one commit from the files of a folder and return its sha1.

    Names, dates, modes and line ends are pinned, so the same files give the same commit everywhere; a task
    row can therefore name its `base_commit` although the example ships plain files.

    Raises:
        TaskRowError: git is missing or refuses.
    """
    shutil.copytree(
        source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".git", "*.pyc")
    )
    for path in target.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    git(target, "init", "--quiet", "--initial-branch=main", "--object-format=sha1")
    git(target, "config", "core.autocrlf", "false")
    git(target, "add", "--all", "--force")
    git(target, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message", f"{name}: initial import")
    return git(target, "rev-parse", "HEAD").strip()


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, untouched by the user's configuration; returns its output."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "LC_ALL": "C",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        **_IDENTITY,
    }
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            start_new_session=True,  # an interrupt is for the run to handle, not for git
        )
    except FileNotFoundError as error:
        raise TaskRowError("git was not found", fix="install git and put it on PATH") from error
    except subprocess.CalledProcessError as error:
        raise TaskRowError(f"git {arguments[0]} failed: {error.stderr.strip()}", where=str(folder)) from error
    return done.stdout
