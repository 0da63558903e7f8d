"""The run's own trainer: `trainer-bridge receive` as a child process."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import cast

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from agent_flow.config import TrainerConfig
from agent_flow.errors import ConfigError, DeliveryError

_START_S = 20.0
_END_S = 1.5
_WORDS = 20
"""Lines of the process's stderr that are kept for an error message."""


class OwnTrainer:
    """`trainer-bridge receive` as a child process: stands in for a trainer on this machine."""

    def __init__(self, config: TrainerConfig, folder: Path, on_lost: Callable[[str], None]) -> None:
        self._config = config
        self._folder = folder
        self._on_lost = on_lost
        self._process: anyio.abc.Process | None = None
        self._ending = False
        self._words: deque[str] = deque(maxlen=_WORDS)

    async def start(self, tasks: anyio.abc.TaskGroup) -> str:
        """Start it and return the address it listens on.

        Raises:
            ConfigError: it ended at once (a port in use, a folder that cannot be written) or said nothing.
        """
        command = [sys.executable, "-m", "trainer_bridge", "receive", "--json"]
        command += ["--bind", self._config.bind, "--out", str(self._folder)]
        command += ["--insecure"] if self._config.insecure else []
        # A session of its own, so that the terminal's Ctrl-C reaches this process alone: samples drain first.
        self._process = await anyio.open_process(command, start_new_session=True)
        listening = anyio.Event()
        heard = anyio.Event()
        address: list[str] = []
        tasks.start_soon(self._read_stdout, self._process, listening, address)
        tasks.start_soon(self._read_stderr, self._process, heard)
        with anyio.move_on_after(_START_S):
            await listening.wait()
        if address:
            return address[0]
        with anyio.move_on_after(1.0):
            await heard.wait()
        raise ConfigError(
            f"the trainer process did not start: {self._last_words()}",
            where="trainer.bind",
            fix="choose a free port, or leave trainer.bind out",
        )

    async def _read_stdout(
        self, process: anyio.abc.Process, listening: anyio.Event, address: list[str]
    ) -> None:
        """Read what the process reports until it ends; the first line says where it listens."""
        if process.stdout is None:
            return
        lines = BufferedByteReceiveStream(process.stdout)
        try:
            while True:
                line = await lines.receive_until(b"\n", 1 << 20)
                if not address:
                    address.append(_address_in(line))
                    listening.set()
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            listening.set()
        if not self._ending and address:
            code = await process.wait()
            self._on_lost(f"the trainer process ended by itself (exit code {code}): {self._last_words()}")

    async def _read_stderr(self, process: anyio.abc.Process, heard: anyio.Event) -> None:
        """Keep the last words; a full pipe would stop the process."""
        if process.stderr is not None:
            async for chunk in process.stderr:
                self._words.extend(chunk.decode("utf-8", "replace").splitlines())
        heard.set()

    def _last_words(self) -> str:
        return "\n  ".join(self._words) or "no reason was given"

    async def stop(self) -> None:
        """End it, and let it say its last counts. Must be called under a shield."""
        self._ending = True
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            with anyio.move_on_after(_END_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()

    async def close_pipes(self) -> None:
        """Let go of the process's pipes, after the tasks that read them have ended."""
        if self._process is not None:
            await self._process.aclose()


def _address_in(line: bytes) -> str:
    try:
        report = cast("dict[str, object]", json.loads(line))
        return str(report["address"])
    except (ValueError, KeyError, TypeError) as error:
        raise DeliveryError(f"the trainer process did not say where it listens: {line[:200]!r}") from error
