"""Work folders that are no repository, and repositories inside a work folder: no work in them is lost."""

import os
import shutil

import pytest
from agent_flow.environments.patch import capture_patch
from agent_flow.environments.repository import git
from agent_flow.errors import EnvError
from agent_flow.protocols import EnvironmentSpec
from agent_flow.runtimes.grading import apply_patch

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def folder(tmp_path):
    """With a repository that has a commit in `lib`, and one that has none in `new`."""
    start = tmp_path / "start"
    for name in ("lib", "new/deep"):
        (start / name).mkdir(parents=True)
        (start / name / "f.txt").write_text("broken\n")
    (start / "a.txt").write_text("a\n")
    commit_all(start / "lib")
    git(start / "new", "init", "--quiet")
    return start


def commit_all(folder):
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")


async def run(environment, script):
    done = await environment.execute(["bash", "-ec", script], timeout_s=60, cwd=environment.workdir)
    assert done.exit_code == 0, done
    return done.stdout.decode()


async def capture(local, bases, spec, script):
    """What is captured after a script."""
    async with local.open(spec) as environment:
        base = await bases.prepare(environment, spec)
        await run(environment, script)
        return await capture_patch(environment, base)


async def after(local, bases, spec, script):
    """The same, and what a folder holds to which the patch was applied."""
    captured = await capture(local, bases, spec, script)
    async with local.open(spec) as environment:
        await apply_patch(environment, captured.patch, "task", "its start")
        files = await run(environment, "find . -name .git -prune -o -type f -exec grep -H '' {} + | sort")
    return captured, files.splitlines()


def left(captured):
    return {(entry.path, entry.reason) for entry in captured.left_out}


def plain(folder):
    return EnvironmentSpec(repository=folder, plain=True)


WORK = """
echo fixed > lib/f.txt; echo y > lib/new.txt; echo fixed > new/deep/f.txt; rm a.txt
git -C lib -c user.name=a -c user.email=a@b commit -qam work
"""
WORKED = ["./lib/f.txt:fixed", "./lib/new.txt:y", "./new/deep/f.txt:fixed"]


async def test_files_of_repositories_in_a_plain_folder_are_files(local, bases, folder):
    captured, files = await after(local, bases, plain(folder), WORK)
    assert files == WORKED
    assert left(captured) == set()


async def test_files_of_repositories_in_a_repository_are_files(local, bases, folder):
    git(folder, "init", "--quiet")
    git(folder, "add", "a.txt")
    git(folder, "commit", "--quiet", "--message", "base")
    spec = EnvironmentSpec(
        repository=folder, base_commit=git(folder, "rev-parse", "HEAD").strip(), plain=True
    )
    captured, files = await after(local, bases, spec, WORK)
    assert files == WORKED
    assert left(captured) == set()


async def test_an_agent_may_turn_files_into_folders_and_links(local, bases, folder):
    (folder / "d").mkdir()
    (folder / "d/x").write_text("x\n")
    script = "rm -r d; ln -s new d; rm a.txt; mkdir a.txt; echo in > 'a.txt/b c'; rm -r lib; mkdir lib"
    _, files = await after(local, bases, plain(folder), script)
    assert files == ["./a.txt/b c:in", "./new/deep/f.txt:broken"]


async def test_ignore_files_hide_nothing_in_a_plain_folder(local, bases, folder):
    (folder / ".gitignore").write_text("out.txt\n*.log\n")
    (folder / "start.log").write_text("0\n")
    captured, files = await after(
        local, bases, plain(folder), "echo '*' > lib/.gitignore; echo 1 > out.txt; echo 1 > start.log"
    )
    assert {"./out.txt:1", "./start.log:1"} < set(files)
    assert "./lib/.gitignore:*" in files
    assert left(captured) == set()


async def test_large_start_files_that_are_changed_are_listed(local, bases, folder):
    for name in ("grown.bin", "gone.bin", "kept.bin", "small.bin"):
        (folder / name).write_bytes(b"\1" * 300_000)
    captured = await capture(
        local,
        bases,
        plain(folder),
        "echo >> grown.bin; rm gone.bin; echo 1 > small.bin; cp kept.bin made.bin",
    )
    assert captured.patch == b""
    assert left(captured) == {
        ("grown.bin", "was_ignored"),
        ("gone.bin", "was_ignored"),
        ("small.bin", "was_ignored"),
        ("made.bin", "too_large"),
    }
    assert captured.left_out_counts == {"was_ignored": 3, "too_large": 1}


async def test_ignored_start_files_that_are_changed_are_listed(local, bases, folder):
    (folder / ".gitignore").write_text("*.db\n")
    commit_all(folder / "new")
    for inner in ("lib", "new"):
        shutil.rmtree(folder / inner / ".git")
    commit_all(folder)
    for name in ("one.db", "two words.db", "kept.db"):
        (folder / name).write_text("0\n")
    captured = await capture(
        local, bases, plain(folder), "echo 1 > one.db; rm 'two words.db'; echo 1 > b.txt"
    )
    assert left(captured) == {("one.db", "was_ignored"), ("two words.db", "was_ignored")}


async def test_what_changes_in_a_submodule_is_listed(local, bases, folder):
    (folder / "lib/same.txt").write_text("same\n")
    shutil.rmtree(folder / "new/.git")
    git(folder, "init", "--quiet")
    commit = git(folder / "lib", "rev-parse", "HEAD").strip()
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{commit},lib")
    git(folder, "add", "a.txt", "new")
    git(folder, "commit", "--quiet", "--message", "base")
    script = "echo fixed > lib/f.txt; echo y > lib/y; echo b > b.txt"
    captured = await capture(local, bases, plain(folder), script)
    assert left(captured) == {("lib/f.txt", "submodule"), ("lib/y", "submodule")}
    captured, files = await after(local, bases, plain(folder), f"{script}; rm -rf lib/.git")
    assert ("lib/f.txt", "submodule") in left(captured)
    assert "./b.txt:b" in files


async def test_what_is_no_file_is_listed_in_a_plain_folder(local, bases, folder):
    (folder / "empty").mkdir()
    captured = await capture(local, bases, plain(folder), "mkdir out; mkfifo pipe; mkdir -p lib/x/y")
    assert left(captured) == {("out", "no_file"), ("pipe", "no_file"), ("lib/x/y", "no_file")}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
async def test_a_start_that_cannot_be_read_whole_is_an_error(local, bases, folder):
    await refused(local, bases, folder, "chmod 0 a.txt")


@pytest.mark.parametrize("kind", ["plain folder", "repository"])
async def test_a_start_that_git_cannot_hold_is_an_error(local, bases, folder, kind):
    if kind == "repository":
        for inner in ("lib", "new"):
            shutil.rmtree(folder / inner / ".git")
        commit_all(folder)
    await refused(local, bases, folder, "mkdir .GIT; echo x > .GIT/x; echo y > y")


async def refused(local, bases, folder, script):
    spec = plain(folder)
    async with local.open(spec) as environment:
        await run(environment, script)
        with pytest.raises(EnvError) as caught:
            await bases.prepare(environment, spec)
    assert (caught.value.cause, caught.value.fault) == ("base_in_part", "image")
