"""`SampleReceiver`: what a trainer holds. One thread talks to the workers; `next` hands out what arrived."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from trainer_bridge.clock import Clock, SystemClock
from trainer_bridge.codec import Data
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.control import ControlBoard, ControlState
from trainer_bridge.errors import BridgeError, ClosedError, ForkedError, SpoolError, reason_of
from trainer_bridge.lease import Lease
from trainer_bridge.messages import RunState
from trainer_bridge.receiver_loop import ReceiverEvent, ReceiverLoop, Waiting
from trainer_bridge.session import ReceiverSession
from trainer_bridge.session.peers import Producer
from trainer_bridge.stats import ProducerStats, ReceiverStats
from trainer_bridge.store import Store
from trainer_bridge.transport import ServerTransport
from trainer_bridge.zmq_transport import ZmqServer


class SampleReceiver:
    """Binds, takes samples from any number of senders, and hands each rollout out once.

    Args:
        bind: `tcp://HOST:PORT` (port 0: any free one) or `ipc://PATH`.
        out: folder for a copy of everything that arrives. With it, a rollout that was handed out and not
            committed is handed out again after a restart, and repeated messages are known across restarts.
        on_event: called for each `ReceiverEvent`, in the receiver's own thread.
        config: the rarer settings.
        clock: time and ids.
        transport: another network than ZeroMQ.

    Raises:
        AddressError: the address is malformed, in use, or not allowed without keys.
        SpoolError: `out` cannot be used.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:0",
        *,
        out: Path | str | None = None,
        on_event: Callable[[ReceiverEvent], None] | None = None,
        config: ReceiverConfig | None = None,
        clock: Clock | None = None,
        transport: ServerTransport | None = None,
    ) -> None:
        config = config or ReceiverConfig()
        clock = clock or SystemClock()
        self._pid = os.getpid()
        network: ServerTransport = transport or ZmqServer(
            bind,
            max_payload_bytes=config.max_payload_bytes,
            insecure=config.insecure,
            timing=config.timing,
        )
        self.address = network.address
        """Where senders connect to."""
        self._board = ControlBoard(clock.now_ns())
        self._store: Store | None = None
        try:
            if out is not None:
                self._store = Store(
                    Path(out),
                    segment_bytes=config.segment_bytes,
                    now_ns=clock.now_ns(),
                    progressed=network.wake,
                )
            self._loop = ReceiverLoop(
                transport=network,
                session=ReceiverSession(
                    receiver=bytes.fromhex(clock.new_id()), config=config, board=self._board
                ),
                store=self._store,
                clock=clock,
                on_event=on_event,
            )
        except BridgeError:
            if self._store is not None:
                self._store.close()
            network.close()
            raise

    def next(self, timeout_s: float | None = None) -> Lease | None:
        """Hand out the next rollout.

        Args:
            timeout_s: how long to wait for one. None: as long as it takes.

        Returns:
            A lease, or None if none came in time.

        Raises:
            ClosedError: the receiver is closed.
            SpoolError: the store failed, or what is in it is damaged.
            BridgeError: the receiver's thread has failed.
        """
        self._check_process()
        loop = self._loop
        with loop.changed:
            loop.changed.wait_for(
                lambda: loop.queue or loop.closing or loop.failure is not None, timeout=timeout_s
            )
            self._check_usable()
            if not loop.queue:
                return None
            waiting, name = loop.take()
        return Lease(
            self._data(waiting),
            producer_name=name,
            restored=waiting.data is None,
            on_commit=lambda: self._commit(waiting),
        )

    def __iter__(self) -> Iterator[Lease]:
        """Rollouts as they come, until `close`."""
        while True:
            try:
                lease = self.next()
            except ClosedError:
                return
            if lease is not None:
                yield lease

    def publish(
        self,
        *,
        run_state: RunState | None = None,
        policy_run: str | None = None,
        weights_version: int | None = None,
        min_version: int | None = None,
    ) -> ControlState:
        """Change the state that all workers are told (what is not given stays), and tell them at once.

        Raises:
            ClosedError, ForkedError: the receiver cannot be used here.
        """
        self._check_process()
        with self._loop.changed:
            self._check_usable()
            state = self._board.set(
                run_state=run_state,
                policy_run=policy_run,
                weights_version=weights_version,
                min_version=min_version,
            )
            self._loop.session.publish()
        self._loop.wake()
        return state

    def stats(self) -> ReceiverStats:
        """Counts as of now; also after `close`."""
        self._check_process()
        with self._loop.changed:
            return self._stats()

    def close(self) -> None:
        """Tell the peers, make the store durable, and free everything. Calling it again does nothing.

        Raises:
            SpoolError: the store could not be made durable.
        """
        self._check_process()
        self._loop.stop()
        if isinstance(self._loop.failure, SpoolError):
            raise SpoolError(str(self._loop.failure)) from self._loop.failure

    def __enter__(self) -> SampleReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _commit(self, waiting: Waiting) -> None:
        self._check_process()
        with self._loop.changed:
            self._check_usable()
            self._loop.commit(waiting)

    def _data(self, waiting: Waiting) -> Data:
        if waiting.data is not None:
            return waiting.data
        if self._store is None:
            raise BridgeError(f"message {waiting.identity.sequence} was queued without its data")
        return self._store.read(waiting.position)

    def _check_usable(self) -> None:
        failure = self._loop.failure
        if isinstance(failure, SpoolError):
            raise SpoolError(str(failure)) from failure
        if failure is not None:
            raise BridgeError(f"the receiver at {self.address} has failed: {failure}") from failure
        if self._loop.closing:
            raise ClosedError(f"the receiver at {self.address} is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this receiver was opened in process {self._pid} and is used in its fork {os.getpid()}: "
                "threads and sockets do not survive a fork; take samples in the process that opened it"
            )

    def _stats(self) -> ReceiverStats:
        loop, session, store = self._loop, self._loop.session, self._store
        producers = session.ledger.producers.values()
        return ReceiverStats(
            address=self.address,
            messages=loop.counts.messages,
            samples=loop.counts.samples,
            tokens=loop.counts.tokens,
            restored=loop.counts.restored,
            queued=len(loop.queue),
            leased=loop.counts.leased,
            committed=loop.counts.committed,
            duplicates=sum(p.duplicates for p in producers),
            fenced=sum(p.fenced for p in producers),
            rejected={reason_of(code): n for code, n in session.rejected.items()},
            stored=store.last if store is not None else 0,
            torn_bytes=store.torn_bytes if store is not None else 0,
            observers=sum(peer.role == "observer" for peer in session.peers.values()),
            skipped_copies=session.skipped_copies,
            forgotten_rollouts=session.ledger.rollouts.forgotten,
            producers=tuple(_producer_stats(p) for p in producers),
        )


def _producer_stats(producer: Producer) -> ProducerStats:
    return ProducerStats(
        name=producer.name,
        producer=producer.id.hex(),
        presence=producer.presence,
        messages=producer.messages,
        samples=producer.samples,
        duplicates=producer.duplicates,
        fenced=producer.fenced,
        rejected=producer.rejected,
        queued=producer.queued,
        unsettled=producer.reported_unsettled,
    )
