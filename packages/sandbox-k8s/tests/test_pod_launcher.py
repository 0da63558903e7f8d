"""The launcher as a container's main process: from a tree, in a root that holds busybox and nothing else."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from sandbox_k8s.launcher.processes import children_of
from sandbox_k8s.tools import container_environment, launcher_command

BUSYBOX = Path("/bin/busybox")
TOKEN = "a token that only the owner has"
WORDS = (
    "cat",
    "env",
    "head",
    "id",
    "kill",
    "killall",
    "ls",
    "pkill",
    "ps",
    "rm",
    "sh",
    "sleep",
    "touch",
    "true",
    "tr",
)


def why_not() -> str:
    if sys.platform != "linux":
        return "pods are Linux"
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    return "" if BUSYBOX.exists() else f"{BUSYBOX} is missing (Debian: apt install busybox-static)"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Pod:
    """One container, and how to talk to its launcher."""

    def __init__(self, argv: list[str], state: Path) -> None:
        self.state = state
        self.outside = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={}
        )
        assert self.outside.stdout is not None
        line = self.outside.stdout.readline()
        self.problem = "" if line else self.outside.communicate()[1]
        self.said = json.loads(line) if line else {}

    def ask(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any]:
        """A request with the right token, POST when it has a body."""
        connection = http.client.HTTPConnection(*self.said["address"][:2], timeout=20)
        data = None if body is None else json.dumps(body)
        given = {"X-API-Key": TOKEN, **{name.replace("_", "-"): value for name, value in headers.items()}}
        connection.request("GET" if data is None else "POST", path, data, given)
        answer = connection.getresponse()
        result = json.loads(answer.read())
        connection.close()
        return answer.status, result

    def run(self, command: str) -> str:
        """What a shell command prints."""
        status, result = self.ask("/execute", {"command": command, "shell": True})
        assert status == 200, result
        return result["stdout"] + result["stderr"]

    @property
    def launcher(self) -> int:
        """Its process, as numbered outside."""
        pid = self.outside.pid
        while b"ld.so" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            pid = max(children_of(pid))
        return pid

    def end(self, within_s: float = 20.0) -> int:
        """Wait for the end of the container; its exit code."""
        return self.outside.wait(within_s)


@pytest.fixture
def pod(tree: Path, tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    """Start a container with these arguments for bwrap."""
    started: list[Pod] = []
    root, state = tmp_path / "root", tmp_path / "state"
    for name in ("bin", "tools", "state", "proc", "dev"):
        (root / name).mkdir(parents=True)
    (root / "lib.so").touch()
    state.mkdir()
    shutil.copy(BUSYBOX, root / "bin" / "busybox")
    for word in WORDS:
        (root / "bin" / word).symlink_to("busybox")
    (root / "bin" / "python3").write_text("#!/bin/sh\necho Python 3.6.8\n")
    (root / "bin" / "python3").chmod(0o755)

    def start(
        *words: str,
        lease_s: float = 60.0,
        first: bool = True,
        listen: str = "127.0.0.1:0",
        at: str = "/state",
        env: dict[str, str] | None = None,
    ) -> Pod:
        argv = ["bwrap", "--die-with-parent", "--unshare-pid", "--ro-bind", str(root), "/"]
        argv += ["--ro-bind", str(tree), "/tools", "--bind", str(state), "/state"]
        argv += ["--proc", "/proc", "--dev", "/dev", *words]
        argv += ["--as-pid-1"]
        # Another process 1 looks at what is left when the launcher has ended.
        argv += [] if first else ["sh", "-c", '"$@"; ps -o args >/state/left', "sh"]
        argv += launcher_command(
            "/tools", listen=listen, state=at, token_hash=sha256(TOKEN.encode()).hexdigest(), lease_s=lease_s,
            sandbox_id="sbx", env=env or {},
        )  # fmt: skip
        started.append(Pod([*argv, "--end-message", "/state/end"], state))
        return started[-1]

    yield start
    for one in started:
        if one.outside.poll() is None:
            one.outside.kill()
        one.outside.communicate()


def test_it_is_small_and_nothing_of_it_leaks(pod: Callable[..., Pod]) -> None:
    """SWE-agent/SWE-agent#1326: the server needed the image's Python, which was too old."""
    one = pod("--setenv", "PATH", "/bin", "--setenv", "GIVEN", "yes")
    assert one.said["shell"] == "sh"
    shown = dict(line.split("=", 1) for line in one.run("env").splitlines())
    shown.pop("SHLVL")
    assert shown == {
        "PATH": "/bin", "GIVEN": "yes", "PWD": "/", "SANDBOX_ID": "sbx", "TERM": "dumb", "LANG": "C.UTF-8",
        "HOME": "/state/home",  # this user has none in the image
    }  # fmt: skip
    assert one.run("python3") == "Python 3.6.8\n"
    said = one.ask("/execute", {"command": ["cat", "/proc/self/status"]})[1]["stdout"]
    signals = dict(line.split() for line in said.splitlines() if line.startswith("Sig"))
    # 32 and 33 are the C library's own: its posix_spawn may leave them ignored, and no program can hear them.
    own = 3 << 31
    assert [int(signals[name], 16) & ~own for name in ("SigBlk:", "SigIgn:")] == [0, 0]
    assert one.run("ls /proc/self/fd").split() == ["0", "1", "2", "3"]  # 3 is the listing's own
    status = Path(f"/proc/{one.launcher}/status").read_text()
    peak_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak_kb < 45_000


