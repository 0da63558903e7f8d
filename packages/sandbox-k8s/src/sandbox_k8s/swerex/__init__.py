"""Drop-in classes for SWE-ReX: its deployments and runtimes, with our sandboxes behind them.

Needs the extra ``sandbox-k8s[swerex]``. Whatever takes an `AbstractDeployment` takes a `K8sDeployment`.
"""

from .config import K8sDeploymentConfig
from .deployment import K8sDeployment
from .errors import (
    K8sAccessError,
    K8sConfigError,
    K8sError,
    K8sFencedError,
    K8sLostError,
    K8sNotFoundError,
    K8sStartupError,
)
from .runtime import K8sRemoteRuntime

__all__ = [
    "K8sAccessError",
    "K8sConfigError",
    "K8sDeployment",
    "K8sDeploymentConfig",
    "K8sError",
    "K8sFencedError",
    "K8sLostError",
    "K8sNotFoundError",
    "K8sRemoteRuntime",
    "K8sStartupError",
]
