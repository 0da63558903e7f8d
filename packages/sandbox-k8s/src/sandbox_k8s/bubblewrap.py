"""The command line of bubblewrap: what a sandbox sees of the machine.

See: ``/usr`` and the libraries, a few files of ``/etc``, the launcher, one Python, what the spec adds, all
    read-only;
its own work, home and temporary folders. Not see: the user's home, other sandboxes, other processes, the
network. The launcher is process 1 of its own PID namespace, and the kernel shields that one from signals sent
inside.
"""

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .errors import ConfigError
from .spec import SandboxSpec

WORKSPACE = "/workspace"
HOME = "/home/sandbox"
LAUNCHER = "/run/sandbox-k8s/launcher"
PIPES = "/run/sandbox-k8s/pipes"
_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_TAKEN = (*_TOP, "/usr", "/etc", "/dev", "/proc", "/run", "/tmp", "/var", HOME, WORKSPACE)
_ETC = (
    "alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies",
    "default/locale", "fonts", "gai.conf", "host.conf", "inputrc", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "locale.alias", "locale.conf", "localtime", "magic", "mime.types", "nsswitch.conf",
    "pki", "protocols", "services", "shells", "ssl", "terminfo", "timezone",
)  # fmt: skip
_NETWORK_ETC = ("hosts", "resolv.conf")
_NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv",
)  # fmt: skip


def why_unusable(python: "Path") -> str:
    """Try a whole sandbox once; empty when it works, else what stood in the way."""
    program = shutil.which("bwrap")
    if program is None:
        return (
            "bwrap is not installed (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)"
        )
    argv = [
        program, *_NAMESPACES, "--unshare-net", *_system(), *_read_only(python),
        "--dev", "/dev", "--mqueue", "/dev/mqueue", "--proc", "/proc", "--", "/bin/sh", "-c", "exit 42",
    ]  # fmt: skip
    try:
        tried = subprocess.run(
            argv, capture_output=True, timeout=20, check=False, env={"PATH": "/usr/bin:/bin"}
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"{program} cannot be run: {problem}"
    if tried.returncode == 42:
        return ""
    said = tried.stderr.decode("utf-8", "replace").strip()
    return f"{program} refuses: {said or f'exit status {tried.returncode}'}"


def command_line(
    folder: Path, spec: SandboxSpec, *, prefix: Path, launcher: Path, program: Sequence[str]
) -> list[str]:
    """The argument list that runs ``program`` inside. It holds paths and nothing secret.

    Args:
        spec: What to show, and whether there is a network.
        program: What runs inside.
        folder: The sandbox's folder, made by `Store.create`; two files for ``/etc`` are written into it.
        prefix: The installation of the Python that runs the launcher.
        launcher: The folder of the launcher's code.
    """
    program_path = shutil.which("bwrap")
    if program_path is None:
        raise ConfigError("bwrap is not installed")
    argv = [program_path, *_NAMESPACES, "--hostname", "sandbox"]
    if not spec.network:
        argv.append("--unshare-net")
    argv += _system()
    if spec.network:
        argv += [word for name in _NETWORK_ETC for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]
    argv += _users(folder)
    # Message queues outlive their processes: a reset must see them.
    argv += ["--dev", "/dev", "--mqueue", "/dev/mqueue", "--proc", "/proc"]
    argv += ["--tmpfs", "/run", "--dir", "/var"]
    argv += ["--bind", str(folder / "tmp"), "/tmp", "--bind", str(folder / "tmp"), "/var/tmp"]
    argv += ["--bind", str(folder / "home"), HOME, "--bind", str(folder / "work"), WORKSPACE]
    argv += ["--bind", str(folder / "pipes"), PIPES, "--ro-bind", str(launcher), LAUNCHER]
    argv += _read_only(prefix)
    for path in spec.read_only_paths:
        argv += _read_only(path)
    argv += _working_directory(folder, spec, (prefix, *spec.read_only_paths))
    # Last: what was mounted over it stays as it is, the empty root between the mounts cannot be filled.
    argv += ["--remount-ro", "/", "--chdir", WORKSPACE, "--", *program]
    return argv


def _working_directory(folder: Path, spec: SandboxSpec, shown: Sequence[Path]) -> list[str]:
    """A place for a working directory in the empty root; below what is there the launcher makes it."""
    if spec.workdir is None:
        return []
    workdir = Path(os.path.normpath(spec.workdir))
    taken = (*_TAKEN, *(place for path in shown for place in (path, path.resolve())))
    if any(workdir.is_relative_to(place) or Path(place).is_relative_to(workdir) for place in taken):
        return []
    return ["--bind", str(folder / "work"), str(workdir)]


def check_read_only(paths: Sequence[Path], root: Path) -> None:
    """Refuse paths that would show what a sandbox must not see.

    Raises:
        ConfigError: A path is missing, or is (or holds) the user's home or the root of the sandboxes.
    """
    home = Path(pwd.getpwuid(os.getuid()).pw_dir).resolve()
    for path in paths:
        if not path.exists():
            raise ConfigError(f"SandboxSpec.read_only_paths: {path} does not exist")
        real = path.resolve()
        for what, hidden in (("your home", home), ("the root of the sandboxes", root.resolve())):
            if hidden == real or real in hidden.parents:
                raise ConfigError(
                    f"SandboxSpec.read_only_paths: {path} would show {what} ({hidden}) in the sandbox"
                )
        if root.resolve() in real.parents:
            raise ConfigError(f"SandboxSpec.read_only_paths: {path} lies in the root of the sandboxes")


def _system() -> list[str]:
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in _TOP:
        path = Path(name)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            argv += ["--ro-bind", name, name]
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return argv


def _read_only(path: Path) -> list[str]:
    # At the name that was given, with what is behind it: tools write the former into their scripts.
    words = ["--ro-bind", str(path.resolve()), str(path)]
    real = path.resolve()
    return words if real == path else [*words, "--ro-bind", str(real), str(real)]


def _users(folder: Path) -> list[str]:
    uid, gid = os.getuid(), os.getgid()
    name = "root" if uid == 0 else "sandbox"
    users = f"{name}:x:{uid}:{gid}::{HOME}:/bin/bash\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n"
    (folder / "passwd").write_text(users)
    (folder / "group").write_text(f"{name}:x:{gid}:\nnogroup:x:65534:\n")
    argv: list[str] = []
    for source in ("passwd", "group"):
        argv += ["--ro-bind", str(folder / source), f"/etc/{source}"]
    return argv