def test_what_the_image_says_about_libraries_and_pythons_is_for_its_programs(pod: Callable[..., Pod]) -> None:
    hostile = {
        "LD_LIBRARY_PATH": "/nonsense", "PYTHONHOME": "/nonsense",
        "PYTHONPATH": "/nonsense", "PYTHONSTARTUP": "/nonsense", "LC_ALL": "xx_XX.latin1", "ENV": "/nonsense",
        "BASH_ENV": "/nonsense",
    }  # fmt: skip
    one = pod(*(word for pair in hostile.items() for word in ("--setenv", *pair)))
    shown = dict(line.split("=", 1) for line in one.run("env").splitlines())
    assert hostile.items() <= shown.items()
    assert "LANG" not in shown


def test_a_library_that_an_image_preloads_cannot_stop_the_launcher(pod: Callable[..., Pod]) -> None:
    """Images preload allocators; built for a newer C library than the tree's, they end its loader at once."""
    library = next(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("_ssl.*.so"), None)
    if library is None:
        pytest.skip("this Python has no library that needs one which is not in the tree")
    image = ("--setenv", "LD_PRELOAD", "/lib.so", "--ro-bind", str(library), "/lib.so")
    assert "libssl" in pod(*image).problem
    env = {"LD_LIBRARY_PATH": "/for/commands", "GIVEN": "yes"}
    given = container_environment(env)
    override = [word for one in given for word in ("--setenv", one["name"], one["value"])]
    shown = dict(line.split("=", 1) for line in pod(*image, *override, env=env).run("env").splitlines())
    assert env.items() <= shown.items()
    assert not {"LD_PRELOAD", "LD_AUDIT"} & shown.keys()
    own = pod(*override, env={"LD_PRELOAD": "/own.so"})
    assert "LD_PRELOAD=/own.so\n" in own.run("env")


def test_the_token_comes_before_everything_else(pod: Callable[..., Pod]) -> None:
    one = pod()
    for path in ("/is_alive", "/sbx/info", "/no/such/path"):
        assert one.ask(path, X_API_Key="wrong")[0] == 401
        assert one.ask(path, X_API_Key="")[0] == 401
    assert one.ask("/execute", {"command": "true"}, X_API_Key=sha256(TOKEN.encode()).hexdigest())[0] == 401
    assert one.ask("/no/such/path")[0] == 404
    assert one.ask("/is_alive") == (200, {"is_alive": True, "message": ""})
    seen = one.run("cat /proc/1/cmdline; cat /state/* 2>/dev/null")
    assert sha256(TOKEN.encode()).hexdigest() in seen
    assert TOKEN not in seen


