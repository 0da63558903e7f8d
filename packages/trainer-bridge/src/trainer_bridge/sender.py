"""`SampleSender`: what a worker holds. `send` is quick; one thread of its own does the talking."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from token_tracking.sample import Sample

from trainer_bridge.block_pool import BlockPool
from trainer_bridge.clock import Clock, SystemClock
from trainer_bridge.codec import Draft
from trainer_bridge.config import Durability, SenderConfig
from trainer_bridge.control import ControlState
from trainer_bridge.drafts import drafts_of, size_of_group
from trainer_bridge.errors import BridgeError, ConfigError, ForkedError
from trainer_bridge.intake import Handover, Intake
from trainer_bridge.keys import CurveKeys
from trainer_bridge.options import check_options
from trainer_bridge.outbox import MemoryOutbox, Outbox, SpoolOutbox
from trainer_bridge.sender_loop import SenderEvent, SenderLoop
from trainer_bridge.sender_stats import gather_sender_stats
from trainer_bridge.session import SenderSession
from trainer_bridge.stats import Receipt, SenderStats
from trainer_bridge.transport import ClientTransport
from trainer_bridge.wire_types import MAX_NAME
from trainer_bridge.zmq_transport import ZmqClient

log = logging.getLogger(__name__)

BYE_S = 1.0
"""`close` waits so long for the receiver's answer to BYE."""


