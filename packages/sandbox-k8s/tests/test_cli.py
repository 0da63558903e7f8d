"""The command line, on real sandboxes."""

import subprocess
import sys
from pathlib import Path

import anyio.to_thread
import pytest
from sandbox_k8s import SandboxClient, SandboxSpec
from sandbox_k8s.cli import main

pytestmark = pytest.mark.anyio


@pytest.fixture
def client(local_client: SandboxClient) -> SandboxClient:
    return local_client


async def test_ps_exec_and_reap(client: SandboxClient, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def run(*arguments: str) -> tuple[int, str, str]:
        words = [arguments[0], "--root", str(root), *arguments[1:]]
        code = await anyio.to_thread.run_sync(main, words)
        return code, *capfd.readouterr()

    sandbox = await client.start(SandboxSpec(labels={"task": "t 1"}))
    session = await sandbox.session("work")
    await session.run("X=kept")
    code, listed, _ = await run("ps")
    assert code == 0
    header, row = listed.splitlines()
    assert header.split()[:3] == ["ID", "STATE", "ISOLATION"]
    assert row.split()[:4] == [sandbox.id, "running", sandbox.backend_name, "1"]
    assert row.endswith("task=t 1")
    assert await run("exec", sandbox.id[:6], "--", "echo out; echo err >&2; exit 5") == (5, "out\n", "err\n")
    assert await run("exec", sandbox.id, "--", "printf", "%s.", "a b", "c") == (0, "a b.c.", "")
    assert await run("exec", "--session", "work", sandbox.id, "--", "echo $X") == (0, "kept\n", "")
    assert (await run("exec", "--timeout", "0.2", sandbox.id, "--", "sleep 60"))[0] == 124
    for option, input_, said in (
        ("-i", b"to cat", b"to cat"),
        ("--timeout=60", b"dropped", b"standard input was not passed on; --stdin (-i) does that\n"),
    ):
        command = [sys.executable, "-m", "sandbox_k8s.cli", "exec", "--root", str(root), option, sandbox.id]
        done = await anyio.run_process([*command, "--", "cat"], input=input_)
        assert (done.stdout + done.stderr).removeprefix(b"sandbox-k8s: ") == said
    assert await run("reap", "--dry-run") == (0, "would remove 0 dead sandboxes\n", "")
    assert (await session.run("echo $X, still the owner")).stdout == b"kept, still the owner\n"


def test_doctor_starts_a_sandbox(root: Path) -> None:
    command = [sys.executable, "-m", "sandbox_k8s.cli", "doctor", "--root", str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert {"root", "launcher", "bubblewrap", "start", "command"} <= {
        line.split()[0] for line in result.stdout.splitlines()
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["exec", "zz", "--", "true"], "no sandbox begins with 'zz'"),
        (["exec"], "required"),
        (["nonsense"], "invalid choice"),
        ([], "required"),
        (["ps", "--root", "/dev/null/x"], "--root /dev/null/x is no folder"),
        (["doctor", "--root", "/dev/null/x"], "LocalConfig.root"),
        (["exec", "--timeout", "-3", "zz", "--", "true"], "'-3' is no number of seconds above 0"),
        (["exec", "--timeout", "nan", "zz", "--", "true"], "'nan' is no number of seconds above 0"),
        (["exec", "--session", "s", "-i", "zz", "--", "true"], "--stdin is for a command on its own"),
        (["build-tools", "--out", "x", "--name", "a:1"], "give --archive"),
        (["build-tools", "--out", "x", "--archive", "x.tar", "--name", "BAD NAME"], "no image name"),
        (["build-tools", "--out", "x", "--archive", "/dev/null/x.tar"], "/dev/null is no folder"),
        (["build-tools", "--out", "x", "--archive", "/"], "it is a folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    root: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root.mkdir(mode=0o700)
    if arguments[:1] == ["exec"] and len(arguments) > 1:
        arguments = [*arguments[:1], "--root", str(root), *arguments[1:]]
    code: object
    try:
        code = main(arguments)
    except SystemExit as ended:  # of argparse
        code = ended.code
    err = capsys.readouterr().err
    assert code == 2
    assert says in err


def test_options_of_doctor_that_are_for_a_cluster(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", str(root), "--json"]) == 2
    assert "add --kubernetes" in capsys.readouterr().err


def test_looking_at_a_folder_that_is_not_there_makes_none(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["ps"], ["reap"], ["exec", "zz", "--", "true"]):
        assert main([command[0], "--root", str(root), *command[1:]]) == 2
        assert f"--root {root} is no folder" in capsys.readouterr().err
    assert not root.exists()


def test_main_can_be_called(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root.mkdir(mode=0o700)
    assert main(["ps", "--root", str(root)]) == 0
    assert capsys.readouterr().out.startswith("ID ")