def test_its_memory_is_not_for_commands(pod: Callable[..., Pod]) -> None:
    """Requests carry the token; a command of the same user must not find it there."""
    one = pod("--unshare-user", "--uid", "1234", "--gid", "1234", "--cap-drop", "ALL")
    assert one.said["uid"] == 1234
    assert one.run("cat /proc/1/environ; head -c 1 /proc/1/mem").count("denied") == 2
    assert (
        one.run("touch /x; touch /state/x && ls /state/x") == "/state/x\ntouch: /x: Read-only file system\n"
    )


@pytest.mark.parametrize("first", [True, False], ids=["as process 1", "below another process 1"])
def test_signals_of_commands_do_not_reach_it(pod: Callable[..., Pod], first: bool) -> None:
    one = pod(first=first)
    pid = one.said["pid"]
    assert (pid == 1) == first
    mean = ["kill 0", "kill -INT 0", f"kill -TERM {pid}", f"kill -HUP {pid}", f"kill -USR1 {pid}"]
    mean += [
        "pkill -f launcher",
        "pkill python",
        "pkill -9 python",
        "pkill -9 -f python",
        "killall -9 python3",
    ]
    if first:
        mean += ["kill -9 1", "kill -9 -1", "pkill -9 -f launcher"]
    for command in mean:
        one.ask("/execute", {"command": command, "shell": True})
        assert one.ask("/sbx/info")[1]["pid"] == pid, command
    assert one.outside.poll() is None


def test_a_signal_from_outside_ends_it_and_its_commands_at_once(pod: Callable[..., Pod]) -> None:
    one = pod()
    one.run("trap '' TERM INT HUP; (while :; do sleep 60; done) >/dev/null 2>&1 &")
    one.ask("/create_session", {})
    inside = children_of(one.launcher)
    assert len(inside) >= 2
    os.kill(one.launcher, signal.SIGTERM)
    assert one.end(5.0) == 0
    assert [pid for pid in inside if Path(f"/proc/{pid}").exists()] == []
    assert (one.state / "end").read_text() == "sandbox-k8s: SIGTERM\n"


def test_without_an_owner_the_first_lease_ends_it(pod: Callable[..., Pod]) -> None:
    """e2b-dev/infra#3193: the one evictor died, and nothing else ended sandboxes."""
    one = pod(lease_s=0.2, first=False)
    assert one.end() == 0
    said = (one.state / "end").read_text()
    assert re.fullmatch(
        r"sandbox-k8s: the lease ran out at 20[-0-9T:]+Z: nothing was heard of anybody for 0 s\n", said
    )


def test_a_lease_that_ends_ends_what_runs_below_another_process_1(pod: Callable[..., Pod]) -> None:
    one = pod(first=False)
    one.run("(trap '' TERM; sleep 1000; sleep 1000) >/dev/null 2>&1 & (sleep 1000 &) >/dev/null 2>&1; true")
    inside = children_of(one.launcher)
    assert len(inside) == 2, "orphans fall to the launcher"
    assert one.ask("/sbx/lease", {"lease_s": 0.1})[0] == 200
    assert one.end() == 0
    assert "sleep" not in (one.state / "left").read_text()


@pytest.mark.parametrize("first", [True, False], ids=["as process 1", "below another process 1"])
def test_orphans_are_reaped(pod: Callable[..., Pod], first: bool) -> None:
    one = pod(first=first)
    one.run("(true & true &) ; (sh -c 'true & exec true' &)")
    assert one.run("while ps -o stat,args | grep -q '^Z'; do sleep 0.01; done; echo none") == "none\n"


