"""`k8s`: one pod per rollout and one per grading, from sandbox-k8s' Kubernetes back end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from sandbox_k8s import (
    BackendUnavailableError,
    Injection,
    KubernetesConfig,
    SandboxClient,
    SandboxError,
    SandboxSpec,
)

from agent_flow.clock import Clock
from agent_flow.config import Count, Seconds
from agent_flow.environments.identity import GIT_IDENTITY
from agent_flow.environments.sandbox import started
from agent_flow.environments.stops import Stops
from agent_flow.errors import ConfigError, EnvCreateError
from agent_flow.protocols import Environment, EnvironmentSpec, ProviderContext

_MIB = 1 << 20
_RUN_NAME = 40
"""Characters of the run's name in its label, which may have 63."""


class KubernetesEnvironments:
    """Starts pods: the task's image, or `image` where it names none."""

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[environment]` with `provider = "k8s"`. What sandbox-k8s calls by the same name means the same."""

        injection: Literal["image_volume", "init_copy", "baked", "pip"]
        """How the launcher gets into the images: `image_volume` (Kubernetes 1.35 or newer), `init_copy`
        (everywhere), `baked` (it is in them), `pip` (each start installs it: a last resort)."""
        tools_image: str = ""
        """Made by `sandbox-k8s build-tools`; for `image_volume` and `init_copy`."""
        tools_path: str = "/opt/sandbox-k8s"
        """Where the tools are in the sandbox."""
        kubeconfig: str = ""
        """Empty: the pod's own account inside a cluster, else `$KUBECONFIG` or `~/.kube/config`."""
        context: str = ""
        """Of the kubeconfig. Empty: its current one."""
        namespace: str = "default"
        """Where the pods are."""
        cluster: str = "default"
        """What all workers of a run call the cluster, however they reach it."""
        run: str = ""
        """Label of all pods of a run, for `sandbox-k8s ps --run`. Empty: the run's name and a new id."""
        run_key_file: str = ""
        """From which every sandbox's token is derived; made when it is missing. Workers of one run share it.
        Empty: this user's own, below `~/.local/state/sandbox-k8s`."""
        image: str = ""
        """For tasks that name none."""
        image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
        """Empty: Kubernetes decides."""
        image_pull_secrets: tuple[str, ...] = ()
        """Names of secrets of the namespace."""
        cpu: Annotated[float, msgspec.Meta(gt=0)] = 1.0
        """Cores of a pod, as request and limit."""
        memory_mib: Annotated[int, msgspec.Meta(ge=64)] = 2048
        """The same for its memory. A grader's process that is killed for it gives no reward, not 0."""
        disk_mib: Count = 4096
        """The same for what it writes."""
        egress: bool = False
        """Whether pods may reach the network. A NetworkPolicy of the namespace has to enforce it
        (`sandbox-k8s manifests network-policy`)."""
        env: Mapping[str, str] = {}
        """Of everything that runs in a pod, on top of the image's own. No secrets: a model sees it."""
        lease_s: Seconds = 60.0
        """A pod ends by itself when its worker was silent for so long."""
        max_lifetime_s: Count = 86400
        """The last stop of a pod, whatever leases say."""
        start_timeout_s: Seconds = 600.0
        """From the pod's creation until it can be used, the image's pull included."""
        failing_timeout_s: Seconds = 120.0
        """How long a start may be failing (no room, a registry that is down) while Kubernetes tries on."""
        start_concurrency: Count = 16
        """Starts at once to begin with; the number follows what the cluster bears."""
        start_concurrency_max: Count = 256
        """It never grows above that."""
        stop_timeout_s: Seconds = 30.0
        """How long the end of the run waits for pods that still live."""
        data_path: Literal["", "pod_ip", "api_proxy", "port_forward"] = ""
        """How pods are reached. Empty: the first of these that works."""
        architecture: Literal["amd64", "arm64"] = "amd64"
        """What the tools were built for."""
        node_selector: Mapping[str, str] = {}
        """Labels that a node must have."""
        tolerations: tuple[dict[str, Any], ...] = ()
        """As in a pod's spec."""
        runtime_class: str = ""
        """Such as `gvisor`. Empty: the cluster's default."""
        run_as_user: int | None = None
        """Numeric user in the place of the image's."""
        add_capabilities: tuple[str, ...] = ()
        """Kept although all others are dropped, such as `CHOWN`."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        where = f"{context.file.path} [environment]"
        try:
            self._kubernetes = _kubernetes_config(config, context)
            self._spec = SandboxSpec(
                env={**GIT_IDENTITY, **config.env}, network=config.egress, lease_s=config.lease_s
            )
        except SandboxError as error:
            raise ConfigError(str(error), where=where) from error
        self._where = where
        self._client: SandboxClient | None = None
        self.stops = Stops()

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None]:
        """One client for all pods; its end stops those that still live."""
        async with AsyncExitStack() as stack:
            try:
                client = SandboxClient.kubernetes(self._kubernetes)
                self._client = await stack.enter_async_context(client)
            except BackendUnavailableError as error:
                fix = "pip install 'agent-flow[k8s]'"
                raise ConfigError(str(error.args[0]), where=self._where, fix=fix) from error
            except SandboxError as error:
                raise ConfigError(f"no pods can be started: {error}", where=self._where) from error
            try:
                yield
            finally:
                self._client = None

    def open(self, spec: EnvironmentSpec) -> AbstractAsyncContextManager[Environment]:
        """A fresh pod; with a working copy of the repository unless that is in its image."""
        if self._client is None:
            raise EnvCreateError("client", "open was called outside session")
        image = spec.image or (self._kubernetes.image or "")
        if not image:
            raise EnvCreateError(
                "image", "the task names no image, and environment.image is empty", fault="task"
            )
        sandbox = msgspec.structs.replace(self._spec, image=image)
        return started(self._client, sandbox, spec, self.stops, name="k8s", image=image)


def _kubernetes_config(config: KubernetesEnvironments.Config, context: ProviderContext) -> KubernetesConfig:
    file = context.file
    return KubernetesConfig(
        injection=Injection(kind=config.injection, image=config.tools_image or None, path=config.tools_path),
        cluster=config.cluster,
        namespace=config.namespace,
        run=config.run or _run_label(file.run.name, context.clock),
        kubeconfig=_path(context, config.kubeconfig),
        context=config.context or None,
        run_key_file=_path(context, config.run_key_file),
        image=config.image or None,
        cpu=config.cpu,
        memory_bytes=config.memory_mib * _MIB,
        disk_bytes=config.disk_mib * _MIB,
        image_pull_policy=config.image_pull_policy or None,
        image_pull_secrets=config.image_pull_secrets,
        runtime_class=config.runtime_class or None,
        node_selector=dict(config.node_selector),
        architecture=config.architecture,
        tolerations=config.tolerations,
        run_as_user=config.run_as_user,
        add_capabilities=config.add_capabilities,
        data_path=config.data_path or None,
        start_timeout_s=config.start_timeout_s,
        stop_timeout_s=config.stop_timeout_s,
        max_lifetime_s=config.max_lifetime_s,
        failing_timeout_s=config.failing_timeout_s,
        start_concurrency=config.start_concurrency,
        start_concurrency_max=max(config.start_concurrency, config.start_concurrency_max),
    )


def _path(context: ProviderContext, value: str) -> Path | None:
    return context.file.resolve(value) if value else None


def _run_label(name: str, clock: Clock) -> str:
    return f"{name[:_RUN_NAME]}-{clock.new_id()[:12]}"
