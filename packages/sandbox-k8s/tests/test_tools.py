"""The launcher tree and its image, and what it takes along from the machine that made it."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import msgspec
import pytest
from sandbox_k8s import BackendUnavailableError, ConfigError
from sandbox_k8s.cli import main
from sandbox_k8s.launcher.install import content_hash, copy_tree
from sandbox_k8s.local import base_python
from sandbox_k8s.tools import (
    build,
    install_command,
    launcher_command,
    layout,
    libraries,
    node_requirements,
    read_record,
    write_archive,
)
from sandbox_k8s.tools.image import write_image

RUNNABLE = shutil.which("bwrap") is not None


def archived(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {one.name: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr]


def test_the_record_says_what_the_tree_is(tree: Path) -> None:
    record = read_record(tree)
    assert record.architecture in ("amd64", "arm64")
    assert record.content == content_hash(tree)
    assert record.size == sum(path.stat().st_size for path in tree.rglob("*") if path.is_file()) - len(
        (tree / "tools.json").read_bytes()
    )
    assert record.size <= 60 << 20
    assert node_requirements(tree) == node_requirements(record)
    assert node_requirements(tree)["nodeSelector"] == {
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": record.architecture,
    }


def test_any_change_changes_the_content_hash(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy_tree(tree, copy)
    assert content_hash(copy) == read_record(tree).content
    file = copy / "launcher" / "pod.py"
    file.chmod(0o755)
    assert content_hash(copy) != read_record(tree).content
    file.chmod(0o644)
    file.rename(file.with_name("pot.py"))
    with pytest.raises(ValueError, match="content"):
        copy_tree(copy, tmp_path / "again")
    assert not (tmp_path / "again" / "tools.json").exists()


def test_nothing_in_the_tree_knows_where_it_was_made(tree: Path) -> None:
    told = [
        path.name
        for path in tree.rglob("*.pyc")
        if str(tree.parent).encode() in path.read_bytes()
        or str(base_python().parent).encode() in path.read_bytes()
    ]
    assert told == []
    assert not list((tree / "lib").rglob("*.py"))


@pytest.fixture
def small_tree(tree: Path, tmp_path: Path) -> Path:
    """The form of a tree and little of its weight."""
    small = tmp_path / "small"
    for name in ("launcher/pod.py", "lib/ld.so"):
        (small / name).parent.mkdir(parents=True)
        shutil.copy(tree / name, small / name)
    layout.write_record(small, msgspec.structs.replace(read_record(tree), content=content_hash(small)))
    return small


def test_the_image_is_an_oci_layout_of_one_layer(small_tree: Path, tmp_path: Path) -> None:
    tree = small_tree
    made = write_archive(tree, tmp_path / "one.tar", name="registry.example.com/tools:1")
    files = archived(made.path)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    for name, data in files.items():
        if name.startswith("blobs/sha256/"):
            assert name.removeprefix("blobs/sha256/") == hashlib.sha256(data).hexdigest()

    def blob(entry: dict[str, object]) -> bytes:
        data = files[f"blobs/sha256/{str(entry['digest']).removeprefix('sha256:')}"]
        assert len(data) == entry["size"]
        return data

    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["digest"] == made.digest
    assert entry["annotations"]["io.containerd.image.name"] == "registry.example.com/tools:1"
    assert entry["platform"] == {"architecture": read_record(tree).architecture, "os": "linux"}
    manifest = json.loads(blob(entry))
    config = json.loads(blob(manifest["config"]))
    assert config["config"]["User"] == "65534:65534"
    (layer,) = manifest["layers"]
    plain = subprocess.run(["gzip", "-dc"], input=blob(layer), capture_output=True, check=True).stdout
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(plain).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(plain)) as root:
        assert {(one.uid, one.gid, one.mtime) for one in root} == {(0, 0, 0)}
        root.extractall(tmp_path / "root", filter="tar")
    assert content_hash(tmp_path / "root") == read_record(tree).content
    assert (tmp_path / "root" / "sandbox-k8s").readlink() == Path()
    again = write_archive(tree, tmp_path / "two.tar", name="registry.example.com/tools:1")
    assert again.digest == made.digest
    assert again.path.read_bytes() == made.path.read_bytes()


@pytest.mark.slow
def test_the_same_input_gives_the_same_tree(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, archive = tmp_path / "deeper" / "other name", tmp_path / "image.tar"
    assert main(["build-tools", "--out", str(out), "--archive", str(archive)]) == 0
    assert read_record(out) == read_record(tree)
    said = capsys.readouterr().out
    assert read_record(out).content in said
    assert write_archive(tree, tmp_path / "own.tar").digest in said


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(ConfigError, match="not an empty folder"):
        build(tmp_path)
    assert main(["build-tools", "--out", str(tmp_path / "precious")]) == 2
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        build(tmp_path / "precious" / "below")
    assert (tmp_path / "precious").read_text() == "data"


def test_what_is_no_tree_is_refused(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tools\.json: No such file"):
        node_requirements(tmp_path)
    (tmp_path / "tools.json").write_text("{}")
    with pytest.raises(ConfigError, match="missing required field"):
        read_record(tmp_path)
    later = json.loads((tree / "tools.json").read_text()) | {"version": 2}
    (tmp_path / "tools.json").write_text(json.dumps(later))
    with pytest.raises(ConfigError, match="of version 2; this release reads"):
        write_archive(tmp_path, tmp_path / "x.tar")
    with pytest.raises(ConfigError, match=r"x\.tar cannot be written: No such file"):
        write_image(tmp_path / "missing" / "x.tar", "x:1", b"", {}, {})


def test_programs_without_glibc_are_refused(tmp_path: Path) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is not installed")
    with pytest.raises(BackendUnavailableError, match=r"ldd cannot say|not linked against glibc"):
        libraries.needed_by([Path(busybox)])


def test_commands_need_no_shell_and_hold_no_token(tree: Path) -> None:
    command = launcher_command(
        "/opt/t", listen="0.0.0.0:1", state="/s", token_hash="ab" * 32, lease_s=90.5, sandbox_id="id",
        workdir="/w d", memory_bytes=1 << 30,
    )  # fmt: skip
    assert command[0] == "/opt/t/lib/ld.so"
    for word in command[1:]:
        if word.startswith("/opt/t/"):
            assert (tree / word.removeprefix("/opt/t/")).exists()
    assert command[command.index("--lease") + 1] == "90.5"
    assert command[-4:] == ["--workdir", "/w d", "--memory-bytes", str(1 << 30)]


@pytest.mark.skipif(not RUNNABLE, reason="bwrap is not installed")
def test_a_container_of_the_image_copies_its_own_tree(tree: Path, tmp_path: Path) -> None:
    """As the init container does: the tree is the root, and there is nothing else, no shell either."""
    root, target = tmp_path / "root", tmp_path / "target"
    copy_tree(tree, root)
    (root / "sandbox-k8s").symlink_to(".")
    for name in ("target", "proc"):
        (root / name).mkdir()
    target.mkdir()
    words = ["--ro-bind", str(root), "/", "--bind", str(target), "/target", "--proc", "/proc", "--clearenv"]
    run = ["bwrap", *words, *install_command("/target")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert read_record(target) == read_record(tree)
    assert content_hash(target) == read_record(tree).content
    assert {path.name for path in target.iterdir()} == {"bin", "launcher", "lib", "tools.json"}
    (root / "launcher" / "pod.py").write_text("raise SystemExit('something else')")
    broken = subprocess.run(run, capture_output=True, text=True, check=False)
    assert broken.returncode == 1
    assert "launcher install: the copy in /target has content sha256:" in broken.stderr
