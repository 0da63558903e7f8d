"""The contract with swe-rex 1.4.0: its stock RemoteRuntime against our launcher, over TCP."""

import hashlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

pytest.importorskip("swerex.runtime.remote", reason="needs the extra sandbox-k8s[swerex]")

from sandbox_k8s.local import LAUNCHER, base_python
from swerex import exceptions
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

pytestmark = pytest.mark.anyio

KEY = "the key"


def launcher_words(token_hash: str, state: Path) -> list[str | Path]:
    where = ["--listen", "127.0.0.1:0", "--state", state, "--end-message", "/dev/null"]
    who = ["--token-hash", token_hash, "--sandbox-id", "s", "--lease", "600"]
    return [base_python(), "-I", "-S", LAUNCHER, "pod", *where, *who]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    folder = tmp_path_factory.mktemp("launcher")
    (folder / "home").mkdir()
    process = subprocess.Popen(
        launcher_words(hashlib.sha256(KEY.encode()).hexdigest(), folder),
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder / "home")},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    yield tuple(json.loads(process.stdout.readline())["address"])
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
async def runtime(address: tuple[str, int]) -> AsyncIterator[RemoteRuntime]:
    runtime = RemoteRuntime(host=f"http://{address[0]}", port=address[1], auth_token=KEY, timeout=5)
    yield runtime
    await runtime.close()


def on_disk(path: str) -> bytes:
    return Path(path).read_bytes()


async def test_is_alive_also_while_a_command_runs(runtime: RemoteRuntime, tmp_path: Path) -> None:
    """The reference server answers neither question until the command has ended."""
    await runtime.create_session(CreateBashSessionRequest())
    waits = f"until [ -e {tmp_path}/go ]; do sleep 0.01; done"
    async with anyio.create_task_group() as tasks:
        alone = Command(command=f"touch {tmp_path}/one; {waits}", shell=True, timeout=20)
        tasks.start_soon(runtime.execute, alone)
        tasks.start_soon(runtime.run_in_session, BashAction(command=f"touch {tmp_path}/two; {waits}"))
        both = f"until [ -e {tmp_path}/one ] && [ -e {tmp_path}/two ]; do sleep 0.01; done"
        await runtime.execute(Command(command=both, shell=True, timeout=20, check=True))
        assert await runtime.is_alive(timeout=5)
        await runtime.write_file(WriteFileRequest(path=f"{tmp_path}/go", content=""))


async def test_session(runtime: RemoteRuntime) -> None:
    assert (await runtime.create_session(CreateBashSessionRequest())).output == ""
    with pytest.raises(exceptions.SessionExistsError):
        await runtime.create_session(CreateBashSessionRequest())
    observed = await runtime.run_in_session(BashAction(command="export A=1; cd /\necho hi; echo err >&2"))
    assert (observed.output, observed.exit_code) == ("hi\nerr\n", 0)
    assert (await runtime.run_in_session(BashAction(command="echo $A $PWD"))).output == "1 /\n"
    with pytest.raises(exceptions.NonZeroExitCodeError, match="what I say"):
        await runtime.run_in_session(BashAction(command="false", error_msg="what I say"))
    assert (
        await runtime.run_in_session(BashAction(command="exit_() { return 3; }; exit_", check="silent"))
    ).exit_code == 3
    assert (await runtime.run_in_session(BashAction(command="false", check="ignore"))).exit_code is None
    with pytest.raises(exceptions.BashIncorrectSyntaxError) as wrong:
        await runtime.run_in_session(BashAction(command="if true; do"))
    assert "syntax error" in wrong.value.extra_info["bash_stderr"]
    await runtime.close_session(CloseBashSessionRequest())
    with pytest.raises(exceptions.SessionDoesNotExistError):
        await runtime.run_in_session(BashAction(command="true"))
    with pytest.raises(exceptions.SessionDoesNotExistError):
        await runtime.close_session(CloseBashSessionRequest())


async def test_a_session_comes_back_after_a_time_out(runtime: RemoteRuntime) -> None:
    await runtime.create_session(CreateBashSessionRequest())
    with pytest.raises(exceptions.CommandTimeoutError) as late:
        await runtime.run_in_session(BashAction(command="echo partial; sleep 30; echo late", timeout=0.2))
    assert late.value.extra_info == {"output": "partial\n"}
    await runtime.run_in_session(BashInterruptAction())
    assert (await runtime.run_in_session(BashAction(command="echo next"))).output == "next\n"


async def test_interrupt_reaches_a_running_command(runtime: RemoteRuntime, tmp_path: Path) -> None:
    await runtime.create_session(CreateBashSessionRequest())
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                result = await runtime.run_in_session(
                    BashAction(command=f"touch {tmp_path}/begun; sleep 600", check="silent")
                )
                assert result.exit_code is None

            tasks.start_soon(run)
            await runtime.execute(
                Command(command=f"until [ -e {tmp_path}/begun ]; do sleep 0.01; done", shell=True, timeout=5)
            )
            await runtime.run_in_session(BashInterruptAction())


