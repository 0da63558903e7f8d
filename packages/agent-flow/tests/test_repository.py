"""Repositories of plain files: the same commit whatever the machine's git is told."""

import os

import pytest
from agent_flow.environments.repository import build_repository, git
from agent_flow.errors import TaskRowError


def make_source(folder):
    folder.mkdir()
    (folder / "a.py").write_bytes(b"x = 1\r\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "ignored.log").write_text("kept: a base commit holds every file")
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_bytes(b"\0")
    return folder


def test_the_commit_depends_on_the_files_alone(tmp_path, monkeypatch):
    source = make_source(tmp_path / "source")
    first = build_repository(source, tmp_path / "first", "demo")
    config = tmp_path / "gitconfig"
    config.write_text(
        "[core]\n autocrlf = true\n fileMode = false\n[user]\n name = Somebody\n[commit]\n gpgsign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    old = os.umask(0o077)
    try:
        second = build_repository(source, tmp_path / "second", "demo")
    finally:
        os.umask(old)
    assert first == second
    assert git(tmp_path / "second", "status", "--porcelain") == ""
    listed = git(tmp_path / "second", "ls-tree", "-r", "HEAD").splitlines()
    assert [line.split()[0] + " " + line.split()[3] for line in listed] == [
        "100644 .gitignore",
        "100644 a.py",
        "100644 ignored.log",
        "100755 run.sh",
    ]
    (source / "a.py").write_bytes(b"x = 2\r\n")
    assert build_repository(source, tmp_path / "third", "demo") != first


def test_git_that_refuses_is_named(tmp_path):
    with pytest.raises(TaskRowError, match="git rev-parse failed"):
        git(tmp_path, "rev-parse", "--verify", "nope")
