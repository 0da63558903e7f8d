"""A folder of ours in a sandbox, for files that only this package reads and writes."""

from __future__ import annotations

from agent_flow.errors import EnvError
from agent_flow.protocols import Environment


async def make_folder(environment: Environment) -> str:
    """A new empty folder outside the repository.

    Raises:
        EnvError: the sandbox has no working `mktemp` or no space; whoever runs the sandbox has to mend it.
    """
    made = await environment.execute(["mktemp", "-d"], timeout_s=60.0)
    folder = made.stdout.decode("utf-8", "replace").strip()
    if made.exit_code != 0 or not folder.startswith("/"):
        evidence = made.stderr.decode("utf-8", "replace")
        raise EnvError("mktemp", "no temporary folder in the sandbox", retryable=True, evidence=evidence)
    return folder
