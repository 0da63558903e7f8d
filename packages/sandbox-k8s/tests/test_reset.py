"""Used sandboxes: brought back to what they were, proven, or stopped. In every kind of place."""

import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from sandbox_k8s import (
    ClientConfig,
    FencedError,
    ResetRefusedError,
    Sandbox,
    SandboxClient,
    SandboxNotFoundError,
)
from sandbox_k8s.kubernetes.config import KubernetesConfig
from sandbox_k8s.launcher import tenure
from sandbox_k8s.launcher.box import Box, BoxSettings
from sandbox_k8s.launcher.execute import CutOffError
from sandbox_k8s.launcher.kept import content, untouched
from sandbox_k8s.launcher.ownership import AloneError, Ownership
from sandbox_k8s.launcher.ownership import FencedError as OldOwnerError
from sandbox_k8s.launcher.repository import git_files
from sandbox_k8s.launcher.tenure import Caller

pytestmark = pytest.mark.anyio

REPO = """
set -e
git init -q repo && cd repo
git config user.name t && git config user.email t@example.com
mkdir -p src/deep && printf 'one\\n' > src/a.py && printf 'two\\r\\n' > src/deep/b.py
ln -s a.py src/link
printf '*.so\\nbuild/\\n' > .gitignore && printf '#!/bin/sh\\n' > run && chmod 755 run && chmod 664 src/a.py
mkdir other third && printf other > other/a.py && printf third > third/a.py
git add -A && git commit -qm base
mkdir build && printf built > build/lib.so && printf 'ext' > src/ext.so
printf 'export X=1\\n' > ~/.profile-of-mine
"""

# What agents leave behind: each line is one, all of them together are brought back.
TRACES = """
cd repo
printf changed > src/a.py; rm src/deep/b.py; ln -sf /etc/passwd src/link; chmod 600 run
printf new > src/new.py; mkdir -p more/deep; printf x > more/deep/x; printf y > build/y.so
git checkout -q -b mine; git add -A; git commit -qm work; printf s >> src/a.py; git stash -q
git tag cheat; git update-ref refs/hidden/x HEAD; git config core.fsmonitor /tmp/evil; git config alias.x !id
printf '#!/bin/sh\\ntouch /tmp/hooked\\n' > .git/hooks/post-checkout; chmod 755 .git/hooks/post-checkout
printf '*.py filter=evil\\n' > .git/info/attributes
printf secret > /tmp/left; mkdir -p /tmp/dir/.hidden; printf z > ~/.bashrc; printf q > ~/.profile-of-mine
mv third away; mv other third; mv away other; chmod 777 other; touch .git/index.lock
mkdir ~/.cache; printf w > ~/.cache/w
touch -d 1980-01-01 other/a.py .gitignore ~ . .git/config
find .git/objects -type f -exec touch -h -d 1980-01-01 {} +
setsid sh -c 'trap "" TERM HUP; while :; do touch /tmp/alive; sleep 0.01; done' > /dev/null 2>&1 < /dev/null &
"""


@pytest.fixture
async def marked(client: SandboxClient, place: str) -> Sandbox:
    if place == "process":
        pytest.skip("without a PID namespace nothing can be brought back")
    sandbox = await client.start()
    if (await sandbox.execute("git --version")).exit_code != 0:
        pytest.skip("the image of the tests has no git")
    made = await sandbox.execute(REPO)
    assert made.exit_code == 0, made
    await sandbox.mark_clean("repo")
    return sandbox


async def listing(sandbox: Sandbox) -> bytes:
    shown = await sandbox.execute(
        "cd repo && find . ~ /tmp -xdev -not -path './.git' -not -path './.git/index' -printf '%p %t %m\\n'"
        " | sort; git diff-files --quiet; echo $?; git diff-index --quiet HEAD; echo $?"
        "; git status --porcelain && git log --all --oneline && git stash list && git config --list"
        " && find . ~ /tmp -xdev -not -path './.git/*' | sort && find . -type f -not -path './.git/*'"
        " -exec sha256sum {} + | sort && stat -c '%a %n' src run src/a.py build && cat ~/.profile-of-mine"
    )
    assert shown.exit_code == 0, shown
    return shown.stdout


