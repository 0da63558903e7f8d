"""Delivery of samples to a trainer: a running one, or a receiver process that the run starts for itself.

The only file that imports trainer_bridge.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import anyio.abc
import anyio.to_thread
from anyio.streams.buffered import BufferedByteReceiveStream
from token_tracking.sample import Sample
from trainer_bridge import BridgeError, SampleSender, SenderConfig, SenderEvent

from agent_flow.config import TrainerConfig
from agent_flow.errors import ConfigError, DeliveryError

_START_S = 20.0
_END_S = 1.5


class OwnTrainer:
    """`trainer-bridge receive` as a child process: stands in for a trainer on this machine."""

    def __init__(self, bind: str, folder: Path, on_lost: Callable[[str], None]) -> None:
        self._bind = bind
        self._folder = folder
        self._on_lost = on_lost
        self._process: anyio.abc.Process | None = None
        self._lines: BufferedByteReceiveStream | None = None
        self._ending = False
        self.received: set[str] = set()
        """Rollouts that the process itself reported."""

    async def start(self) -> str:
        """Start it and return the address it listens on.

        Raises:
            ConfigError: it ended at once (a port in use, a folder that cannot be written) or said nothing.
        """
        command = [sys.executable, "-m", "trainer_bridge", "receive", "--json"]
        command += ["--bind", self._bind, "--out", str(self._folder)]
        # A session of its own, so that the terminal's Ctrl-C reaches this process alone: samples drain first.
        self._process = await anyio.open_process(command, start_new_session=True)
        with anyio.move_on_after(_START_S):
            line = await self._read_line()
            if line is not None:
                return str(json.loads(line)["address"])
        raise ConfigError(
            f"the trainer process did not start: {await self._last_words()}",
            where="trainer.bind",
            fix="choose a free port, or leave trainer.bind out",
        )

    async def watch(self) -> None:
        """Read what the process reports until it ends."""
        while (line := await self._read_line()) is not None:
            report = cast("dict[str, object]", json.loads(line))
            if report.get("event") == "sample":
                self.received.add(str(report.get("rollout_id")))
        if not self._ending and self._process is not None:
            code = await self._process.wait()
            self._on_lost(
                f"the trainer process ended by itself (exit code {code}): {await self._last_words()}"
            )

    async def stop(self) -> None:
        """End it and let it say its last counts."""
        self._ending = True
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            with anyio.move_on_after(_END_S, shield=True):
                await process.wait()
        if process.returncode is None:
            process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()

    async def close_pipes(self) -> None:
        """Let go of the process's pipes."""
        if self._process is not None:
            with anyio.CancelScope(shield=True):
                await self._process.aclose()

    async def _read_line(self) -> bytes | None:
        process = self._process
        if process is None or process.stdout is None:
            return None
        if self._lines is None:
            self._lines = BufferedByteReceiveStream(process.stdout)
        try:
            return await self._lines.receive_until(b"\n", 1 << 20)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            return None

    async def _last_words(self) -> str:
        process = self._process
        if process is None or process.stderr is None:
            return "no reason was given"
        words = b""
        with anyio.move_on_after(1.0):
            async for chunk in process.stderr:
                words += chunk
        return words.decode("utf-8", "replace").strip() or "no reason was given"


class Delivery:
    """Sends rollouts and keeps count of what the trainer has."""

    def __init__(
        self, config: TrainerConfig, spool: Path, folder: Path, on_lost: Callable[[str], None]
    ) -> None:
        self._config = config
        self._spool = spool
        self._own = None if config.address else OwnTrainer(config.bind, folder, on_lost)
        self._sender: SampleSender | None = None
        self._answered = threading.Event()
        self._refusal = ""
        self.address = config.address
        self.problem = ""
        """Why not everything was acknowledged. Empty: all was."""
        self.received = 0
        """Rollouts the trainer has; final after `close`."""

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Connect; start the receiver process first where no address is given.

        Raises:
            ConfigError: there is no trainer at the address, or the process cannot start.
        """
        if self._own is not None:
            self.address = await self._own.start()
            tasks.start_soon(self._own.watch)
        try:
            self._sender = SampleSender(
                self.address,
                spool=self._spool,
                config=SenderConfig(keep_segments=True),
                on_event=self._on_event,
            )
        except BridgeError as error:
            raise self._no_trainer(str(error)) from error
        wait = partial(self._answered.wait, self._config.connect_timeout_s)
        if not await anyio.to_thread.run_sync(wait, abandon_on_cancel=True):
            raise self._no_trainer(f"nobody answered in {self._config.connect_timeout_s:g} s")
        if self._refusal:
            raise self._no_trainer(self._refusal)

    def _on_event(self, event: SenderEvent) -> None:
        """Called in the sender's thread."""
        if event.kind == "refused":
            self._refusal = event.text
        if event.kind in ("connected", "refused"):
            self._answered.set()

    def _no_trainer(self, why: str) -> ConfigError:
        return ConfigError(
            why,
            where=f"trainer {self.address}",
            fix=f"start it: trainer-bridge receive --bind {self.address}",
        )

    async def send(self, samples: Sequence[Sample]) -> None:
        """Hand over all samples of one rollout; returns when they are as durable as the sender promises.

        Raises:
            DeliveryError: the sender did not take them.
        """
        if self._sender is None:
            raise DeliveryError("the delivery was not started")
        try:
            await anyio.to_thread.run_sync(
                partial(self._sender.send, samples, timeout_s=self._config.send_timeout_s),
                abandon_on_cancel=True,
            )
        except BridgeError as error:
            raise DeliveryError(str(error)) from error

    async def close(self, drain_s: float) -> None:
        """Wait for acknowledgements, end the receiver process, and count."""
        if self._sender is not None:
            stats = await anyio.to_thread.run_sync(partial(self._sender.close, drain_s=drain_s))
            self._sender = None
            self.received = stats.acknowledged
            if stats.pending:
                self.problem = (
                    f"{stats.pending} of {stats.sent} rollouts were not acknowledged by "
                    f"{self.address}; they lie in {stats.where}\n  deliver them later: "
                    f"trainer-bridge replay {stats.where} --to tcp://HOST:PORT"
                )
        if self._own is not None:
            await self._own.stop()

    async def close_pipes(self) -> None:
        """Last step, after the task that watches the receiver process has ended."""
        if self._own is not None:
            await self._own.close_pipes()