async def test_start_up_files_and_a_prompt_of_their_own(runtime: RemoteRuntime, tmp_path: Path) -> None:
    (tmp_path / "rc").write_text("PS1='(testbed) # '; export FROM_RC=1; echo said\n")
    created = await runtime.create_session(CreateBashSessionRequest(startup_source=[str(tmp_path / "rc")]))
    assert created.output == "said\n"
    assert (
        await runtime.run_in_session(BashAction(command="echo $FROM_RC SHELLPS1PREFIX"))
    ).output == "1 SHELLPS1PREFIX\n"


async def test_interactive_programs_are_refused_by_name(runtime: RemoteRuntime) -> None:
    await runtime.create_session(CreateBashSessionRequest())
    with pytest.raises(exceptions.SwerexException, match="no terminal"):
        await runtime.run_in_session(BashAction(command="gdb", is_interactive_command=True))


async def test_execute(runtime: RemoteRuntime, tmp_path: Path) -> None:
    result = await runtime.execute(Command(command=["sh", "-c", "echo o; echo e >&2; exit 4"]))
    assert (result.stdout, result.stderr, result.exit_code) == ("o\n", "e\n", 4)
    merged = await runtime.execute(
        Command(command="echo o; echo e >&2", shell=True, merge_output_streams=True)
    )
    assert (merged.stdout, merged.stderr) == ("o\ne\n", "")
    placed = await runtime.execute(
        Command(command="echo $X $Y; pwd", shell=True, env={"X": "x"}, cwd=str(tmp_path))
    )
    assert placed.stdout == f"x\n{tmp_path}\n"
    assert (await runtime.execute(Command(command="kill -9 $$", shell=True))).exit_code == -9
    assert (await runtime.execute(Command(command=r"printf '\xff'", shell=True))).stdout == "\\xff"
    with pytest.raises(exceptions.CommandTimeoutError):
        await runtime.execute(Command(command=["sleep", "30"], timeout=0.2))
    with pytest.raises(exceptions.NonZeroExitCodeError, match="exit code 1"):
        await runtime.execute(Command(command="false", check=True))
    with pytest.raises(FileNotFoundError):
        await runtime.execute(Command(command="no-such-program"))


async def test_files(runtime: RemoteRuntime, tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "file")
    await runtime.write_file(WriteFileRequest(path=path, content="a\r\nü"))
    assert on_disk(path) == "a\r\nü".encode()
    assert (await runtime.read_file(ReadFileRequest(path=path))).content == "a\r\nü"
    await runtime.execute(Command(command=f"printf 'a\\xff' > '{path}'", shell=True))
    with pytest.raises(exceptions.SwerexException, match="can't decode byte 0xff"):
        await runtime.read_file(ReadFileRequest(path=path))
    assert (
        await runtime.read_file(ReadFileRequest(path=path, errors="backslashreplace"))
    ).content == "a\\xff"
    assert (await runtime.read_file(ReadFileRequest(path=path, encoding="latin-1"))).content == "aÿ"
    with pytest.raises(FileNotFoundError):
        await runtime.read_file(ReadFileRequest(path="/no/such"))


async def test_upload_of_a_file_and_of_a_folder(runtime: RemoteRuntime, tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000 + b"\r\n--"
    (tmp_path / "data").write_bytes(content)
    await runtime.upload(
        UploadRequest(source_path=str(tmp_path / "data"), target_path=str(tmp_path / "to" / "data"))
    )
    assert (tmp_path / "to" / "data").read_bytes() == content
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "script").write_text("#!/bin/sh\n")
    (tree / "sub" / "script").chmod(0o755)
    await runtime.upload(UploadRequest(source_path=str(tree), target_path=str(tmp_path / "copy")))
    assert (tmp_path / "copy" / "sub" / "script").stat().st_mode & 0o777 == 0o755


async def test_a_wrong_key(address: tuple[str, int]) -> None:
    wrong = RemoteRuntime(host=f"http://{address[0]}", port=address[1], auth_token="wrong", timeout=5)
    answer = await wrong.is_alive()
    assert not answer
    assert "401" in answer.message


def ask(address: tuple[str, int], key: str, request_id: str, command: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=20)
    body = json.dumps({"command": command, "shell": True})
    connection.request("POST", "/execute", body, {"X-API-Key": key, "X-Request-ID": request_id})
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def test_a_known_request_id_gives_nothing_to_a_wrong_key(address: tuple[str, int]) -> None:
    """swe-rex 1.4.0 looks the id up before the key: 200 and somebody else's output."""
    assert ask(address, KEY, "one", "echo secret")[0] == 200
    status, body = ask(address, "wrong", "one", "echo secret")
    assert status == 401
    assert b"secret" not in body


def test_a_repeated_request_is_answered_not_run_again(address: tuple[str, int], tmp_path: Path) -> None:
    command = f"echo run >> {tmp_path}/log; wc -l < {tmp_path}/log"
    first = ask(address, KEY, "two", command)
    for number in range(5):
        ask(address, KEY, f"other-{number}", "true")
    assert ask(address, KEY, "two", command) == first
    assert (tmp_path / "log").read_text() == "run\n"


def test_the_launcher_starts_fast(tmp_path: Path) -> None:
    begun = time.monotonic()
    process = subprocess.Popen(launcher_words("0" * 64, tmp_path), env={}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert b"listening" in process.stdout.readline()
    took = time.monotonic() - begun
    process.kill()
    process.communicate()
    assert took < 2.0, f"{took:.2f} s (usually 0.1 s), {sys.version}"
