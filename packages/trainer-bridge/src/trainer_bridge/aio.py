"""`AsyncSampleSender`: a thin asyncio face over the sync sender, whose own thread does the I/O.

zmq's asyncio sockets cost about twice the CPU per small message, and encoding on the event loop stalls it
(zeromq/pyzmq#1209, PrimeIntellect-ai/prime-rl#1713); here the loop only waits. Copying samples and handing
them over happens in the loop's default threads; waiting for room takes none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Sequence

from token_tracking.sample import Sample

from trainer_bridge.drafts import size_of_group
from trainer_bridge.errors import BackpressureError
from trainer_bridge.intake import RECHECK_S, Handover
from trainer_bridge.sender import SampleSender
from trainer_bridge.stats import Receipt, SenderStats


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
        """As `SampleSender.send`.

        If it is cancelled, some rollouts may have been accepted all the same; sending them again is harmless,
        because the receiver drops what it has (same rollout id and attempt).

        Raises:
            BackpressureError: no room within `timeout_s`. The rollouts before it, if any, were taken over.
            BridgeError: as `SampleSender.send`.
        """
        loop = asyncio.get_running_loop()
        end_s = None if timeout_s is None else loop.time() + timeout_s
        handover = await asyncio.to_thread(self.sender.handover, samples, group_size=group_size)
        with _room(handover) as room:
            while True:
                room.clear()
                try:
                    return await asyncio.to_thread(handover.advance)
                except BackpressureError:
                    left_s = RECHECK_S if end_s is None else min(end_s - loop.time(), RECHECK_S)
                    if left_s <= 0:
                        raise
                with contextlib.suppress(TimeoutError):  # then it looks whether room can still come
                    await asyncio.wait_for(room.wait(), left_s)

    async def send_group(self, samples: Sequence[Sample], *, timeout_s: float | None = None) -> Receipt:
        """As `SampleSender.send_group`."""
        return await self.send(samples, group_size=size_of_group(samples), timeout_s=timeout_s)

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


@contextlib.contextmanager
def _room(handover: Handover) -> Generator[asyncio.Event]:
    """An event of the running loop that is set whenever there may be room."""
    loop, room = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has just ended, and with it whoever waits
            loop.call_soon_threadsafe(room.set)

    handover.on_room(tell)
    try:
        yield room
    finally:
        handover.off_room(tell)
