"""What a sandbox cannot see."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_k8s import BackendUnavailableError, ConfigError, LocalConfig, SandboxClient, SandboxSpec
from sandbox_k8s.local_backend import LocalBackend

pytestmark = pytest.mark.anyio


@pytest.fixture
def client(local_client: SandboxClient) -> SandboxClient:
    return local_client


SECRETS = ("AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "HF_TOKEN")


def backend_of(client: SandboxClient) -> LocalBackend:
    backend = client._backend
    assert isinstance(backend, LocalBackend)
    return backend


bubblewrap_only = pytest.mark.parametrize("isolation", ["bubblewrap"], indirect=True)


def process_folders() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*")) if sys.platform == "linux" else []


async def test_no_process_of_a_sandbox_has_the_callers_secrets(
    local_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, f"secret-{name}")
    async with SandboxClient.local(local_config) as client:
        sandbox = await client.start(SandboxSpec(env={"GIVEN": "yes"}))
        session = await sandbox.session()
        for shown in (await sandbox.execute("env"), await session.run("export -p")):
            assert b"GIVEN" in shown.stdout
            assert b"secret-" not in shown.stdout
        # Seen from outside: the keeper, bubblewrap, the launcher, the shells.
        keeper = backend_of(client).keeper(sandbox.id)
        assert keeper is not None
        seen = 0
        for entry in process_folders():
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"SANDBOX_ID={sandbox.id}".encode() in environment or entry.name == str(keeper.pid):
                seen += 1
                assert b"secret-" not in environment + command
                assert backend_of(client).key.token("local", sandbox.id).encode() not in environment + command
        assert seen >= 3 or sys.platform != "linux"


@bubblewrap_only
async def test_a_sandbox_sees_its_own_processes_only(client: SandboxClient) -> None:
    sandbox = await client.start()
    await (await client.start()).session()
    shown = await sandbox.execute("echo /proc/[0-9]*; tr '\\0' ' ' < /proc/1/cmdline")
    processes, first = shown.stdout.decode().splitlines()
    assert processes.split()[0] == "/proc/1"
    assert len(processes.split()) == 2
    assert "/run/sandbox-k8s/launcher/__main__.py serve" in first


@bubblewrap_only
async def test_home_other_sandboxes_and_the_run_key_are_not_there(client: SandboxClient) -> None:
    one, other = await client.start(), await client.start()
    await other.write("secret", b"s")
    root = backend_of(client).store.root
    shown = await one.execute(
        f"ls -A {Path.home()} {root} {root}/run.key; ls -A ~ /workspace /tmp; "
        "find / -xdev -name run.key -o -name secret 2>/dev/null; echo $HOME"
    )
    allowed = {"/home/sandbox:", "/workspace:", "/tmp:", "/home/sandbox", ""}
    visible = set(shown.stdout.decode().splitlines()) - allowed
    prefix = Path(sys.base_prefix)
    if Path.home() in prefix.parents:  # the way to the launcher's Python, and nothing beside it
        visible -= {f"{Path.home()}:", prefix.relative_to(Path.home()).parts[0]}
    assert visible == set()


@bubblewrap_only
async def test_the_system_is_read_only_and_the_network_is_away(client: SandboxClient) -> None:
    sandbox = await client.start()
    for path in ("/usr/x", "/bin/x", "/etc/x", "/x", "/run/sandbox-k8s/launcher/x"):
        assert (await sandbox.execute(f"touch {path}")).exit_code == 1, path
    assert (await sandbox.execute("touch /tmp/x ~/x /workspace/x /dev/shm/x /run/x")).exit_code == 0
    assert (await sandbox.execute("cat /proc/net/dev | tail -n +3 | cut -d: -f1")).stdout.split() == [b"lo"]
    assert (await sandbox.execute("echo > /dev/tcp/1.1.1.1/53", timeout_s=5)).exit_code == 1
    open_net = await client.start(SandboxSpec(network=True))
    names = (await open_net.execute("cat /proc/net/dev | tail -n +3 | cut -d: -f1")).stdout.split()
    assert names == interfaces()
    assert (await sandbox.execute("grep CapEff /proc/self/status")).stdout.split()[1] == b"0" * 16


def interfaces() -> list[bytes]:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return [line.split(":")[0].strip().encode() for line in lines]


async def test_python_of_the_caller_runs_inside(client: SandboxClient) -> None:
    prefix = Path(sys.base_prefix)
    sandbox = await client.start(
        SandboxSpec(read_only_paths=(prefix,), env={"PATH": f"{prefix}/bin:/usr/bin:/bin"})
    )
    result = await sandbox.execute(["python3", "-c", "import sys, ssl, sqlite3; print(sys.prefix)"])
    assert result.stdout_text.strip() == str(prefix), result.stderr_text


@bubblewrap_only
async def test_a_virtual_environment_and_its_packages_run_inside(client: SandboxClient) -> None:
    sandbox = await client.start(SandboxSpec(read_only_paths=(Path(sys.prefix), Path(sys.base_prefix))))
    result = await sandbox.execute([sys.executable, "-c", "import pytest, sys; print(sys.prefix)"])
    assert result.stdout_text.strip() == sys.prefix, result.stderr_text
    refused = await sandbox.execute(["touch", f"{sys.prefix}/x"])
    assert b"Read-only file system" in refused.stderr


async def test_paths_that_would_show_too_much_are_refused(client: SandboxClient) -> None:
    root = backend_of(client).store.root
    for path in (Path("/"), Path.home(), root, root.parent, root / "sandboxes", Path("/no/such/path")):
        with pytest.raises(ConfigError, match="read_only_paths"):
            await client.start(SandboxSpec(read_only_paths=(path,)))
    assert await client.list() == ()


async def test_without_bubblewrap_there_is_one_warning_and_a_counter(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with caplog.at_level(logging.WARNING, logger="sandbox_k8s"):
        async with SandboxClient.local(LocalConfig(root=root)) as client:
            sandboxes = [await client.start() for _ in range(2)]
            assert {sandbox.backend_name for sandbox in sandboxes} == {"process"}
            assert client.stats.unisolated == 2
    assert [record.getMessage().count("WITHOUT isolation") for record in caplog.records] == [1]
    with pytest.raises(BackendUnavailableError, match="apt install bubblewrap"):
        async with SandboxClient.local(LocalConfig(root=root, isolation="bubblewrap")):
            pass


async def test_a_bubblewrap_that_refuses_is_quoted(root: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    async with SandboxClient.local(LocalConfig(root=root)) as client:
        assert (await (await client.start()).execute("echo ok")).stdout == b"ok\n"
    assert "setting up uid map: Permission denied" in caplog.text


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, sandbox_k8s; print(*sorted(m.split('.')[0] for m in sys.modules))"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    heavy = {"kubernetes", "swerex", "pydantic", "fastapi", "rich", "torch", "token_tracking", "agent_flow"}
    assert loaded & heavy == set()


IMPORTS = """
import asyncio.events, importlib.util, logging, os, signal, socket, sys, threading

