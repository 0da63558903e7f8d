"""Which sandboxes a command is about: the options that all commands share, and what they lead to."""

import argparse
import math
import os
import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import anyio.to_thread
import msgspec

from sandbox_k8s.client import SandboxClient
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.config import LocalConfig
from sandbox_k8s.errors import AccessError, ConfigError
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import PodApi
from sandbox_k8s.kubernetes.config import DataPath, Injection, KubernetesConfig
from sandbox_k8s.kubernetes.kubeconfig import (
    KubeContext,
    find_context,
    in_cluster_context,
    is_in_cluster,
)

from .problems import of_cluster

_PATIENCE_S = 3.0
_PATHS = ("kubeconfig", "run_key_file")
_NAMES = ("context", "namespace", "cluster", "run", "data_path")
_OF_CLUSTER = ("kubernetes", "config", *_PATHS, *_NAMES)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Sandboxes in a cluster.

    Attributes:
        config: Its ``run`` is a default where `run` is None, and its ``injection`` where `knows_injection`
            is False.
        run: None is every run of the namespace.
        context: Who the caller is there.
    """

    config: KubernetesConfig
    run: str | None
    context: KubeContext
    knows_injection: bool

    @property
    def at(self) -> str:
        """For messages."""
        server = f" ({self.context.server})" if self.context.server else ""
        return f"context {self.context.name!r}{server}, namespace {self.config.namespace!r}"

    @property
    def of_run(self) -> str:
        """For messages."""
        return "" if self.run is None else f" of run {self.run!r}"


def parent(*, local: bool = True) -> argparse.ArgumentParser:
    """The shared options.

    Args:
        local: Whether the command is about sandboxes of this machine, too.
    """
    parser = argparse.ArgumentParser(add_help=False)
    if local:
        here = parser.add_argument_group("sandboxes of this machine (the default)")
        here.add_argument("--root", type=Path, metavar="DIR", help="their folder (default: LocalConfig's)")
    group = parser.add_argument_group("sandboxes in a cluster (each of these options chooses it)")
    group.add_argument(
        "--kubernetes", "-k", action="store_true", help="as kubectl would find it, or this pod's"
    )
    group.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="(default: $KUBECONFIG, ~/.kube/config)"
    )
    group.add_argument("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
    group.add_argument("--namespace", "-n", metavar="NAME", help="(default: the context's, else 'default')")
    group.add_argument("--run", metavar="NAME", help="sandboxes of this run alone (default: of all)")
    group.add_argument("--cluster", metavar="NAME", help="KubernetesConfig.cluster of the run's workers")
    group.add_argument("--data-path", choices=get_args(DataPath), help="the way in (default: what works)")
    group.add_argument("--run-key-file", type=Path, metavar="FILE", help="the run's key, to get in")
    group.add_argument("--config", type=Path, metavar="FILE.toml", help="a KubernetesConfig; options win")
    return parser


def add_injection(command: argparse.ArgumentParser) -> None:
    """The options that name a tools image."""
    command.add_argument("--tools-image", metavar="IMAGE", help="of build-tools: what sandboxes run from")
    command.add_argument(
        "--injection", choices=("image_volume", "init_copy"), default="image_volume", help="how it comes in"
    )


def with_injection(place: Cluster, options: argparse.Namespace) -> Cluster:
    """The cluster with the tools image of `add_injection`, if one was given."""
    if options.tools_image is None:
        return place
    injection = Injection(kind=options.injection, image=options.tools_image)
    config = msgspec.structs.replace(place.config, injection=injection)
    return msgspec.structs.replace(place, config=config, knows_injection=True)


def chooses_cluster(options: argparse.Namespace) -> bool:
    """Whether an option of a cluster was given."""
    given: dict[str, Any] = vars(options)
    return any(given[name] for name in _OF_CLUSTER)


def seconds(text: str) -> float:
    """A time-out of an option, for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found


