"""The worker: many rollouts at once, each started once and ended once, whatever happens to it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from token_tracking.sample import Sample

from agent_flow.clock import Clock
from agent_flow.config import WorkerConfig
from agent_flow.destination import Destination
from agent_flow.dump import dump_of
from agent_flow.engine_calls import CallLog
from agent_flow.errors import DeliveryError, Fault, JournalError, RolloutError, UsageError, text_of
from agent_flow.events import Event, Listener, RolloutRow
from agent_flow.journal import Journal
from agent_flow.model import ConversationModel
from agent_flow.outcome import about_unknown, outcome_of_error
from agent_flow.parts import Parts
from agent_flow.rollout import Mode, Rollout, samples_of
from agent_flow.run_folder import RunFolder
from agent_flow.stage import hold_plain, raised_at, within
from agent_flow.task import Task

logger = logging.getLogger(__name__)

INTERRUPTED = "flow/interrupted"
_MEASURES = ("exit_status", "turns", "prompt_tokens", "sampled_tokens", "seconds")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rollout stands: its task, its group, and which of the group it is."""

    task: Task
    group_id: str
    member: int
    mode: Mode = "train"
    rollout_id: str = ""
    """Of the first rollout in it. Empty: a new one."""
    now: datetime | None = None
    """What the chat template prints as the date. None: today's."""


