import numpy as np
import pytest
from token_tracking import LedgerError, SnapshotError, TokenLedger, TokenManager
from token_tracking.ledger import BYTES_PER_TOKEN


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
