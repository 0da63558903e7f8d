"""A run of which nothing comes: task after task is dropped for one reason, and nothing was ever delivered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent_flow.events import Event, Listener, RolloutRow
from agent_flow.worker import INTERRUPTED, Place


class Streak:
    """Stops a run before it has spent all of its tasks on a mistake that every one of them meets.

    Args:
        limit: Tasks in a row, as `worker.stop_after_tasks` says. 0: never.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reason = ""
        self._tasks: set[str] = set()
        self._first: RolloutRow | None = None
        self._not_started = 0

    @property
    def problem(self) -> str:
        """Why the run was stopped. Empty: it was not."""
        if self._first is None or not self._not_started:
            return ""
        return (
            f"stopped: nothing was delivered, and {len(self._tasks)} tasks in a row were dropped for one "
            f"reason, {self._reason}: {self._first.note}\n  {self._not_started} rollouts were not started; "
            f"worker.stop_after_tasks = {self._limit} (0: never stop)"
        )

    def until_broken(self, places: Sequence[Place]) -> Iterator[Place]:
        """The places, as long as there is hope."""
        for number, place in enumerate(places):
            if self._broken:
                self._not_started = len(places) - number
                return
            yield place

    def before(self, listener: Listener) -> Listener:
        """A listener that looks at how rollouts end and passes everything on."""

        def heard(event: Event) -> None:
            if event.row is not None and not self._broken:
                self._see(event, event.row)
            listener(event)

        return heard

    @property
    def _broken(self) -> bool:
        return 0 < self._limit <= len(self._tasks)

    def _see(self, event: Event, row: RolloutRow) -> None:
        if event.event == "rollout_delivered":
            self._limit = 0
        elif event.event != "rollout_dropped" or row.dropped == INTERRUPTED:
            return
        elif row.fault == "agent" or row.attempt:
            # What an agent does, and what was worth another try, may be otherwise with the next task.
            self._reason = ""
            self._tasks.clear()
        else:
            if row.dropped != self._reason:
                self._reason, self._first = row.dropped, row
                self._tasks.clear()
            self._tasks.add(row.task)
