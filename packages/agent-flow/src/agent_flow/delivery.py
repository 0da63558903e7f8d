"""Delivery of samples to a trainer: a running one, or a receiver process that the run starts for itself.

The only file that imports trainer_bridge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
from token_tracking.sample import Sample
from trainer_bridge import (
    AddressError,
    BackpressureError,
    BridgeError,
    NotDurableError,
    SampleSender,
    SenderConfig,
    SenderEvent,
)

from agent_flow.config import TrainerConfig
from agent_flow.errors import ConfigError, DeliveryError
from agent_flow.events import pasteable
from agent_flow.own_trainer import OwnTrainer

_SLICE_S = 0.2
"""Waits in threads are cut into slices this long, so that an interrupt is never behind one of them."""


class Delivery:
    """Sends rollouts and keeps count of what the trainer has."""

    def __init__(
        self, config: TrainerConfig, spool: Path, folder: Path, on_lost: Callable[[str], None]
    ) -> None:
        self._config = config
        self._spool = spool
        self._own = None if config.address else OwnTrainer(config, folder, on_lost)
        self._sender: SampleSender | None = None
        self._answered = threading.Event()
        self._refusal = ""
        self.address = config.address
        self.problem = ""
        """Why the trainer does not have everything. Empty: it has."""
        self.received = 0
        """Rollouts the trainer has; final after `close`."""

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Connect; start the receiver process first where no address is given.

        Raises:
            ConfigError: there is no trainer at the address, or the process cannot start.
        """
        if self._own is not None:
            self.address = await self._own.start(tasks)
        try:
            self._sender = SampleSender(
                self.address,
                spool=self._spool,
                config=SenderConfig(keep_segments=True, insecure=self._config.insecure),
                on_event=self._on_event,
            )
        except AddressError as error:
            raise ConfigError(
                str(error),
                where="trainer.address",
                fix="tcp://127.0.0.1:PORT, or set trainer.insecure = true",
            ) from error
        except BridgeError as error:
            raise ConfigError(str(error), where=f"trainer {self.address}") from error
        await self._wait_for_an_answer()

    async def _wait_for_an_answer(self) -> None:
        with anyio.move_on_after(self._config.connect_timeout_s):
            while not await anyio.to_thread.run_sync(self._answered.wait, _SLICE_S):
                pass
        if self._refusal or not self._answered.is_set():
            raise ConfigError(
                self._refusal or f"nobody answered in {self._config.connect_timeout_s:g} s",
                where=f"trainer {self.address}",
                fix=f"start it: {pasteable(f'trainer-bridge receive --bind {self.address}')}",
            )

    def _on_event(self, event: SenderEvent) -> None:
        """Called in the sender's thread."""
        if event.kind == "refused":
            self._refusal = event.text
        if event.kind in ("connected", "refused"):
            self._answered.set()

    async def send(self, samples: Sequence[Sample], *, on_taken: Callable[[str], None]) -> None:
        """Hand over all samples of one rollout; returns when they are as durable as the sender promises.

        `on_taken` is called once the sender has them, with a remark for people (empty: none). No interrupt
        comes between the sender's yes and that call, so that no rollout is both taken and dropped.

        Raises:
            DeliveryError: the sender did not take them.
        """
        sender = self._sender
        if sender is None:
            raise DeliveryError("the delivery was not started")
        with anyio.move_on_after(self._config.send_timeout_s):
            while True:
                with anyio.CancelScope(shield=True):
                    remark = await anyio.to_thread.run_sync(_try_send, sender, samples)
                    if remark is not None:
                        on_taken(remark)
                        return
                await anyio.lowlevel.checkpoint()
        raise DeliveryError(f"no room for {self._config.send_timeout_s:g} s: the trainer takes nothing more")

    async def close(self, drain_s: float, *, hurry: anyio.Event) -> None:
        """Wait for acknowledgements, until `drain_s` have passed or `hurry` is set; end the receiver; count.

        Must be called under a shield.
        """
        sender, self._sender = self._sender, None
        if sender is not None:
            with anyio.move_on_after(drain_s):
                while not hurry.is_set() and not await anyio.to_thread.run_sync(
                    sender.wait_settled, _SLICE_S
                ):
                    pass
            stats = await anyio.to_thread.run_sync(partial(sender.close, drain_s=0.0))
            self.received = stats.acknowledged
            folder = self._spool / "samples"
            problems = [f"the trainer refused {n} rollouts ({why})" for why, n in stats.dropped.items()]
            if stats.pending:
                problems.append(
                    f"{stats.pending} of {stats.sent} rollouts were not acknowledged by {self.address}"
                )
            if problems:
                again = pasteable(f"trainer-bridge replay {folder} --to tcp://HOST:PORT")
                self.problem = (
                    f"{'; '.join(problems)}; they lie in {folder}\n  send them again later: {again}"
                )
        if self._own is not None:
            await self._own.stop()

    async def close_pipes(self) -> None:
        """Last step, after the task group given to `start` has ended."""
        if self._own is not None:
            await self._own.close_pipes()


def _try_send(sender: SampleSender, samples: Sequence[Sample]) -> str | None:
    """None: no room yet, nothing was taken."""
    try:
        sender.send(samples, timeout_s=_SLICE_S)
    except BackpressureError:
        return None
    except NotDurableError as error:
        return f"taken, but not confirmed by the disk: {error}"
    except BridgeError as error:
        raise DeliveryError(str(error)) from error
    return ""
