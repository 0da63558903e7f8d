"""Providers by kind and name, loaded when they are used and not before."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

import msgspec

from agent_flow.decoding import decode, dotted, nearest
from agent_flow.errors import ConfigError, ProviderError
from agent_flow.protocols import (
    AgentFlow,
    AgentProvider,
    Engine,
    EnvironmentProvider,
    ProviderContext,
    Runtime,
)
from agent_flow.provider_module import load_class, searched, translated
from agent_flow.toml_lines import Keys

Kind = Literal["engine", "flow", "agent", "environment", "runtime"]

BUILTIN_PROVIDERS: dict[Kind, dict[str, str]] = {
    "engine": {
        "none": "agent_flow.engines.none:NoEngine",
        "replay": "agent_flow.engines.replay:ReplayEngine",
        "sglang": "agent_flow.engines.sglang:SglangEngine",
    },
    "flow": {"swe": "agent_flow.flow:SweFlow", "plain": "agent_flow.plain_flow:PlainFlow"},
    "agent": {
        "litellm_agent": "agent_flow.agents.litellm_agent:LitellmAgent",
        "minisweagent": "agent_flow.agents.minisweagent:MiniSweAgent",
        "sweagent": "agent_flow.agents.sweagent:SweAgent",
        "sweagent_legacy": "agent_flow.agents.sweagent:SweAgent",
        "sweagent_original": "agent_flow.agents.sweagent:OriginalSweAgent",
    },
    "environment": {
        "local": "agent_flow.environments.local:LocalEnvironments",
        "k8s": "agent_flow.environments.k8s:KubernetesEnvironments",
        "k8s_legacy": "agent_flow.environments.k8s:KubernetesEnvironments",
        "kr8s": "agent_flow.environments.k8s:KubernetesEnvironments",
        "docker": "agent_flow.environments.docker:DockerEnvironments",
        "e2b": "agent_flow.environments.e2b:E2bEnvironments",
    },
    "runtime": {
        "command": "agent_flow.runtimes.command:CommandRuntime",
        "plain": "agent_flow.runtimes.plain:PlainRuntime",
        "swebench": "agent_flow.runtimes.swebench:SwebenchRuntime",
        "swebench_sii": "agent_flow.runtimes.swebench:SwebenchRuntime",
        "swebench_agent": "agent_flow.runtimes.swebench_agent:SwebenchAgentRuntime",
        "swefactory": "agent_flow.runtimes.swefactory:SwefactoryRuntime",
        "harbor": "agent_flow.runtimes.harbor:HarborRuntime",
    },
}
"""Value: `module:Class`. The class has a `Config` (a msgspec Struct) and is built with `(config,
context)`. Several names may lead to one class; what is built of them shares nothing."""

NOT_IN_THIS_VERSION: dict[Kind, dict[str, str]] = {
    "engine": {"vllm": "sglang", "local": "sglang", "openai": "sglang"},
    "flow": {},
    "agent": {},
    "environment": {},
    "runtime": {},
}
"""Names of the original design that are to come. Value: what there is to use instead."""

BRINGS_MODEL = frozenset({"litellm_agent"})
"""Agents with a model of their own: an evaluation by one opens no engine."""

_PROTOCOLS: dict[Kind, type] = {
    "engine": Engine,
    "flow": AgentFlow,
    "agent": AgentProvider,
    "environment": EnvironmentProvider,
    "runtime": Runtime,
}


class ProviderClass:
    """What a provider's class looks like from here."""

    Config: type[msgspec.Struct]

    def __init__(self, config: msgspec.Struct, context: ProviderContext) -> None: ...


def load_engine(context: ProviderContext) -> Engine:
    """The engine that `[engine] provider` names.

    Raises:
        ConfigError: of this and those below: the section does not fit the provider.
        ProviderError: there is no such provider, or it cannot be imported or built.
    """
    return cast("Engine", _load("engine", context.file.run.engine, context))


def load_flow(context: ProviderContext) -> AgentFlow:
    """The flow that `[flow] provider` names."""
    return cast("AgentFlow", _load("flow", context.file.run.flow, context))


def load_agent(context: ProviderContext) -> AgentProvider:
    """The agent that `[agent] provider` names."""
    return cast("AgentProvider", _load("agent", context.file.run.agent, context))


def load_environments(
    context: ProviderContext, section: Mapping[str, object] | None = None, way: Keys = ("environment",)
) -> EnvironmentProvider:
    """The environment provider that `[environment] provider` names.

    `section`: another table of the file that is read in its place; it stands at `way`.
    """
    chosen = context.file.run.environment if section is None else section
    return cast("EnvironmentProvider", _load("environment", chosen, context, way))