def test_whoever_has_no_home_gets_one_that_can_be_written_to(pod: Callable[..., Pod]) -> None:
    """Container runtimes say ``/`` for a user that the image does not know."""
    for home in ("/", "/nowhere"):
        one = pod("--setenv", "HOME", home)
        assert one.run("touch ~/.gitconfig; echo $?; ls -A ~; echo $HOME") == "0\n.gitconfig\n/state/home\n"
    assert pod("--setenv", "HOME", "/bin").run("echo $HOME") == "/bin\n", "the image's own is kept"
    assert pod(env={"HOME": "/nowhere"}).run("echo $HOME") == "/nowhere\n", "so is what was asked for"


def test_an_older_owner_is_fenced(pod: Callable[..., Pod]) -> None:
    one = pod()
    assert one.ask("/sbx/fence", {"epoch": 2})[1] == {"epoch": 2}
    assert one.ask("/sbx/lease", {}, X_Sandbox_Epoch="1")[1]["error"] == "fenced"
    assert one.ask("/sbx/lease", {}, X_Sandbox_Epoch="2")[0] == 200
    one.outside.kill()
    one.end()
    again = pod()  # the pod's next container
    assert again.ask("/sbx/info")[1]["epoch"] == 2
    assert again.ask("/sbx/fence", {"epoch": 1})[1]["error"] == "fenced"


def test_a_session_without_bash(pod: Callable[..., Pod]) -> None:
    one = pod()
    assert one.ask("/create_session", {})[0] == 200
    for command, printed in (("cd /bin; X=1", ""), ("pwd; echo $X", "/bin\n1\n")):
        assert one.ask("/run_in_session", {"command": command})[1]["output"] == printed
    assert one.ask("/run_in_session", {"command": "rm -rf /state/*; echo $X"})[1]["output"] == "1\n"
    assert one.ask("/run_in_session", {"command": "echo $X"})[1]["output"] == "1\n"
    error = one.ask("/run_in_session", {"command": "echo 'open"})[1]["swerexception"]
    assert error["class_path"].endswith("BashIncorrectSyntaxError")


def test_start_up_files_and_the_images_path_hold_for_a_user_that_is_not_root(
    pod: Callable[..., Pod], tmp_path: Path
) -> None:
    """SWE-agent/mini-swe-agent#773, #858: one way of running missed the file, the other lost the PATH."""
    folders = [path for path in ("/usr", "/lib", "/lib64") if Path(path).exists()]
    mounts = [word for path in folders for word in ("--ro-bind", path, path)]
    for path in folders:
        (tmp_path / "root" / path[1:]).mkdir()
    (tmp_path / "state" / ".bashrc").write_text("PATH=/opt/env/bin:$PATH\n")
    user = ("--unshare-user", "--uid", "1234", "--gid", "1234", "--cap-drop", "ALL")
    image = "/opt/tool/bin:/usr/bin:/bin"
    one = pod(*mounts, *user, "--setenv", "PATH", image, "--setenv", "HOME", "/state")
    assert one.said["shell"] == "bash"
    assert one.run("id -u; echo $PATH") == f"1234\n/opt/env/bin:{image}\n"
    assert one.ask("/create_session", {})[0] == 200
    assert one.ask("/run_in_session", {"command": "echo $PATH"})[1]["output"] == f"/opt/env/bin:{image}\n"
    assert f"PATH={image}" in one.ask("/execute", {"command": ["env"]})[1]["stdout"].splitlines()


def test_ipv6(pod: Callable[..., Pod]) -> None:
    one = pod(listen="[::]:0")
    if "cannot listen" in one.problem:
        pytest.skip("this machine has no IPv6")
    assert one.ask("/is_alive")[0] == 200


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"at": "/nowhere"}, "--state /nowhere cannot be written to by uid"),
        ({"listen": "127.0.0.1:99999"}, "is not HOST:PORT"),
        ({"listen": "192.0.2.1:80"}, "cannot listen on 192.0.2.1:80"),
        ({"lease_s": 0.0}, "is not a number of seconds above 0"),
    ],
)
def test_what_cannot_work_is_said_at_once(
    pod: Callable[..., Pod], changed: dict[str, Any], says: str
) -> None:
    one = pod(**changed)
    assert says in one.problem
    assert one.end() in (1, 2)
