"""The run key's file: made when it is missing, readable by nobody else."""

import os
from pathlib import Path

import pytest
from sandbox_k8s import ConfigError
from sandbox_k8s.run_key import RunKey


def test_a_missing_file_is_made_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.key"
    first = RunKey(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunKey(path).token("local", "a") == first.token("local", "a")
    assert [entry.name for entry in path.parent.iterdir()] == ["run.key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_ones_own_file_is_for_oneself(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run.key"
    path.write_bytes(bytes(32))
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        RunKey(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize(("mode", "good"), [(0o440, True), (0o640, True), (0o660, False), (0o444, False)])
def test_a_mounted_secret_may_be_read_by_a_group(tmp_path: Path, mode: int, good: bool) -> None:
    """Kubernetes mounts a Secret as root's, and with fsGroup readable for a group of the pod's own."""
    path = tmp_path / "run.key"
    path.write_bytes(bytes(32))
    os.chown(path, 12345, 12345)
    path.chmod(mode)
    if good:
        RunKey(path)
        return
    with pytest.raises(ConfigError, match="can be read by others"):
        RunKey(path)
