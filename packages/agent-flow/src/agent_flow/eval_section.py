"""`[eval]`: the configuration that an evaluation uses, and what can be said of it before a run."""

from __future__ import annotations

import msgspec

from agent_flow.config import ConfigFile, SamplingConfig
from agent_flow.decoding import decode
from agent_flow.errors import ConfigError
from agent_flow.providers import BRINGS_MODEL, provider_class
from agent_flow.toml_lines import Keys

_AGENT = ("eval", "agent")
_BUILT_IN = ("swe", "plain")
"""Flows whose tasks are a file; what others make of `path` is their own."""


def eval_file(file: ConfigFile) -> ConfigFile:
    """The configuration with `[eval]` applied. Where the agent brings a model of its own, it has no engine.

    Raises:
        ConfigError: a key of `eval.sampling` is unknown or its value does not fit.
    """
    run, own = file.run, file.run.eval
    sampling = {**msgspec.structs.asdict(run.sampling), **own.sampling}
    decode(own.sampling, SamplingConfig, where=file.where, section=("eval", "sampling"))
    tasks = msgspec.structs.replace(
        run.tasks,
        path=own.path or run.tasks.path,
        rollouts_per_task=own.rollouts_per_task or run.tasks.rollouts_per_task,
    )
    changed = msgspec.structs.replace(
        run,
        name=f"{run.name[:94]}-eval",
        tasks=tasks,
        agent=_agent(file),
        engine={"provider": "none"} if _brings_model(file) else run.engine,
        sampling=msgspec.convert(sampling, SamplingConfig),
    )
    return msgspec.structs.replace(file, run=changed)


def check_eval(file: ConfigFile) -> None:
    """Look at `[eval]` and build nothing, so that its mistakes show before a run and not after it.

    Of the flow `swe` the agent's keys are looked at; what other flows do with theirs is their own.

    Raises:
        UsageError: a key is unknown, a value does not fit, or there is no such agent or task file; says
            which and where.
    """
    run = eval_file(file).run
    flow = file.run.flow.get("provider")
    if file.run.eval.path and flow in _BUILT_IN and not file.resolve(run.tasks.path).exists():
        raise ConfigError(
            f"there is no task file {file.resolve(run.tasks.path)}", where=file.where(("eval", "path"))
        )
    if file.run.eval.agent and flow == "swe":
        _check_agent(file)


def evaluation_only(file: ConfigFile) -> bool:
    """Whether `agent-flow eval` alone takes it: in a run no engine would sample a token."""
    run, engine = file.run, file.run.engine.get("provider")
    if run.flow.get("provider") != "swe":
        return engine == "none"
    return run.agent.get("provider") in BRINGS_MODEL or (engine in (None, "none") and _brings_model(file))


def _agent(file: ConfigFile) -> dict[str, object]:
    own, trained = file.run.eval.agent, file.run.agent
    other = own.get("provider", trained.get("provider")) != trained.get("provider")
    return dict(own) if other else {**trained, **own}


def _brings_model(file: ConfigFile) -> bool:
    """What flows of a user's ask of the engine beside their agent, nobody knows."""
    return file.run.flow.get("provider") == "swe" and _agent(file).get("provider") in BRINGS_MODEL


def _check_agent(file: ConfigFile) -> None:
    own = file.run.eval.agent
    options = _agent(file)
    name = options.pop("provider", None)

    def where(way: Keys) -> str:
        """Of a key that was not overridden, in the section of training."""
        taken_over = way[:2] == _AGENT and len(way) > 2 and way[2] not in own
        return file.where(way[1:] if taken_over else way)

    if not isinstance(name, str):
        raise ConfigError("not a name: 'eval.agent.provider'", where=where((*_AGENT, "provider")))
    found = provider_class(
        "agent",
        name,
        where=where((*_AGENT, "provider")),
        python_path=tuple(file.resolve(folder) for folder in file.run.python_path),
    )
    decode(options, found.Config, where=where, section=_AGENT)
