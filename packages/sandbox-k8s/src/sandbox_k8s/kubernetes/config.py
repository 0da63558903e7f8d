"""Settings of the Kubernetes back end."""

import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from sandbox_k8s.checks import check_fields
from sandbox_k8s.config import ClientConfig
from sandbox_k8s.errors import ConfigError

DataPath = Literal["pod_ip", "api_proxy", "port_forward"]

TOOLS_PATH = "/opt/sandbox-k8s"


class Injection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the launcher and its Python get into an image that knows nothing of them.

    Attributes:
        kind: ``image_volume`` mounts the tools image (Kubernetes 1.35 or newer, or 1.33 with the feature gate
            ImageVolume; containerd 2.1 or newer); ``init_copy`` copies it into an empty volume with an init
            container and works everywhere; ``baked``: the sandbox's image has it at ``path``; ``pip``: each
            start installs it with the image's own ``python3`` (3.11 or newer) and pip. A last resort: that
            takes time and a way to a package index, which a closed network does not have.
        image: The tools image, made by ``sandbox-k8s build-tools``; None for ``baked`` and ``pip``.
        path: Where the tree is in the sandbox.
        requirement: What pip installs: a name with a version, a URL, or a file of the image. None is
            sandbox-k8s of this client's version; of another kind always None.
    """

    kind: Literal["image_volume", "init_copy", "baked", "pip"]
    image: str | None = None
    path: str = TOOLS_PATH
    requirement: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        check_fields(self)
        if (self.kind in ("baked", "pip")) == (self.image is not None):
            needs = "takes no tools image" if self.image else "needs a tools image"
            raise ConfigError(f"Injection(kind={self.kind!r}) {needs}")
        if self.requirement is not None and self.kind != "pip":
            raise ConfigError(f"Injection.requirement is for kind='pip', not for {self.kind!r}")
        if not PurePosixPath(self.path).is_absolute():
            raise ConfigError(f"Injection.path {self.path!r} is not absolute")


class KubernetesConfig(ClientConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the Kubernetes back end, beside those of `ClientConfig`.

    Attributes:
        injection: How the launcher gets into the images.
        cluster: What the workers of a run call the cluster, however they reach it; part of every token.
        namespace: Where the pods are.
        run: Label of all pods of a run; one watch, `list` and `reap` are about one run.
        kubeconfig: None is in-cluster configuration inside a pod, else ``$KUBECONFIG`` or ``~/.kube/config``.
        context: Of the kubeconfig; None is its current one.
        run_key_file: File with the key from which every sandbox's token is derived, made with mode 0600 when
            it is missing. All workers of a run need the same one.
        image: For specs that name none.
        cpu: Cores of a sandbox, as request and limit, for specs that say nothing.
        memory_bytes: The same for memory.
        disk_bytes: The same for what it writes outside mounted volumes.
        image_pull_policy: None leaves it to Kubernetes.
        image_pull_secrets: Names of secrets of the namespace.
        runtime_class: For example ``gvisor``; None is the cluster's default.
        node_selector: Labels that a node must have, beside the architecture.
        architecture: What the tools tree was built for.
        tolerations: As in a pod's spec.
        run_as_user: Numeric user (and group) instead of the image's; root is then refused. One of whom the
            image knows no home gets one of the sandbox's own.
        read_only_root: Only ``/tmp``, the sandbox's own working directory and its own home can be written: no
            folder of the image that ``SandboxSpec.workdir`` names, and no home that the image has for its
            user.
        add_capabilities: Kept although all others are dropped, for example ``CHOWN``.
        port: The launcher's.
        data_path: How to reach the launcher; None tries the pod's address, the API server's pod proxy and
            port-forward, once, and keeps to what worked first.
        max_lifetime_s: ``activeDeadlineSeconds``: the last stop, whatever leases say.
        failing_timeout_s: How long a start may be failing (no room in the cluster or the namespace's quota, a
            registry that is down) while it is tried again. What cannot heal fails at once.
        start_concurrency: Starts under way at once, to begin with. The number grows while they succeed, and
            is halved when the API server is slow or refuses, a quota is used up, or pods find no node.
            Waiting for a turn is not part of ``start_timeout_s``.
        start_concurrency_max: It never grows above that.
        image_failures: So many permanent failures of one image in a row (not found, refused, wrong
            architecture), and starts of it fail at once with the same diagnosis.
        image_retry_s: For so long; then one start finds out whether it is better now.
        image_rate_limit_s: The same after a registry limited pulls of an image without saying for how long.
        record_s: How far ahead of now the pod's annotation says that the sandbox is alive, at least; a reaper
            removes it after that. The launcher itself ends with the much shorter lease.
        api_timeout_s: For one request to the API server; less than the 34 s after which it gives up itself.
        api_patience_s: How long a request is tried again that the API server does not answer, or answers with
            429 or 5xx: long enough for it to be started again.
        api_threads: Requests to the API server at the same time.
        watch_s: How long one watch request lasts; silence for 5 s more means that the connection is dead.
    """

    injection: Injection
    cluster: str = "default"
    namespace: str = "default"
    run: str = "default"
    kubeconfig: Path | None = None
    context: str | None = None
    run_key_file: Path | None = None
    image: str | None = None
    cpu: float = 1.0
    memory_bytes: int = 2 << 30
    disk_bytes: int = 4 << 30
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[str, ...] = ()
    runtime_class: str | None = None
    node_selector: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    architecture: Literal["amd64", "arm64"] = "amd64"
    tolerations: tuple[dict[str, Any], ...] = ()
    run_as_user: int | None = None
    read_only_root: bool = False
    add_capabilities: tuple[str, ...] = ()
    port: int = 8000
    data_path: DataPath | None = None
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0
    max_lifetime_s: int = 86400
    failing_timeout_s: float = 120.0
    start_concurrency: int = 16
    start_concurrency_max: int = 256
    image_failures: int = 3
    image_retry_s: float = 300.0
    image_rate_limit_s: float = 60.0
    record_s: float = 600.0
    api_timeout_s: float = 20.0
    api_patience_s: float = 60.0
    api_threads: int = 8
    watch_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        super().__post_init__()
        positive = ("failing_timeout_s", "record_s", "api_patience_s", "api_threads", "watch_s")
        positive += ("start_concurrency", "image_failures")
        positive += ("image_retry_s", "image_rate_limit_s")
        for name in (*positive, "max_lifetime_s", "cpu"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"KubernetesConfig.{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.api_timeout_s < 34:
            raise ConfigError(f"KubernetesConfig.api_timeout_s must be below 34 s, got {self.api_timeout_s}")
        if not re.fullmatch("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", self.run):
            raise ConfigError(
                f"KubernetesConfig.run {self.run!r} is no label: 1 to 63 of A-Z, a-z, 0-9, '-', '_' and '.', "
                "with a letter or digit at both ends"
            )
        if not re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", self.namespace):
            raise ConfigError(
                f"KubernetesConfig.namespace {self.namespace!r} is no namespace: 1 to 63 of a-z, 0-9 and "
                "'-', with a letter or digit at both ends"
            )
        if not 0 < self.port < 65536:
            raise ConfigError(f"KubernetesConfig.port must lie between 1 and 65535, got {self.port}")
        if self.run_as_user == 0:
            raise ConfigError("KubernetesConfig.run_as_user is for a user that is not root; leave it out")

    def resolved_run_key_file(self) -> Path:
        """The run key's file, by default one of this user's."""
        if self.run_key_file is not None:
            return self.run_key_file.expanduser().absolute()
        # Asked for last: a pod whose user is in no passwd file has no home.
        return Path.home() / ".local" / "state" / "sandbox-k8s" / "run.key"
