"""The pod of a sandbox, from its spec and the settings: a pure function. No secret goes in."""

import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from sandbox_k8s.errors import ConfigError
from sandbox_k8s.spec import SandboxSpec
from sandbox_k8s.tools.layout import LOADER
from sandbox_k8s.tools.pod import (
    container_environment,
    install_command,
    launcher_command,
    pip_install_command,
)

from . import records
from .config import KubernetesConfig

WORKSPACE = "/workspace"
STATE_DIR = "/run/sandbox-k8s"
_TOOLS_TARGET = "/tools"
_COPIED = ("init_copy", "pip")
_COPIED_BYTES = 128 << 20
_FETCHER_AMOUNTS = {"cpu": "20m", "memory": "48Mi", "ephemeral-storage": "64Mi"}
_FETCHER_RESOURCES = {"requests": _FETCHER_AMOUNTS, "limits": _FETCHER_AMOUNTS}
_NONE_ALLOWED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def pod_name(sandbox_id: str) -> str:
    """The name of a sandbox's pod: fixed, so that a create whose answer was lost can be looked up."""
    return f"sbx-{sandbox_id}"


def pod_manifest(
    spec: SandboxSpec,
    config: KubernetesConfig,
    *,
    sandbox_id: str,
    token_hash: str,
    annotations: dict[str, str],
) -> dict[str, Any]:
    """The pod as the API server takes it.

    Args:
        spec: What is wanted.
        config: What holds for all of the run's sandboxes.
        sandbox_id: 16 hex characters.
        token_hash: Hex SHA-256 of the token; the token itself never leaves the client.
        annotations: From `records.annotations`.

    Raises:
        ConfigError: The spec asks for what pods do not have, or names no image.
    """
    image = image_of(spec, config)
    if spec.read_only_paths:
        raise ConfigError("SandboxSpec.read_only_paths are paths of this machine; a pod has none of them")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(sandbox_id),
            "namespace": config.namespace,
            "labels": {
                records.MANAGED_BY: "sandbox-k8s",
                records.RUN: config.run,
                records.SANDBOX: sandbox_id,
                records.NETWORK: "open" if spec.network else "closed",
            },
            "annotations": annotations,
        },
        "spec": _pod_spec(spec, config, image, sandbox_id, token_hash),
    }


def prefetch_manifest(
    config: KubernetesConfig,
    images: Mapping[str, str],
    *,
    node: str,
    request: str,
    annotations: dict[str, str],
) -> dict[str, Any]:
    """A pod that brings images to a node, and ends at once.

    Args:
        config: What holds for all of the run's pods.
        images: By the name of their container.
        node: Its name. The scheduler brings the pod there, so that the node is not overfilled.
        request: 32 hex characters; its beginning names the pod.
        annotations: From `records.annotations`.
    """
    # The loader alone, which ends after a line: that needs neither a shell nor anything else of the image.
    command = [str(PurePosixPath(config.injection.path) / LOADER), "--version"]
    if config.injection.kind == "pip":
        command = ["python3", "--version"]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "activeDeadlineSeconds": math.ceil(config.start_timeout_s),
        "terminationGracePeriodSeconds": 0,
        "affinity": _on_node(node),
        "securityContext": _pod_security(config),
        "containers": [_fetcher(config, name, image, command) for name, image in images.items()],
        "volumes": [one for one in _volumes(SandboxSpec(), config) if one["name"] == "tools"],
    }
    if config.injection.kind == "init_copy":
        spec["initContainers"] = [_copier(SandboxSpec(), config) | {"resources": _FETCHER_RESOURCES}]
    if config.runtime_class is not None:
        spec["runtimeClassName"] = config.runtime_class
    if config.tolerations:
        spec["tolerations"] = list(config.tolerations)
    if config.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in config.image_pull_secrets]
    labels = {
        records.MANAGED_BY: "sandbox-k8s",
        records.RUN: config.run,
        records.SANDBOX: request[:16],
        records.PREFETCH: "true",
        records.NETWORK: "closed",
    }
    metadata = {"name": f"{pod_name(request[:16])}-prefetch", "namespace": config.namespace}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "labels": labels, "annotations": annotations},
        "spec": spec,
    }


