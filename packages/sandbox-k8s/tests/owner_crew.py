"""Worker processes of tests (`owner_worker`), asked and killed."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
from sandbox_k8s import ClientConfig

SCRIPT = Path(__file__).with_name("owner_worker.py")
Answer = dict[str, Any]


class Process:
    """One worker process."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._answers: dict[int, tuple[anyio.Event, Answer]] = {}
        self._number = 0
        self.dead = anyio.Event()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Start it, and read what it says until it is gone."""
        settings = msgspec.json.encode(self._config, enc_hook=str).decode()
        argv = [sys.executable, str(SCRIPT), type(self._config).__name__, settings]
        self._process = await anyio.open_process(argv, stderr=None)
        rest = b""
        assert self._process.stdout is not None
        async with self._process:
            async for data in self._process.stdout:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    answer = json.loads(line)
                    if answer["number"] == 0:
                        task_status.started()
                    else:
                        self._answers[answer["number"]][1].update(answer)
                        self._answers[answer["number"]][0].set()
        self.dead.set()
        for done, answer in self._answers.values():
            answer.setdefault("error", "Killed")
            done.set()

    async def ask(self, do: str, **order: Any) -> Answer:
        """Have something done; the answer has ``error`` when it failed: ``Killed`` when nobody was left."""
        self._number += 1
        done, answer = self._answers[self._number] = anyio.Event(), {}
        line = json.dumps({"number": self._number, "do": do, **order}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(line)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return {"error": "Killed"}
        if self.dead.is_set():
            return {"error": "Killed"}
        await done.wait()
        return answer

    async def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        await self.dead.wait()

    async def leave(self) -> None:
        """Have it end well."""
        assert self._process.stdin is not None
        await self._process.stdin.aclose()
        await self.dead.wait()


class Crew:
    """Worker processes; one that is killed is replaced."""

    def __init__(self, config: ClientConfig, tasks: anyio.abc.TaskGroup) -> None:
        self._config = config
        self._tasks = tasks
        self.workers: list[Process] = []

    async def hire(self, many: int) -> None:
        """That many more."""
        for _ in range(many):
            worker = Process(self._config)
            await self._tasks.start(worker.run)
            self.workers.append(worker)

    async def kill(self, worker: Process) -> None:
        """kill -9 of one, which others may be using."""
        if worker in self.workers and len(self.workers) > 2:
            self.workers.remove(worker)
            await worker.kill()
            await self.hire(1)


@asynccontextmanager
async def crew(config: ClientConfig, many: int) -> AsyncIterator[Crew]:
    async with anyio.create_task_group() as tasks:
        hired = Crew(config, tasks)
        await hired.hire(many)
        yield hired
        for worker in hired.workers:
            await worker.leave()
