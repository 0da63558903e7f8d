"""`SampleReceiver`: what a trainer holds. One thread talks to the workers; `next` hands out what arrived."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from trainer_bridge.checkpoint import state_from
from trainer_bridge.clock import Clock, SystemClock
from trainer_bridge.codec import Data
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.control import ControlBoard, ControlState
from trainer_bridge.dead_letters import DeadLetter, DeadLetters, letter_of
from trainer_bridge.desk import Desk
from trainer_bridge.errors import (
    BridgeError,
    ClosedError,
    ConfigError,
    ForkedError,
    SpoolError,
)
from trainer_bridge.guard import Guard
from trainer_bridge.keys import CurveKeys
from trainer_bridge.lease import BatchLease, Lease
from trainer_bridge.member import Member
from trainer_bridge.messages import RunState
from trainer_bridge.meter import flat_metrics
from trainer_bridge.permits import admission
from trainer_bridge.pool import Pool
from trainer_bridge.pool_state import state_of
from trainer_bridge.ranked import RankedDesk
from trainer_bridge.receiver_events import ReceiverEvent
from trainer_bridge.receiver_loop import ReceiverLoop
from trainer_bridge.receiver_stats import gather_stats
from trainer_bridge.session import ReceiverSession
from trainer_bridge.stats import ReceiverStats
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
        keys: encrypt, and take connections from the keys in `keys.peers` alone. None: plain text, on this
            machine only.
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
        keys: CurveKeys | None = None,
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
            keys=keys,
        )
        self._network = network
        self.address = network.address
        """Where senders, observers and other ranks connect to."""
        self.world = 1
        """Data-parallel ranks that share each step of `next_batch`."""
        self._board = ControlBoard(clock.now_ns(), max_staleness=config.max_staleness)
        self._clock = clock
        self._store: Store | None = None
        letters: DeadLetters | None = None
        try:
            if out is not None:
                self._store = Store(Path(out), config=config, now_ns=clock.now_ns(), progressed=network.wake)
            letters = self._letters = DeadLetters(None if out is None else Path(out))
            session = ReceiverSession(
                receiver=bytes.fromhex(clock.new_id()),
                config=config,
                board=self._board,
                admit=admission(keys, self._store),
            )
            pool = Pool(
                session=session,
                config=config,
                board=self._board,
                read=self._read,
                bury=self._bury,
                now_s=clock.monotonic_s(),
            )
            self._loop = ReceiverLoop(
                transport=network,
                session=session,
                pool=pool,
                store=self._store,
                letters=letters,
                guard=Guard(config),
                clock=clock,
                on_event=on_event,
            )
            self._desk = Desk(
                loop=self._loop,
                board=self._board,
                clock=clock,
                patience_s=config.patience_s,
                ranked=RankedDesk(
                    loop=self._loop,
                    clock=clock,
                    split=config.rank_split,
                    patience_s=config.patience_s,
                    check=self._check_usable,
                ),
                check=self._check_usable,
            )
        except BridgeError:
            if self._store is not None:
                self._store.close()
            if letters is not None:
                letters.close()
            network.close()
            raise

    def next(self, timeout_s: float | None = None) -> Lease | None:
        """Hand out the next rollout, whatever its group. Use this or `next_batch`, not both.

        Args:
            timeout_s: how long to wait for one. None: as long as it takes. 0: only look.

        Returns:
            A lease, or None if none came in time.

        Raises:
            ClosedError: the receiver is closed.
            StuckError: nothing can come, and nothing has moved for `patience_s`.
            SpoolError: the store failed.
            BridgeError: the receiver's thread has failed.
        """
        self._check_process()
        return self._desk.one(timeout_s)

    def next_batch(
        self, *, groups: int, deadline_s: float | None = None, world: int | None = None
    ) -> BatchLease | None:
        """Hand out the next `groups` groups, each with every part of every rollout.

        What is not handed out stays where it is: nothing is taken out to look at it (THUDM/slime PR #2238). A
        group id names one group for ever: what comes after it was handed out is `late`, and dropped.

        Args:
            groups: how many.
            deadline_s: how long to wait for so many, in seconds from now. None: as long as it takes. 0: only
                look.
            world: data-parallel ranks that share the step, this one (rank 0) included; it may change from
                step to step. None: `self.world`. The others hold a `RankReceiver`. The lease is rank 0's
                share, as `rank_split` says; its `commit` waits until all ranks have committed theirs.

        Returns:
            A lease, or None if there were not so many in time, or a rank did not ask; then nothing was taken,
            and the other ranks get None too.

        Raises:
            ConfigError: nobody says how large any group is, or the groups cannot be shared out evenly.
            ClosedError, StuckError, SpoolError, BridgeError: as `next`.
        """
        self._check_process()
        if groups < 1:
            raise ConfigError(f"groups must be 1 or more, got {groups}")
        return self._desk.batch(groups, deadline_s, self.world if world is None else world)

    def __iter__(self) -> Iterator[Lease]:
        """Rollouts as they come, until `close`; raises as `next`."""
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
        weights_location: str | None = None,
    ) -> ControlState:
        """Change the state that all workers are told (what is not given stays), and tell them at once.

        With `max_staleness`, a new `weights_version` brings the `min_version` that follows from it, so that
        workers can give up early what would be dropped here. `weights_location` says where the weights of
        `weights_version` lie; a new version without one has none.

        Raises:
            ConfigError: a value that is none, or that no message can carry; nothing is changed then.
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
                weights_location=weights_location,
            )
            self._loop.session.publish()
        self._loop.wake()
        return state

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's checkpoint must hold: everything committed or dropped until now.

        Plain values (JSON, `torch.save`, msgpack). Take it after `commit` and save it together with the
        weights; then call `checkpoint_saved` with it.
        """
        self._check_process()
        with self._loop.changed:
            return msgspec.to_builtins(state_of(self._loop.pool))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, also an older one: nothing that it holds comes again, all else does.

        What was told to the senders as committed after that checkpoint comes from the store. Without one, or
        where the store has deleted it (`ReceiverConfig.keep_committed`), it is gone: it is counted as
        `unavailable`, and a `ReceiverEvent` of kind "store" says whose it was.

        Raises:
            BridgeError: rollouts were handed out already, or it is no state of a receiver.
        """
        self._check_process()
        loaded = state_from(state)
        with self._loop.changed:
            self._check_usable()
            self._loop.load(loaded)
            self._loop.changed.notify_all()

    def checkpoint_saved(self, state: Mapping[str, Any]) -> None:
        """A checkpoint that holds `state` is on the disk.

        With `commit_on="checkpoint"` senders may now forget what it knows of, and with
        `keep_committed="checkpoint"` the store may.

        Raises:
            BridgeError: it is no state of a receiver.
        """
        self._check_process()
        saved = state_from(state)
        with self._loop.changed:
            self._check_usable()
            self._loop.checkpoint_saved(saved)

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """What nobody could use, with the reason: given back too often, unreadable, or malformed.

        Raises:
            ClosedError: the receiver is closed; with `out`, `trainer-bridge inspect` shows the file.
            SpoolError: the catalogue cannot be read.
        """
        self._check_process()
        if self._loop.closing:
            raise ClosedError(f"the receiver at {self.address} is closed: ask for dead letters before")
        return self._letters.all()

    def metrics(self) -> dict[str, float]:
        """Counts and gauges under flat, fixed names, for W&B or TensorBoard; see `flat_metrics`."""
        self._check_process()
        with self._loop.changed:
            version = self._board.state.weights_version
            return flat_metrics(self._stats(), self._loop.pool.meter, version)

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
        self._letters.close()
        if isinstance(self._loop.failure, SpoolError):
            raise SpoolError(str(self._loop.failure)) from self._loop.failure

    def __enter__(self) -> SampleReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _read(self, position: int) -> Data:
        if self._store is None:
            raise BridgeError(f"record {position} is to be read and there is no store")
        return self._store.read(position)

    def _bury(self, member: Member, reason: str, detail: str) -> None:
        self._letters.add(letter_of(member, reason, detail, self._clock.now_ns()))

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
        return gather_stats(self._network, self._loop.session, self._loop.pool, self._store, self._loop.guard)
