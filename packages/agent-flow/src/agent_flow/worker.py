"""The worker: many rollouts at once, each started once and ended once, whatever happens to it."""

from __future__ import annotations

import logging
import traceback
from functools import partial

import anyio
import anyio.to_thread

from agent_flow.clock import Clock
from agent_flow.config import WorkerConfig
from agent_flow.delivery import Delivery
from agent_flow.errors import DeliveryError, JournalError, RolloutError, UsageError
from agent_flow.events import Event, Listener, RolloutRow
from agent_flow.journal import Journal
from agent_flow.protocols import AgentFlow, Rollout
from agent_flow.run_folder import RunFolder
from agent_flow.task import Task

logger = logging.getLogger(__name__)

INTERRUPTED = "flow/interrupted"
TIMEOUT = "flow/timeout"
BUG = "flow/bug"


class Worker:
    """Runs the rollouts of one process and journals every step.

    A rollout is `started` in the journal before anything is done for it, and then ends exactly once:
    `delivered` when the sender has taken all its samples, or `dropped` with a reason.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        flow: AgentFlow,
        journal: Journal,
        delivery: Delivery,
        folder: RunFolder,
        clock: Clock,
        listener: Listener,
    ) -> None:
        self._config = config
        self._flow = flow
        self._journal = journal
        self._delivery = delivery
        self._folder = folder
        self._clock = clock
        self._listener = listener
        self._slots = anyio.Semaphore(config.max_rollouts)
        self.rows: list[RolloutRow] = []

    async def run(self, tasks: tuple[Task, ...], rollouts_per_task: int) -> None:
        """Run every task's group to its end. A failed rollout is a row, not an exception."""
        async with anyio.create_task_group() as group:
            for task in tasks:
                group_id = self._clock.new_id()
                for member in range(rollouts_per_task):
                    await self._slots.acquire()
                    group.start_soon(self._run_one, task, group_id, member)

    async def _run_one(self, task: Task, group_id: str, member: int) -> None:
        try:
            await self._run_to_its_end(task, self._clock.new_id(), group_id, member)
        finally:
            self._slots.release()

    async def _run_to_its_end(self, task: Task, rollout_id: str, group_id: str, member: int) -> None:
        end = _End(self, task, rollout_id)
        self._journal.write("started", rollout_id, task=task.instance_id, group_id=group_id, member=member)
        try:
            self._listener(Event(event="rollout_started", task=task.instance_id, rollout_id=rollout_id))
            limit_s = self._config.rollout_timeout_s
            with anyio.move_on_after(limit_s) as scope:
                await self._attempts(task, rollout_id, group_id, member, end)
            if scope.cancelled_caught:
                end.dropped(TIMEOUT, f"longer than worker.rollout_timeout_s = {limit_s:g} s")
        except JournalError:
            raise
        except UsageError:
            end.dropped("flow/usage", "the run cannot go on")
            raise
        except RolloutError as error:
            end.dropped(error.reason, error.message, error.evidence)
            await self._write_files(end)
        except DeliveryError as error:
            end.dropped("delivery/refused", str(error))
        except Exception as error:
            # The one broad handler: a rollout that meets a fault of ours is counted, the others go on.
            logger.exception("rollout %s failed", rollout_id)
            end.dropped(f"{BUG}:{type(error).__name__}", str(error), traceback.format_exc())
        except BaseException:
            end.dropped(INTERRUPTED, "cut from outside")
            raise

    async def _attempts(self, task: Task, rollout_id: str, group_id: str, member: int, end: _End) -> None:
        for attempt in range(self._config.max_attempts):
            try:
                rollout = await self._flow.preprocess(rollout_id, group_id, member, attempt, task)
                end.rollout = rollout
                await self._flow.generate(rollout, on_turn=end.turn)
                await self._flow.reward(rollout)
            except RolloutError as error:
                if not error.retryable or attempt + 1 == self._config.max_attempts:
                    raise
                text = str(error)
                self._journal.write(
                    "attempt_failed", rollout_id, attempt=attempt, reason=error.reason, message=text
                )
                self._listener(
                    Event(event="attempt_failed", task=task.instance_id, rollout_id=rollout_id, text=text)
                )
            else:
                await self._deliver(rollout, end)
                return

    async def _deliver(self, rollout: Rollout, end: _End) -> None:
        samples = self._flow.samples(rollout)
        await self._delivery.send(samples, on_taken=lambda remark: end.delivered(len(samples), remark))
        # After the samples are safe: a page that cannot be written must not cost them.
        await self._write_files(end)

    async def _write_files(self, end: _End) -> None:
        """What a person may want to see of a rollout, whether it was delivered or dropped."""
        rollout = end.rollout
        if rollout is None or not rollout.conversation.turns:
            return
        facts, provenance = self._flow.facts(rollout, end.seconds), self._flow.provenance(rollout)
        # In a thread: checking every prompt of a long conversation against full renders takes seconds.
        write = partial(self._folder.write_rollout, rollout, facts, provenance)
        try:
            await anyio.to_thread.run_sync(write)
        except OSError as error:
            logger.warning("the files of %s could not be written: %s", rollout.task.instance_id, error)

    def end(self, event: str, row: RolloutRow, evidence: str) -> None:
        """Write a rollout's one end to the journal and tell it."""
        if row.dropped:
            self._journal.write(
                event,
                row.rollout_id,
                attempt=row.attempt,
                reason=row.dropped,
                message=row.note,
                evidence=evidence[-4000:],
            )
        else:
            self._journal.write(
                event,
                row.rollout_id,
                attempt=row.attempt,
                samples=row.samples,
                reward=row.reward,
                exit_status=row.exit_status,
            )
        self.rows.append(row)
        kind = "rollout_dropped" if row.dropped else "rollout_delivered"
        self._listener(Event(event=kind, task=row.task, rollout_id=row.rollout_id, row=row, text=row.note))

    def tell(self, event: Event) -> None:
        """Pass an event on."""
        self._listener(event)


