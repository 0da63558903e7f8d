"""Providers by kind and name, loaded when they are used and not before."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Literal, cast

import msgspec

from agent_flow.config import decode
from agent_flow.errors import ConfigError, ProviderError
from agent_flow.protocols import (
    AgentFlow,
    AgentProvider,
    Engine,
    EnvironmentProvider,
    ProviderContext,
    Runtime,
)

Kind = Literal["engine", "flow", "agent", "environment", "runtime"]

BUILTIN_PROVIDERS: dict[Kind, dict[str, str]] = {
    "engine": {"replay": "agent_flow.engines.replay:ReplayEngine"},
    "flow": {"swe": "agent_flow.flow:SweFlow"},
    "agent": {"minisweagent": "agent_flow.agents.minisweagent:MiniSweAgent"},
    "environment": {"local": "agent_flow.environments.local:LocalEnvironments"},
    "runtime": {"command": "agent_flow.runtimes.command:CommandRuntime"},
}
"""Value: `module:Class`. The class has a `Config` (a msgspec Struct) and is built with `(config,
context)`."""

_INSTALL = {
    "minisweagent": "pip install 'agent-flow[minisweagent]'",
    "sandbox_k8s": "pip install 'agent-flow[sandbox]'",
    "trainer_bridge": "pip install 'agent-flow[bridge]'",
}


def load_engine(context: ProviderContext) -> Engine:
    """The engine that `[engine] provider` names."""
    return cast("Engine", _load("engine", context.file.run.engine, context))


def load_flow(context: ProviderContext) -> AgentFlow:
    """The flow that `[flow] provider` names."""
    return cast("AgentFlow", _load("flow", context.file.run.flow, context))


def load_agent(context: ProviderContext) -> AgentProvider:
    """The agent that `[agent] provider` names."""
    return cast("AgentProvider", _load("agent", context.file.run.agent, context))


def load_environments(context: ProviderContext) -> EnvironmentProvider:
    """The environment provider that `[environment] provider` names."""
    return cast("EnvironmentProvider", _load("environment", context.file.run.environment, context))


def load_runtime(context: ProviderContext) -> Runtime:
    """The runtime (tasks and grader) that `[runtime] provider` names."""
    return cast("Runtime", _load("runtime", context.file.run.runtime, context))


def _load(kind: Kind, section: Mapping[str, object], context: ProviderContext) -> object:
    name = section.get("provider")
    where = f"{context.file.path} [{kind}]"
    if not isinstance(name, str):
        raise ConfigError(
            f"missing key '{kind}.provider'",
            where=where,
            fix=f"one of {', '.join(sorted(BUILTIN_PROVIDERS[kind]))}, or 'module:Class'",
        )
    provider = _resolve(kind, name, where)
    options = {key: value for key, value in section.items() if key != "provider"}
    config = decode(
        options, provider.Config, path=context.file.path, text=context.file.text, section=f"{kind}"
    )
    return provider(config, context)


class _ProviderClass:
    """What a provider's class looks like from here."""

    Config: type[msgspec.Struct]

    def __init__(self, config: msgspec.Struct, context: ProviderContext) -> None: ...


def _resolve(kind: Kind, name: str, where: str) -> type[_ProviderClass]:
    target = BUILTIN_PROVIDERS[kind].get(name, name if ":" in name else None)
    if target is None:
        known = sorted(BUILTIN_PROVIDERS[kind])
        near = difflib.get_close_matches(name, known, n=1)
        raise ProviderError(
            f"unknown {kind} provider {name!r}",
            where=where,
            fix=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}; or 'module:Class'",
        )
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        raise ProviderError(
            f"{kind} provider {name!r} needs the package {missing!r}, which is not installed",
            where=where,
            fix=_INSTALL.get(missing, f"pip install {missing}"),
        ) from error
    found = vars(module).get(class_name)
    if not isinstance(found, type) or not hasattr(found, "Config"):
        raise ProviderError(
            f"{target} is not a provider: a class with a `Config` type, built with (config, context)",
            where=where,
        )
    return cast("type[_ProviderClass]", found)
