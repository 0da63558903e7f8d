"""The processes that are measured. Each runs one rollout when it is told to, and says what it took."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from agent_flow_parts.script import TASK, copy_of_repository

TICK_S = 0.005


def cpu_s() -> float:
    """Of this process and of every child that has ended, sandboxes and their commands among them."""
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in times)


def own_cpu_s() -> float:
    one = resource.getrusage(resource.RUSAGE_SELF)
    return one.ru_utime + one.ru_stime


class Took:
    """From its making to now."""

    def __init__(self) -> None:
        self._cpu_s, self._own_s, self.at_s = cpu_s(), own_cpu_s(), time.perf_counter()

    def values(self) -> dict[str, float]:
        return {
            "cpu_s": cpu_s() - self._cpu_s,
            "own_s": own_cpu_s() - self._own_s,
            "seconds": time.perf_counter() - self.at_s,
        }


def serve_ours(pipe: Connection, config: Path) -> None:
    """`agent-flow run`. Between two rollouts, which follow one another, it waits to be told to go on."""
    from agent_flow.clock import Clock
    from agent_flow.config import load_config
    from agent_flow.run import run

    logging.disable(logging.WARNING)
    took: list[Took] = []

    def listener(event: Any) -> None:
        if event.event == "rollout_started":
            # From there to here the whole rollout: sandbox, agent, patch, grading, sample, sending, files.
            pipe.send(took.pop().values() if took else None)
            pipe.recv()
            took.append(Took())

    result = anyio.run(lambda: run(load_config(config), clock=Clock(), listener=listener))
    assert result.folder is not None
    told = [json.loads(path.read_bytes()) for path in result.folder.glob("rollouts/*/messages.json")]
    pipe.send({"seen": sorted({seen(one["messages"]) for one in told}), "complete": result.complete})


def seen(messages: list[dict[str, Any]]) -> str:
    """What all commands gave, as a hash."""
    outputs = [message["extra"]["raw_output"] for message in messages if message["role"] == "tool"]
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()


def serve_mini(pipe: Connection, folder: Path, rounds: int, alone: bool) -> None:
    """mini-swe-agent's `DefaultAgent` and `LocalEnvironment`. `alone`: commands answer at once."""
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = str(folder / "mini")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments.local import LocalEnvironment

    from agent_flow_parts.mini import ReadyEnvironment, ScriptedModel

    script = json.loads((folder / "script.json").read_text())
    settings = get_config_from_spec("mini.yaml")
    templates = {key: settings["agent"][key] for key in ("system_template", "instance_template")}
    for number in range(rounds):
        pipe.recv()
        copy = copy_of_repository(folder, folder / f"mini-{alone}-{len(script['replies'])}-{number}")
        took = Took()
        environment = ReadyEnvironment(script["outputs"], copy) if alone else LocalEnvironment(cwd=str(copy))
        model = ScriptedModel(script["commands"], settings["model"])
        agent = DefaultAgent(model, environment, **templates, cost_limit=0.0)
        ended = agent.run(TASK)
        values = took.values()
        assert ended["exit_status"] == "Submitted"
        pipe.send(values | {"seen": seen(agent.messages)})


def serve_sandbox(pipe: Connection, config: Path, rounds: int) -> None:
    """A sandbox of `agent-flow run` with the task's working copy, in which nothing is done."""
    from agent_flow.clock import Clock
    from agent_flow.config import load_config
    from agent_flow.protocols import ProviderContext
    from agent_flow.providers import load_environments, load_runtime

    async def main(scratch: Path) -> None:
        file = load_config(config)
        nobody_asks: Any = None  # for tokens
        context = ProviderContext(file=file, clock=Clock(), tokenizer=nobody_asks, scratch=scratch)
        runtime, environments = load_runtime(context), load_environments(context)
        (task,) = runtime.load()
        async with environments.session():
            pipe.send(None)
            for _ in range(rounds):
                pipe.recv()
                took = Took()
                async with environments.open(runtime.environment(task)):
                    pass
                pipe.send(took.values())

    with tempfile.TemporaryDirectory(prefix="afb-") as folder:
        anyio.run(main, Path(folder))


def serve_many(pipe: Connection, config: Path, turns: int) -> None:
    """`agent-flow run` with many rollouts at once that start no process; how often the loop came around."""
    from agent_flow.clock import Clock
    from agent_flow.config import load_config
    from agent_flow.run import run

    logging.disable(logging.WARNING)
    late: list[float] = []
    marks: list[tuple[Took, float]] = []
    ends: list[tuple[dict[str, float], float]] = []
    delivered = 0

    def listener(event: Any) -> None:
        nonlocal delivered
        if event.event == "rollout_started" and not marks:
            pipe.send(None)
            pipe.recv()
            marks.append((Took(), time.thread_time()))
        if event.event == "rollout_delivered":
            delivered += 1
            ends[:] = [(marks[0][0].values(), time.thread_time() - marks[0][1])]

    async def tick() -> None:
        while True:
            begin = time.perf_counter()
            await anyio.sleep(TICK_S)
            if marks and marks[0][0].at_s < begin:
                late.append(time.perf_counter() - begin - TICK_S)

    async def main() -> Any:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            result = await run(load_config(config), clock=Clock(), listener=listener)
            tasks.cancel_scope.cancel()
        return result

    result = anyio.run(main)
    assert result.complete
    ((took, loop_s),) = ends
    done = delivered * turns
    pipe.send(
        {
            "turns_per_s": done / took["seconds"],
            "cpu_ms_per_turn": took["own_s"] / done * 1000,
            "loop_share": loop_s / took["own_s"],
            "loop_busy": loop_s / took["seconds"],
            "loop_stall_ms": max(late) * 1000,
            "loop_stall_p99_ms": statistics.quantiles(late, n=100)[98] * 1000,
        }
    )


class Contestant:
    """A process that was started, and its pipe."""

    def __init__(self, name: str, target: Any, *arguments: Any) -> None:
        self.name = name
        self._pipe, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=target, args=(there, *arguments), daemon=True
        )
        self._process.start()
        there.close()

    def ready(self) -> None:
        """Until its first rollout may begin."""
        assert self._pipe.recv() is None

    def go(self) -> Any:
        """One rollout, or all of those that it runs at once."""
        self._pipe.send(True)
        return self._pipe.recv()

    def end(self) -> None:
        """It ends by itself when it has done what it was made for."""
        if not self._pipe.closed:
            self._pipe.close()
        self._process.join(30)
        self._process.kill()
        self._process.join()
