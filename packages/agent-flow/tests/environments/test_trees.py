"""Folders that a container sends are not trusted."""

import io
import os
import tarfile

import pytest
from agent_flow.environments.tree import pack_tree, unpack_tree
from agent_flow.errors import EnvError


def archive(*entries):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, kind, data in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(data)
            else:
                info.linkname = data.decode()
            info.mode = 0o755
            made.addfile(info, io.BytesIO(data) if kind == tarfile.REGTYPE else None)
    out.seek(0)
    return out


@pytest.mark.parametrize("name", ["top/../../out", "/etc/out", "..", "top/../out"])
def test_names_that_lead_outside_are_refused(tmp_path, name):
    with pytest.raises(EnvError, match="outside") as caught:
        unpack_tree(archive(("top", tarfile.DIRTYPE, b""), (name, tarfile.REGTYPE, b"x")), tmp_path / "in")
    assert caught.value.fault == "agent"
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_through_a_link(tmp_path):
    sent = archive(
        ("top", tarfile.DIRTYPE, b""),
        ("top/away", tarfile.SYMTYPE, str(tmp_path / "outside").encode()),
        ("top/away/file", tarfile.REGTYPE, b"x"),
    )
    (tmp_path / "outside").mkdir()
    with pytest.raises((EnvError, FileExistsError)):
        unpack_tree(sent, tmp_path / "in")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_hard_link_to_the_outside_is_refused(tmp_path):
    with pytest.raises(EnvError, match="outside"):
        unpack_tree(archive(("top/link", tarfile.LNKTYPE, b"../../etc/passwd")), tmp_path / "in")


def test_what_is_no_archive_says_so(tmp_path):
    with pytest.raises(EnvError, match="tar"):
        unpack_tree(io.BytesIO(b"no archive" * 100), tmp_path / "in")


def test_pipes_stay_behind_and_the_rest_is_the_same(tmp_path):
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep").chmod(0o555)
    (source / "file").write_bytes(b"\r\n\xff")
    os.mkfifo(source / "pipe")
    out = io.BytesIO()
    pack_tree(source, out, name="x", owner=(1, 2))
    out.seek(0)
    unpack_tree(out, tmp_path / "target")
    assert (tmp_path / "target/file").read_bytes() == b"\r\n\xff"
    assert (tmp_path / "target/deep").stat().st_mode & 0o777 == 0o555
    assert not (tmp_path / "target/pipe").exists()
    for folder in (source, tmp_path / "target"):
        (folder / "deep").chmod(0o755)