async def test_whatever_an_agent_leaves_is_gone(marked: Sandbox, client: SandboxClient) -> None:
    before = await listing(marked)
    again = await marked.reset()
    assert await listing(again) == before, "nothing was done, nothing changes"
    session = await again.session()
    await session.run("export LEFT=behind")
    used = await again.execute(TRACES)
    assert used.exit_code == 0, used
    assert await listing(again) != before
    fresh = await again.reset()
    assert await listing(fresh) == before
    assert (await fresh.execute("[ -e /tmp/alive ] || [ -e /tmp/hooked ]")).exit_code == 1
    assert (await (await fresh.session()).run("echo ${LEFT:-nothing}")).stdout == b"nothing\n"
    assert (client.stats.resets, client.stats.resets_refused) == (2, 0)


async def test_those_who_used_it_are_fenced(marked: Sandbox) -> None:
    fresh = await marked.reset()
    assert fresh.handle.epoch == marked.handle.epoch + 1
    with pytest.raises(FencedError):
        await marked.execute("true")
    with pytest.raises(FencedError):
        await marked.reset()
    assert (await fresh.execute("true")).exit_code == 0


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("rm repo/build/lib.so", "changed or missing in"),
        (
            "cp -p repo/build/lib.so x && cat x > repo/build/lib.so && touch -r x repo/build/lib.so",
            "repo/build",
        ),
        ("cd repo && git commit -q --allow-empty -m x && git gc -q --prune=now", "objects"),
        ("prlimit --pid 1 --fsize=8192:8192", "the launcher's RLIMIT_FSIZE"),
        ("for one in /proc/1/task/*; do renice -n 19 -p ${one##*/}; done", "the launcher's scheduling"),
    ],
)
async def test_what_cannot_be_brought_back_is_refused_and_stopped(
    marked: Sandbox, client: SandboxClient, trace: str, said: str
) -> None:
    assert (await marked.execute(trace)).exit_code == 0
    with pytest.raises(ResetRefusedError, match="not what it was") as refused:
        await marked.reset()
    assert any(said in line for line in refused.value.differences), refused.value.differences
    assert (client.stats.resets_refused, refused.value.stopped) == (1, True)
    with pytest.raises(SandboxNotFoundError):
        await client.attach(marked.handle)


async def test_a_busy_or_unmarked_sandbox_is_refused(client: SandboxClient, place: str) -> None:
    sandbox = await client.start()
    reason = "PID namespace" if place == "process" else "processes are running"
    await sandbox.session()
    with pytest.raises(ResetRefusedError, match=reason):
        await sandbox.mark_clean()
    with pytest.raises(ResetRefusedError, match="never marked as clean") as refused:
        await sandbox.reset()
    assert not refused.value.stopped
    assert (client.stats.resets_refused, (await sandbox.execute("true")).exit_code) == (0, 0)


async def test_without_git_small_files_of_the_home_come_back(client: SandboxClient, place: str) -> None:
    if place == "process":
        pytest.skip("without a PID namespace nothing can be brought back")
    sandbox = await client.start()
    await sandbox.execute("printf a > ~/.rc; printf kept > data")
    await sandbox.mark_clean()
    await sandbox.execute("printf b > ~/.rc; printf x > more; mkdir -p deep/er; printf '#' > /tmp/y")
    fresh = await sandbox.reset()
    shown = await fresh.execute("cat ~/.rc data; find . /tmp")
    assert shown.stdout.split() == [b"akept.", b"./data", b"/tmp"]
    await fresh.execute("printf changed > data")
    with pytest.raises(ResetRefusedError):
        await fresh.reset()