class SampleSender:
    """Sends samples to one receiver: numbered, acknowledged, sent again after a lost connection.

    With a spool, `send` returns as soon as the samples are as durable as asked for, whether or not a receiver
    is there. Without one, they are kept in memory, the constructor waits for the receiver, and `send` waits
    while too much is unsettled.

    Args:
        address: the receiver's, `tcp://HOST:PORT` or `ipc://PATH`.
        spool: folder for unacknowledged samples, used by this sender alone; a later sender that opens it
            sends what is left. None: memory only.
        durability: what `send` waits for. None: `async` with a spool, `none` without.
        producer: name for people. Empty: host and process id.
        connect_timeout_s: without a spool: how long the constructor waits for the receiver, and how long
            `send` puts up with its absence.
        window: messages on the wire without an acknowledgement.
        on_event: called for each `SenderEvent`, in the sender's own thread.
        config: the rarer settings.
        keys: encrypt, and talk to a receiver with the key in `keys.peers` alone. None: plain text, on this
            machine only.
        clock: time and ids.
        transport: another network than ZeroMQ.

    Raises:
        AddressError: the address is malformed or not allowed without keys.
        ConfigError: the settings contradict each other.
        SpoolError: the spool cannot be used (the text says why).
        ConnectError: no spool, and the receiver did not answer in time (AuthError: the keys do not fit).
        RefusedError: no spool, and the receiver said no.
    """

    def __init__(
        self,
        address: str,
        *,
        spool: Path | str | None = None,
        durability: Durability | None = None,
        producer: str = "",
        connect_timeout_s: float = 10.0,
        window: int = 64,
        on_event: Callable[[SenderEvent], None] | None = None,
        config: SenderConfig | None = None,
        keys: CurveKeys | None = None,
        clock: Clock | None = None,
        transport: ClientTransport | None = None,
    ) -> None:
        given = {
            "durability": durability,
            "producer": producer,
            "connect_timeout_s": connect_timeout_s,
            "window": window,
        }
        check_options(SampleSender.__init__, given, ConfigError)
        if durability is None:
            durability = "none" if spool is None else "async"
        if spool is None and durability != "none":
            raise ConfigError(f"durability {durability!r} needs a spool folder (spool=...)")
        if window < 1:
            raise ConfigError(f"window must be at least 1, got {window}")
        if len(producer) > MAX_NAME:
            raise ConfigError(f"producer has {len(producer)} characters, at most {MAX_NAME} fit")
        self._config = config or SenderConfig()
        self._clock = clock or SystemClock()
        self._address = address
        self._spooled = spool is not None
        self._pid = os.getpid()
        self._pool = BlockPool()
        network: ClientTransport = transport or ZmqClient(
            address,
            max_payload_bytes=self._config.max_payload_bytes,
            insecure=self._config.insecure,
            timing=self._config.timing,
            keys=keys,
        )
        try:
            outbox: Outbox = (
                MemoryOutbox(self._config, self._clock)
                if spool is None
                else SpoolOutbox(Path(spool), durability=durability, config=self._config, clock=self._clock)
            )
        except BridgeError:
            network.close()
            raise
        session = SenderSession(
            producer=outbox.producer,
            name=producer or f"{socket.gethostname()}:{self._pid}",
            streams=outbox.streams,
            last=outbox.last,
            settled=outbox.settled,
            window=window,
            settle=self._config.settle,
            timing=self._config.timing,
        )
        self._first_own = outbox.last + 1
        self._inherited = session.unsettled + outbox.lost
        self._loop = SenderLoop(
            address=address,
            transport=network,
            outbox=outbox,
            session=session,
            blocks=self._pool,
            timing=self._config.timing,
            clock=self._clock,
            on_event=on_event,
        )
        self._intake = Intake(
            self._loop,
            address=address,
            settle=self._config.settle,
            patience_s=connect_timeout_s if spool is None else None,
            clock=self._clock,
        )
        if spool is None:
            self._await_connection(connect_timeout_s)

    @property
    def control(self) -> ControlState:
        """The state the trainer last asked for."""
        return self._loop.session.control.state

    def send(
        self,
        samples: Sample | Sequence[Sample],
        *,
        group_size: int | None = None,
        timeout_s: float | None = None,
    ) -> Receipt:
        """Take samples over; durable at the level asked for when it returns. Safe from any thread.

        Args:
            samples: a sample, or samples in order; all parts of a rollout stand together, and become one
                message. Their arrays are copied and may be reused.
            group_size: rollouts that make each of their groups complete, whoever sends the others. None: the
                receiver's configuration says it.
            timeout_s: how long to wait for room. None: as long as it takes (without a spool, and without a
                receiver for `connect_timeout_s`, ConnectError ends the wait).

        Raises:
            UnsendableError: not whole rollouts, a value that the wire cannot carry, more bytes than the
                receiver takes, or a group size that cannot be. Nothing was taken over.
            BackpressureError: no room within `timeout_s`. The rollouts before it, if any, were taken over.
            ConnectError: no spool, and the receiver has been away for too long.
            RefusedError: the receiver said no.
            NotDurableError: taken over, but the disk did not confirm it; the samples may reach the receiver.
            SpoolError: the disk did not take the samples, or failed at earlier ones. Nothing was taken over.
            CallbackError: there is no room, and this is the sender's own thread (inside `on_event`).
            ClosedError, ForkedError: the sender cannot be used here.
        """
        seqs: list[int] = []
        self._intake.take(self._drafts(samples, group_size), seqs, timeout_s)
        return Receipt(tuple(seqs))

    def send_group(self, samples: Sequence[Sample], *, timeout_s: float | None = None) -> Receipt:
        """As `send`, for all rollouts of one group at once: it is complete with these.

        Raises:
            UnsendableError: also if the samples belong to several groups.
        """
        return self.send(samples, group_size=size_of_group(samples), timeout_s=timeout_s)

    def handover(self, samples: Sample | Sequence[Sample], *, group_size: int | None = None) -> Handover:
        """As `send`, for callers that must not wait in a thread: copies the samples, takes nothing over yet.

        `AsyncSampleSender` is made of it; so can be a face for another event loop.

        Raises:
            UnsendableError, ForkedError: as `send`.
        """
        return Handover(self._intake, self._loop, self._drafts(samples, group_size))

    def stats(self) -> SenderStats:
        """Counts as of now; also after `close`."""
        self._check_process()
        with self._loop.changed:
            return self._stats()

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged at the level asked for.

        Returns:
            False if it took longer, or the receiver refused this sender.

        Raises:
            ForkedError: the sender cannot be used here.
            CallbackError: this is the sender's own thread (inside `on_event`).
        """
        self._check_process()
        self._loop.listener.check_outside("wait_settled")
        with self._loop.changed:
            self._wait_settled(timeout_s)
            return self._loop.session.unsettled == 0

    def close(self, *, drain_s: float = 5.0) -> SenderStats:
        """Wait for acknowledgements, say BYE, and free everything.

        Args:
            drain_s: the longest wait for acknowledgements. What is pending after it stays in the spool, if
                there is one, and is reported either way: `pending`, `spooled` and `where` of the result, and
                a logged warning.

        Returns:
            The final counts. A second call returns them again.

        Raises:
            CallbackError: this is the sender's own thread (inside `on_event`); nothing was closed.
        """
        self._check_process()
        self._loop.listener.check_outside("close")
        loop = self._loop
        with loop.changed:
            first = not self._intake.closing
            self._intake.closing = True
            if first:
                loop.changed.notify_all()
                self._wait_settled(drain_s)
                loop.say_bye()
                loop.changed.wait_for(lambda: loop.session.state != "open" or loop.over, timeout=BYE_S)
        loop.stop()
        stats = self.stats()
        if first and stats.pending:
            log.warning(
                "%d messages to %s are not acknowledged (%s); they lie in %s",
                stats.pending,
                self._address,
                self._config.settle,
                stats.where,
            )
        return stats

    def __enter__(self) -> SampleSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nobody wants to wait for a trainer.
        self.close(drain_s=5.0 if error is None else 0.0)

    # -- inside; the caller holds the lock

    def _wait_settled(self, timeout_s: float) -> None:
        loop = self._loop
        loop.changed.wait_for(lambda: loop.session.unsettled == 0 or loop.over, timeout=timeout_s)

    def _drafts(self, samples: Sample | Sequence[Sample], group_size: int | None) -> list[Draft]:
        self._check_process()
        return drafts_of(
            samples,
            group_size=group_size,
            max_payload_bytes=self._config.max_payload_bytes,
            pool=self._pool,
        )

    def _await_connection(self, timeout_s: float) -> None:
        loop = self._loop
        with loop.changed:
            loop.changed.wait_for(lambda: loop.session.state == "open" or loop.over, timeout=timeout_s)
            if loop.session.state == "open":
                return
            try:
                self._intake.check()
                failure: BridgeError = self._intake.absence(timeout_s)
            except BridgeError as error:
                failure = error
        self.close(drain_s=0.0)
        raise failure

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this sender was opened in process {self._pid} and is used in its fork {os.getpid()}: "
                "threads and sockets do not survive a fork; open a sender (with its own spool) in the child"
            )

    def _stats(self) -> SenderStats:
        return gather_sender_stats(
            self._loop,
            self._address,
            first_own=self._first_own,
            inherited=self._inherited,
            spooled=self._spooled,
        )
