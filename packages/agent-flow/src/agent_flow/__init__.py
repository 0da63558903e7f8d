"""Tasks become agents' runs in sandboxes against an engine, and these become token-exact samples."""

from agent_flow.config import ConfigFile, RunConfig, load_config
from agent_flow.errors import AgentFlowError, RolloutError, UsageError
from agent_flow.task import Task, load_tasks

__all__ = [
    "AgentFlowError",
    "ConfigFile",
    "RolloutError",
    "RunConfig",
    "Task",
    "UsageError",
    "load_config",
    "load_tasks",
]