QUEUE = """
import ctypes, os
kernel = ctypes.CDLL(None)
queue = kernel.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o600, None)
assert kernel.mq_send(queue, b"hello", 5, 0) == 0
"""
PEEK = """
import os
maps = open("/proc/1/maps").read()
os.open("/proc/1/mem", os.O_RDWR)
"""
ATTRIBUTES = """
import os
for path in ("repo/src/deep/b.py", "repo/.git/config", "/home/sandbox/.profile-of-mine"):
    os.setxattr(path, "user.left", b"payload")
"""
LOOK = """
import os
print([os.listxattr(path) for path in ("repo/src/deep/b.py", "repo/.git/config")])
print(os.path.exists("/dev/mqueue/left"))
"""
FILTER = """
cd repo && printf '*.py filter=slow\\n' > .gitattributes && git add -A && git commit -qm filtered
git config filter.slow.smudge "setsid sleep 1000 > /dev/null 2>&1 < /dev/null & cat"
"""


@pytest.mark.parametrize("place", ["bubblewrap"], indirect=True)
async def test_what_lies_beside_the_bytes_of_files_is_gone(marked: Sandbox) -> None:
    """Attributes of files, message queues, and what a filter of git leaves running."""
    assert (await marked.execute(FILTER)).exit_code == 0
    await marked.mark_clean("repo")
    for code in (QUEUE, ATTRIBUTES):
        left = await marked.execute(["python3", "-c", code])
        assert left.exit_code == 0, left
    fresh = await marked.reset()
    looked = await fresh.execute(["python3", "-c", LOOK])
    assert looked.stdout == b"[[], []]\nFalse\n", looked
    quiet = await fresh.execute("cd repo && git diff-files --quiet && ! pgrep sleep")
    assert quiet.exit_code == 0, quiet


@pytest.mark.parametrize("place", ["bubblewrap"], indirect=True)
async def test_commands_do_not_see_the_launchers_memory(client: SandboxClient) -> None:
    """The clean state is in there, and the key of each request."""
    looked = await (await client.start()).execute(["python3", "-c", PEEK])
    assert (looked.exit_code, b"PermissionError" in looked.stderr) == (1, True)


@pytest.mark.parametrize("place", ["fake", "kubernetes"], indirect=True)
async def test_the_launchers_own_file_in_a_pod_is_written_again(client: SandboxClient) -> None:
    sandbox = await client.start()
    await sandbox.mark_clean()
    path = "/run/sandbox-k8s/epoch"
    spoils = (f"echo secret > {path}", f"rm {path}; mkdir -p {path}/x", f"rm -r {path}; ln -s /etc {path}")
    for spoil in spoils:
        assert (await sandbox.execute(spoil)).exit_code == 0
        sandbox = await sandbox.reset()
        held = await sandbox.execute(f"cat {path}; stat -c %F {path}")
        assert held.stdout == b"%dregular file\n" % sandbox.handle.epoch


def _box(folder: Path) -> Box:
    return Box(BoxSettings({}, "/", folder), Ownership(None, 0.0))


def test_nobody_disturbs_a_mark_or_a_reset(tmp_path: Path) -> None:
    """What a guest did meanwhile was taken for the clean state, or handed out."""
    box = _box(tmp_path)
    box.fence(1)
    with box.operation("write"), box.operation("command", Caller(1)) as marking:
        _refused(lambda: box.alone(marking, cut=False), "1 requests of others")
    with box.operation("command", Caller(1)) as marking:
        box.alone(marking, cut=False)

        def try_to_write(caller: Caller) -> None:
            _refused(lambda: box.operation("write", caller).__enter__(), "marked or reset")

        with ThreadPoolExecutor() as pool:  # each waits for a while before it is refused
            assert list(pool.map(try_to_write, (Caller(), Caller(1)))) == [None, None]
    with box.operation("write"):
        pass


def test_who_was_replaced_is_refused_without_waiting_for_a_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenure, "_ALONE_END_S", None)  # whoever waits does so for ever
    box = _box(tmp_path)
    box.fence(1)
    box.fence(2)
    with box.operation("command", Caller(2)) as resetting:
        box.alone(resetting, cut=True)
        with pytest.raises(OldOwnerError):
            box.operation("write", Caller(1)).__enter__()


