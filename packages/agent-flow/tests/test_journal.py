"""The journal's law: every rollout that was started ends exactly once."""

import subprocess
import sys

import pytest
from agent_flow.clock import Clock
from agent_flow.errors import JournalError
from agent_flow.journal import Journal, read_ledger
from hypothesis import given
from hypothesis import strategies as st


def rollout(number):
    return f"{number:032x}"


def test_counts_over_several_workers(tmp_path):
    with Journal(tmp_path, "worker-0", Clock()) as a, Journal(tmp_path, "worker-1", Clock()) as b:
        for n in range(4):
            (a if n % 2 else b).write("started", rollout(n), task="t")
        a.write("delivered", rollout(1), samples=2)
        b.write("dropped", rollout(0), reason="environment/start")
        b.write("parked", rollout(2))
    ledger = read_ledger(tmp_path)
    assert (ledger.started, ledger.live, ledger.parked, ledger.delivered) == (4, 1, 1, 1)
    assert ledger.dropped == {"environment/start": 1}
    assert ledger.live_ids == (rollout(3),)
    assert ledger.balanced
    assert ledger.line() == "started 4 = live 1 + parked 1 + delivered 1 + dropped 1"


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([("started", 1), ("started", 1)], "started twice"),
        ([("delivered", 1)], "never started"),
        ([("started", 1), ("dropped", 1), ("delivered", 1)], "already dropped"),
    ],
)
def test_events_that_break_the_law_are_named(tmp_path, events, said):
    with Journal(tmp_path, "worker-0", Clock()) as journal:
        for event, number in events:
            journal.write(event, rollout(number))
    with pytest.raises(JournalError, match=said):
        read_ledger(tmp_path)


def test_a_line_torn_by_a_crash_is_cut_off_before_the_next_is_written(tmp_path):
    with Journal(tmp_path, "worker-0", Clock()) as journal:
        journal.write("started", rollout(1))
    path = tmp_path / "worker-0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"t_ns": 1, "event": "deliv')
    assert read_ledger(tmp_path).live == 1
    with Journal(tmp_path, "worker-0", Clock()) as journal:
        journal.write("delivered", rollout(1))
    assert read_ledger(tmp_path).delivered == 1


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "worker-0.jsonl").write_text('{"kind": "something else"}\n')
    with pytest.raises(JournalError, match="is not an agent-flow journal"):
        read_ledger(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["started", "delivered", "dropped", "parked"]))))
def test_whatever_is_written_the_ledger_balances_or_says_why_not(events):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        with Journal(Path(folder), "worker-0", Clock()) as journal:
            for number, event in events:
                journal.write(event, rollout(number))
        try:
            ledger = read_ledger(Path(folder))
        except JournalError:
            return
        assert ledger.balanced
        assert ledger.started == len({number for number, event in events if event == "started"})


FULL_DISK = """
import resource, sys
from pathlib import Path
from agent_flow.clock import Clock
from agent_flow.errors import JournalError
from agent_flow.journal import Journal

folder = Path(sys.argv[1])
journal = Journal(folder, "worker-0", Clock())
journal.write("started", "0" * 32)
size = journal.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, size + 20))
try:
    journal.write("delivered", "0" * 32)
except JournalError as error:
    print(error)
print(journal.path.stat().st_size - size)
"""


def test_a_line_that_the_disk_takes_in_part_is_taken_back_and_told(tmp_path):
    """A write past the file size limit is short, as on a full disk; no later line may be glued to it."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    said, left = done.stdout.splitlines()
    assert "the journal cannot be written" in said
    assert left == "0"
    assert read_ledger(tmp_path).live == 1
