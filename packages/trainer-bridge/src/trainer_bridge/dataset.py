"""`SampleDataset`: training steps from a receiver, one by one, for a loop or a torch `DataLoader`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

from trainer_bridge.batch import in_loader_worker, register_iterable
from trainer_bridge.errors import BridgeError, ClosedError, NoDataError, StepAbortedError
from trainer_bridge.lease import BatchLease

T = TypeVar("T", covariant=True)


class StepSource(Protocol):
    """Where steps come from."""

    def next_batch(self, *, groups: int, deadline_s: float | None) -> BatchLease | None:
        """The next step of `groups` complete groups. None: it was not complete in `deadline_s`."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """What a trainer's checkpoint must hold to go on from here: what was committed."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Before the first `next_batch`."""
        ...

    def checkpoint_saved(self, state: Mapping[str, Any]) -> None:
        """A checkpoint that holds this state is on the disk."""
        ...


class SampleDataset(Generic[T]):
    """An iterable over training steps, with the state that a checkpoint needs.

    Without torch, iterate over it. With torch, `DataLoader(dataset.for_torch(), batch_size=None)` and
    torchdata's `StatefulDataLoader` take it as an iterable-style dataset.

    A step that was handed out is not done with: `commit` it when the optimizer has stepped. A loader that
    reads ahead therefore loses nothing, and steps handed out but not committed when the trainer dies come
    again. So that none comes twice either, save `state_dict()` with the weights, call `checkpoint_saved`
    after it, and give the receiver `ReceiverConfig(commit_on="checkpoint")`.

    On data-parallel ranks, each has a dataset of its own over its receiver. After `StepAbortedError`, from
    the iterator, `commit` or `nack`, the step that it is about is no longer outstanding: take the weights
    back to before it, and iterate anew; its rollouts come again.

    Args:
        source: a receiver: a `SampleReceiver`, or a rank's `RankReceiver`.
        groups: groups per step.
        collate: makes of a step what the iterator gives, as `Collator(...).pad`.
        deadline_s: how long to wait for a step. None: as long as it takes.
    """

    def __init__(
        self,
        source: StepSource,
        collate: Callable[[BatchLease], T],
        *,
        groups: int,
        deadline_s: float | None = None,
    ) -> None:
        self._source = source
        self._collate = collate
        self._groups = groups
        self._deadline_s = deadline_s
        self._handed_out: deque[BatchLease] = deque()
        self._committed = 0

    def __iter__(self) -> Iterator[T]:
        """Steps as they come, until the receiver is closed. They are shared by all iterators.

        Raises:
            NoDataError: no step was complete in `deadline_s`.
            StepAbortedError: the last step of this rank is void.
            BridgeError: in a worker process of a `DataLoader`: a receiver's sockets do not survive the fork.
        """
        if in_loader_worker():
            raise BridgeError(
                "a SampleDataset reads from a receiver of this process, and DataLoader workers are other "
                "processes: use num_workers=0 (receiving already runs in a thread of its own)"
            )
        while True:
            try:
                lease = self._source.next_batch(groups=self._groups, deadline_s=self._deadline_s)
            except ClosedError:
                return
            except StepAbortedError:
                if self._handed_out:
                    self._handed_out.popleft()
                else:
                    self._committed -= 1  # this rank was done with it
                raise
            if lease is None:
                raise NoDataError(
                    f"no step of {self._groups} complete groups came in {self._deadline_s} s: look at the "
                    "workers, and at the receiver's stats() for what has arrived"
                )
            self._handed_out.append(lease)
            yield self._collate(lease)

    @property
    def outstanding(self) -> int:
        """Steps handed out and neither committed nor given back."""
        return len(self._handed_out)

    def commit(self) -> None:
        """The oldest outstanding step is in the weights: its senders may forget it.

        Raises:
            BridgeError: none is outstanding.
            StepAbortedError: it is void on all ranks, and no longer outstanding.
            ClosedError, SpoolError, StuckError: as the receiver's lease says; it stays outstanding.
        """
        self._end("commit", BatchLease.commit)
        self._committed += 1

    def nack(self, reason: str) -> None:
        """Give the oldest outstanding step back, to come again.

        Raises:
            BridgeError, StepAbortedError, ClosedError, SpoolError: as `commit`.
        """
        self._end("nack", lambda lease: lease.nack(reason))

    def state_dict(self) -> dict[str, Any]:
        """`steps`, the number committed, and the `source`'s state. Outstanding steps are not in it."""
        return {"steps": self._committed, "source": dict(self._source.state_dict())}

    def checkpoint_saved(self, state_dict: Mapping[str, Any]) -> None:
        """A checkpoint that holds `state_dict` is on the disk: the senders may forget what it knows of.

        Raises:
            BridgeError: this is no state of a `SampleDataset`.
        """
        self._source.checkpoint_saved(_parts_of(state_dict)[1])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state. Before the first step.

        Raises:
            BridgeError: steps were already handed out, or this is no state of a `SampleDataset`.
        """
        if self._handed_out:
            raise BridgeError(
                f"load_state_dict comes after {len(self._handed_out)} steps were handed out: load it first"
            )
        steps, source = _parts_of(state_dict)
        self._source.load_state_dict(source)
        self._committed = steps

    def for_torch(self) -> SampleDataset[T]:
        """This dataset, from now on an iterable-style dataset in torch's eyes.

        Raises:
            TorchMissingError: torch is not installed.
        """
        register_iterable(SampleDataset)
        return self

    def _end(self, what: str, end: Callable[[BatchLease], None]) -> None:
        """End the oldest outstanding step; if it cannot be ended now, but may be later, it stays."""
        if not self._handed_out:
            raise BridgeError(f"there is no step to {what}: each is committed or given back once")
        try:
            end(self._handed_out[0])
        except StepAbortedError:
            self._handed_out.popleft()
            raise
        self._handed_out.popleft()


def _parts_of(given: object) -> tuple[int, Mapping[str, Any]]:
    if not isinstance(given, Mapping):
        raise BridgeError(f"not a state of a SampleDataset: a {type(given).__name__}")
    state_dict = cast("Mapping[Any, Any]", given)
    steps, source = state_dict.get("steps"), state_dict.get("source")
    if not isinstance(steps, int) or not isinstance(source, Mapping):
        raise BridgeError(f"not a state of a SampleDataset: it holds {sorted(map(str, state_dict))}")
    return steps, cast("Mapping[str, Any]", source)
