"""`Lease`: a rollout in the consumer's hands."""

from __future__ import annotations

from collections.abc import Callable

from token_tracking.sample import Sample

from trainer_bridge.codec import Data


class Lease:
    """One rollout, handed out: yours until you `commit` it.

    A receiver with a store hands it out again after a restart if it was not committed; so does its sender.

    Args:
        data: the rollout.
        producer_name: the producer's name, for people.
        restored: an earlier process stored it, and did not commit it.
        on_commit: called once.
    """

    def __init__(
        self, data: Data, *, producer_name: str, restored: bool, on_commit: Callable[[], None]
    ) -> None:
        self._data = data
        self._on_commit = on_commit
        self._committed = False
        self.producer_name = producer_name
        self.restored = restored

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All parts of the rollout, in order. Their arrays are read-only views of the received message."""
        return self._data.samples

    @property
    def rollout_id(self) -> str:
        """32 hex characters."""
        return self._data.rollout_id

    @property
    def producer(self) -> str:
        """The producer id, 32 hex characters."""
        return self._data.head.producer.hex()

    @property
    def sequence(self) -> int:
        """The message's number within its producer."""
        return self._data.head.sequence

    @property
    def created_ns(self) -> int:
        """When the producer accepted it, Unix nanoseconds of its clock."""
        return self._data.head.created_ns

    def commit(self) -> None:
        """Say that the rollout is done with for good: its sender may forget it. Again: nothing happens.

        Raises:
            ClosedError: the receiver was closed before; the rollout stays uncommitted.
            SpoolError: the store has failed.
        """
        if not self._committed:
            self._on_commit()
            self._committed = True
