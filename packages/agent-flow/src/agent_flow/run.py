"""One run from a configuration file to a summary: builds the parts, runs the worker, closes everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.destination import Destination, FolderOnly
from agent_flow.errors import UsageError, unwrapped
from agent_flow.eval_section import check_eval
from agent_flow.events import Event, Listener, RolloutRow, Summary
from agent_flow.interrupt import Interrupt
from agent_flow.journal import Journal, Ledger, read_ledger
from agent_flow.parts import Parts
from agent_flow.protocols import Counting, ProviderContext
from agent_flow.replay_run import Replay
from agent_flow.rollout import Mode
from agent_flow.run_folder import RunFolder
from agent_flow.scratch import scratch_folder
from agent_flow.streak import Streak
from agent_flow.task import Task
from agent_flow.templates import tokenizer_of
from agent_flow.worker import Habits, Place, Worker, places_of

_INTERRUPTED_DRAIN_S = 0.5
_NOTHING = Ledger(started=0, live=0, parked=0, delivered=0, dropped={})


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    summary: Summary
    rows: tuple[RolloutRow, ...]
    ledger: Ledger
    folder: Path | None
    """None: interrupted before there was one."""
    problem: str
    interrupted: bool

    @property
    def complete(self) -> bool:
        """Every rollout was delivered and the trainer has them all."""
        return (
            not self.interrupted
            and not self.problem
            and self.ledger.balanced
            and self.ledger.delivered == self.ledger.started == self.summary.received_by_trainer
        )


async def run(
    file: ConfigFile,
    *,
    clock: Clock,
    listener: Listener,
    mode: Mode = "train",
    dump: bool = False,
    replay: Replay | None = None,
) -> RunResult:
    """Run every task of a configuration.

    Args:
        file: The configuration.
        clock: Wall clock and ids.
        listener: Told what happens.
        mode: `eval` measures: nothing is trained, nothing is sent, no trainer is needed.
        dump: Write what is needed to replay the run.
        replay: Run these rollouts again, each with what its engine gave then; nothing is sent.

    Raises:
        UsageError: the configuration, a task row or a provider cannot work. No run folder is left if no
            rollout was started; in a rollout it is a counted drop.
    """
    interrupt = Interrupt(lambda text: listener(Event(event="warning", text=text)))
    run_of_one = _Run(file, clock, listener, interrupt, mode=mode, dump=dump, replay=replay)
    async with interrupt.watching():
        with interrupt.scope():
            await run_of_one.run()
    return run_of_one.result()


class _Run:
    """The parts of one run and what became of them."""

    def __init__(
        self,
        file: ConfigFile,
        clock: Clock,
        listener: Listener,
        interrupt: Interrupt,
        *,
        mode: Mode,
        dump: bool,
        replay: Replay | None,
    ) -> None:
        self._file = file
        self._mode: Mode = mode
        self._replay = replay
        self._habits = Habits(
            dump=dump,
            sends=mode == "train" and replay is None,
            on_finished=None if replay is None else replay.finished,
        )
        self._clock = clock
        self._listener = listener
        self._interrupt = interrupt
        self._began_s = anyio.current_time()
        self._tasks: tuple[Task, ...] = ()
        self._rows: Sequence[RolloutRow] = ()
        self._folder: RunFolder | None = None
        self._received = 0
        self._problem = ""
        self._streak = Streak(0 if replay is not None else file.run.worker.stop_after_tasks)
        self._engine: Mapping[str, int] = {}

    async def run(self) -> None:
        with scratch_folder() as scratch:
            tokenizer = tokenizer_of(self._file)
            context = ProviderContext(
                file=self._file, clock=self._clock, tokenizer=tokenizer, scratch=scratch, mode=self._mode
            )
            await anyio.lowlevel.checkpoint()
            parts = Parts(context, None if self._replay is None else self._replay.engine(tokenizer))
            await anyio.lowlevel.checkpoint()
            tasks = parts.flow.load()
            parts.engine.check(tasks)
            for task in tasks:
                await anyio.lowlevel.checkpoint()
                parts.templates.of(task)
            if self._mode == "train" and self._replay is None:
                check_eval(self._file)
            await anyio.lowlevel.checkpoint()
            self._tasks = tasks
            places = self._places()
            folder = self._folder = RunFolder.create(self._file, self._clock)
            try:
                with Journal(folder.journal, "worker-0", self._clock) as journal:
                    await self._session(parts, folder, journal, places)
            except UsageError:
                if not read_ledger(folder.journal).started:
                    self._folder = None
                    folder.discard()
                raise

    def _places(self) -> tuple[Place, ...]:
        if self._replay is not None:
            return self._replay.places(self._tasks)
        return places_of(self._tasks, self._file.run.tasks.rollouts_per_task, self._mode, self._clock)

    def _destination(self, folder: RunFolder, trainer_lost: Callable[[str], None]) -> Destination:
        if not self._habits.sends:
            return FolderOnly()
        from agent_flow.delivery import Delivery  # loads trainer_bridge, which an evaluation does without

        return Delivery(self._file.run.trainer, folder.path, folder.trainer, trainer_lost)

    async def _session(
        self, parts: Parts, folder: RunFolder, journal: Journal, places: Sequence[Place]
    ) -> None:
        def trainer_lost(why: str) -> None:
            journal.write("trainer_lost", message=why)
            text = f"{why}\n  samples are kept in {folder.samples} until a trainer has them"
            self._listener(Event(event="warning", text=text))

        delivery = self._destination(folder, trainer_lost)
        try:
            with unwrapped():
                async with anyio.create_task_group() as group:
                    try:
                        await delivery.start(group)
                        self._tell_start(folder, journal, delivery)
                        async with parts.session():
                            await self._work(parts, folder, journal, delivery, places)
                    finally:
                        await self._close(folder, journal, delivery)
                        group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await delivery.close_pipes()

    def _tell_start(self, folder: RunFolder, journal: Journal, delivery: Destination) -> None:
        journal.write("run_started", tasks=len(self._tasks), name=self._file.run.name)
        path = str(folder.path)
        self._listener(Event(event="run_started", text=f"run folder: {path}", values={"folder": path}))
        self._listener(Event(event="trainer", text=f"trainer: {delivery.address}"))

    async def _work(
        self,
        parts: Parts,
        folder: RunFolder,
        journal: Journal,
        delivery: Destination,
        places: Sequence[Place],
    ) -> None:
        worker = Worker(
            self._file.run.worker,
            parts,
            self._habits,
            journal=journal,
            delivery=delivery,
            folder=folder,
            clock=self._clock,
            listener=self._streak.before(self._listener),
        )
        self._rows = worker.rows
        try:
            await worker.run(self._streak.until_broken(places))
        finally:
            if isinstance(parts.engine, Counting):
                self._engine = dict(parts.engine.stats())

    async def _close(self, folder: RunFolder, journal: Journal, delivery: Destination) -> None:
        interrupted = self._interrupt.happened
        drain_s = _INTERRUPTED_DRAIN_S if interrupted.is_set() else self._file.run.trainer.drain_s
        with anyio.CancelScope(shield=True):
            await delivery.close(drain_s, hurry=interrupted)
            self._received, self._problem = delivery.received, delivery.problem
            try:
                folder.write_index(self._rows)
            except OSError as error:  # as on a full disk: what the run came to is told all the same
                self._problem = "\n".join(filter(None, (self._problem, f"no index.html: {error}")))
            journal.write("run_ended", interrupted=interrupted.is_set())

    def result(self) -> RunResult:
        """The counts, read back from the journal."""
        ledger = _NOTHING if self._folder is None else read_ledger(self._folder.journal)
        rows = tuple(self._rows)
        summary = Summary(
            tasks=len(self._tasks),
            started=ledger.started,
            delivered=ledger.delivered,
            parked=ledger.parked,
            dropped=ledger.dropped,
            ungraded=dict(Counter(row.ungraded for row in rows if row.ungraded)),
            rewards={task.instance_id: _mean_reward(task, rows) for task in self._tasks},
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            sampled_tokens=sum(row.sampled_tokens for row in rows),
            seconds=round(anyio.current_time() - self._began_s, 3),
            received_by_trainer=self._received,
            samples=sum(row.samples for row in rows),
            engine=self._engine,
        )
        return RunResult(
            summary=summary,
            rows=rows,
            ledger=ledger,
            folder=None if self._folder is None else self._folder.path,
            problem="\n".join(text for text in (self._streak.problem, self._problem) if text),
            interrupted=self._interrupt.happened.is_set(),
        )


def _mean_reward(task: Task, rows: Sequence[RolloutRow]) -> float | None:
    rewards = [row.reward for row in rows if row.task == task.instance_id and row.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