def places_of(tasks: Iterable[Task], rollouts_per_task: int, mode: Mode, clock: Clock) -> tuple[Place, ...]:
    """A group for each task."""
    groups = [(task, clock.new_id()) for task in tasks]
    return tuple(
        Place(task=task, group_id=group_id, member=member, mode=mode)
        for task, group_id in groups
        for member in range(rollouts_per_task)
    )


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind of run does otherwise than `agent-flow run`."""

    dump: bool = False
    """Write `engine.dump` for each rollout."""
    sends: bool = True
    """Samples go to a trainer."""
    on_finished: Callable[[Rollout, Sequence[Sample]], None] | None = None
    """Called with each rollout that came to its end, and its samples."""


class Worker:
    """Runs the rollouts of one process and journals every step.

    A rollout is `started` in the journal before anything is done for it, and then ends exactly once:
    `delivered` when the sender has taken all its samples, or `dropped` with a reason.
    """

    def __init__(
        self,
        config: WorkerConfig,
        parts: Parts,
        habits: Habits,
        *,
        journal: Journal,
        delivery: Destination,
        folder: RunFolder,
        clock: Clock,
        listener: Listener,
    ) -> None:
        self._config = config
        self._parts = parts
        self._habits = habits
        self._journal = journal
        self._delivery = delivery
        self._folder = folder
        self._clock = clock
        self._listener = listener
        self._slots = anyio.Semaphore(config.max_rollouts)
        self.rows: list[RolloutRow] = []

    async def run(self, places: Iterable[Place]) -> None:
        """Run every place to its end. A failed rollout is a row, not an exception."""
        async with anyio.create_task_group() as group:
            for place in places:
                await self._slots.acquire()
                group.start_soon(self._run_one, place)

    async def _run_one(self, place: Place) -> None:
        try:
            for refill in range(1 + self._config.max_refills):
                first = place.rollout_id if not refill else ""
                if not await self._run_to_its_end(place, first or self._clock.new_id()):
                    break
        finally:
            self._slots.release()

    async def _run_to_its_end(self, place: Place, rollout_id: str) -> bool:
        """Returns whether another has to take its place."""
        task, refill = place.task, False
        end = _End(self, task, rollout_id)
        self._journal.write(
            "started", rollout_id, task=task.instance_id, group_id=place.group_id, member=place.member
        )
        try:
            self._listener(Event(event="rollout_started", task=task.instance_id, rollout_id=rollout_id))
            await self._attempts(place, rollout_id, end)
            return False
        except JournalError:
            raise
        except UsageError as error:
            end.dropped("flow/usage", text_of(error), fault="task")
        except RolloutError as error:
            end.dropped(error.reason, error.message, error.evidence, fault=error.fault)
            refill = outcome_of_error(error).refill
        except DeliveryError as error:
            end.dropped("delivery/refused", str(error))
        except (KeyboardInterrupt, GeneratorExit):
            end.dropped(INTERRUPTED, "cut from outside")
            raise
        except BaseException as error:
            # The one broad handler: a rollout that meets a fault is counted, the others go on. Code of a
            # user's may also raise `SystemExit`, or be cancelled by a task of its own.
            reason, note, evidence = *raised_at(error), traceback.format_exc()
            try:
                await anyio.lowlevel.checkpoint_if_cancelled()
            except BaseException:
                end.dropped(INTERRUPTED, "cut from outside", evidence)
                raise
            logger.exception("rollout %s failed", rollout_id)
            end.dropped(reason, note, evidence)
        await self._write_files(end)
        return refill

    async def _attempts(self, place: Place, rollout_id: str, end: _End) -> None:
        for attempt in range(self._config.max_attempts):
            try:
                rollout = end.rollout = self._parts.new_rollout(
                    place.task, place.mode, rollout_id, place.group_id, place.member, attempt, now=place.now
                )
                await self._stages(rollout, end)
            except RolloutError as error:
                again = outcome_of_error(error).retry and error.retryable
                if not again or attempt + 1 == self._config.max_attempts:
                    raise
                text = text_of(error)
                self._journal.write(
                    "attempt_failed", rollout_id, attempt=attempt, reason=error.reason, message=text
                )
                self._listener(
                    Event(
                        event="attempt_failed", task=place.task.instance_id, rollout_id=rollout_id, text=text
                    )
                )
            else:
                await self._deliver(rollout, end)
                return

    async def _stages(self, rollout: Rollout, end: _End) -> None:
        flow, config = self._parts.flow, self._config
        end.log = CallLog() if self._habits.dump else None
        model = ConversationModel(
            rollout, self._parts.engine, self._parts.sampling, on_turn=end.turn, log=end.log
        )
        await within(config.preprocess_timeout_s, "preprocess", flow.preprocess(rollout))
        await within(config.generate_timeout_s, "generate", flow.generate(rollout, model))
        await within(config.reward_timeout_s, "reward", flow.reward(rollout))

    async def _deliver(self, rollout: Rollout, end: _End) -> None:
        if rollout.mode == "eval":
            # Whatever the flow says: what measures is never trained, nor a baseline for what is.
            rollout.in_loss = rollout.in_baseline = False
        hold_plain(rollout)
        samples = self._samples(rollout)
        await self._delivery.send(samples, on_taken=end.ready(len(samples) if self._habits.sends else 0))
        if self._habits.on_finished is not None:
            self._habits.on_finished(rollout, samples)
        # After the samples are safe: a page that cannot be written must not cost them.
        await self._write_files(end, samples)

    def _samples(self, rollout: Rollout) -> tuple[Sample, ...]:
        if rollout.mode == "eval" and not rollout.conversation.turns:
            return ()  # an agent that measures may bring a model of its own, whose tokens nobody sees
        return samples_of(rollout, self._parts.engine.source, self._parts.provenance(rollout))

    async def _write_files(self, end: _End, samples: Sequence[Sample] = ()) -> None:
        """What a person may want to see of a rollout, whether it was delivered or dropped.

        A file that cannot be written costs itself alone, and the rollout's row says so.
        """
        caught: BaseException | None = None
        try:
            failed = await self._files(end, samples)
        except (Exception, SystemExit, anyio.get_cancelled_exc_class()) as error:
            await anyio.lowlevel.checkpoint_if_cancelled()  # an interrupt goes on
            failed, caught = (f"{type(error).__name__}: {text_of(error)}",), error
        if failed:
            text = f"not written: {'; '.join(failed)}"
            logger.warning("rollout %s: %s", end.rollout_id, text, exc_info=caught)
            end.remark(text)

    async def _files(self, end: _End, samples: Sequence[Sample]) -> tuple[str, ...]:
        rollout = end.rollout
        if rollout is None or not (rollout.conversation.turns or rollout.messages):
            return ()
        source = self._parts.engine.source
        calls = None if end.log is None else end.log.calls
        # In a thread: checking every prompt of a long conversation against full renders takes seconds.
        write = partial(
            self._folder.write_rollout,
            rollout,
            source,
            end.seconds,
            self._parts.provenance(rollout),
            dump=None if calls is None else partial(dump_of, rollout, source, calls, samples),
        )
        return await anyio.to_thread.run_sync(write)

    def line_of(self, event: str, row: RolloutRow, evidence: str) -> bytes:
        """A rollout's end as a line for the journal."""
        values: dict[str, object] = {"attempt": row.attempt}
        if row.dropped:
            values |= {"reason": row.dropped, "message": row.note, "evidence": evidence[-4000:]}
        else:
            values |= {"samples": row.samples, "reward": row.reward}
        known = msgspec.structs.asdict(row)
        return self._journal.prepare(
            event, row.rollout_id, **values, **{name: known[name] for name in _MEASURES}
        )

    def write_end(self, line: bytes, row: RolloutRow) -> None:
        """Write a rollout's one end to the journal, and keep its row."""
        self._journal.put(line)
        self.rows.append(row)

    def remark(self, row: RolloutRow, text: str) -> None:
        """Add to the note of a row that was kept."""
        note = f"{row.note}; {text}" if row.note else text
        self.rows[self.rows.index(row)] = msgspec.structs.replace(row, note=note)

    def tell(self, event: Event) -> None:
        """Pass an event on."""
        self._listener(event)


