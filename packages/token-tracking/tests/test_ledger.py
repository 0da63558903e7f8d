from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from token_tracking import LedgerError, SnapshotError, TokenLedger, TokenManager, TokenSource
from token_tracking.ledger import BYTES_PER_TOKEN

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=400)


def rows(ledger: TokenLedger) -> list[tuple[Any, ...]]:
    columns = [ledger.ids, ledger.mask, ledger.logprobs.view(np.uint32), ledger.versions, ledger.sources]
    return list(zip(*(column.tolist() for column in columns), strict=True))


class Ledgers(RuleBasedStateMachine):
    """Appends, refused appends, forks and snapshots, against plain lists."""

    @initialize()
    def start(self) -> None:
        self.ledgers: list[tuple[TokenLedger, list[tuple[Any, ...]]]] = [(TokenLedger(), [])]

    def pick(self, n: int) -> tuple[TokenLedger, list[tuple[Any, ...]]]:
        return self.ledgers[n % len(self.ledgers)]

    @rule(n=st.integers(0, 9), ids=IDS, repair=st.booleans())
    def append_unsampled(self, n: int, ids: list[int], repair: bool) -> None:
        ledger, model = self.pick(n)
        (ledger.append_repair if repair else ledger.append_prompt)(ids)
        nan = int(np.float32(np.nan).view(np.uint32))
        model += [(i, 0, nan, -1, TokenSource.REPAIR if repair else TokenSource.TEMPLATE) for i in ids]

    @rule(
        n=st.integers(0, 9), ids=IDS, version=st.sampled_from([-2, 0, 7, 2**31 - 1]), recorded=st.booleans()
    )
    def append_sampled(self, n: int, ids: list[int], version: int, recorded: bool) -> None:
        ledger, model = self.pick(n)
        values = -np.arange(len(ids), dtype=np.float32) if recorded else np.full(len(ids), np.nan, np.float32)
        assert ledger.append_sampled(ids, values if recorded else None, version) == (
            len(model),
            len(model) + len(ids),
        )
        bits = values.view(np.uint32).tolist()
        model += [(i, 1, b, version, TokenSource.SAMPLED) for i, b in zip(ids, bits, strict=True)]

    @rule(n=st.integers(0, 9), bad=st.integers(0, 6))
    def refused(self, n: int, bad: int) -> None:
        ledger, _ = self.pick(n)
        ids: Any = [1, 2]
        calls = [
            lambda: ledger.append_prompt([1, -1]),
            lambda: ledger.append_prompt([2**31]),
            lambda: ledger.append_prompt(np.array([0.5])),
            lambda: ledger.append_sampled(ids, [-0.5], 0),
            lambda: ledger.append_sampled(ids, [-0.5, float("nan")], 0),
            lambda: ledger.append_sampled(ids, [-0.5, 1.0], 0),
            lambda: ledger.append_sampled(ids, None, -1),
        ]
        with pytest.raises(LedgerError):
            calls[bad]()

    @rule(n=st.integers(0, 9), cut=st.integers(0, 2000))
    def fork(self, n: int, cut: int) -> None:
        ledger, model = self.pick(n)
        length = min(cut, len(model))
        child = ledger.fork(length)
        assert child.shared_length(ledger) == length
        self.ledgers.append((child, model[:length]))

    @rule(n=st.integers(0, 9))
    def restore(self, n: int) -> None:
        ledger, model = self.pick(n)
        data = ledger.to_bytes()
        again = TokenLedger.from_bytes(data)
        assert again.to_bytes() == data
        self.ledgers.append((again, list(model)))

    @invariant()
    def equal_lengths_and_contents(self) -> None:
        for ledger, model in self.ledgers:
            assert {len(column) for column in ledger.channels().values()} == {len(model)} == {len(ledger)}
            assert rows(ledger) == model


TestLedgers = Ledgers.TestCase


def test_views_are_zero_copy_and_read_only():
    ledger = TokenLedger()
    ledger.append_prompt(range(100))
    first, second = ledger.ids, ledger.ids
    assert np.shares_memory(first, second)
    for view in ledger.channels().values():
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 0
    held = first[:3].tolist()
    ledger.append_prompt(range(100_000))
    assert first[:3].tolist() == held


def test_a_fork_shares_what_it_did_not_write():
    parent = TokenLedger()
    parent.append_prompt(range(1000))
    child = parent.fork(600)
    assert np.shares_memory(child.ids, parent.ids)
    child.append_prompt([7])
    parent.append_prompt([8])
    assert (len(child), child.ids[-1], parent.ids[-1]) == (601, 7, 8)
    assert np.shares_memory(child.slice_ids(0, 600), parent.ids)
    assert np.shares_memory(child.fork(5).fork(3).ids, parent.ids)


def test_bytes_per_token():
    ledger = TokenLedger()
    for _ in range(2000):
        ledger.append_prompt(range(97))
    held = sum(array.nbytes for array in ledger._block.arrays.values())
    assert BYTES_PER_TOKEN == 14
    assert held / len(ledger) <= 16


def test_damaged_snapshots_are_refused():
    ledger = TokenLedger()
    ledger.append_sampled([1, 2, 3], None, 0)
    data = ledger.to_bytes()
    for bad in (b"", data[:-1], data + b"x", data[:-1] + bytes([data[-1] ^ 1]), b"X" + data[1:]):
        with pytest.raises(SnapshotError):
            TokenLedger.from_bytes(bad)
    with pytest.raises(SnapshotError, match="version 1"):
        TokenLedger.from_bytes(data[:8] + b"\x01\0\0\0" + data[12:])


def test_manager_has_the_list_face():
    manager = TokenManager()
    manager.add_prompt([1, 2])
    manager.add_response([3, 4], [-0.5, -0.25])
    assert manager.token_ids == [1, 2, 3, 4]
    assert manager.loss_mask == [0, 0, 1, 1]
    assert manager.logprobs[2:] == [-0.5, -0.25]
    assert np.isnan(manager.logprobs[:2]).all()
    with pytest.raises(LedgerError):
        manager.add_response([5], [-0.5, -0.5])
    assert len(manager) == 4
    manager.reset()
    assert (manager.token_ids, len(manager)) == ([], 0)


def test_a_forks_ids_are_one_view_from_the_first_time_on():
    parent = TokenLedger()
    parent.append_prompt(range(1000))
    child = parent.fork(900)
    child.append_prompt([7])
    first, grandchild = child.ids, child.fork()
    assert np.shares_memory(child.ids, first)
    for number in range(700):
        child.append_prompt([number])
    assert child.ids.tolist() == [*range(900), 7, *range(700)]
    assert np.shares_memory(child.ids, child.ids)
    assert not child.ids.flags.writeable
    grandchild.append_sampled([1, 2], [-1.0, -2.0], 3)
    assert grandchild.ids.tolist() == [*range(900), 7, 1, 2]
    assert first.tolist() == [*range(900), 7]
    assert (parent.ids.tolist(), child.mask.sum(), np.isnan(child.logprobs).all()) == (
        [*range(1000)],
        0,
        True,
    )
    assert child.versions.tolist() == [-1] * len(child)
    assert TokenLedger.from_bytes(grandchild.to_bytes()).to_bytes() == grandchild.to_bytes()
