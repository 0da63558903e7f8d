import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from token_tracking import ChatTemplate, Conversation, LedgerError, SnapshotError, TokenLedger, TokenManager
from token_tracking.kept import KeptSets
from token_tracking.ledger import BYTES_PER_TOKEN
from token_tracking.testing import completion


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


def kept(*sets: list[int]) -> KeptSets:
    offsets = np.cumsum([0, *map(len, sets)], dtype=np.int64)
    return KeptSets(np.array([i for one in sets for i in one], np.int32), offsets)


@pytest.mark.parametrize("shared", [0, 6])
def test_what_is_cut_back_stays_in_views_and_in_forks(shared: int):
    ledger = TokenLedger()
    if shared:
        ledger.append_prompt(range(10))
        ledger = ledger.fork(shared)
    ledger.append_sampled([1, 2], [-1.0, -2.0], 3, kept([1, 5], [2, 4]))
    fork, held = ledger.fork(), len(ledger)
    ledger.append_sampled([7, 8], None, 4, kept([7], [8, 9]))
    seen, mask = ledger.ids, ledger.mask
    assert ledger.cut_back(len(ledger)) is ledger
    assert ledger.cut_back(held) is ledger
    ledger.append_prompt([30, 31, 32])
    ids = [*range(shared), 1, 2]
    assert (seen.tolist(), mask.tolist()[-2:]) == ([*ids, 7, 8], [1, 1])
    assert (fork.ids.tolist(), ledger.ids.tolist()) == (ids, [*ids, 30, 31, 32])
    assert ledger.mask.tolist() == [*[0] * shared, 1, 1, 0, 0, 0]
    assert ledger.versions.tolist()[-3:] == [-1, -1, -1]
    assert np.isnan(ledger.logprobs[-3:]).all()
    sets = ledger.kept_sets()
    assert sets is not None
    assert (sets.ids.tolist(), np.diff(sets.offsets).tolist()[-5:]) == ([1, 5, 2, 4], [2, 2, 0, 0, 0])
    # A fork that shares more forbids to cut what it reads; and what is shared itself is not this ledger's.
    longer = ledger.fork()
    other = ledger.cut_back(held)
    other.append_prompt([40])
    assert other is not ledger
    assert (longer.ids.tolist()[-3:], other.ids.tolist()) == ([30, 31, 32], [*ids, 40])
    assert ledger.cut_back(shared // 2).ids.tolist() == [*range(shared // 2)]
    with pytest.raises(LedgerError, match="cannot fork at 99"):
        ledger.cut_back(99)


def test_prompts_that_are_taken_back_leave_no_memory(compiled: Callable[..., ChatTemplate]):
    """A harness that adds, asks for the prompt, adds again: each fork kept a copy of all ids."""
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'

    def held_after(turns: int) -> int:
        tracemalloc.start()
        conversation = Conversation(compiled("qwen3"))
        conversation.add([{"role": "user", "content": "task"}])
        for _ in range(turns):
            conversation.prompt_ids()
            conversation.add([{"role": "tool", "content": "result " * 40}])
            conversation.prompt_ids()
            conversation.record(completion(conversation, call))
            conversation.add([{"role": "tool", "content": "result " * 40}])
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        ledger = conversation.branches[0].ledger
        assert ledger._base is None
        assert sum(array.nbytes for array in ledger._block.arrays.values()) <= 16 * len(ledger)
        return held

    held_after(3)
    assert held_after(200) < 2.3 * held_after(100)


def test_a_branch_per_turn_keeps_one_copy_of_shared_ids(compiled: Callable[..., ChatTemplate]):
    """Thinking that is stripped at each user turn: every prompt begins a branch."""
    conversation = Conversation(compiled("qwen3"))
    for number in range(12):
        conversation.advance([*conversation.messages, {"role": "user", "content": f"q{number}"}])
        conversation.record(completion(conversation, "<think>\nhm\n</think>\n\nok"))
    assert len(conversation.branches) == 12
    conversation.advance([{"role": "user", "content": "a sub-agent"}])
    copies = [branch.ledger._block.joined for branch in conversation.branches]
    assert [copy for copy in copies if copy is not None] == []
    assert conversation.report().broken == 0
