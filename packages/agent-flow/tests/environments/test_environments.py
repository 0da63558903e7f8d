"""What every environment promises, tried out in every place."""

import os
import stat

import anyio
import pytest
from agent_flow.environments.repository import build_repository, git
from agent_flow.errors import EnvCreateError, EnvError
from agent_flow.protocols import EnvironmentSpec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]  # images are made on the way


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    source = tmp_path_factory.mktemp("repository") / "source"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg/a.py").write_bytes(b"x = 1\n")
    (source / "run.sh").write_bytes(b"#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    commit = build_repository(source, source.parent / "demo", "demo")
    return EnvironmentSpec(repository=source.parent / "demo", base_commit=commit)


@pytest.fixture(scope="module")
async def environment(place, repository):
    """One sandbox for the tests that leave nothing behind in it."""
    async with place.environments.open(repository) as environment:
        yield environment


@pytest.fixture
async def folder(environment):
    """A folder of a test's own in it."""
    made = await environment.execute(["mktemp", "-d"], timeout_s=30)
    return made.stdout.decode().strip()


async def run(environment, script, **more):
    return await environment.execute(["bash", "-c", script], **{"timeout_s": 30} | more)


async def test_streams_are_apart_and_byte_exact(environment):
    done = await run(environment, r"printf 'out\r\n\xff\x00\n'; printf 'err\xfe' >&2")
    assert (done.stdout, done.stderr, done.exit_code) == (b"out\r\n\xff\x00\n", b"err\xfe", 0)
    silent = await run(environment, "true")
    assert (silent.stdout, silent.stderr) == (b"", b"")


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("exit 125", 125), ("exit 255", 255), ("kill -9 $$", 137)],
)
async def test_the_exit_code_is_the_commands(environment, script, code):
    done = await run(environment, script)
    assert (done.exit_code, done.timed_out) == (code, False)


async def test_a_program_that_is_not_there_and_one_that_is_none(environment, folder):
    assert (await environment.execute(["no-such-program"], timeout_s=30)).exit_code == 127
    await environment.write(f"{folder}/text", b"no program")
    assert (await environment.execute([f"{folder}/text"], timeout_s=30)).exit_code == 126
    # A name that a shell has for itself is still a program.
    assert (await environment.execute(["exit", "3"], timeout_s=30)).exit_code == 127


async def test_arguments_arrive_as_they_are(environment):
    words = ["", "two words", "$HOME `id` \\", "line\nbreak", "'\"", "-e", "ü"]
    done = await environment.execute(["printf", "%s|", *words], timeout_s=30)
    assert done.stdout.decode() == "".join(f"{word}|" for word in words)


async def test_a_time_out_ends_everything_and_keeps_the_output(environment, folder):
    script = f"setsid sleep 300 & echo begun; sleep 300; touch {folder}/late"
    done = await run(environment, script, timeout_s=2)
    assert (done.exit_code, done.timed_out, done.stdout) == (None, True, b"begun\n")
    left = await run(environment, "grep -lsz '^300$' /proc/[0-9]*/cmdline | wc -l")
    assert left.stdout.strip() == b"0"


async def test_what_a_command_leaves_in_the_background_does_not_hold_it_up(environment):
    with anyio.fail_after(25):
        done = await run(environment, "sleep 30 & echo done; exit 4")
    assert (done.exit_code, done.stdout) == (4, b"done\n")


async def test_cancelling_ends_the_command(environment, folder):
    async def command():
        await run(environment, f"touch {folder}/begun; sleep 301", timeout_s=60)

    with anyio.fail_after(40):
        async with anyio.create_task_group() as group:
            group.start_soon(command)
            await run(environment, f"until [ -e {folder}/begun ]; do sleep 0.02; done")
            group.cancel_scope.cancel()
        ended = await run(environment, "while grep -qsz '^301$' /proc/[0-9]*/cmdline; do sleep 0.02; done")
        assert ended.exit_code == 0


