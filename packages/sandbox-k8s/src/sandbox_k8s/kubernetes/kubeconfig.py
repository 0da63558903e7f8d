"""Which contexts a kubeconfig has: what people choose by, before anybody connects."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from sandbox_k8s.errors import BackendUnavailableError, ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubeContext(msgspec.Struct, frozen=True):
    """A context of a kubeconfig.

    Attributes:
        namespace: Empty when it names none.
        server: Address of its cluster; empty when the file does not tell.
    """

    name: str
    namespace: str = ""
    server: str = ""


class Kubeconfig(msgspec.Struct, frozen=True):
    """The contexts of one or more files.

    Attributes:
        path: The file, or files with colons between them.
        current: Name of the current context; empty when none is.
    """

    path: str
    contexts: tuple[KubeContext, ...]
    current: str

    def context(self, name: str | None) -> KubeContext:
        """The context of that name; of None, the current one.

        Raises:
            ConfigError: There is none; the message lists those that there are.
        """
        wanted = self.current if name is None else name
        for one in self.contexts:
            if one.name == wanted:
                return one
        there = ", ".join(one.name for one in self.contexts) or "none at all"
        what = f"no context {wanted!r}" if wanted else "no current context"
        raise ConfigError(
            f"{what} in {self.path}; there are: {there}; choose one with --context or "
            "KubernetesConfig.context"
        )


def kubeconfig_path() -> Path | None:
    """What ``$KUBECONFIG`` says, or ``~/.kube/config`` if it is there; None when neither is."""
    said = os.environ.get("KUBECONFIG")
    if said:
        return Path(said)
    usual = Path.home() / ".kube" / "config"
    return usual if usual.exists() else None


def is_in_cluster() -> bool:
    """Whether this is a pod with a service account."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists()


def in_cluster_context() -> KubeContext:
    """Where a pod with a service account is."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    namespace = SERVICE_ACCOUNT / "namespace"
    text = namespace.read_text(encoding="utf-8").strip() if namespace.exists() else ""
    return KubeContext("in-cluster", text, f"https://{f'[{host}]' if ':' in host else host}:{port}")


def find_context(path: Path | None, name: str | None) -> KubeContext:
    """The context that a client would take.

    Args:
        path: Of the kubeconfig; None is the one that kubectl would read.
        name: None is the current context.

    Raises:
        ConfigError: There is no kubeconfig, it cannot be read, or it has no such context.
    """
    path = path or kubeconfig_path()
    if path is None:
        raise ConfigError(
            "no cluster: $KUBECONFIG is not set, ~/.kube/config is not there, and this is no pod with a "
            "service account; name a file with --kubeconfig or KubernetesConfig.kubeconfig"
        )
    return read_kubeconfig(path).context(name)


def read_kubeconfig(path: Path) -> Kubeconfig:
    """Read the contexts of a kubeconfig; of several files with colons between, the first mention wins.

    Raises:
        ConfigError: A file cannot be read, or is no kubeconfig.
        BackendUnavailableError: The client library, which brings the YAML reader, is not installed.
    """
    try:
        yaml: Any = import_module("yaml")
    except ImportError as problem:
        raise BackendUnavailableError(
            f"no Kubernetes client library ({problem}); do: pip install 'sandbox-k8s[kubernetes]'"
        ) from problem
    names = [Path(name).expanduser() for name in str(path).split(os.pathsep) if name]
    files = [_read(one, yaml) for one in names if one.exists() or len(names) == 1]
    servers = {one.name: one.cluster.server for file in reversed(files) for one in file.clusters or ()}
    contexts = {one.name: one for file in reversed(files) for one in file.contexts or ()}
    return Kubeconfig(
        str(path),
        tuple(
            KubeContext(name, one.context.namespace or "", servers.get(one.context.cluster, ""))
            for name, one in contexts.items()
        ),
        next((file.current_context for file in files if file.current_context), ""),
    )


class _Cluster(msgspec.Struct):
    server: str = ""


class _NamedCluster(msgspec.Struct):
    name: str
    cluster: _Cluster


class _Context(msgspec.Struct):
    cluster: str = ""
    namespace: str | None = None


class _NamedContext(msgspec.Struct):
    name: str
    context: _Context


class _File(msgspec.Struct, rename="kebab"):
    clusters: tuple[_NamedCluster, ...] | None = None
    contexts: tuple[_NamedContext, ...] | None = None
    current_context: str | None = None


def _read(path: Path, yaml: Any) -> _File:
    try:
        return msgspec.convert(yaml.safe_load(path.read_bytes()), _File)
    except OSError as problem:
        raise ConfigError(
            f"cannot read kubeconfig {path}: {problem.strerror}; name another one with --kubeconfig or "
            "KubernetesConfig.kubeconfig"
        ) from problem
    except (yaml.YAMLError, msgspec.ValidationError, UnicodeDecodeError) as problem:
        said = " ".join(str(problem).split())
        raise ConfigError(f"{path} is no kubeconfig: {said}; see: kubectl config view") from problem
