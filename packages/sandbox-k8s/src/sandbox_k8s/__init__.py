"""A shell in a sandbox with a life cycle: start, run, detach, attach elsewhere, lease, reap."""

from .client import SandboxClient
from .config import ClientConfig, LocalConfig
from .errors import (
    AccessError,
    BackendUnavailableError,
    ClusterError,
    CommandRefusedError,
    ConfigError,
    Fault,
    FencedError,
    FileError,
    SandboxError,
    SandboxLostError,
    SandboxNotFoundError,
    SandboxStartError,
    SessionError,
    TransferError,
)
from .handle import LocalPlace, PodPlace, SandboxHandle
from .kubernetes.config import Injection, KubernetesConfig
from .result import CommandResult, SessionResult
from .sandbox import Sandbox, Session
from .spec import SandboxSpec
from .stats import ClientStats, ReapedSandbox, SandboxInfo

__all__ = [
    "AccessError",
    "BackendUnavailableError",
    "ClientConfig",
    "ClientStats",
    "ClusterError",
    "CommandRefusedError",
    "CommandResult",
    "ConfigError",
    "Fault",
    "FencedError",
    "FileError",
    "Injection",
    "KubernetesConfig",
    "LocalConfig",
    "LocalPlace",
    "PodPlace",
    "ReapedSandbox",
    "Sandbox",
    "SandboxClient",
    "SandboxError",
    "SandboxHandle",
    "SandboxInfo",
    "SandboxLostError",
    "SandboxNotFoundError",
    "SandboxSpec",
    "SandboxStartError",
    "Session",
    "SessionError",
    "SessionResult",
    "TransferError",
]
