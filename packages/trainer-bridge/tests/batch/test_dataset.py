"""Steps from a real receiver: commit after use, come again otherwise, and the checkpoint's state."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trainer_bridge import (
    BatchLease,
    BridgeError,
    LeasedGroup,
    LeasedRollout,
    ReceiverConfig,
    SampleReceiver,
    SampleSender,
    SenderConfig,
)
from trainer_bridge.collate import Collator
from trainer_bridge.dataset import SampleDataset
from trainer_bridge.errors import NoDataError
from trainer_bridge.testing import make_rollout

GROUPS_OF_2 = ReceiverConfig(group_size=2)
RECEIVED = SenderConfig(settle="received")  # or closing a sender would wait for the commit


def send_groups(address: str, spool: Path, groups: range) -> None:
    with SampleSender(address, spool=spool, config=RECEIVED) as sender:
        for member in range(2):
            for group in groups:
                sender.send(make_rollout(2 * group + member, parts=1 + member, tokens=16, group=group))


def groups_of(step: BatchLease) -> list[int]:
    return [int(sample.group_id, 16) for sample in step.samples]


def test_steps_are_whole_groups_and_come_again_until_committed(tmp_path: Path) -> None:
    store, spool = tmp_path / "store", tmp_path / "spool"
    with SampleReceiver(out=store, config=GROUPS_OF_2) as receiver:
        send_groups(receiver.address, spool, range(4))
        dataset = SampleDataset(receiver, groups_of, groups=1, deadline_s=20)
        steps = iter(dataset)
        assert [next(steps) for _ in range(3)] == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
        dataset.commit()
        dataset.commit()
        assert dataset.outstanding == 1
        state = dataset.state_dict()
        assert state["steps"] == 2
    with SampleReceiver(out=store, config=GROUPS_OF_2) as receiver:
        dataset = SampleDataset(receiver, groups_of, groups=2, deadline_s=20)
        dataset.load_state_dict(state)
        assert next(iter(dataset)) == [2, 2, 2, 3, 3, 3], "read ahead, never committed"
        dataset.commit()
        assert dataset.state_dict()["steps"] == 3
        with pytest.raises(BridgeError, match="no step to commit"):
            dataset.commit()


def test_given_back_steps_come_again_first(tmp_path: Path) -> None:
    with SampleReceiver(config=GROUPS_OF_2) as receiver:
        send_groups(receiver.address, tmp_path, range(2))
        dataset = SampleDataset(receiver, groups_of, groups=1, deadline_s=20)
        steps = iter(dataset)
        assert next(steps) == [0, 0, 0]
        dataset.nack("the loss was NaN")
        assert [next(steps), next(steps)] == [[0, 0, 0], [1, 1, 1]]


def test_a_step_that_does_not_come_is_an_error_and_a_closed_receiver_an_end(tmp_path: Path) -> None:
    """trl PR #5751: an empty queue that became a None batch."""
    with SampleReceiver(config=GROUPS_OF_2) as receiver:
        with SampleSender(receiver.address, config=RECEIVED) as sender:
            sender.send(make_rollout(1))
        dataset = SampleDataset(receiver, groups_of, groups=1, deadline_s=0.05)
        with pytest.raises(NoDataError, match="no step of 1 complete groups came in"):
            next(iter(dataset))
    assert list(dataset) == []


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with SampleReceiver(config=GROUPS_OF_2) as receiver:
        send_groups(receiver.address, tmp_path, range(1))
        dataset = SampleDataset(receiver, groups_of, groups=1, deadline_s=20)
        with pytest.raises(BridgeError, match="not a state of a SampleDataset"):
            dataset.load_state_dict({"model": 1})
        with pytest.raises(BridgeError, match="not a state of a SampleReceiver"):
            dataset.load_state_dict({"steps": 1, "source": {"watermark": 3}})
        state = dataset.state_dict()
        next(iter(dataset))
        with pytest.raises(BridgeError, match="load it first"):
            dataset.load_state_dict(state)


