"""`agent-flow init`: a file that says what the types say, and means what they mean."""

import re
from typing import Annotated, Literal

import msgspec
import pytest
from agent_flow.cli import main
from agent_flow.config import RunConfig, load_config
from agent_flow.decoding import decode
from agent_flow.providers import BUILTIN_PROVIDERS, provider_class
from agent_flow.starter import field_docs, starter

USUAL = {
    "engine": "replay",
    "flow": "swe",
    "agent": "minisweagent",
    "environment": "local",
    "runtime": "command",
}
SECTIONS = [(kind, name) for kind, names in BUILTIN_PROVIDERS.items() for name in names]


def uncommented(text):
    return re.sub(r"(?m)^#(?! )", "", text)


def load(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(path)


def options(file, kind):
    section = {key: value for key, value in getattr(file.run, kind).items() if key != "provider"}
    found = provider_class(kind, getattr(file.run, kind)["provider"], python_path=())
    return decode(section, found.Config, where=str)


@pytest.mark.parametrize(("kind", "name"), SECTIONS)
def test_taking_every_default_in_changes_nothing(tmp_path, kind, name):
    text = starter({**USUAL, kind: name})
    written, taken = load(tmp_path, text), load(tmp_path, uncommented(text))
    assert text != uncommented(text)
    for other in USUAL:
        assert getattr(written.run, other)["provider"] == {**USUAL, kind: name}[other]
        assert options(written, other) == options(taken, other)
    same = {field: getattr(taken.run, field) for field in taken.run.__struct_fields__ if field not in USUAL}
    assert same == {field: getattr(written.run, field) for field in same}


def test_every_key_is_there_with_its_docstring():
    text = starter(USUAL)
    words = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for section in msgspec.structs.fields(RunConfig):
        kinds = [section.type]
        if section.name in USUAL:
            kinds = [provider_class(section.name, USUAL[section.name]).Config]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                docs = field_docs(kind)
                for field in msgspec.structs.fields(kind):
                    assert re.search(rf"(?m)^#? ?{field.encode_name} = ", text), field.encode_name
                    assert docs.get(field.name, "") in words
    for field in ("name", "base", "run_dir", "python_path"):
        assert field_docs(RunConfig)[field] in words


def test_every_key_of_the_configuration_has_a_docstring():
    for section in msgspec.structs.fields(RunConfig):
        kind = section.type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            assert set(field_docs(kind)) == {field.name for field in msgspec.structs.fields(kind)}, kind


class Inner(msgspec.Struct, frozen=True):
    """A table inside."""

    url: str
    ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5


class Maybe(msgspec.Struct, frozen=True):
    """May be left out."""

    size: int = 1


class Odd:
    """A provider with every kind of key.

    This paragraph is not for a configuration.
    """

    class Config(msgspec.Struct, frozen=True):
        inner: Inner
        must: Annotated[int, msgspec.Meta(ge=3)]
        choice: Literal["b", "a"]
        named: Annotated[str, msgspec.Meta(examples=["like this"])]
        """Named
        over two lines."""
        flags: tuple[str, ...]
        table: dict[str, int]
        nothing: int | None = None
        """May be absent."""
        maybe: Maybe | None = None
        texts: list[str] = msgspec.field(default_factory=lambda: ['a "quoted" one', "back\\slash"])
        deep: dict[str, object] = msgspec.field(default_factory=lambda: {"a b": [1, {"c": True}]})

    def load(self): ...
    def session(self): ...
    async def preprocess(self, rollout): ...
    async def generate(self, rollout, model): ...
    async def reward(self, rollout): ...
    def describe(self): ...


def test_every_kind_of_key(tmp_path, monkeypatch):
    import sys
    import types

    module = types.ModuleType("odd_provider_of_test_init")
    module.Odd = Odd
    module.__spec__ = types.SimpleNamespace(origin=None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = starter({**USUAL, "flow": f"{module.__name__}:Odd"})
    section = text.partition("# A provider with every kind of key.\n")[2].partition("\n\n\n")[0]
    assert section.partition("\n")[2] == ODD
    taken = load(tmp_path, uncommented(text)).run.flow
    assert taken == {
        "provider": "odd_provider_of_test_init:Odd",
        "must": 3,
        "choice": "a",
        "named": "like this",
        "flags": ["FILL IN"],
        "table": {},
        "texts": ['a "quoted" one', "back\\slash"],
        "deep": {"a b": [1, {"c": True}]},
        "inner": {"url": "FILL IN", "ratio": 0.5},
    }


ODD = """\
[flow]
provider = "odd_provider_of_test_init:Odd"

must = 3  # FILL IN, >= 3

choice = "a"  # FILL IN, "a" | "b"

# Named over two lines.
named = "like this"  # FILL IN

flags = ["FILL IN"]  # FILL IN

table = {}  # FILL IN

# May be absent.
# nothing = a whole number; left out by default

#texts = ["a \\"quoted\\" one", "back\\\\slash"]

#deep = { "a b" = [1, { c = true }] }

# A table inside.
[flow.inner]

url = "FILL IN"  # FILL IN

#ratio = 0.5  # > 0 and <= 1

# May be left out.
# [flow.maybe]

# size = 1"""


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "new/project"]) == 0
    path = tmp_path / "new" / "project" / "run.toml"
    assert "new/project/run.toml" in capsys.readouterr().out
    assert load_config(path).run.agent == {"provider": "minisweagent"}
    before = path.read_text()
    assert main(["init", "new/project", "--engine", "replay"]) == 2
    assert "there is something of that name already" in capsys.readouterr().err
    assert path.read_text() == before
    assert main(["init"]) == 0
    assert (tmp_path / "run.toml").read_text() == before


@pytest.mark.parametrize(("agent", "command"), [("minisweagent", "run"), ("litellm_agent", "eval")])
def test_it_names_the_command_that_takes_the_file(tmp_path, monkeypatch, capsys, agent, command):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--agent", agent]) == 0
    assert f"agent-flow {command} run.toml" in capsys.readouterr().out.splitlines()[-1]
    assert f": agent-flow {command} run.toml" in (tmp_path / "run.toml").read_text().splitlines()[0]


def test_a_provider_that_is_not_there_and_a_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--engine", "vlmm"]) == 2
    assert "did you mean 'vllm'?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing is written that cannot be used"
    (tmp_path / "file").write_text("in the way")
    for folder in ("file/below", "file"):
        assert main(["init", folder]) == 2
        assert f"{folder}: no such folder can be made" in capsys.readouterr().err
