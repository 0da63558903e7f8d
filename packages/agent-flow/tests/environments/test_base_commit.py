"""What an agent finds in `.git`, and what its patch is made against."""

import json
import shutil
from pathlib import Path

import anyio
import msgspec
import pytest
from agent_flow.environments.base_commit import BaseCommits, prune
from agent_flow.environments.patch import capture_patch
from agent_flow.environments.repository import git
from agent_flow.errors import EnvError, GraderError
from agent_flow.protocols import EnvironmentSpec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]  # images are made on the way
LIMIT = 200_000


async def run(environment, script):
    done = await environment.execute(["bash", "-ec", script], timeout_s=60, cwd=environment.workdir)
    assert done.exit_code == 0, done
    return done.stdout.decode()


@pytest.fixture
def task(place, testbed, in_image):
    """The repository with a future: in the image, or on this machine where there are no images."""
    if place.image:
        return in_image(place)
    return EnvironmentSpec(repository=testbed.folder, base_commit=testbed.base)


@pytest.fixture
def bases(tmp_path):
    return BaseCommits(tmp_path / "bases", max_file_bytes=LIMIT)


async def test_nothing_of_the_future_can_be_read(place, task, bases, testbed):
    """mini-swe-agent#787: `git log --all` showed the fix; after a reset it was still there by its hash."""
    assert len(testbed.future) == 12
    async with place.environments.open(task) as environment:
        before = await run(environment, "git log --all --format=%H; cat .git/packed-refs")
        assert testbed.future[0] in before
        base = await bases.prepare(environment, task)
        assert base.pruned >= len(testbed.future)
        for name in testbed.future:
            done = await environment.execute(
                ["git", "cat-file", "-e", name], timeout_s=30, cwd=environment.workdir
            )
            assert done.exit_code != 0, f"{name} can be read"
        names = "|".join(testbed.future)
        script = f"""
        git log --all --format=%H; git reflog; git stash list; git remote
        git branch -a --format='%(refname)'; git tag; grep -rlE '{names}' .git || :
        """
        said = await run(environment, script)
        past = git(testbed.folder, "rev-list", testbed.base).split()
        assert said.split() == [*past, "refs/heads/main", "v1"]


async def test_the_repository_is_whole_and_the_files_are_left_alone(place, task, bases, testbed):
    async with place.environments.open(task) as environment:
        files = "find . -name .git -prune -o -type f -print | sort | while read -r f; do sha256sum $f; done"
        before = await run(environment, files)
        base = await bases.prepare(environment, task)
        assert base.commit == testbed.base
        assert await run(environment, "git fsck --full --strict 2>/dev/null") == ""
        assert (await run(environment, "git describe --tags; git rev-parse HEAD")).split()[1] == testbed.base
        assert (await run(environment, "git describe --tags")).startswith("v1-1-g")
        status = await run(environment, "git status --porcelain")
        assert status == " M setup.cfg\n?? data.bin\n?? untracked.txt\n"
        assert await run(environment, files) == before
        # The agent's own git works on: a commit on the branch that it found.
        await run(environment, "git commit -qam work && git symbolic-ref HEAD | grep -qx refs/heads/main")


@pytest.mark.original("A-bootstrap")
async def test_a_repository_without_a_future_is_not_packed_again(place, task, bases):
    async with place.environments.open(task) as environment:
        await prune(environment, task.base_commit)
        packs = await run(environment, "stat -c '%n %i' .git/objects/pack/* .git/index")
        assert (await bases.prepare(environment, task)).pruned == 0
        assert await run(environment, "stat -c '%n %i' .git/objects/pack/* .git/index") == packs


async def test_objects_that_are_borrowed_from_another_repository(place, task, testbed):
    """`git clone --shared` leaves them outside `.git`."""
    async with place.environments.open(task) as environment:
        await run(environment, "git clone -q --shared . /tmp/other && git -C /tmp/other checkout -q main")
        environment.workdir, whole = "/tmp/other", environment.workdir
        await prune(environment, testbed.base)
        await run(
            environment, f"rm -rf {whole}/.git && git fsck --full && git log --format=%s | grep -qx past"
        )
        done = await environment.execute(
            ["git", "cat-file", "-e", testbed.future[0]], timeout_s=30, cwd="/tmp/other"
        )
        assert done.exit_code != 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [("rm -rf .git", "no git repository"), (":", "no commit 1234567890")],
    ids=["no-repository", "no-commit"],
)
async def test_what_the_row_names_must_be_there(place, task, bases, spoil, why):
    async with place.environments.open(task) as environment:
        await run(environment, spoil)
        wrong = msgspec.structs.replace(task, base_commit="1234567890")
        with pytest.raises(EnvError, match=why) as caught:
            await bases.prepare(environment, wrong)
    assert caught.value.fault == "task"


