"""A whole run whose only server dies in mid answer, and whose port is closed from then on."""

import anyio
import pytest
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.run import run

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
TOKENS = 200


async def test_a_server_that_dies_is_a_counted_drop_without_a_reward(scripted_run, kind, server, wire):
    if kind[1] is not None:
        pytest.skip("its own connection is cut, whatever server it is")
    scripted_run.task("demo", [])
    engine = {"provider": "sglang", "addresses": [wire.address], "stream_interval": 1, "patience_s": 1.0}
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS}
    file = load_config(scripted_run.file(engine=engine, sampling=sampling))
    events = []

    async def die():
        await wire.seen(TOKENS + 50)  # within the second turn
        wire.server.close()
        wire.cut()

    async with anyio.create_task_group() as group:
        group.start_soon(die)
        result = await run(file, clock=Clock(), listener=events.append)
    summary = result.summary
    assert summary.dropped == {"engine/no_replica": 2}, "it was refilled once"
    assert (summary.started, summary.delivered, summary.samples) == (2, 0, 0)
    assert summary.rewards == {"demo": None}
    assert result.ledger.balanced
    assert not result.complete
    again = [event for event in events if event.event == "attempt_failed"]
    assert len(again) == 2
    assert all("no server could be called" in event.text for event in again)
    assert [event.row.sampled_tokens for event in events if event.event == "turn"] == [TOKENS]