def place_of(options: argparse.Namespace, *, makes_root: bool = False) -> LocalConfig | Cluster:
    """What the options say.

    Args:
        options: Parsed by a parser with the options of `parent`.
        makes_root: Whether the command may be the first to use that ``--root``.

    Raises:
        ConfigError: They contradict each other, or lead nowhere.
    """
    if not chooses_cluster(options):
        if options.root is not None and not makes_root and not options.root.is_dir():
            raise ConfigError(f"--root {options.root} is no folder: no sandbox was ever started there")
        # Nothing is started, so that a missing bubblewrap is no worry; `doctor` looks for itself.
        return LocalConfig(root=options.root, isolation="process")
    if options.root is not None:
        raise ConfigError("--root is for sandboxes of this machine; leave out the options of a cluster")
    return cluster_of(options)


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the options say, or the one that kubectl would take.

    Raises:
        ConfigError: There is none, or a file is not what it should be.
    """
    said = {} if options.config is None else _read_toml(options.config)
    said |= {name: value for name in _NAMES if (value := getattr(options, name)) is not None}
    said |= {name: str(value) for name in _PATHS if (value := getattr(options, name)) is not None}
    knows_injection = "injection" in said
    said.setdefault("injection", {"kind": "baked"})
    if "kubeconfig" not in said and os.environ.get("KUBECONFIG"):
        said["kubeconfig"] = os.environ["KUBECONFIG"]
    context = _context_of(said)
    if context.namespace:
        said.setdefault("namespace", context.namespace)
    try:
        config = msgspec.convert(said, KubernetesConfig, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as problem:
        raise ConfigError(f"{options.config or 'the options'}: {problem}; see KubernetesConfig") from problem
    run = config.run if "run" in said else None
    return Cluster(config=config, run=run, context=context, knows_injection=knows_injection)


@asynccontextmanager
async def opened_api(place: Cluster) -> AsyncGenerator[PodApi]:
    """Requests to the API server; no run key is read or made."""
    config = _impatient(place.config)
    api = PodApi(await anyio.to_thread.run_sync(ApiAccess, config), config, SystemClock())
    try:
        with of_cluster(place.at):
            yield api
    finally:
        api.close()


@asynccontextmanager
async def opened_client(place: LocalConfig | Cluster) -> AsyncGenerator[SandboxClient]:
    """A client for sandboxes of the place that others started.

    Raises:
        ConfigError: There is no run key for them.
        AccessError: The run key is another one.
    """
    if isinstance(place, LocalConfig):
        async with SandboxClient.local(place) as client:
            yield client
        return
    key = place.config.resolved_run_key_file()
    if not key.exists():
        raise ConfigError(
            f"there is no run key {key}; getting into a sandbox takes the key of its run's workers: "
            "--run-key-file FILE"
        )
    try:
        with of_cluster(place.at):
            async with SandboxClient.kubernetes(_impatient(place.config)) as client:
                yield client
    except AccessError as problem:
        raise AccessError(
            f"{problem.args[0]}; the key is of {key} (--run-key-file) for cluster "
            f"{place.config.cluster!r} (--cluster): both must be as the run's workers have them"
        ) from problem


def _impatient(config: KubernetesConfig) -> KubernetesConfig:
    """A person waits: an API server that is silent is said to be so at once."""
    patience_s = min(_PATIENCE_S, config.api_patience_s)
    return msgspec.structs.replace(config, api_patience_s=patience_s)


def _context_of(said: dict[str, Any]) -> KubeContext:
    path = Path(said["kubeconfig"]) if "kubeconfig" in said else None
    if path is None and "context" not in said and is_in_cluster():
        return in_cluster_context()
    return find_context(path, said.get("context"))


def _read_toml(path: Path) -> dict[str, Any]:
    """A KubernetesConfig's fields; paths in it are relative to the file."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not TOML: {problem}") from problem
    for name in _PATHS:
        if isinstance(said.get(name), str):
            said[name] = str(path.absolute().parent / Path(said[name]).expanduser())
    return said
