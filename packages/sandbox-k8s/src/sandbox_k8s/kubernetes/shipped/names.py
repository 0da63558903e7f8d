"""Names and labels of what is shipped."""

import hashlib
import re

from .options import ManifestOptions

WORKER = "sandbox-k8s-worker"
REAPER = "sandbox-k8s-reaper"
READER = "sandbox-k8s-reader"
PARTS = {"app.kubernetes.io/name": "sandbox-k8s", "app.kubernetes.io/part-of": "sandbox-k8s"}
"""Not ``app.kubernetes.io/managed-by``, which says that a pod is a sandbox."""

_SHORT_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?")


def resource_name(name: str, options: ManifestOptions) -> str:
    """A name that tells runs apart; a CronJob's has at most 52 characters, and a run may have others."""
    if options.run is None:
        return name
    if _SHORT_NAME.fullmatch(options.run):
        return f"{name}-{options.run}"
    return f"{name}-{hashlib.sha256(options.run.encode()).hexdigest()[:10]}"
