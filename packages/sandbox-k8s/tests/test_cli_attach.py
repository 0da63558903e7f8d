"""``attach HANDLE``: a process that takes a sandbox over, works in its session, and leaves it to the next."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import (
    FencedError,
    KubernetesConfig,
    LocalConfig,
    LocalPlace,
    PodPlace,
    SandboxClient,
    SandboxHandle,
    SandboxNotFoundError,
)
from sandbox_k8s.cli import main

pytestmark = pytest.mark.anyio
ATTACH = [sys.executable, "-m", "sandbox_k8s.cli", "attach"]
PODS = pytest.mark.parametrize(
    "place", ["fake", pytest.param("kubernetes", marks=pytest.mark.cluster)], indirect=True
)


async def attach(*words: str | Path, lines: str = "") -> subprocess.CompletedProcess[str]:
    def run() -> subprocess.CompletedProcess[str]:
        command = [*ATTACH, *map(str, words)]
        return subprocess.run(command, input=lines, capture_output=True, text=True, check=False)

    return await anyio.to_thread.run_sync(run)


@pytest.fixture
def local(root: Path) -> LocalConfig:
    return LocalConfig(root=root, isolation="process", grace_s=0.3)


async def test_lines_run_in_the_session_and_the_sandbox_is_detached_again(
    local: LocalConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with SandboxClient.local(local) as client:
        sandbox = await client.start()
        await (await sandbox.session()).run("X=kept; cd /usr")
        handle = sandbox.handle.to_json().decode()
        done = await attach(handle, lines="echo $X; pwd\nY=new\necho err >&2; (exit 4)")
        *shown, printed = done.stdout.splitlines()
        assert (done.returncode, shown, done.stderr) == (4, ["kept", "/usr"], "err\n")
        with pytest.raises(FencedError):
            await sandbox.execute("true")
        # The handle may be the first line of what comes; an old one is as good.
        file = tmp_path / "handle.json"
        done = await attach("-", "--out", file, lines=f"{printed}\necho $X $Y\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, "kept new\n", "")
        assert SandboxHandle.from_json(file.read_bytes()).epoch == 3
        done = await attach(file, "--out", tmp_path / "no" / "folder", lines="")
        assert (done.returncode, SandboxHandle.from_json(done.stdout).epoch) == (2, 4)
        assert "the handle is on standard output" in done.stderr
        done = await attach(file, "--stop", "--session", "other", lines="echo three\n\n")
        assert (done.returncode, done.stdout) == (0, "three\n")
        with pytest.raises(SandboxNotFoundError):
            await client.attach(sandbox.handle)
    assert await anyio.to_thread.run_sync(main, ["attach", str(file)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
async def test_a_line_that_times_out_or_ends_the_shell(local: LocalConfig) -> None:
    async with SandboxClient.local(local) as client:
        handle = await (await client.start()).detach()
        done = await attach(
            handle.to_json().decode(),
            "--timeout",
            "0.2",
            "--stop",
            lines="sleep 60\necho $?\n{ exit 7; }\necho no\n",
        )
    assert done.returncode == 7
    assert "no" not in done.stdout
    assert "timed out after 0." in done.stderr


async def test_exit_leaves_and_the_shell_stays(local: LocalConfig) -> None:
    """It ended the shell that the next one was to find."""
    async with SandboxClient.local(local) as client:
        sandbox = await client.start()
        await (await sandbox.session()).run("X=kept")
        done = await attach(sandbox.handle.to_json().decode(), lines="echo $X\nexit 3\necho no\n")
        assert (done.returncode, done.stdout.splitlines()[0], "no" in done.stdout.split()) == (
            3, "kept", False
        )  # fmt: skip
        again = await client.attach(SandboxHandle.from_json(done.stdout.splitlines()[-1]))
        assert (await (await again.session()).run("echo $X")).stdout == b"kept\n"


async def test_sigterm_leaves_the_sandbox_detached(local: LocalConfig, tmp_path: Path) -> None:
    async with SandboxClient.local(local) as client:
        handle = await (await client.start()).detach()
        out = tmp_path / "out"
        words = [*ATTACH, handle.to_json().decode(), "--out", str(out)]
        async with await anyio.open_process(words, stderr=None) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            await process.stdin.send(b"echo begun; touch begun\nsleep 60\n")
            assert await process.stdout.receive() == b"begun\n"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 128 + signal.SIGTERM
        (info,) = await client.list()
        assert (info.state, info.handle.epoch) == ("detached", 2)
        await (await client.attach(SandboxHandle.from_json(out.read_bytes()))).stop()


class Terminal:
    """A process in a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        pid, self._descriptor = pty.fork()
        if pid == 0:
            os.execvp(words[0], words)
        self.pid = pid
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, text: str) -> str:
        """What it shows up to that text."""
        end = time.monotonic() + 20
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self._descriptor], [], [], 1.0)[0]:
                self.shown += os.read(self._descriptor, 65536).decode()
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def ended(self) -> int:
        with contextlib.suppress(OSError):
            while os.read(self._descriptor, 65536):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*words: str) -> Terminal:
        made.append(Terminal(*words))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(one.pid, signal.SIGKILL)