def state():
    root = logging.getLogger()
    return {
        "policy": asyncio.events._event_loop_policy,
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads": threading.active_count(),
        "logging": (root.level, list(root.handlers), list(logging.getLogger("sandbox_k8s").handlers)),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "environment": dict(os.environ),
        "sockets": socket.getdefaulttimeout(),
    }

before = state()
import sandbox_k8s, sandbox_k8s.cli, sandbox_k8s.kubernetes.backend, sandbox_k8s.testing
if importlib.util.find_spec("swerex"):
    import swerex.deployment.abstract, swerex.runtime.remote
    before["logging"] = state()["logging"]
    import sandbox_k8s.swerex
print([name for name, value in state().items() if value != before[name]])
"""


def test_importing_changes_nothing_of_the_process() -> None:
    """siiRL's adapter set the event loop policy of everybody who imported it."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_launcher_needs_the_standard_library_only() -> None:
    launcher = Path(sys.modules["sandbox_k8s"].__file__ or "").parent
    load = "import launcher.server, launcher.keeper; print(*sys.modules)"
    code = f"import sys; sys.path.append({str(launcher)!r}); {load}"
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    shown = subprocess.run(
        [base, "-I", "-S", "-B", "-c", code], capture_output=True, text=True, check=True, env={}
    )
    loaded = {name.split(".")[0] for name in shown.stdout.split()}
    assert loaded - {"launcher", "__main__"} <= set(sys.stdlib_module_names)
    assert os.environ  # the caller's was not needed
