"""What stands in the way of a capture: files that change meanwhile, attributes of the agent, odd names."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
from agent_flow.environments.base_commit import ATTRIBUTES, Base, prune
from agent_flow.environments.patch import capture_patch, choose
from agent_flow.environments.repository import git
from agent_flow.environments.staging import FUNCTIONS
from agent_flow.errors import EnvError
from agent_flow.protocols import EnvironmentSpec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
async def sandbox(local, testbed):
    spec = EnvironmentSpec(repository=testbed.folder, base_commit=testbed.base)
    async with local.open(spec) as environment:
        yield environment, spec


async def run(environment, script):
    done = await environment.execute(["bash", "-ec", script], timeout_s=60, cwd=environment.workdir)
    assert done.exit_code == 0, done
    return done.stdout.decode()


def apply_raw(patch: bytes, folder: Path, scratch: Path) -> None:
    """As a grader has to: under the attributes that the patch was made with."""
    own = scratch / "own"
    git(scratch, "init", "--quiet", "--bare", "--template=", str(own))
    (own / "info").mkdir()
    (own / "info/attributes").write_text(ATTRIBUTES + "\n")
    under = os.environ | {"GIT_DIR": str(own), "GIT_WORK_TREE": str(folder)}
    subprocess.run(["git", "apply", "--binary", "-"], cwd=folder, input=patch, check=True, env=under)


def settle(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run `settled` on a shell function `attempt_of` in a folder."""
    own = folder / "own"
    own.mkdir()
    work = folder / "work"
    work.mkdir()
    (own / "functions.sh").write_text(FUNCTIONS)
    text = f'set -eu\nown={own}\n. "$own/functions.sh"\nGIT_INDEX_FILE="$own/index"\n{script}\n'
    return subprocess.run(["sh", "-c", text], cwd=work, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("codes", "tries", "ends"),
    [
        ("0", 1, 0),
        ("1 1", 2, 0),  # files that nobody can read are listed
        ("1 0", 2, 0),
        ("128 0", 2, 0),  # a file that vanished
        ("135 137 1", 3, 0),  # one that shrank, and a killed git
        ("137 137 137", 3, 69),
    ],
)
def test_a_git_that_did_not_come_to_its_end_is_tried_again(tmp_path, codes, tries, ends):
    done = settle(
        tmp_path,
        f"""
        set -- {codes}
        reads() {{
          [ ! -e "$own/index.lock" ] || {{ echo locked >&2; exit 3; }}
          : > "$own/index.lock"; echo tried; echo why >&2
          code=$(sed -n "$(wc -l < "$own/count" | tr -d ' ')p" "$own/codes"); echo >> "$own/count"
          return "$code"
        }}
        printf '%s\\n' {codes} > "$own/codes"; echo > "$own/count"
        settled reads
        """,
    )
    assert (done.returncode, done.stdout.count("tried")) == (ends, tries), done
    assert ("why" in done.stderr) == (ends != 0)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="there is no /proc here")
def test_what_the_agent_left_running_is_halted_and_goes_on(tmp_path):
    """Only what works in that folder, and not the script itself."""
    (tmp_path / "work2").mkdir()
    other = subprocess.Popen(["sleep", "60"], cwd=tmp_path / "work2")
    script = """
    sleep 60 > /dev/null 2>&1 & left=$!
    state() { cut -d ' ' -f 3 "/proc/$1/stat"; }
    reads() { state $left; state OTHER; [ "$(state $left)" = T ] || return 128; }
    settled reads
    resume; state $left; kill -9 $left
    """
    try:
        done = settle(tmp_path, script.replace("OTHER", str(other.pid)))
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert done.returncode == 0, done
    states = done.stdout.split()
    assert states[-3:-1] == ["T", "S"]
    assert states[-1] != "T"