class Recorded:
    """A source over a list of steps, for what needs no network."""

    def __init__(self, steps: int) -> None:
        self._left = iter(range(steps))
        self.loaded: Mapping[str, Any] | None = None
        self.saved: Mapping[str, Any] | None = None
        self.committed = 0

    def next_batch(self, *, groups: int, deadline_s: float | None) -> BatchLease | None:
        number = next(self._left, None)
        if number is None:
            return None
        rollout = LeasedRollout(
            rollout_id=f"{1:032x}", group_id=f"{0:032x}", attempt=0, samples=make_rollout(1, tokens=16),
            producer="0" * 32, producer_name="recorded", sequence=1, created_ns=0, restored=False, nacks=0,
            staleness=None,
        )  # fmt: skip
        group = LeasedGroup(group_id=f"{0:032x}", rollouts=(rollout,), size=1, complete=True)
        return BatchLease(number, [group], self)

    def commit_lease(self, number: int) -> None:
        self.committed += 1

    def nack_lease(self, number: int, rollouts: frozenset[bytes] | None, reason: str) -> None:
        raise AssertionError(reason)

    def state_dict(self) -> dict[str, Any]:
        return {"committed": self.committed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state

    def checkpoint_saved(self, state: Mapping[str, Any]) -> None:
        self.saved = state


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the refused worker is a fork
def test_torch_loaders_take_it() -> None:
    pytest.importorskip("torch", reason="torch is not installed: its DataLoader is not tested here")
    from torch.utils.data import DataLoader

    collator = Collator(advantages=None)
    dataset = SampleDataset(Recorded(3), collator.pad, groups=1)
    rows: Iterator[Any] = iter(DataLoader(dataset.for_torch(), batch_size=None, collate_fn=lambda step: step))
    (batch,) = next(rows)
    assert batch.token_ids.shape == (1, 16)
    dataset.commit()
    state = dataset.state_dict()
    assert state == {"steps": 1, "source": {"committed": 1}}
    worker = DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=lambda step: step)
    with pytest.raises(BridgeError, match="use num_workers=0"):
        next(iter(worker))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 on torch 2.13
def test_torchdatas_loader_saves_and_restores_its_state() -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed: its loader is not tested here")
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = SampleDataset(Recorded(3), Collator(advantages=None).pad, groups=1)
    loader = StatefulDataLoader(dataset.for_torch(), batch_size=None, collate_fn=lambda step: step)
    next(iter(loader))
    dataset.commit()
    state = loader.state_dict()
    later = Recorded(3)
    loader = StatefulDataLoader(
        SampleDataset(later, Collator(advantages=None).pad, groups=1), batch_size=None, collate_fn=lambda s: s
    )
    loader.load_state_dict(state)
    next(iter(loader))
    assert later.loaded == {"committed": 1}


def test_without_torch() -> None:
    """numpy alone makes batches; tensors are a clear error; nothing here loads torch by itself."""
    code = """
        import sys
        sys.modules["torch"] = None
        from trainer_bridge.batch import Batch, in_loader_worker
        from trainer_bridge.collate import Collator
        from trainer_bridge.dataset import SampleDataset
        from trainer_bridge.testing import make_rollout
        (batch,) = Collator().pad(make_rollout(1))
        assert not in_loader_worker()
        try:
            batch.torch()
        except ImportError as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert "TorchMissingError" in done.stdout, done.stderr
    assert "(the extra trainer-bridge[torch])" in done.stdout


def test_a_sample_from_the_wire_batches_like_the_one_that_was_sent(tmp_path: Path) -> None:
    sent = [msgspec.structs.replace(each, reward=0.5) for each in make_rollout(3, parts=2)]
    with SampleReceiver() as receiver, SampleSender(receiver.address, config=RECEIVED) as sender:
        sender.send(sent)
        lease = receiver.next(timeout_s=20)
    assert lease is not None
    (a,), (b,) = Collator().pad(sent), Collator().pad(lease.samples)
    for name in ("token_ids", "loss_mask", "logprobs", "weights", "advantages", "versions", "temperature"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
