"""Repositories of this machine for tasks: built of plain files, or taken from a clone, once each."""

from __future__ import annotations

from pathlib import Path

from agent_flow.environments.repository import build_repository, git
from agent_flow.errors import TaskRowError
from agent_flow.runtimes.rows import RepositoryRow
from agent_flow.task import Task


class Repositories:
    """The working copies that tasks start from, below one folder of sources.

    Args:
        sources: Folder with one folder per repository: plain files, or a git clone that has the commit.
        target: Folder for the copies; made when the first one is.
    """

    def __init__(self, sources: Path, target: Path) -> None:
        self._sources = sources
        self._target = target
        self._built: dict[str, tuple[Path, str]] = {}

    def prepare(self, task: Task, row: RepositoryRow) -> Path:
        """The repository of a task with HEAD at its base commit.

        Raises:
            TaskRowError: there is no such folder, or it does not have the base commit.
        """
        source = (self._sources / row.repo).resolve()
        if not source.is_dir() or self._sources not in source.parents:
            raise TaskRowError(
                f"no folder {row.repo!r} below {self._sources}",
                where=f"{task.where} ({task.instance_id})",
                fix="set `repo` to the name of a folder of runtime.repos",
            )
        cloned = (source / ".git").exists()
        key = f"{row.repo}@{row.base_commit}" if cloned else row.repo
        if key not in self._built:
            path = self._target / str(len(self._built)) / source.name
            path.parent.mkdir(parents=True)
            commit = (
                _fetch(source, path, row.base_commit) if cloned else build_repository(source, path, row.repo)
            )
            self._built[key] = (path, commit)
        path, commit = self._built[key]
        if not commit.startswith(row.base_commit):
            raise TaskRowError(
                f"base_commit is {row.base_commit}, but the files of {row.repo!r} give {commit}",
                where=f"{task.where} ({task.instance_id})",
                fix="put the files back, or write the new commit into the row",
            )
        return path


def _fetch(source: Path, target: Path, commit: str) -> str:
    """A repository with the history up to a commit and nothing after it: no future that could be read."""
    full = git(source, "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
    git(source, "init", "--quiet", "--initial-branch=main", str(target))
    git(target, "fetch", "--quiet", "--no-tags", str(source), full)
    git(target, "reset", "--quiet", "--hard", full)
    return full