def _on_node(name: str) -> dict[str, Any]:
    """Affinity to one node, as DaemonSets have it."""
    field = {"key": "metadata.name", "operator": "In", "values": [name]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _fetcher(config: KubernetesConfig, name: str, image: str, command: list[str]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": name,
        "image": image,
        "command": command,
        "resources": _FETCHER_RESOURCES,
        "securityContext": {**_NONE_ALLOWED, "readOnlyRootFilesystem": True},
        "volumeMounts": [one for one in _mounts(SandboxSpec(), config) if one["name"] == "tools"],
    }
    if config.image_pull_policy is not None:
        container["imagePullPolicy"] = config.image_pull_policy
    return container


def image_of(spec: SandboxSpec, config: KubernetesConfig) -> str:
    """The sandbox's image.

    Raises:
        ConfigError: Neither names one.
    """
    image = spec.image or config.image
    if image is None:
        raise ConfigError("SandboxSpec.image is missing, and KubernetesConfig.image gives no default")
    return image


def workdir_of(spec: SandboxSpec) -> str:
    """Where commands start: the spec's folder, or the sandbox's own empty one."""
    return spec.workdir or WORKSPACE


def _pod_spec(
    spec: SandboxSpec, config: KubernetesConfig, image: str, sandbox_id: str, token_hash: str
) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "activeDeadlineSeconds": config.max_lifetime_s,
        "terminationGracePeriodSeconds": 5,
        "nodeSelector": {"kubernetes.io/arch": config.architecture, **config.node_selector},
        "securityContext": _pod_security(config),
        "containers": [_container(spec, config, image, sandbox_id, token_hash)],
        "volumes": _volumes(spec, config),
    }
    if config.injection.kind in _COPIED:
        pod["initContainers"] = [_copier(spec, config)]
    if config.runtime_class is not None:
        pod["runtimeClassName"] = config.runtime_class
    if config.tolerations:
        pod["tolerations"] = list(config.tolerations)
    if config.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in config.image_pull_secrets]
    return pod


def _container(
    spec: SandboxSpec, config: KubernetesConfig, image: str, sandbox_id: str, token_hash: str
) -> dict[str, Any]:
    security: dict[str, Any] = {**_NONE_ALLOWED, "readOnlyRootFilesystem": config.read_only_root}
    if config.add_capabilities:
        security["capabilities"] = {"drop": ["ALL"], "add": list(config.add_capabilities)}
    container: dict[str, Any] = {
        "name": records.CONTAINER,
        "image": image,
        "command": launcher_command(
            config.injection.path,
            listen=f"0.0.0.0:{config.port}",
            state=STATE_DIR,
            token_hash=token_hash,
            lease_s=spec.lease_s,
            sandbox_id=sandbox_id,
            env=spec.env,
            pip=config.injection.kind == "pip",
        ),
        "workingDir": workdir_of(spec),
        "env": container_environment(spec.env),
        "ports": [{"name": "launcher", "containerPort": config.port}],
        "resources": _resources(spec, config),
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(spec, config),
    }
    if config.image_pull_policy is not None:
        container["imagePullPolicy"] = config.image_pull_policy
    return container


def _copier(spec: SandboxSpec, config: KubernetesConfig) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "tools",
        "image": config.injection.image,
        "command": install_command(_TOOLS_TARGET),
        "resources": _resources(spec, config),
        "securityContext": {**_NONE_ALLOWED, "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tools", "mountPath": _TOOLS_TARGET}],
    }
    if config.injection.kind == "pip":
        container["image"] = image_of(spec, config)
        container["command"] = pip_install_command(_TOOLS_TARGET, config.injection.requirement)
        container["env"] = [{"name": "TMPDIR", "value": _TOOLS_TARGET}]  # all that pip may write to
    if config.image_pull_policy is not None:
        container["imagePullPolicy"] = config.image_pull_policy
    return container


def _resources(spec: SandboxSpec, config: KubernetesConfig) -> dict[str, Any]:
    disk = spec.disk_bytes or config.disk_bytes
    if config.injection.kind in _COPIED:
        disk += _COPIED_BYTES  # the copy counts as the pod's own, and is no work of the sandbox
    amounts = {
        "cpu": f"{round((spec.cpu or config.cpu) * 1000)}m",
        "memory": str(spec.memory_bytes or config.memory_bytes),
        "ephemeral-storage": str(disk),
    }
    return {"requests": amounts, "limits": amounts}


def _pod_security(config: KubernetesConfig) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if config.run_as_user is not None:
        user = config.run_as_user
        security |= {"runAsUser": user, "runAsGroup": user, "fsGroup": user, "runAsNonRoot": True}
    return security


def _volumes(spec: SandboxSpec, config: KubernetesConfig) -> list[dict[str, Any]]:
    limit = str(spec.disk_bytes or config.disk_bytes)
    volumes: list[dict[str, Any]] = [
        {"name": name, "emptyDir": {"sizeLimit": limit}} for name, _ in _written(spec, config)
    ]
    if config.injection.kind == "image_volume":
        image: dict[str, Any] = {"reference": config.injection.image}
        if config.image_pull_policy is not None:
            image["pullPolicy"] = config.image_pull_policy
        volumes.append({"name": "tools", "image": image})
    if config.injection.kind in _COPIED:
        volumes.append({"name": "tools", "emptyDir": {"sizeLimit": str(_COPIED_BYTES)}})
    return volumes


def _mounts(spec: SandboxSpec, config: KubernetesConfig) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": name, "mountPath": path} for name, path in _written(spec, config)
    ]
    if config.injection.kind != "baked":
        mounts.append({"name": "tools", "mountPath": config.injection.path, "readOnly": True})
    return mounts


def _written(spec: SandboxSpec, config: KubernetesConfig) -> list[tuple[str, str]]:
    """The volumes that can be written: names and paths."""
    volumes = [("state", STATE_DIR)]
    if spec.workdir is None:
        volumes.append(("workspace", WORKSPACE))
    if config.read_only_root:
        volumes.append(("tmp", "/tmp"))
    return volumes
