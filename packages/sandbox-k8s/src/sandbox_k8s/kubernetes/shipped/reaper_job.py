"""The reaper as a CronJob: a pod each minute that deletes the sandboxes whose lease is over."""

from typing import Any

from sandbox_k8s.errors import ConfigError

from .names import PARTS, REAPER, resource_name
from .options import ManifestOptions

_NOBODY = 65534
_SWEEP_S = 300


def cron_job(options: ManifestOptions) -> dict[str, Any]:
    """The CronJob; ``kubectl create job NAME --from=cronjob/sandbox-k8s-reaper`` sweeps at once.

    Raises:
        ConfigError: No image is named.
    """
    job = {
        "backoffLimit": 0,  # the next minute is the next try
        "activeDeadlineSeconds": _SWEEP_S,
        "ttlSecondsAfterFinished": 3600,
        "template": {"metadata": {"labels": PARTS}, "spec": _pod(options)},
    }
    body = {
        "schedule": options.schedule,
        "concurrencyPolicy": "Forbid",
        # Without it a CronJob that missed 100 starts, while its controller was away, never starts again.
        "startingDeadlineSeconds": 120,
        "successfulJobsHistoryLimit": 1,
        "failedJobsHistoryLimit": 3,
        "jobTemplate": {"spec": job},
    }
    metadata = {"name": resource_name(REAPER, options), "namespace": options.namespace, "labels": PARTS}
    return {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": metadata, "spec": body}


def _pod(options: ManifestOptions) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "serviceAccountName": REAPER,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _NOBODY,
            "runAsGroup": _NOBODY,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(options)],
    }


def _container(options: ManifestOptions) -> dict[str, Any]:
    if not options.image:
        raise ConfigError(
            "the reaper needs an image (--image): any in which `sandbox-k8s` is a program, made for example "
            "by `pip install 'sandbox-k8s[kubernetes]'` in python:3.12-slim"
        )
    command = ["sandbox-k8s", "reap", "--kubernetes", "--namespace", options.namespace]
    container: dict[str, Any] = {
        "name": "reaper",
        "image": options.image,
        "command": command if options.run is None else [*command, "--run", options.run],
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "16Mi"},
            "limits": {"cpu": "1", "memory": "256Mi", "ephemeral-storage": "16Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if options.image_pull_policy is not None:
        container["imagePullPolicy"] = options.image_pull_policy
    return container
