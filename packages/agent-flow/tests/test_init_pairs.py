"""`agent-flow init` writes parts that go together, and what is still to be filled in is said all at once."""

import re
from pathlib import Path

import pytest
from agent_flow.cli import main
from agent_flow.config import load_config


def fill_in(file, **values):
    """Replace what is marked, key by key."""
    text = file.read_text()
    for key, value in values.items():
        text, found = re.subn(rf'(?m)^{key} = "[^"]*"  # FILL IN', f'{key} = "{value}"', text)
        assert found == 1, key
    file.write_text(text)


def sections(path):
    return re.findall(r"(?m)^\[(\w+)\]", path.read_text())


@pytest.mark.parametrize("options", [["--flow", "plain"], ["--runtime", "plain"]])
def test_a_flow_of_conversations_gets_the_runtime_that_judges_them(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *options]) == 0
    run = load_config(tmp_path / "run.toml").run
    assert (run.flow["provider"], run.runtime["provider"]) == ("plain", "plain")
    assert not {"agent", "environment"}.intersection(sections(tmp_path / "run.toml"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--flow", "plain", "--runtime", "command"], "--runtime plain"),
        (["--flow", "swe", "--runtime", "plain"], "--flow plain"),
        (["--python-path", "gone"], "no such folder: gone"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *options]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_it_writes_runs_when_it_is_filled_in(own_agent):
    (own_agent.folder / "run.toml").unlink()
    flow = f"{own_agent.module}:Guess"
    done = own_agent.call("init", "new", "--flow", flow, "--engine", "replay", "--python-path", ".")
    assert done.code == 0, done.stderr
    path = Path("new/run.toml")
    assert load_config(path).run.python_path == ("..",)
    fill_in(
        Path("new/run.toml"),
        path="../tasks.jsonl",
        chat_template="../qwen3.jinja",
        recordings="../recordings",
        reward=f"{own_agent.module}:efficient",
    )
    done = own_agent.call("run", path, "--json")
    assert done.code == 0, done.stderr
    assert done.summary["rewards"] == {"guess-37": pytest.approx(1 / 3)}


@pytest.mark.parametrize("command", ["run", "eval", "doctor", "check-tasks"])
def test_all_that_is_to_be_filled_in_is_named_at_once(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--engine", "replay"]) == 0
    capsys.readouterr()
    assert main([command, "run.toml"]) == 2
    error = capsys.readouterr().err
    named = dict(re.findall(r"([\w.]+) \(line (\d+)\)", error))
    assert set(named) == {"engine.recordings", "runtime.repos", "runtime.test_command"}
    lines = Path("run.toml").read_text().splitlines()
    for key, line in named.items():
        assert lines[int(line) - 1].startswith(f'{key.rpartition(".")[2]} = "FILL IN"')
    assert not Path("runs").exists()