async def test_the_folder_is_the_callers(environment, folder):
    assert (await run(environment, "pwd", cwd=folder)).stdout.decode().strip() == folder
    with pytest.raises(EnvError) as caught:
        await run(environment, "pwd", cwd=f"{folder}/nowhere")
    assert (caught.value.fault, caught.value.retryable) == ("agent", False)
    assert not isinstance(caught.value, EnvCreateError)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"a\r\nb\r\n",
        b"\xef\xbb\xbfbom",
        b"\xff\xfe\x00\x80",
        bytes(range(256)) * 4096,
        b"no end of line",
    ],
    ids=["empty", "crlf", "bom", "not-utf8", "a-mebibyte", "no-newline"],
)
async def test_files_are_byte_exact(environment, folder, data):
    path = f"{folder}/new folder/ü.bin"
    await environment.write(path, data)
    assert await environment.read(path) == data
    await environment.write(path, data[::-1])
    assert await environment.read(path) == data[::-1]


async def test_a_file_that_is_not_there_is_the_agents_doing(environment, folder):
    with pytest.raises(EnvError) as caught:
        await environment.read(f"{folder}/nothing")
    assert caught.value.fault == "agent"


async def test_a_tree_goes_in_and_comes_out_the_same(environment, folder, tmp_path):
    tree = tmp_path / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "tool").write_bytes(b"#!/bin/sh\necho \xff\r\n")
    (tree / "tool").chmod(0o751)
    (tree / "name with ü and 'quotes'").write_bytes(b"")
    (tree / "link").symlink_to("tool")
    (tree / "away").symlink_to("/nowhere/at/all")
    os.link(tree / "tool", tree / "same")
    await environment.upload(tree, f"{folder}/in/tree")
    looked = await run(environment, "stat -c %a tool; readlink link away", cwd=f"{folder}/in/tree")
    assert looked.stdout.split() == [b"751", b"tool", b"/nowhere/at/all"]
    await environment.download(f"{folder}/in/tree", tmp_path / "out")
    assert seen(tmp_path / "out") == seen(tree)