async def test_what_cannot_be_written_is_no_empty_patch(sandbox, bases, tmp_path):
    """A full disk: git says the same of each file as of one that it cannot read, and ends with 1."""
    environment, spec = sandbox
    base = await bases.prepare(environment, spec)
    spoiled = tmp_path / "spoiled"
    shutil.copytree(base.git, spoiled)
    for number in range(256):
        (spoiled / f"objects/{number:02x}").write_text("no folder\n")
    await run(environment, "echo 'x = 2' > pkg/a.py")
    with pytest.raises(EnvError, match="could not read") as caught:
        await capture_patch(environment, msgspec.structs.replace(base, git=spoiled))
    assert (caught.value.cause, caught.value.fault, caught.value.retryable) == ("capture", "infra", True)
    assert "unable to create temporary file" in caught.value.evidence


BYTES = {
    "text=auto": b"a\r\nb\r\n",
    "text eol=crlf": b"a\nb\r\nc\n",
    "text eol=lf": b"a\r\nb\n",
    "ident": b"$Id: mine$\n",
    "text working-tree-encoding=UTF-16": "a\nb\n".encode("utf-16"),
    "text working-tree-encoding=UTF-32": b"abc",
    "text working-tree-encoding=latin-1": b"caf\xe9\n",
    "filter=none": b"plain\n",
    "-diff": b"plain\n",
    "binary": b"plain\r\n",
    "diff=python merge=union": b"plain\n",
}


async def test_attributes_of_the_agent_change_no_byte(sandbox, bases, testbed, tmp_path):
    """Nor do they make git refuse a file, run a program, or hide a text behind `GIT binary patch`."""
    environment, spec = sandbox
    base = await bases.prepare(environment, spec)
    written = {f"new{at}.t": data for at, data in enumerate(BYTES.values())}
    lines = [f"new{at}.t {attributes}\n" for at, attributes in enumerate(BYTES)]
    written |= {"crlf.txt": b"a\r\nB\r\n", "pkg/a.py": b"x = 2\n", "setup.cfg": b"[metadata]\nname = other\n"}
    lines += ["crlf.txt text=auto\n", "pkg/a.py -diff\n", "setup.cfg text working-tree-encoding=UTF-16\n"]
    written[".gitattributes"] = "".join(lines).encode()
    for name, data in written.items():
        await environment.write(f"{environment.workdir}/{name}", data)
    await run(environment, "git config filter.none.required true; git config filter.none.clean false")
    captured = await capture_patch(environment, base)
    assert captured.left_out == ()
    assert captured.patch.count(b"GIT binary patch") == sum(b"\0" in data for data in written.values()) == 1
    graded = tmp_path / "graded"
    shutil.copytree(testbed.folder, graded, symlinks=True)
    apply_raw(captured.patch, graded, tmp_path)
    assert {name: (graded / name).read_bytes() for name in written} == written


