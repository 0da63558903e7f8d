"""What an abort carries, and what an agent's state refuses."""

import pickle

import anyio
import msgspec
import numpy as np
import pytest
from agent_flow.agents.scaffold_thread import run_scaffold, stopping
from agent_flow.agents.state import AgentState
from agent_flow.errors import AgentError, EngineError, GenerationAborted
from token_tracking import GenerationRecord

pytestmark = pytest.mark.anyio

STATE = AgentState(
    agent="minisweagent",
    scaffold_version="2.4.6",
    messages=({"role": "user", "content": "“héllo” \u2028"},),
    n_calls=3,
    n_format_fails=1,
    spent_s=12.5,
    scaffold={"shown": [], "root": "/root"},
)


@pytest.mark.original("A-abort-fields", "A-abort-pickles")
def test_an_abort_carries_what_there_was_and_is_picklable():
    record = GenerationRecord(
        prompt_ids=np.array([1, 2], dtype=np.int32),
        output_ids=np.array([3], dtype=np.int32),
        logprobs=np.array([-0.5], dtype=np.float32),
        finish_reason="abort",
        weight_version=4,
        logprob_kind="raw",
    )
    aborted = pickle.loads(pickle.dumps(GenerationAborted((record,))))  # noqa: S301
    assert aborted.records[0].output_ids.tolist() == [3]
    assert aborted.records[0].weight_version == 4
    assert GenerationAborted(*GenerationAborted((record,)).args).records == (record,)
    assert GenerationAborted().records == ()


@pytest.mark.original("A-abort-base")
async def test_a_scaffold_cannot_swallow_an_abort_or_an_error_of_ours():
    def swallow(error):
        def work():
            try:
                with stopping():
                    raise error
            except Exception:
                return "exit_error"

        return work

    threads = anyio.CapacityLimiter(1)
    with pytest.raises(GenerationAborted):
        await run_scaffold(swallow(GenerationAborted()), threads)
    with pytest.raises(EngineError, match="no answer"):
        await run_scaffold(swallow(EngineError("down", "no answer")), threads)
    assert await run_scaffold(swallow(KeyError("of the scaffold")), threads) == "exit_error"


@pytest.mark.original("A-agent-state")
def test_a_state_comes_back_as_it_was():
    assert AgentState.from_bytes(STATE.to_bytes()) == STATE


@pytest.mark.original("A-snapshot-keys", "A-agent-state")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"version":1', b'"version":2'),
        (b'"n_calls":3', b'"n_calls":-1'),
        (b'"spent_s"', b'"spent"'),
        (b'"kind":"agent-flow-agent-state"', b'"kind":"something"'),
        (b"}", b""),
    ],
)
def test_a_damaged_state_is_refused(old, new):
    data = STATE.to_bytes()
    assert old in data
    with pytest.raises(AgentError, match="not an agent's state"):
        AgentState.from_bytes(data.replace(old, new))


@pytest.mark.original("A-agent-state")
def test_the_state_of_another_agent_or_version_is_refused():
    STATE.check("minisweagent", "2.4.6")
    for agent, version in (("sweagent", "2.4.6"), ("minisweagent", "2.5.0")):
        with pytest.raises(AgentError, match=r"made by minisweagent 2\.4\.6"):
            STATE.check(agent, version)


def test_a_state_that_is_not_json_is_refused():
    with pytest.raises(AgentError, match="not plain JSON"):
        msgspec.structs.replace(STATE, scaffold={"a": object()}).to_bytes()