def load_runtime(context: ProviderContext) -> Runtime:
    """The runtime (tasks and grader) that `[runtime] provider` names."""
    return cast("Runtime", _load("runtime", context.file.run.runtime, context))


def provider_class(
    kind: Kind, name: str, *, where: str = "", python_path: tuple[Path, ...] = ()
) -> type[ProviderClass]:
    """The class that a name means.

    Args:
        kind: What it has to be.
        name: A built-in name, or `module:Class`.
        where: Where the name stands, for errors.
        python_path: Folders in which the module of `module:Class` is sought first.

    Raises:
        ProviderError: there is no such provider in this version, its package is not installed, its module
            fails, or the class is not of this kind.
    """
    builtin = BUILTIN_PROVIDERS[kind].get(name)
    if builtin is None and ":" not in name:
        raise _no_such_name(kind, name, where)
    folders = () if builtin else python_path
    with searched(folders):
        found = load_class(f"{kind} provider {name!r}", builtin or name, where, folders)
    config = inspect.getattr_static(found, "Config", None)
    if not isinstance(config, type) or not issubclass(config, msgspec.Struct):
        raise ProviderError(
            f"{kind} provider {name!r} has no `Config` that is a msgspec Struct",
            where=where,
            fix=f"class {found.__name__}: class Config(msgspec.Struct, frozen=True): ...",
        )
    absent = [method for method in _methods(kind) if not callable(getattr(found, method, None))]
    if absent:
        raise ProviderError(
            f"{kind} provider {name!r} has no {' and no '.join(f'`{method}`' for method in absent)}",
            where=where,
            fix=f"see {_PROTOCOLS[kind].__name__} in agent_flow.protocols",
        )
    return cast("type[ProviderClass]", found)


def _load(kind: Kind, section: Mapping[str, object], context: ProviderContext, way: Keys = ()) -> object:
    way = way or (kind,)
    file = context.file
    name = section.get("provider")
    if not isinstance(name, str):
        said = "missing key" if name is None else "not a name:"
        raise ConfigError(
            f"{said} {dotted((*way, 'provider'))!r}",
            where=file.where((*way, "provider")),
            fix=f"one of {', '.join(sorted(BUILTIN_PROVIDERS[kind]))}, or 'module:Class'",
        )
    where = file.where((*way, "provider"))
    python_path = _folders(context)
    found = provider_class(kind, name, where=where, python_path=python_path)
    options = {key: value for key, value in section.items() if key != "provider"}
    what = f"{kind} provider {name!r}"
    with translated(f"{what}: its Config cannot be used", where):
        config = decode(options, found.Config, where=file.where, section=way)
    with searched(python_path if ":" in name else ()), translated(f"{what} could not be built", where):
        built = found(config, context)
    for attribute in _attributes(kind):
        if not hasattr(built, attribute):
            raise ProviderError(f"{what} has no attribute `{attribute}`", where=where)
    return built


def _folders(context: ProviderContext) -> tuple[Path, ...]:
    folders = tuple(context.file.resolve(folder) for folder in context.file.run.python_path)
    for number, folder in enumerate(folders):
        if not folder.is_dir():
            raise ConfigError(
                f"no such folder: {folder}",
                where=context.file.where(("python_path", number)),
                fix="name folders that hold modules, relative to this file",
            )
    return folders


def _no_such_name(kind: Kind, name: str, where: str) -> ProviderError:
    instead = NOT_IN_THIS_VERSION[kind].get(name)
    if instead is not None:
        return ProviderError(
            f"{kind} provider {name!r} is not in this version",
            where=where,
            fix=f"{instead}, or a provider of your own as 'module:Class'",
        )
    if "." in name:
        module, _, last = name.rpartition(".")
        return ProviderError(f"unknown {kind} provider {name!r}", where=where, fix=f"'{module}:{last}'")
    fix = nearest(name, [*BUILTIN_PROVIDERS[kind], *NOT_IN_THIS_VERSION[kind]])
    if not fix.startswith("did you mean"):
        fix = f"{nearest('', BUILTIN_PROVIDERS[kind])}, or 'module:Class'"
    return ProviderError(f"unknown {kind} provider {name!r}", where=where, fix=fix)


def _methods(kind: Kind) -> list[str]:
    return [name for name, value in vars(_PROTOCOLS[kind]).items() if _is_public_function(name, value)]


def _is_public_function(name: str, value: object) -> bool:
    return inspect.isfunction(value) and not name.startswith("_")


def _attributes(kind: Kind) -> list[str]:
    return [name for name in inspect.get_annotations(_PROTOCOLS[kind]) if not name.startswith("_")]
