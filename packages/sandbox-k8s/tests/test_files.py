"""Bytes in and out: nothing changed, nothing half, nothing outside."""

import errno
import hashlib
import io
import os
import stat
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_k8s import FileError, Sandbox, TransferError
from sandbox_k8s.launcher import archive, frames

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "content", [b"a\r\nb\r\n", b"no newline", b"\xef\xbb\xbfbom\n", b"", b"\x00\xff" * 1000, b"x" * 3_000_000]
)
async def test_read_and_write_are_byte_exact(sandbox: Sandbox, content: bytes) -> None:
    """langchain-ai/deepagents#2879: CRLF was read as LF, and no edit could match any more."""
    await sandbox.write("new/folder/file", content)
    assert await sandbox.read("new/folder/file") == content
    digest = await sandbox.execute(["sha256sum", "new/folder/file"])
    assert digest.stdout.split()[0].decode() == hashlib.sha256(content).hexdigest()


async def test_write_keeps_mode_and_link_unless_told(sandbox: Sandbox) -> None:
    await sandbox.write("tool", b"1", mode=0o750)
    await sandbox.execute("ln -s tool link")
    await sandbox.write("link", b"2")
    shown = await sandbox.execute("stat -c %a tool; readlink link; cat tool; ls -A")
    assert shown.stdout == b"750\ntool\n2link\ntool\n"


async def test_paths_may_be_absolute_and_strange(sandbox: Sandbox) -> None:
    path = f"{sandbox.workdir}/a b&c=d?#%41ü\n"
    await sandbox.write(path, b"1")
    assert await sandbox.read(path) == b"1"


async def test_a_missing_file_is_named_with_its_errno(sandbox: Sandbox) -> None:
    with pytest.raises(FileError, match="no/such") as missing:
        await sandbox.read("no/such")
    assert missing.value.errno == errno.ENOENT
    assert missing.value.missing
    assert missing.value.fault == "agent"
    with pytest.raises(FileError) as folder:
        await sandbox.read(".")
    assert folder.value.errno == errno.EISDIR
    with pytest.raises(FileError):
        await sandbox.write(".", b"")
    with pytest.raises(FileError):
        await sandbox.download("no/such", "/nonexistent/target")
    with pytest.raises(FileNotFoundError):
        await sandbox.upload("/no/such", "x")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def make_tree(base: Path) -> Path:
    tree = base / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "sub").mkdir(mode=0o700)
    (tree / "sub" / "script").write_bytes(b"#!/bin/sh\necho ran\n")
    (tree / "sub" / "script").chmod(0o775)
    (tree / "sub" / "twin").hardlink_to(tree / "sub" / "script")
    (tree / "link").symlink_to("sub/script")
    (tree / "dangling").symlink_to("/no/where")
    (tree / "folder-link").symlink_to("sub")
    (tree / "read-only").mkdir()
    (tree / "read-only" / "f").write_bytes(b"\x00" * 2_000_001)
    (tree / "read-only").chmod(0o555)
    (tree / os.fsdecode(b"name-\xff")).write_bytes(b"latin")
    (tree / ("long-" + "x" * 200)).write_bytes(b"")
    return tree


def describe(tree: Path) -> dict[str, object]:
    """Everything that must survive a copy."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(tree):
        for name in [".", *folders, *files]:
            path = Path(folder) / name
            status = path.lstat()
            key = str(path.relative_to(tree))
            if path.is_symlink():
                found[key] = path.readlink()
            elif stat.S_ISREG(status.st_mode):
                found[key] = (stat.S_IMODE(status.st_mode), status.st_nlink, path.read_bytes())
            else:
                found[key] = stat.S_IMODE(status.st_mode)
    return found


async def test_a_tree_goes_in_and_comes_out_the_same(sandbox: Sandbox, tmp_path: Path) -> None:
    """swe-rex 1.4.0's zip loses modes and turns links into files."""
    tree = make_tree(tmp_path)
    wanted = describe(tree)
    await sandbox.upload(tree, "in")
    assert (
        await sandbox.execute("in/link; stat -c %a in/sub/script; find in | wc -l")
    ).stdout == b"ran\n775\n12\n"
    await sandbox.download("in", tmp_path / "out")
    assert describe(tmp_path / "out") == wanted


