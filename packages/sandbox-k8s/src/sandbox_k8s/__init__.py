"""A shell in a sandbox with a life cycle: start, run, detach, attach elsewhere, lease, reap."""

from .client import SandboxClient
from .config import LocalConfig
from .errors import (
    AccessError,
    BackendUnavailableError,
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
from .handle import SandboxHandle
from .result import CommandResult, SessionResult
from .sandbox import Sandbox, Session
from .spec import SandboxSpec
from .stats import ClientStats, SandboxInfo
from .sweep import ReapedSandbox

__all__ = [
    "AccessError",
    "BackendUnavailableError",
    "ClientStats",
    "CommandRefusedError",
    "CommandResult",
    "ConfigError",
    "Fault",
    "FencedError",
    "FileError",
    "LocalConfig",
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