class _End:
    """How one rollout ends: exactly once, and with what was known of it by then."""

    def __init__(self, worker: Worker, task: Task, rollout_id: str) -> None:
        self._worker = worker
        self._task = task
        self.rollout_id = rollout_id
        self._began_s = anyio.current_time()
        self._row_of_end: RolloutRow | None = None
        self.rollout: Rollout | None = None
        self.log: CallLog | None = None
        """What the engine gave in this attempt. None: it is not kept."""

    @property
    def seconds(self) -> float:
        return round(anyio.current_time() - self._began_s, 3)

    def turn(self) -> None:
        """A turn was sampled."""
        self._worker.tell(
            Event(event="turn", task=self._task.instance_id, rollout_id=self.rollout_id, row=self._row())
        )

    def ready(self, samples: int) -> Callable[[str], None]:
        """Prepare all that is written when the samples are taken; the result is called then, with a remark.

        Nothing may fail between the samples and the journal's line but the disk.
        """
        rollout = self.rollout
        note = "" if rollout is None else text_of(rollout.ungraded or about_unknown(rollout.exit_status))
        row = self._row(samples=samples, note=note, reward=None if rollout is None else rollout.reward)
        line = self._worker.line_of("delivered", row, "")

        def delivered(remark: str) -> None:
            self._finish(line, msgspec.structs.replace(row, note=remark) if remark else row)

        return delivered

    def dropped(self, reason: str, note: str, evidence: str = "", *, fault: Fault = "infra") -> None:
        row = self._row(dropped=text_of(reason), note=text_of(note), fault=fault)
        self._finish(self._worker.line_of("dropped", row, text_of(evidence)), row)

    def remark(self, text: str) -> None:
        """Say something of a rollout that has ended."""
        if self._row_of_end is not None:
            self._worker.remark(self._row_of_end, text)

    def _finish(self, line: bytes, row: RolloutRow) -> None:
        # After its samples were taken a rollout is delivered, even if the interrupt comes one step later.
        if self._row_of_end is not None:
            return
        self._worker.write_end(line, row)
        self._row_of_end = row
        kind = "rollout_dropped" if row.dropped else "rollout_delivered"
        self._worker.tell(Event(event=kind, task=row.task, rollout_id=row.rollout_id, row=row, text=row.note))

    def _row(
        self,
        *,
        samples: int = 0,
        reward: float | None = None,
        dropped: str = "",
        note: str = "",
        fault: Fault | Literal[""] = "",
    ) -> RolloutRow:
        rollout = self.rollout
        conversation, ungraded = (rollout.conversation, rollout.ungraded) if rollout else (None, None)
        return RolloutRow(
            rollout_id=self.rollout_id,
            task=self._task.instance_id,
            attempt=0 if rollout is None else rollout.attempt,
            exit_status="" if rollout is None else text_of(rollout.exit_status),
            reward=reward,
            turns=0 if conversation is None else conversation.turns,
            prompt_tokens=0 if conversation is None else conversation.prompt_tokens,
            sampled_tokens=0 if conversation is None else conversation.sampled_tokens,
            seconds=self.seconds,
            samples=samples,
            dropped=dropped,
            fault=fault or (ungraded.fault if ungraded else ""),
            ungraded=ungraded.reason if ungraded and not dropped else "",
            note=note,
        )