async def test_a_tree_goes_into_a_mount_point_and_a_folder_with_a_read_only_parent(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """What comes was put aside in the parent folder, which nobody may write to there."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(b"here")
    for target in (".", sandbox.workdir):
        await sandbox.upload(tmp_path, target)
        assert await sandbox.read("sub/file") == b"here"
        assert (await sandbox.execute("ls -A")).stdout == b"sub\n", "nothing stays aside"


async def test_a_tree_is_merged_into_a_folder_and_a_file_is_replaced(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    for name, text in (("new", "n"), ("both", "from outside")):
        write(tmp_path / "t" / name, text)
    await sandbox.execute("mkdir t; echo old > t/old; echo old > t/both")
    await sandbox.upload(tmp_path / "t", "t")
    assert (await sandbox.execute("ls t; cat t/both")).stdout == b"both\nnew\nold\nfrom outside"
    await sandbox.upload(tmp_path / "t" / "new", "single/file")
    assert await sandbox.read("single/file") == b"n"
    assert (await sandbox.execute("ls -A . single")).stdout == b".:\nsingle\nt\n\nsingle:\nfile\n"


async def test_a_large_upload_does_not_fill_the_launchers_memory(sandbox: Sandbox, tmp_path: Path) -> None:
    """swe-rex 1.4.0 grew by the size of the upload (600 MB: 54 to 670 MB)."""
    if sys.platform != "linux":
        pytest.skip("memory is read from /proc")
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(96 << 20)
    pid = (await sandbox.info())["pid"]
    peak = f"sed -n 's/^VmHWM:[^0-9]*\\([0-9]*\\).*/\\1/p' /proc/{pid}/status"
    before = int((await sandbox.execute(peak)).stdout)
    await sandbox.upload(big, "big")
    await sandbox.download("big", tmp_path / "back")
    assert (tmp_path / "back").stat().st_size == 96 << 20
    assert int((await sandbox.execute(peak)).stdout) - before < 24 << 10


def hostile(*entries: tuple[str, bytes, str]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as bundle:
        for name, kind, link in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
            bundle.addfile(info, io.BytesIO(b"!"))
    stream.seek(0)
    return stream


@pytest.mark.parametrize(
    "entries",
    [
        [("root/../../evil", tarfile.REGTYPE, "")],
        [("/evil", tarfile.REGTYPE, "")],
        [("other/evil", tarfile.REGTYPE, "")],
        [("root", tarfile.SYMTYPE, "/"), ("root/evil", tarfile.REGTYPE, "")],
        [
            ("root", tarfile.DIRTYPE, ""),
            ("root/l", tarfile.SYMTYPE, ".."),
            ("root/l/evil", tarfile.REGTYPE, ""),
        ],
        [("root", tarfile.LNKTYPE, "/etc/passwd")],
        [("root", tarfile.DIRTYPE, ""), ("root/h", tarfile.LNKTYPE, "root/../../secret")],
        [("root", tarfile.CHRTYPE, "")],
        [("root", tarfile.FIFOTYPE, "")],
        [],
    ],
)
def test_an_archive_from_a_sandbox_cannot_write_outside(tmp_path: Path, entries: list) -> None:
    (tmp_path / "secret").write_text("s")
    target = tmp_path / "deep" / "target"
    with pytest.raises(archive.ArchiveError):
        archive.unpack(hostile(*entries), target)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "secret"]


def test_what_is_no_archive_is_an_archive_error(tmp_path: Path) -> None:
    with pytest.raises(archive.ArchiveError):
        archive.unpack(io.BytesIO(b"no tar" * 200), tmp_path / "t")


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_frames_prove_that_they_are_whole(chunks: list[bytes], data: st.DataObject) -> None:
    """kubernetes/kubernetes#124571: output was cut, and the copy reported success."""
    stream = b"".join(frames.encode(chunks))
    decoder = frames.Decoder()
    got: list[bytes] = []
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, 40))
        got += decoder.feed(stream[at : at + size])
        at += size
    assert decoder.trailer is not None
    assert b"".join(got) == b"".join(chunks)
    cut = data.draw(st.integers(0, len(stream) - 1))
    with pytest.raises(frames.FrameError):
        list(frames.decode(io.BytesIO(stream[:cut])))
    flipped = bytearray(stream)
    flipped[data.draw(st.integers(0, len(stream) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        content = list(frames.decode(io.BytesIO(bytes(flipped))))
    except frames.FrameError:
        return
    assert b"".join(content) == b"".join(chunks)  # only the trailer's own spelling was touched


async def test_a_source_that_shrinks_is_an_error_on_both_sides(sandbox: Sandbox, tmp_path: Path) -> None:
    class Shrinking:
        def __iter__(self):
            yield b"first"
            raise OSError("it shrank")

    with pytest.raises(TransferError, match="it shrank"):
        await sandbox.launcher.put("/sbx/file", {"path": "half"}, Shrinking())
    with pytest.raises(FileError):
        await sandbox.read("half")
    assert (await sandbox.execute("ls -A")).stdout == b""
