"""Sessions and shell strings where there is no bash: Debian's dash and busybox, both as ``sh``."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_k8s.launcher.box import Box, BoxSettings
from sandbox_k8s.launcher.execute import CommandRequest, Outcome, Wake
from sandbox_k8s.launcher.ownership import Ownership
from sandbox_k8s.launcher.shell import Shell, ShellRequest

PROGRAMS = ("sleep", "cat", "grep", "env", "mkdir")


@pytest.fixture(params=["dash", "busybox"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    """A box whose PATH has an sh and a few programs, and no bash."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"{request.param} is not installed")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sh").symlink_to(shell)
    for name in PROGRAMS:
        (programs / name).symlink_to(shutil.which(name) or "missing")
    (tmp_path / "pipes").mkdir()
    env = {"PATH": str(programs), "HOME": str(tmp_path), "ENV": str(tmp_path / "it's production")}
    (tmp_path / ".bashrc").write_text("echo this is for bash; exit 9\n")
    (tmp_path / "it's production").write_text("LEAKED=yes\n")
    box = Box(BoxSettings(env, str(tmp_path), tmp_path / "pipes"), Ownership(None, 0.0))
    yield box
    box.close_sessions()


def run(shell: Shell, command: str, timeout_s: float = 10.0) -> tuple[int | None, bytes, bytes]:
    outcome = turn(shell, command, timeout_s)
    assert not outcome.timed_out
    return outcome.exit_code, *(b"".join(part.parts()) for part in (outcome.stdout, outcome.stderr))


def turn(shell: Shell, command: str, timeout_s: float) -> Outcome:
    wake = Wake()
    try:
        return shell.run(ShellRequest(command, timeout_s=timeout_s, grace_s=0.1), wake, None)
    finally:
        wake.close()


@pytest.fixture
def shell(box: Box) -> Shell:
    assert box.shell().program == "sh"
    shell = box.create_session("s")
    assert shell.start_up(Wake(), [], 10.0).exit_code == 0
    return shell


def test_a_session_keeps_what_commands_leave(shell: Shell, tmp_path: Path) -> None:
    assert run(shell, "mkdir 'a dir'; cd 'a dir'; X=1; export Y=2; f() { echo f$1; }") == (0, b"", b"")
    assert run(shell, "pwd; echo $X $Y; f 3; echo err >&2; exec 9>file") == (
        0, f"{tmp_path}/a dir\n1 2\nf3\n".encode(), b"err\n",
    )  # fmt: skip
    kept = f"{tmp_path}/it's production: no\n".encode()
    assert run(shell, 'echo "$ENV: ${LEAKED-no}"; false') == (1, kept, b"")
    assert run(shell, "echo $?") == (0, b"1\n", b"")
    assert run(shell, "cat; sleep 1000 & echo $!")[0] == 0
    assert run(shell, "kill $!") == (0, b"", b"")


@pytest.mark.parametrize(
    "command",
    [
        "if",
        "echo 'open",
        ". /no/such/file",
        "${X?not set}",
        "set -u; echo $nothing",
        "export 1x=2",
        "( exit 2 )",
    ],
)
def test_what_fails_ends_the_command_and_not_the_session(shell: Shell, command: str) -> None:
    code, out, _ = run(shell, command)
    assert code in (1, 2, 127), (code, out)
    assert run(shell, "set +u; echo next") == (0, b"next\n", b"")


def test_functions_of_a_command_do_not_speak_for_the_shell(shell: Shell) -> None:
    assert run(shell, "echo() { :; }; printf() { :; }; test() { :; }")[0] == 0
    assert turn(shell, "sleep 60", 0.1).session_alive
    assert run(shell, "command echo next") == (0, b"next\n", b"")


def test_half_a_line_of_a_trap_does_not_spoil_the_next_mark(shell: Shell) -> None:
    assert run(shell, "trap 'printf x' USR1; kill -USR1 $$; true")[0] == 0
    assert run(shell, "(sleep 0.05; kill -USR1 $$) & true")[0] == 0
    assert run(shell, "sleep 0.1; echo next")[1].endswith(b"next\n")
    assert run(shell, "exit 7")[0] == 7
    assert not shell.alive


@pytest.mark.parametrize("command", ["sleep 60", "while :; do :; done", "trap '' INT; sleep 60 | cat"])
def test_a_timeout_interrupts_and_the_session_goes_on(shell: Shell, command: str) -> None:
    assert run(shell, "X=kept; sleep 1000 & J=$!")[0] == 0
    outcome = turn(shell, f"echo begun; {command}; echo not reached", 0.1)
    assert outcome.timed_out
    assert outcome.session_alive
    # A shell that ignores interrupts goes on with its line once what it waited for was killed.
    left = b"not reached\n" if "trap" in command else b""
    assert b"".join(outcome.stdout.parts()) == b"begun\n" + left
    assert run(shell, "trap - INT; echo $X; kill -0 $J && kill $J") == (0, b"kept\n", b"")


def test_a_string_is_for_sh_and_reads_no_file_of_bash(box: Box) -> None:
    argv = box.argv_for('echo "$0 ${LEAKED-no}"; env | grep -c BASH')
    request = CommandRequest(argv, cwd=box.settings.workdir, env=box.environment(None), timeout_s=10)
    with box.operation(None) as wake:
        outcome = box.execute(request, wake, None)
    assert outcome.exit_code == 1
    assert b"".join(outcome.stdout.parts()) == b"sh no\n0\n"


def test_bash_that_comes_later_is_used(box: Box) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    Path(box.settings.env["PATH"], "bash").symlink_to(bash)
    assert box.argv_for("true")[0] == "bash"