async def test_a_repository_that_normalises_keeps_its_bytes(local, testbed, bases, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(testbed.folder, source, symlinks=True)
    (source / ".gitattributes").write_text("*.txt text eol=crlf\n*.id ident\n")
    (source / "v.id").write_bytes(b"$Id$\n")
    git(source, "add", "--all", "--renormalize", ".gitattributes", "v.id", "crlf.txt")
    git(source, "add", ".gitattributes", "v.id")
    git(source, "commit", "--quiet", "--message", "normalised")
    spec = EnvironmentSpec(repository=source, base_commit=git(source, "rev-parse", "HEAD").strip())
    async with local.open(spec) as environment:
        await run(environment, "rm v.id crlf.txt; git checkout -- v.id crlf.txt")
        base = await bases.prepare(environment, spec)
        assert (await environment.read(f"{environment.workdir}/crlf.txt")) == b"a\r\nb\r\n"
        assert b"$Id: " in await environment.read(f"{environment.workdir}/v.id")
        graded = tmp_path / "graded"
        await environment.download(environment.workdir, graded)
        assert (await capture_patch(environment, base)).patch == b""
        await run(environment, "printf 'a\\r\\nB\\r\\nlf\\n' > crlf.txt; echo more >> v.id; echo n > n.txt")
        captured = await capture_patch(environment, base)
        names = ("crlf.txt", "v.id", "n.txt")
        made = [await environment.read(f"{environment.workdir}/{name}") for name in names]
    apply_raw(captured.patch, graded, tmp_path)
    assert [(graded / name).read_bytes() for name in names] == made


async def test_names_with_line_ends_are_names(sandbox, bases):
    """Of nested repositories and of large files: nothing else is removed or left out."""
    environment, spec = sandbox
    base = await bases.prepare(environment, spec)
    await run(
        environment,
        r"""
        mkdir src $'src\n' $'in\nner'; echo 1 > src/kept.py; echo 2 > pkg/c.py
        head -c 200001 /dev/zero > $'src\n/pkg'
        git init -q $'in\nner'; echo 3 > $'in\nner/f.py'
        """,
    )
    captured = await capture_patch(environment, base)
    for name in (b"src/kept.py", b"pkg/c.py", rb'"b/in\nner/f.py"'):
        assert name in captured.patch
    assert [(left.path, left.reason) for left in captured.left_out] == [("src\n/pkg", "too_large")]


async def test_one_staged_file_that_is_unreadable_costs_no_other(sandbox, bases):
    """Ignored files that the agent staged, one of which is a folder meanwhile."""
    environment, spec = sandbox
    base = await bases.prepare(environment, spec)
    await run(
        environment,
        "for f in a b c; do echo 1 > $f.log; done; git add -f *.log; rm b.log; mkdir b.log; : > b.log/x",
    )
    captured = await capture_patch(environment, base)
    assert b"b/a.log" in captured.patch
    assert b"b/c.log" in captured.patch


def test_what_was_read_and_changed_again_is_in_the_patch(tmp_path):
    """A log that is still written to is not said to be left out."""
    raw = b":000000 100644 %s %s A\0run.txt\0" % (b"0" * 40, b"1" * 40)
    parts = {b"raw": raw, b"unread": b"run.txt\0gone.txt\0"}
    parts |= dict.fromkeys((b"sizes", b"large", b"ignored", b"inner", b"odd"), b"")
    report = b"".join(b"%s %d\n%s" % (name, len(data), data) for name, data in parts.items())
    base = Base(git=tmp_path, commit="", tree="", max_file_bytes=9)
    _, left_out = choose(report, base)
    assert [left.path for left in left_out] == ["gone.txt"]


async def test_messages_and_bundles_of_the_future_go(sandbox, testbed):
    environment, _ = sandbox
    await run(
        environment,
        """
        mkdir -p .git/rr-cache/x .git/lost-found/other
        for f in COMMIT_EDITMSG SQUASH_MSG MERGE_MSG TAG_EDITMSG rr-cache/x/postimage lost-found/other/y \
          deep.bundle info/x.bundle objects/pack/tmp_pack_x objects/pack/.tmp-1-pack
        do echo fix > .git/$f; done
        git branch kept.bundle
        git symbolic-ref HEAD refs/heads/kept.bundle
        """,
    )
    await prune(environment, testbed.base)
    assert await run(environment, "grep -rl fix .git --include='*' | grep -v hooks || :") == ""
    assert await run(environment, "git symbolic-ref HEAD; ls .git | grep -c 'MSG\\|rr-\\|lost' || :") == (
        "refs/heads/kept.bundle\n0\n"
    )


@pytest.mark.parametrize("how", ["--filter=blob:none", "--filter=tree:0"])
async def test_a_partial_clone_is_the_images_fault(sandbox, testbed, how):
    """Before anything is changed: the list of wanted objects would be wrong."""
    environment, _ = sandbox
    partial = f"{environment.workdir}/partial"
    await run(
        environment, f'git config uploadpack.allowFilter true; git clone -q {how} "file://$PWD" partial'
    )
    environment.workdir = partial
    before = await run(environment, "git for-each-ref; cat .git/config; ls .git")
    with pytest.raises(EnvError, match="partial clone") as caught:
        await prune(environment, testbed.base)
    assert (caught.value.fault, caught.value.retryable) == ("image", False)
    assert await run(environment, "git for-each-ref; cat .git/config; ls .git") == before
