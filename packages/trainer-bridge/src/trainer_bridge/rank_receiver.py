"""`RankReceiver`: what a data-parallel rank other than 0 holds."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from trainer_bridge.address import absence_hint
from trainer_bridge.clock import Clock, SystemClock
from trainer_bridge.config import MAX_PAYLOAD_BYTES, Timing
from trainer_bridge.control import ControlState
from trainer_bridge.errors import (
    AuthError,
    BridgeError,
    ClosedError,
    ConfigError,
    ConnectError,
    ForkedError,
    RefusedError,
    StepAbortedError,
)
from trainer_bridge.guest_link import GuestLink, decode_whole
from trainer_bridge.keys import CurveKeys
from trainer_bridge.lease import BatchLease, WholeStep
from trainer_bridge.leased import granted_groups
from trainer_bridge.messages import DataHead
from trainer_bridge.payload import Buffer
from trainer_bridge.session.rank import RankSession
from trainer_bridge.transport import ClientTransport
from trainer_bridge.zmq_transport import ZmqClient

log = logging.getLogger(__name__)

TICK_S = 0.1


class RankReceiver:
    """Takes this rank's share of each step that rank 0 leases with `next_batch(..., world=...)`.

    All ranks get a step or none does; it is committed when all have committed it. A thread of its own keeps
    the connection alive while the rank computes.

    Args:
        address: of rank 0's `SampleReceiver`.
        rank: 1 to `world - 1`.
        world: number of ranks, rank 0 included. Set `world` to change it between steps.
        connect_timeout_s: how long the constructor, and `next_batch` after a lost connection, wait for rank
            0.
        keys: encrypt, and talk to a receiver with the key in `keys.peers` alone. None: plain text.
        insecure: allow rank 0 beyond this machine, without encryption or authentication.
        timing: as rank 0's.
        clock: time and ids.
        transport: another network than ZeroMQ.

    Raises:
        ConfigError: `rank` is not within `world`.
        AddressError: the address is malformed or not allowed without keys.
        ConnectError: rank 0 did not answer in time (AuthError: the keys do not fit).
        RefusedError: rank 0 said no.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        world: int,
        connect_timeout_s: float = 60.0,
        keys: CurveKeys | None = None,
        insecure: bool = False,
        timing: Timing | None = None,
        clock: Clock | None = None,
        transport: ClientTransport | None = None,
    ) -> None:
        if not 1 <= rank < world:
            raise ConfigError(
                f"rank {rank} of {world}: a RankReceiver is for ranks 1 to world - 1, rank 0 holds the "
                "SampleReceiver"
            )
        timing = timing or Timing()
        self.world = world
        self._address = address
        self._rank = rank
        self._connect_timeout_s = connect_timeout_s
        self._pid = os.getpid()
        self._clock = clock or SystemClock()
        self._transport: ClientTransport = transport or ZmqClient(
            address, max_payload_bytes=MAX_PAYLOAD_BYTES, insecure=insecure, timing=timing, keys=keys
        )
        self._session = RankSession(process=bytes.fromhex(self._clock.new_id()), rank=rank, timing=timing)
        self._changed = threading.Condition()
        self._absent_since_s: float | None = self._clock.monotonic_s()
        self._closing = False
        self._failure: Exception | None = None
        self._link = GuestLink(
            address=address, transport=self._transport, session=self._session, on_data=self._on_rollout
        )
        self._thread = threading.Thread(
            target=self._run, name=f"trainer-bridge rank {rank} {address}", daemon=True
        )
        self._thread.start()
        try:
            self._await(lambda: self._session.state == "open", None)
        except BaseException:
            self.close()
            raise

    @property
    def control(self) -> ControlState:
        """The state that rank 0 published last."""
        return self._session.control.state

    @property
    def unreadable(self) -> int:
        """Messages of rank 0 that were damaged on their way, and asked for again."""
        return self._session.unreadable

    def next_batch(self, *, groups: int, deadline_s: float | None = None) -> BatchLease | None:
        """This rank's share of the next step.

        Args:
            groups: of the whole step, as rank 0 says.
            deadline_s: seconds until this rank asks no longer for rank 0 to decide, and raises. None: as long
                as it takes. Whether there is a step in time is for rank 0 to say: its deadline holds for all.
                Call again after that, or after Ctrl-C: nobody gets a step without this rank, and one that
                rank 0 has already is handed out then.

        Returns:
            A lease, or None: nobody gets a step this time, or, where rank 0 counts fewer ranks now, not this
            one. `commit` and `nack` concern the whole step.

        Raises:
            StepAbortedError: the last step was aborted after it was handed out (the text says why).
            ConfigError: rank 0 counts other groups, or other ranks, than this rank.
            ConnectError: rank 0 is away, or did not decide in `deadline_s`.
            ClosedError, ForkedError: the receiver cannot be used here, or rank 0 has closed.
        """
        self._check_process()
        session = self._session
        with self._changed:
            self._check_usable()
            self._check_broken()
            if session.granted is None:  # else the last call was interrupted right after that
                if session.holding is not None:
                    raise BridgeError(f"step {session.holding} is neither committed nor given back yet")
                self._ask(groups, deadline_s)
            granted = session.granted
            if granted is not None:
                whole = WholeStep.of(granted.share, granted.world)
                here = granted_groups(granted.share, granted.rollouts)
                lease = BatchLease(granted.share.step, here, self, whole)
                session.granted = None
                return lease
            answer, session.answer = session.answer, None
        self._check_broken()
        if answer is not None and answer.verdict == "aborted":
            raise ConfigError(f"rank {self._rank} cannot get a step: {answer.reason}")
        return None

    def state_dict(self) -> dict[str, Any]:
        """Empty: rank 0's receiver holds the state for all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load: rank 0's receiver goes on from the checkpoint."""

    def checkpoint_saved(self, state: Mapping[str, Any]) -> None:
        """Nothing to say: rank 0's receiver hears it."""

    def commit_lease(self, number: int) -> None:
        """For `BatchLease.commit`."""
        self._end_step(number, committed=True, reason="")

    def nack_lease(self, number: int, rollouts: frozenset[bytes] | None, reason: str) -> None:
        """For `BatchLease.nack`.

        Raises:
            BridgeError: single rollouts were named.
        """
        if rollouts is not None:
            raise BridgeError("a step that is shared by ranks is given back whole: name no rollouts")
        self._end_step(number, committed=False, reason=reason)

    def close(self) -> None:
        """Leave. A step that this rank holds is aborted. Calling it again does nothing."""
        self._check_process()
        with self._changed:
            self._closing = True
            self._session.say_bye("closed")
        self._transport.wake()
        self._thread.join()

    def __enter__(self) -> RankReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _ask(self, groups: int, deadline_s: float | None) -> None:
        """Wait until rank 0 has decided; whoever stops waiting takes the question back."""
        session = self._session
        session.ask(self.world, groups)
        self._transport.wake()
        try:
            self._await(lambda: session.is_answered, deadline_s)
        except BaseException:
            session.withdraw(self._clock.monotonic_s())
            self._transport.wake()
            raise

    def _end_step(self, number: int, *, committed: bool, reason: str) -> None:
        self._check_process()
        with self._changed:
            self._check_usable()
            self._check_broken()
            if self._session.holding != number:
                raise StepAbortedError(f"step {number} was aborted before; its rollouts come again")
            self._session.done(number, committed=committed, reason=reason)
        self._transport.wake()

    def _check_broken(self) -> None:
        reason, self._session.broken = self._session.broken, ""
        if reason:
            raise StepAbortedError(f"{reason}; its rollouts come again: call next_batch again")

    def _await(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        end_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        with self._changed:
            while not condition():
                self._check_usable()
                now_s = self._clock.monotonic_s()
                if end_s is not None and now_s >= end_s:
                    raise ConnectError(f"rank 0 at {self._address} did not decide within {timeout_s} s")
                away_s = 0.0 if self._absent_since_s is None else now_s - self._absent_since_s
                if away_s > self._connect_timeout_s and self._link.stranger:
                    raise AuthError(f"rank {self._rank} at {self._address}: {self._link.stranger}")
                if away_s > self._connect_timeout_s:
                    raise ConnectError(
                        f"rank {self._rank}: no receiver has answered at {self._address} for {away_s:.1f} s: "
                        f"{self._session.quarantine or absence_hint(self._address)}; does rank 0 run?"
                    )
                self._changed.wait(TICK_S)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._transport.wait(TICK_S)
                with self._changed:
                    self._step(self._clock.monotonic_s())
                    self._changed.notify_all()
        except Exception as error:
            log.exception("rank %d at %s has failed", self._rank, self._address)
            with self._changed:
                self._failure = error
        finally:
            with self._changed:
                self._link.send_messages()
                self._transport.close()
                self._changed.notify_all()

    def _step(self, now_s: float) -> None:
        self._link.step(now_s)
        if self._session.state == "open":
            self._absent_since_s = None
        elif self._absent_since_s is None:
            self._absent_since_s = now_s

    def _on_rollout(self, head: DataHead, frames: Sequence[Buffer], now_s: float) -> None:
        self._session.on_data(decode_whole(head, frames), now_s)

    def _check_usable(self) -> None:
        session = self._session
        if self._failure is not None:
            raise BridgeError(f"rank {self._rank} has failed: {self._failure}") from self._failure
        if session.refusal is not None:
            raise RefusedError(
                f"{self._address} refused rank {self._rank}: {session.refusal.text}", session.refusal.code
            )
        if self._closing or session.state == "ended":
            who = "this RankReceiver" if self._closing else f"rank 0 at {self._address}"
            raise ClosedError(f"{who} is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this RankReceiver was opened in process {self._pid} and is used in its fork {os.getpid()}: "
                "threads and sockets do not survive a fork; open it in the process of its rank"
            )
