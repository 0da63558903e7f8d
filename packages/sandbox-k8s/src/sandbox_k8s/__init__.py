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
    ResetRefusedError,
    ResultLostError,
    SandboxError,
    SandboxLostError,
    SandboxNotFoundError,
    SandboxStartError,
    SessionError,
    TransferError,
)
from .handle import LocalPlace, PodPlace, SandboxHandle
from .kubernetes.config import Injection, KubernetesConfig
from .log import LogEntry, double_owners
from .many import StartProgress
from .pool import WarmPool
from .prometheus import prometheus_text
from .result import CommandResult, SessionResult
from .sandbox import Sandbox
from .session import Session
from .spec import SandboxSpec
from .stats import ClientStats, ReapedSandbox, SandboxInfo
from .sync import SyncSandboxClient
from .sync_pool import SyncWarmPool
from .sync_sandbox import SyncSandbox, SyncSession

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
    "LogEntry",
    "PodPlace",
    "ReapedSandbox",
    "ResetRefusedError",
    "ResultLostError",
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
    "StartProgress",
    "SyncSandbox",
    "SyncSandboxClient",
    "SyncSession",
    "SyncWarmPool",
    "TransferError",
    "WarmPool",
    "double_owners",
    "prometheus_text",
]
