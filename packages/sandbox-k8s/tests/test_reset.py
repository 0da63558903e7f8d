"""Used sandboxes: brought back to what they were, proven, or stopped. In every kind of place."""

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
        "cd repo && git status --porcelain && git log --all --oneline && git stash list && git config --list"
        " && find . ~ /tmp -not -path './.git/*' | sort && find . -type f -not -path './.git/*'"
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
    ],
)
async def test_what_cannot_be_brought_back_is_refused_and_stopped(
    marked: Sandbox, client: SandboxClient, trace: str, said: str
) -> None:
    assert (await marked.execute(trace)).exit_code == 0
    with pytest.raises(ResetRefusedError, match="not what it was") as refused:
        await marked.reset()
    assert any(said in line for line in refused.value.differences), refused.value.differences
    assert client.stats.resets_refused == 1
    with pytest.raises(SandboxNotFoundError):
        await client.attach(marked.handle)


async def test_a_busy_or_unmarked_sandbox_is_refused(client: SandboxClient, place: str) -> None:
    sandbox = await client.start()
    reason = "PID namespace" if place == "process" else "processes are running"
    await sandbox.session()
    with pytest.raises(ResetRefusedError, match=reason):
        await sandbox.mark_clean()
    with pytest.raises(ResetRefusedError, match="marked as clean"):
        await sandbox.reset()


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
