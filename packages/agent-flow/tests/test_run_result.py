"""When a run counts as complete: exit code 0 means that the trainer has every rollout."""

import msgspec
import pytest
from agent_flow.events import Summary
from agent_flow.journal import Ledger
from agent_flow.run import RunResult

GOOD = RunResult(
    summary=Summary(
        tasks=2,
        started=2,
        delivered=2,
        parked=0,
        dropped={},
        rewards={},
        prompt_tokens=1,
        sampled_tokens=1,
        seconds=1.0,
        received_by_trainer=2,
        samples=2,
    ),
    rows=(),
    ledger=Ledger(started=2, live=0, parked=0, delivered=2, dropped={}),
    folder=None,
    problem="",
    interrupted=False,
)


def test_all_delivered_and_received_is_complete():
    assert GOOD.complete


@pytest.mark.parametrize(
    "change",
    [
        {"interrupted": True},
        {"problem": "the trainer refused 1 rollouts (bad_sample)"},
        {"summary": msgspec.structs.replace(GOOD.summary, received_by_trainer=1)},
        {"ledger": Ledger(started=2, live=0, parked=0, delivered=1, dropped={"flow/generate_timeout": 1})},
        {"ledger": Ledger(started=2, live=1, parked=0, delivered=1, dropped={})},
        {"ledger": Ledger(started=3, live=0, parked=0, delivered=2, dropped={})},
    ],
)
def test_anything_less_is_not(change):
    assert not msgspec.structs.replace(GOOD, **change).complete
