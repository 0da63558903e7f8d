"""Where a finished rollout goes: to a trainer (`delivery`), or nowhere but into its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import anyio.abc
from token_tracking.sample import Sample


class Destination(Protocol):
    """What a run does with the samples of a rollout."""

    address: str
    """For people."""
    problem: str
    """Why it does not have everything. Empty: it has."""
    received: int
    """Rollouts it has; final after `close`."""

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Get ready.

        Raises:
            ConfigError: it cannot.
        """
        ...

    async def send(self, samples: Sequence[Sample], *, on_taken: Callable[[str], None]) -> None:
        """Hand over all samples of one rollout; `on_taken` is called once they are safe, with a remark.

        Raises:
            DeliveryError: they were not taken.
        """
        ...

    async def close(self, drain_s: float, *, hurry: anyio.Event) -> None:
        """Wait for what is under way, for `drain_s` or until `hurry` is set."""
        ...

    async def close_pipes(self) -> None:
        """The last step, after the task group given to `start` has ended."""
        ...


class FolderOnly:
    """For `eval` and `--replay`: samples are built and checked; the rollout's files are all that stays."""

    address = "none: nothing is sent"

    def __init__(self) -> None:
        self.problem = ""
        self.received = 0

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Nothing to start."""

    async def send(self, samples: Sequence[Sample], *, on_taken: Callable[[str], None]) -> None:
        """Count the rollout."""
        self.received += 1
        on_taken("")

    async def close(self, drain_s: float, *, hurry: anyio.Event) -> None:
        """Nothing is under way."""

    async def close_pipes(self) -> None:
        """There are none."""