class _End:
    """How one rollout ends: exactly once, and with what was known of it by then."""

    def __init__(self, worker: Worker, task: Task, rollout_id: str) -> None:
        self._worker = worker
        self._task = task
        self._rollout_id = rollout_id
        self._began_s = anyio.current_time()
        self._done = False
        self.rollout: Rollout | None = None

    @property
    def seconds(self) -> float:
        return anyio.current_time() - self._began_s

    def turn(self) -> None:
        """A turn was sampled."""
        self._worker.tell(
            Event(event="turn", task=self._task.instance_id, rollout_id=self._rollout_id, row=self._row())
        )

    def delivered(self, samples: int, remark: str) -> None:
        ungraded = None if self.rollout is None else self.rollout.ungraded
        self._finish("delivered", self._row(samples=samples, note=remark or str(ungraded or "")))

    def dropped(self, reason: str, note: str, evidence: str = "") -> None:
        # After its samples were taken a rollout is delivered, even if the interrupt comes one step later.
        self._finish("dropped", self._row(dropped=reason, note=note), evidence)

    def _finish(self, event: str, row: RolloutRow, evidence: str = "") -> None:
        if not self._done:
            self._done = True
            self._worker.end(event, row, evidence)

    def _row(self, *, samples: int = 0, dropped: str = "", note: str = "") -> RolloutRow:
        rollout = self.rollout
        conversation = None if rollout is None else rollout.conversation
        return RolloutRow(
            rollout_id=self._rollout_id,
            task=self._task.instance_id,
            attempt=0 if rollout is None else rollout.attempt,
            exit_status="" if rollout is None else rollout.exit_status,
            reward=None if rollout is None or dropped else rollout.reward,
            turns=0 if conversation is None else conversation.turns,
            prompt_tokens=0 if conversation is None else conversation.prompt_tokens,
            sampled_tokens=0 if conversation is None else conversation.sampled_tokens,
            seconds=self.seconds,
            samples=samples,
            dropped=dropped,
            note=note,
        )
