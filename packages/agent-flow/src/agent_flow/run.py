"""One run from a configuration file to a summary: builds the parts, runs the worker, closes everything."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
from token_tracking import Tokenizer, load_tokenizer
from token_tracking.errors import TokenTrackingError

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.delivery import Delivery
from agent_flow.errors import ConfigError
from agent_flow.events import Event, Listener, RolloutRow, Summary
from agent_flow.flow import SweFlow
from agent_flow.journal import Journal, Ledger, read_ledger
from agent_flow.protocols import EnvironmentProvider, ProviderContext
from agent_flow.providers import load_agent, load_engine, load_environments, load_runtime
from agent_flow.run_folder import RunFolder
from agent_flow.task import Task
from agent_flow.worker import Worker

_INTERRUPTED_DRAIN_S = 0.5
_LONGEST_SCRATCH_PARENT = 50
"""Bytes. A socket's path may have 104; a sandbox's own part of it takes the rest."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    summary: Summary
    rows: tuple[RolloutRow, ...]
    ledger: Ledger
    folder: Path
    problem: str
    interrupted: bool

    @property
    def complete(self) -> bool:
        """Every rollout was delivered and the trainer has them all."""
        return (
            not self.interrupted
            and not self.problem
            and self.ledger.balanced
            and self.ledger.delivered == self.ledger.started
        )


async def run(file: ConfigFile, *, clock: Clock, listener: Listener) -> RunResult:
    """Run every task of a configuration.

    Raises:
        UsageError: the configuration, a task row or a provider cannot work; raised before the first rollout
        starts.
    """
    began = clock.monotonic_s()
    with tempfile.TemporaryDirectory(prefix="af-", dir=_scratch_parent()) as scratch:
        context = ProviderContext(file=file, clock=clock, tokenizer=_tokenizer(file), scratch=Path(scratch))
        runtime = load_runtime(context)
        environments = load_environments(context)
        flow = SweFlow(
            context,
            engine=load_engine(context),
            agent=load_agent(context),
            environments=environments,
            runtime=runtime,
        )
        tasks = runtime.load()
        for task in tasks:
            flow.template(task)
        folder = RunFolder.create(file, clock)
        listener(
            Event(event="run_started", text=f"run folder: {folder.path}", values={"folder": str(folder.path)})
        )
        with Journal(folder.journal, "worker-0", clock) as journal:
            session = _Session(file, folder, journal, clock, listener)
            await session.run(flow, environments, tasks)
        return session.result(tasks, seconds=clock.monotonic_s() - began)


def _scratch_parent() -> str:
    """The temporary folder, or `/tmp` where its path leaves no room for the sandboxes' unix sockets."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _LONGEST_SCRATCH_PARENT else "/tmp"


def _tokenizer(file: ConfigFile) -> Tokenizer:
    name = file.run.model.tokenizer
    path = file.resolve(name)
    try:
        return load_tokenizer(path if path.exists() else name)
    except TokenTrackingError as error:
        raise ConfigError(str(error), where=f"{file.path} model.tokenizer") from error


class _Session:
    """The time between the first rollout and the last count."""

    def __init__(
        self, file: ConfigFile, folder: RunFolder, journal: Journal, clock: Clock, listener: Listener
    ) -> None:
        self._file = file
        self._folder = folder
        self._journal = journal
        self._clock = clock
        self._listener = listener
        self._delivery = Delivery(file.run.trainer, folder.path, folder.trainer, self._trainer_lost)
        self._rows: Sequence[RolloutRow] = ()
        self._interrupted = False

    async def run(self, flow: SweFlow, environments: EnvironmentProvider, tasks: tuple[Task, ...]) -> None:
        self._journal.write("run_started", tasks=len(tasks), name=self._file.run.name)
        async with anyio.create_task_group() as outer:
            outer.start_soon(self._watch_signals, outer.cancel_scope)
            try:
                await self._delivery.start(outer)
                self._listener(Event(event="trainer", text=f"trainer: {self._delivery.address}"))
                async with environments.session():
                    await self._work(flow, tasks)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._delivery.close(self._drain_s())
                    self._journal.write("run_ended", interrupted=self._interrupted)
            outer.cancel_scope.cancel()
        await self._delivery.close_pipes()

    async def _work(self, flow: SweFlow, tasks: tuple[Task, ...]) -> None:
        worker = Worker(
            self._file.run.worker,
            flow=flow,
            journal=self._journal,
            delivery=self._delivery,
            folder=self._folder,
            clock=self._clock,
            listener=self._listener,
        )
        self._rows = worker.rows
        await worker.run(tasks, self._file.run.tasks.rollouts_per_task)

    async def _watch_signals(self, scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if not self._interrupted:
                    self._interrupted = True
                    self._listener(
                        Event(event="warning", text="interrupted: stopping sandboxes, keeping samples")
                    )
                    scope.cancel()

    def _drain_s(self) -> float:
        return _INTERRUPTED_DRAIN_S if self._interrupted else self._file.run.trainer.drain_s

    def _trainer_lost(self, why: str) -> None:
        text = f"{why}\n  samples are kept in {self._folder.samples} until a trainer has them"
        self._journal.write("trainer_lost", message=why)
        self._listener(Event(event="warning", text=text))

    def result(self, tasks: tuple[Task, ...], *, seconds: float) -> RunResult:
        ledger = read_ledger(self._folder.journal)
        rows = tuple(self._rows)
        summary = Summary(
            tasks=len(tasks),
            started=ledger.started,
            delivered=ledger.delivered,
            parked=ledger.parked,
            dropped=ledger.dropped,
            rewards={task.instance_id: _mean_reward(task, rows) for task in tasks},
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            sampled_tokens=sum(row.sampled_tokens for row in rows),
            seconds=round(seconds, 3),
            received_by_trainer=self._delivery.received,
            samples=sum(row.samples for row in rows),
        )
        return RunResult(
            summary=summary,
            rows=rows,
            ledger=ledger,
            folder=self._folder.path,
            problem=self._delivery.problem,
            interrupted=self._interrupted,
        )


def _mean_reward(task: Task, rows: Sequence[RolloutRow]) -> float | None:
    rewards = [row.reward for row in rows if row.task == task.instance_id and row.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
