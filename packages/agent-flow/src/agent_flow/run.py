"""One run from a configuration file to a summary: builds the parts, runs the worker, closes everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
from token_tracking import Tokenizer, load_tokenizer
from token_tracking.errors import TokenTrackingError

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.delivery import Delivery
from agent_flow.errors import ConfigError, UsageError, unwrapped
from agent_flow.events import Event, Listener, RolloutRow, Summary
from agent_flow.interrupt import Interrupt
from agent_flow.journal import Journal, Ledger, read_ledger
from agent_flow.parts import Parts
from agent_flow.protocols import ProviderContext
from agent_flow.run_folder import RunFolder
from agent_flow.scratch import scratch_folder
from agent_flow.task import Task
from agent_flow.worker import Worker

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


async def run(file: ConfigFile, *, clock: Clock, listener: Listener) -> RunResult:
    """Run every task of a configuration.

    Raises:
        UsageError: the configuration, a task row or a provider cannot work; raised before the first rollout
            starts, and no run folder is left.
    """
    interrupt = Interrupt(lambda text: listener(Event(event="warning", text=text)))
    run_of_one = _Run(file, clock, listener, interrupt)
    async with interrupt.watching():
        with interrupt.scope():
            await run_of_one.run()
    return run_of_one.result()


class _Run:
    """The parts of one run and what became of them."""

    def __init__(self, file: ConfigFile, clock: Clock, listener: Listener, interrupt: Interrupt) -> None:
        self._file = file
        self._clock = clock
        self._listener = listener
        self._interrupt = interrupt
        self._began_s = anyio.current_time()
        self._tasks: tuple[Task, ...] = ()
        self._rows: Sequence[RolloutRow] = ()
        self._folder: RunFolder | None = None
        self._received = 0
        self._problem = ""

    async def run(self) -> None:
        with scratch_folder() as scratch:
            tokenizer = _tokenizer(self._file)
            context = ProviderContext(
                file=self._file, clock=self._clock, tokenizer=tokenizer, scratch=scratch
            )
            await anyio.lowlevel.checkpoint()
            parts = Parts(context)
            await anyio.lowlevel.checkpoint()
            tasks = parts.flow.load()
            parts.engine.check(tasks)
            for task in tasks:
                await anyio.lowlevel.checkpoint()
                parts.templates.of(task)
            await anyio.lowlevel.checkpoint()
            self._tasks = tasks
            folder = self._folder = RunFolder.create(self._file, self._clock)
            try:
                with Journal(folder.journal, "worker-0", self._clock) as journal:
                    await self._session(parts, folder, journal)
            except UsageError:
                self._folder = None
                folder.discard()
                raise

    async def _session(self, parts: Parts, folder: RunFolder, journal: Journal) -> None:
        def trainer_lost(why: str) -> None:
            journal.write("trainer_lost", message=why)
            text = f"{why}\n  samples are kept in {folder.samples} until a trainer has them"
            self._listener(Event(event="warning", text=text))

        delivery = Delivery(self._file.run.trainer, folder.path, folder.trainer, trainer_lost)
        try:
            with unwrapped():
                async with anyio.create_task_group() as group:
                    try:
                        await delivery.start(group)
                        self._tell_start(folder, journal, delivery)
                        async with parts.session():
                            await self._work(parts, folder, journal, delivery)
                    finally:
                        await self._close(folder, journal, delivery)
                        group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await delivery.close_pipes()

    def _tell_start(self, folder: RunFolder, journal: Journal, delivery: Delivery) -> None:
        journal.write("run_started", tasks=len(self._tasks), name=self._file.run.name)
        path = str(folder.path)
        self._listener(Event(event="run_started", text=f"run folder: {path}", values={"folder": path}))
        self._listener(Event(event="trainer", text=f"trainer: {delivery.address}"))

    async def _work(self, parts: Parts, folder: RunFolder, journal: Journal, delivery: Delivery) -> None:
        worker = Worker(
            self._file.run.worker,
            parts,
            "train",
            journal=journal,
            delivery=delivery,
            folder=folder,
            clock=self._clock,
            listener=self._listener,
        )
        self._rows = worker.rows
        await worker.run(self._tasks, self._file.run.tasks.rollouts_per_task)

    async def _close(self, folder: RunFolder, journal: Journal, delivery: Delivery) -> None:
        interrupted = self._interrupt.happened
        drain_s = _INTERRUPTED_DRAIN_S if interrupted.is_set() else self._file.run.trainer.drain_s
        with anyio.CancelScope(shield=True):
            await delivery.close(drain_s, hurry=interrupted)
            self._received, self._problem = delivery.received, delivery.problem
            folder.write_index(self._rows)
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
            rewards={task.instance_id: _mean_reward(task, rows) for task in self._tasks},
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            sampled_tokens=sum(row.sampled_tokens for row in rows),
            seconds=round(anyio.current_time() - self._began_s, 3),
            received_by_trainer=self._received,
            samples=sum(row.samples for row in rows),
        )
        return RunResult(
            summary=summary,
            rows=rows,
            ledger=ledger,
            folder=None if self._folder is None else self._folder.path,
            problem=self._problem,
            interrupted=self._interrupt.happened.is_set(),
        )


def _tokenizer(file: ConfigFile) -> Tokenizer:
    name = file.run.model.tokenizer
    path = file.resolve(name)
    try:
        return load_tokenizer(path if path.exists() else name)
    except TokenTrackingError as error:
        raise ConfigError(str(error), where=f"{file.path} model.tokenizer") from error


def _mean_reward(task: Task, rows: Sequence[RolloutRow]) -> float | None:
    rewards = [row.reward for row in rows if row.task == task.instance_id and row.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