async def test_in_a_terminal_it_asks_ctrl_c_interrupts_and_exit_keeps_the_shell(
    local: LocalConfig, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    async with SandboxClient.local(local) as client:
        sandbox = await client.start()
        await (await sandbox.session()).run("X=kept")
        out = tmp_path / "handle"

        def talk() -> int:
            shell = terminal(*ATTACH, sandbox.handle.to_json().decode(), "--out", str(out))
            prompt = f"{sandbox.id[:8]}$ "
            assert "ctrl-D leaves it running" in shell.until(prompt)
            shell.type("echo $X; sleep 6161\n")
            shell.until("sleep 6161")
            while not subprocess.run(
                ["pgrep", "-f", "^sleep 6161$"], capture_output=True, check=False
            ).stdout:
                pass
            shell.type("\x03")
            assert "kept" in shell.until(f"[130] {prompt}")
            shell.type("(exit 3)\n")
            shell.until(f"[3] {prompt}")
            shell.type("half a line\x03")
            shell.until(prompt)
            shell.type("exit\n")
            return shell.ended()

        assert await anyio.to_thread.run_sync(talk) == 3
        taken = await client.attach(SandboxHandle.from_json(out.read_bytes()))
        assert (await (await taken.session()).run("echo $X")).stdout == b"kept\n"
        await taken.stop()


@PODS
async def test_a_pod_is_taken_over_by_another_process(client: SandboxClient) -> None:
    config = client.config
    assert isinstance(config, KubernetesConfig)
    sandbox = await client.start()
    await (await sandbox.session()).run("X=kept")
    options = ["--kubeconfig", config.kubeconfig, "--run-key-file", config.run_key_file]
    done = await attach(sandbox.handle.to_json().decode(), *map(str, options), lines="echo $X\n")
    shown, handle = done.stdout.splitlines()
    assert (done.returncode, shown) == (0, "kept")
    with pytest.raises(FencedError):
        await sandbox.execute("true")
    taken = await client.attach(SandboxHandle.from_json(handle))
    assert taken.handle.epoch == 3
    await taken.stop()


LOCAL = SandboxHandle(
    place=LocalPlace(root="/tmp/nowhere", isolation="process"), sandbox_id="0" * 16, epoch=1, key_id="k",
    workdir="/", lease_s=60.0, detached_lease_s=60.0, created_ns=0,
)  # fmt: skip
POD = msgspec.structs.replace(
    LOCAL, place=PodPlace(cluster="prod", namespace="runs", pod="sbx-" + "0" * 16, uid="u")
)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{"], "the argument: not a sandbox handle: "),
        (['{"version": 1}'], "the argument: sandbox handle of version 1; this release reads 2"),
        (["/nonexistent/handle"], "cannot read handle file /nonexistent/handle: No such file or directory"),
        ([LOCAL.to_json().decode(), "--kubernetes"], "is on this machine, in /tmp/nowhere; no cluster"),
        ([POD.to_json().decode(), "--root", "/tmp"], "is in cluster 'prod'; --root is of a machine"),
        (
            [POD.to_json().decode(), "--cluster", "staging"],
            "is in cluster 'prod', as its handle says, not 'sta",
        ),
        ([POD.to_json().decode(), "-n", "default"], "is in namespace 'runs', as its handle says"),
        ([POD.to_json().decode(), "--run-key-file", "/nonexistent/key"], "no run key /nonexistent/key"),
    ],
)
def test_a_handle_that_leads_nowhere_is_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("{current-context: a, contexts: [{name: a, context: {cluster: a}}]}")
    options = [] if words[0] == LOCAL.to_json().decode() else ["--kubeconfig", str(kubeconfig)]
    assert main(["attach", *options, *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
