"""The local back end's folder: one folder per sandbox, a locked state file in each."""

import fcntl
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from .errors import ConfigError, SandboxNotFoundError
from .handle import SandboxHandle
from .launcher.keeper import ALIVE_LOCK

STATE_VERSION = 1


class SandboxState(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox's folder says about it; read and replaced under the folder's lock.

    Attributes:
        handle: With the epoch of the owner now.
        detached: Whether it waits for a next owner.
        expires_ns: When a detached sandbox ends if nobody comes; None while it is owned.
    """

    version: int = STATE_VERSION
    handle: SandboxHandle
    detached: bool = False
    expires_ns: int | None = None


class Store:
    """The root folder and what is in it."""

    def __init__(self, root: Path) -> None:
        """Make the root if it is missing.

        Raises:
            ConfigError: It belongs to somebody else or others may enter it.
        """
        self.root = root
        self._sandboxes = root / "sandboxes"
        for folder in (root, self._sandboxes):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as problem:
                raise ConfigError(
                    f"{folder} cannot be made: {problem.strerror}; give another LocalConfig.root"
                ) from problem
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise ConfigError(
                    f"{folder} must be a folder of yours with mode 0700 (it is of user {found.st_uid}, mode "
                    f"{stat.S_IMODE(found.st_mode):04o}); remove it or give another LocalConfig.root"
                )

    def folder(self, sandbox_id: str) -> Path:
        """The folder of a sandbox, there or not."""
        if len(sandbox_id) != 16 or not set(sandbox_id) <= set("0123456789abcdef"):
            raise ConfigError(f"{sandbox_id!r} is not a sandbox id: 16 hex characters")
        return self._sandboxes / sandbox_id

    def ids(self) -> list[str]:
        """All sandboxes that have a folder, dead or alive."""
        return sorted(entry.name for entry in self._sandboxes.iterdir() if len(entry.name) == 16)

    def create(self, sandbox_id: str) -> Path:
        """Make the folder of a new sandbox and those that it sees."""
        folder = self.folder(sandbox_id)
        folder.mkdir(mode=0o700)
        for name in ("work", "home", "tmp", "pipes"):
            (folder / name).mkdir(mode=0o700)
        return folder

    @contextmanager
    def locked(self, sandbox_id: str, *, wait: bool = True) -> Generator[bool]:
        """Hold the lock of a sandbox's state; gives False when ``wait`` is False and somebody else holds it.

        Raises:
            SandboxNotFoundError: There is no such sandbox.
        """
        folder = self.folder(sandbox_id)
        try:
            descriptor = os.open(folder / "state.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as problem:
            raise SandboxNotFoundError(f"there is no sandbox {sandbox_id} in {self.root}") from problem
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(descriptor)

    def read(self, sandbox_id: str) -> SandboxState:
        """The state of a sandbox.

        Raises:
            SandboxNotFoundError: There is none, or it never came up.
        """
        try:
            data = (self.folder(sandbox_id) / "state.json").read_bytes()
            return msgspec.json.decode(data, type=SandboxState)
        except FileNotFoundError as problem:
            raise SandboxNotFoundError(f"there is no sandbox {sandbox_id} in {self.root}") from problem
        except msgspec.MsgspecError as problem:
            raise SandboxNotFoundError(
                f"the state of sandbox {sandbox_id} is not readable: {problem}"
            ) from problem

    def write(self, state: SandboxState) -> None:
        """Replace the state of a sandbox; the caller holds its lock."""
        folder = self.folder(state.handle.sandbox_id)
        aside = folder / "state.json.new"
        aside.write_bytes(msgspec.json.encode(state))
        aside.replace(folder / "state.json")

    def kept(self, sandbox_id: str) -> bool:
        """Whether a keeper watches over the sandbox. The lock, not a pid: pids come back."""
        try:
            descriptor = os.open(self.folder(sandbox_id) / ALIVE_LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False