def seen(folder):
    return {
        str(path.relative_to(folder)): (
            path.readlink() if path.is_symlink() else stat.S_IMODE(path.stat().st_mode),
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(folder.rglob("*"))
    }


async def test_a_repository_from_this_machine_is_at_its_base(environment, repository):
    said = await run(
        environment, "git rev-parse HEAD; git status --porcelain; ./run.sh", cwd=environment.workdir
    )
    assert said.stdout.decode().split() == [repository.base_commit, "ran"], said.stderr


@pytest.mark.original("A-k8s-image")
async def test_a_repository_in_the_image_is_where_the_task_says(place, in_image, testbed):
    async with place.environments.open(in_image(place)) as environment:
        assert environment.workdir == "/testbed"
        said = await run(environment, "cat pkg/b.py; git rev-parse HEAD", cwd="/testbed")
        assert said.stdout.decode().split("\n") == ["y = 1", testbed.base, ""]


async def test_a_folder_that_the_image_has_not_is_the_tasks_fault(place, in_image):
    in_image(place)
    spec = EnvironmentSpec(image=place.image, workdir="/nowhere")
    with pytest.raises(EnvCreateError, match="/nowhere") as caught:
        async with place.environments.open(spec):
            pass
    assert caught.value.fault == "task"


@pytest.mark.original("A-one-owner", "A-one-end")
async def test_the_sandbox_is_gone_when_the_block_ends(place, environment, repository):
    """Whether it ends by itself, by an exception or by a cancellation."""
    before = set(place.left())
    done, failed = place.environments.stops.done, place.environments.stops.failed
    async with place.environments.open(repository):
        assert len(set(place.left()) - before) == 1
    assert set(place.left()) == before
    with pytest.raises(ZeroDivisionError):
        async with place.environments.open(repository):
            1 / 0  # noqa: B018
    assert set(place.left()) == before
    with anyio.CancelScope() as scope:
        async with place.environments.open(repository) as second:
            scope.cancel()
            await run(second, "sleep 300", timeout_s=300)
    assert scope.cancelled_caught
    assert set(place.left()) == before
    assert (place.environments.stops.done, place.environments.stops.failed) == (done + 3, failed)


async def test_a_start_that_is_cancelled_leaves_nothing(place, environment, repository):
    before = set(place.left())
    async with anyio.create_task_group() as group:

        async def start():
            async with place.environments.open(repository):
                await anyio.sleep_forever()

        group.start_soon(start)
        await anyio.sleep(0.05)
        group.cancel_scope.cancel()
    assert set(place.left()) == before


async def test_two_at_once_do_not_see_each_other(place, repository):
    async with (
        place.environments.open(repository) as one,
        place.environments.open(repository) as other,
    ):
        async with anyio.create_task_group() as group:
            for environment, text in ((one, "1"), (other, "2")):
                group.start_soon(environment.write, f"{environment.workdir}/mine", text.encode())
        assert await one.read(f"{one.workdir}/mine") == b"1"
        assert await other.read(f"{other.workdir}/mine") == b"2"


async def test_it_says_what_it_is(place, environment):
    described = environment.describe()
    assert described["environment"] == {"fake": "k8s"}.get(place.name, place.name)
    assert described["environment_backend"]
    if place.image:
        assert described["environment_image"] == place.image
        if place.name == "e2b":  # a template has no digest
            assert described["environment_template"]
        else:
            assert str(described["environment_image_digest"]).partition("sha256:")[2]


@pytest.mark.original("A-k8s-image")
async def test_an_image_that_is_not_there_is_nobodys_reward(place, make_place, in_image):
    """METR/vivaria#657: named, of the image's fault, and not tried again."""
    in_image(place)
    spec = EnvironmentSpec(image="localhost/agent-flow-no-such-image:1", workdir="/")
    made = make_place(place.name, **{"k8s": {"image_pull_policy": "Never"}}.get(place.name, {}))
    async with made.environments.session():
        with pytest.raises(EnvCreateError) as caught:
            async with made.environments.open(spec):
                pass
        assert (caught.value.fault, caught.value.retryable) == ("image", False), caught.value
        assert caught.value.cause.startswith("image_")
        assert caught.value.evidence
        assert made.left() == []


async def test_a_grader_that_is_out_of_memory_is_nobodys_reward(place, make_place, in_image):
    """The test process is killed, and whatever ran it may call that a failed test."""
    in_image(place)
    if place.name == "e2b":
        pytest.skip("a template has its memory, no sandbox; what counts there is in test_e2b")
    made = make_place(place.name, memory_mib=96)
    hog = "bash -o pipefail -c 'head -c 300000000 /dev/zero | tail | wc -c'"
    async with made.environments.session():
        async with made.environments.open(in_image(place, purpose="grader")) as environment:
            assert (await run(environment, "exit 1")).exit_code == 1
            with pytest.raises(EnvError, match="memory") as caught:
                await run(environment, f"{hog} >&2 || echo FAILED test_a")
            assert (caught.value.cause, caught.value.fault) == ("oom", "task")
        async with made.environments.open(in_image(place)) as environment:
            done = await run(environment, f"{hog} >&2 || echo killed")
            assert done.stdout == b"killed\n", "an agent is told, as on any machine"


@pytest.mark.original("A-k8s-lazy")
async def test_without_a_session_nothing_is_started(place_name, make_place, repository):
    with pytest.raises(EnvCreateError, match="outside session"):
        async with make_place(place_name).environments.open(repository):
            pass


def test_a_base_repository_is_clean(repository):
    assert git(repository.repository, "status", "--porcelain") == ""
