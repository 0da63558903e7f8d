"""`swebench_agent`: as `swebench`, with sandboxes of its own for grading.

What sets the original (`swebench_k8s_eval`) apart: agents and eval scripts run in different pods, and those
of the second kind are the runtime's to start. Here every runtime grades in a fresh sandbox; this one may take
it from another provider, namespace or size than the agents' (`[runtime.environment]`). An eval pod that fails
is no reward of 0, and a patch that applies in part only is no patch.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent_flow.protocols import EnvironmentProvider, ProviderContext
from agent_flow.providers import load_environments
from agent_flow.runtimes.swebench import SwebenchRuntime
from agent_flow.task import Task, load_tasks

_INNER = "extra_info"
_IMAGE_NAME = "image_name"


class SwebenchAgentRuntime(SwebenchRuntime):
    """Tasks in swebench 5.x form whose patches are graded in sandboxes that `[runtime.environment]` names.

    A row may have its columns in a table `extra_info`, as verl's data sets do, and its image in `image_name`.
    """

    class Config(SwebenchRuntime.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[runtime]` with `provider = "swebench_agent"`."""

        environment: Mapping[str, object] = {}
        """`provider` and keys of the sandboxes that grade, as in `[environment]`. Empty: those of
        `[environment]`."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        super().__init__(config, context)
        self._graders: EnvironmentProvider | None = None
        if config.environment:
            scratch = context.scratch / "g"
            scratch.mkdir(parents=True, exist_ok=True)
            own = msgspec.structs.replace(context, scratch=scratch)
            self._graders = load_environments(own, config.environment, ("runtime", "environment"))

    def graders_environments(self) -> EnvironmentProvider | None:
        """See `GradersEnvironments`."""
        return self._graders

    def read_tasks(self) -> tuple[Task, ...]:
        """The rows of `tasks.path`; raises as `load_tasks` does."""
        read = load_tasks(self._file.resolve(self._file.run.tasks.path), inner=_INNER)
        return tuple(_with_image(task) for task in read)


def _with_image(task: Task) -> Task:
    named = task.row.get(_IMAGE_NAME)
    if task.row.get("image") or not named:
        return task
    return msgspec.structs.replace(task, row={**task.row, "image": named})