def test_what_comes_during_a_mark_begins_when_it_has_ended(tmp_path: Path) -> None:
    """A client that was cancelled leaves a mark that goes on for a moment: its next command was refused."""
    box = _box(tmp_path)
    box.fence(1)
    marks, order = threading.Event(), list[str]()

    def mark() -> None:
        with box.operation("command", Caller(1)) as marking:
            box.alone(marking, cut=False)
            marks.set()
            select.select([marking.read_fd], [], [], 0.3)
            order.append("marked")

    marker = threading.Thread(target=mark, daemon=True)
    marker.start()
    marks.wait()
    with box.operation("write", Caller(1)):
        order.append("written")
    marker.join()
    assert order == ["marked", "written"]


def _refused(act: Callable[[], object], why: str) -> None:
    with pytest.raises(AloneError, match=why):
        act()


def test_a_reset_ends_what_guests_do_and_a_new_owner_ends_a_reset(tmp_path: Path) -> None:
    box = _box(tmp_path)
    box.fence(1)
    begun, ended = threading.Event(), threading.Event()

    def write() -> None:
        with box.operation("write") as wake:
            begun.set()
            select.select([wake.read_fd], [], [])
            ended.set()

    guest = threading.Thread(target=write, daemon=True)
    guest.start()
    begun.wait()
    owner = threading.Thread(target=box.fence, args=(2,), daemon=True)

    def reset() -> None:
        with box.operation("command", Caller(1)) as resetting:
            box.alone(resetting, cut=True)
            assert ended.is_set()
            owner.start()
            select.select([resetting.read_fd], [], [])
            with pytest.raises(CutOffError):
                box.keep_epoch(resetting)

    with pytest.raises(OldOwnerError):
        reset()
    owner.join()
    guest.join()
    with box.operation("write", Caller(2)):
        pass


def test_a_file_is_untouched_whatever_the_clock_says(tmp_path: Path) -> None:
    """A change time before the mark was believed, and clocks are set back."""
    path = tmp_path / "file"
    path.write_text("one")
    was = content(str(path))
    assert untouched(str(path), was)
    while path.stat().st_ctime_ns == was.seen[0]:
        path.write_text("two")
        os.utime(path, ns=(was.mtime_ns, was.mtime_ns))
    assert not untouched(str(path), was)


def test_objects_of_submodules_are_not_kept_in_memory(tmp_path: Path) -> None:
    """A repository with a submodule of 40 MB could not be marked."""
    for folder in (".git", ".git/modules/sub", ".git/modules/deep/er"):
        (tmp_path / folder / "objects/ab").mkdir(parents=True)
        (tmp_path / folder / "HEAD").write_text("ref: refs/heads/main")
        (tmp_path / folder / "objects/ab/cd").write_text("object")
    (tmp_path / ".git/refs/heads/objects").mkdir(parents=True)
    (tmp_path / ".git/refs/heads/objects/x").write_text("a branch of that name")
    kept, objects = git_files(str(tmp_path))
    assert len(objects) == 3
    assert sorted(Path(one).name for one in kept) == ["HEAD", "HEAD", "HEAD", "x"]


@pytest.mark.cluster
@pytest.mark.parametrize("place", ["kubernetes"], indirect=True)
async def test_folders_that_its_user_may_not_enter_are_no_obstacle(config: ClientConfig) -> None:
    assert isinstance(config, KubernetesConfig)
    settings = msgspec.structs.replace(config, run_as_user=1000)
    async with SandboxClient.kubernetes(settings) as client:
        sandbox = await client.start()
        assert (await sandbox.execute("ls /root")).exit_code != 0
        await sandbox.mark_clean()
        await sandbox.execute("mkdir mine /tmp/shut && touch mine/a && chmod 000 mine /tmp/shut")
        fresh = await sandbox.reset()
        assert (await fresh.execute("ls -A . /tmp")).stdout == b".:\n\n/tmp:\n"
