"""`AsyncSampleSender`: a thin asyncio face over the sync sender, whose own thread does the I/O.

zmq's asyncio sockets cost about twice the CPU per small message, and encoding on the event loop stalls it
(zeromq/pyzmq#1209, PrimeIntellect-ai/prime-rl#1713); here the loop only waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from token_tracking.sample import Sample

from trainer_bridge.errors import BackpressureError
from trainer_bridge.sender import SampleSender
from trainer_bridge.stats import Receipt, SenderStats

SLICE_S = 0.25
"""A thread that waits for room looks up this often, so that a cancelled `send` leaves none behind for
longer."""


class AsyncSampleSender:
    """Lets a coroutine send without blocking its loop.

    Args:
        sender: the sync sender; it may be used directly as well.
    """

    def __init__(self, sender: SampleSender) -> None:
        self.sender = sender

    async def send(
        self,
        samples: Sample | Sequence[Sample],
        *,
        group_size: int | None = None,
        timeout_s: float | None = None,
    ) -> Receipt:
        """As `SampleSender.send` for one rollout.

        If it is cancelled, the rollout may have been accepted all the same; sending it again is harmless,
        because the receiver drops what it has (same rollout id and attempt).

        Raises:
            BackpressureError: no room within `timeout_s`; else as `SampleSender.send`.
        """
        loop = asyncio.get_running_loop()
        end_s = None if timeout_s is None else loop.time() + timeout_s
        while True:
            slice_s = SLICE_S if end_s is None else max(min(SLICE_S, end_s - loop.time()), 0.0)
            try:
                return await asyncio.to_thread(
                    self.sender.send, samples, group_size=group_size, timeout_s=slice_s
                )
            except BackpressureError:
                if end_s is not None and loop.time() >= end_s:
                    raise

    async def close(self, *, drain_s: float = 5.0) -> SenderStats:
        """As `SampleSender.close`."""
        return await asyncio.to_thread(self.sender.close, drain_s=drain_s)

    def stats(self) -> SenderStats:
        """As `SampleSender.stats`; does not wait."""
        return self.sender.stats()

    async def __aenter__(self) -> AsyncSampleSender:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close(drain_s=5.0 if exc[0] is None else 0.0)