@pytest.mark.original("A-bootstrap")
async def test_the_base_is_taken_out_once(place, task, bases, testbed, tmp_path):
    """Two sandboxes at the same time, and a third: one folder of one tree."""
    found = []

    async def prepare():
        async with place.environments.open(task) as environment:
            found.append(await bases.prepare(environment, task))

    async with anyio.create_task_group() as group:
        group.start_soon(prepare)
        group.start_soon(prepare)
    (folder,) = (tmp_path / "bases").iterdir()
    written = folder.stat().st_mtime_ns
    await prepare()
    assert folder.stat().st_mtime_ns == written
    first = found[0]
    assert all(
        msgspec.structs.replace(base, pruned=0) == msgspec.structs.replace(first, pruned=0) for base in found
    )
    assert (first.dirty, first.ignored) == (2, frozenset({b"build/out.bin", b"data.bin"}))
    listed = git(first.git, "ls-tree", "-r", "--name-only", first.tree).split()
    assert listed == [".gitignore", "crlf.txt", "pkg/a.py", "pkg/b.py", "setup.cfg", "untracked.txt"]
    assert not (first.git / "hooks").exists()
    kinds = git(first.git, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype)").split()
    assert "commit" not in kinds, "nothing but the files at the start"


def as_the_image(testbed, folder: Path) -> Path:
    """A grader's working folder: what the image holds at the start."""
    shutil.copytree(testbed.folder, folder, symlinks=True)
    return folder


async def test_what_the_image_had_changed_is_not_the_agents(place, task, bases, testbed, tmp_path):
    """The patch holds the agent's work alone, and applies where the image's own changes are."""
    async with place.environments.open(task) as environment:
        base = await bases.prepare(environment, task)
        assert (await capture_patch(environment, base)).patch == b""
    async with place.environments.open(task) as environment:
        base = await bases.prepare(environment, task)
        await run(
            environment,
            """
            echo 'x = 2' > pkg/a.py
            echo 'license = MIT' >> setup.cfg
            echo 'and of the agent' >> untracked.txt
            git add -A -f && git commit -qm everything
            echo > .gitignore
            rm -rf .git
            """,
        )
        captured = await capture_patch(environment, base)
    graded = as_the_image(testbed, tmp_path / "graded")
    await anyio.run_process(["git", "apply", "--binary", "-"], cwd=graded, input=captured.patch)
    assert (graded / "setup.cfg").read_text() == "[metadata]\nname = demo\nversion = 0\nlicense = MIT\n"
    assert (graded / "untracked.txt").read_text() == "of the image\nand of the agent\n"
    assert (graded / "pkg/a.py").read_text() == "x = 2\n"
    assert captured.patch.count(b"diff --git") == 4
    assert [(left.path, left.reason) for left in captured.left_out] == [("build/out.bin", "was_ignored")]


async def test_what_is_left_out_of_a_patch_is_listed(place, task, bases):
    async with place.environments.open(task) as environment:
        base = await bases.prepare(environment, task)
        await run(
            environment,
            f"""
            echo 'x = 2' > pkg/a.py
            head -c {LIMIT + 1} /dev/zero > 'big [1]*.bin'
            head -c {LIMIT} /dev/zero > just.bin
            head -c {LIMIT + 1} /dev/zero > crlf.txt
            head -c {LIMIT + 1} /dev/zero > staged.bin && git add staged.bin
            echo noise > run.log; echo more > build/new.o
            echo wanted > build/kept.py && git add -f build/kept.py
            """,
        )
        captured = await capture_patch(environment, base)
    names = {
        line.split(" b/")[1] for line in captured.patch.decode("latin-1").splitlines() if line[:6] == "diff -"
    }
    assert names == {"pkg/a.py", "just.bin", "build/kept.py"}
    assert {left.path: (left.reason, left.size) for left in captured.left_out} == {
        "big [1]*.bin": ("too_large", None),
        "crlf.txt": ("too_large", LIMIT + 1),
        "staged.bin": ("too_large", LIMIT + 1),
        "run.log": ("ignored", None),
        "build/new.o": ("ignored", None),
    }
    assert captured.left_out_counts == {"too_large": 3, "ignored": 2}
    assert json.loads(msgspec.json.encode(captured.left_out))[0]["reason"] == "too_large"


async def test_a_patch_above_the_limit_is_not_graded(place, task, bases):
    async with place.environments.open(task) as environment:
        base = await bases.prepare(environment, task)
        await run(environment, "head -c 100000 /dev/urandom > noise.bin")
        with pytest.raises(GraderError, match="allowed") as caught:
            await capture_patch(environment, base, max_patch_bytes=50_000)
    assert (caught.value.cause, caught.value.fault) == ("patch_too_large", "agent")


async def test_submodules_and_repositories_of_the_image_are_no_files(place, task, bases):
    async with place.environments.open(task) as environment:
        await run(
            environment,
            """
            git clone -q . inner && git -C inner checkout -q main
            git update-index --add --cacheinfo 160000,$(git rev-parse HEAD),inner
            git commit -qm 'a submodule'
            """,
        )
        spec = msgspec.structs.replace(task, base_commit="HEAD")
        base = await bases.prepare(environment, spec)
        await run(
            environment,
            "cd inner && echo 'z = 1' > c.py && git add -A && git commit -qm moved; echo > ../new.py",
        )
        captured = await capture_patch(environment, base)
    assert captured.patch.count(b"diff --git") == 1
    left_out = [(left.path, left.reason) for left in captured.left_out]
    assert left_out == [("inner", "submodule"), ("inner/c.py", "submodule")]
