"""The pod of a sandbox, from its spec and the settings: a pure function. No secret goes in."""

from typing import Any

from sandbox_k8s.errors import ConfigError
from sandbox_k8s.spec import SandboxSpec
from sandbox_k8s.tools.pod import container_environment, install_command, launcher_command

from . import records
from .config import KubernetesConfig

WORKSPACE = "/workspace"
STATE_DIR = "/run/sandbox-k8s"
_TOOLS_TARGET = "/tools"
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
    image = spec.image or config.image
    if image is None:
        raise ConfigError("SandboxSpec.image is missing, and KubernetesConfig.image gives no default")
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
    if config.injection.kind == "init_copy":
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
    if config.image_pull_policy is not None:
        container["imagePullPolicy"] = config.image_pull_policy
    return container


def _resources(spec: SandboxSpec, config: KubernetesConfig) -> dict[str, Any]:
    amounts = {
        "cpu": f"{round((spec.cpu or config.cpu) * 1000)}m",
        "memory": str(spec.memory_bytes or config.memory_bytes),
        "ephemeral-storage": str(spec.disk_bytes or config.disk_bytes),
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
    if config.injection.kind == "init_copy":
        volumes.append({"name": "tools", "emptyDir": {"sizeLimit": "512Mi"}})
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
