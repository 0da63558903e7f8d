"""`minisweagent`: an abort can be taken at any turn, and the rollout goes on in another process as if it had
never been cut."""

import json
import os
import signal
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
from agent_flow.agents.state import AgentState
from agent_flow.errors import AgentError, EngineError

pytestmark = pytest.mark.anyio

AGENT = 'provider = "minisweagent"\nstep_limit = 6'


def call(command, thought="Next."):
    made = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{thought}\n<tool_call>\n{made}\n</tool_call>"


TURNS = [
    call("cat answer.py", "I look at it first."),
    "No tool call here.",
    call("sed -i s/41/42/ answer.py && cd / && pwd"),
    call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
]


@pytest.mark.original("A-run", "A-minisweagent")
async def test_a_run_and_its_tokens(bench, drive):
    made = bench(AGENT, TURNS)
    done = await made.leg(drive.Leg())
    assert done.exit_status == "Submitted"
    assert "+ANSWER = 42" in done.patch
    (sample,) = done.samples
    assert sample["turns"] == len(TURNS)
    report = made.last.conversation.report(render_all=True)
    assert report.equal == len(report.prompts) == len(TURNS)


def told(leg):
    """The scaffold's history without the time of day."""
    return [
        {**message, "extra": {k: v for k, v in message.get("extra", {}).items() if k != "timestamp"}}
        for message in leg.messages
    ]


def tokens_of(leg):
    """A turn that was cut stands in two pieces, each of its own weights; its tokens are the same."""
    return [{key: sample[key] for key in ("ids", "mask", "prompt")} for sample in leg.samples]


@pytest.mark.original("A-run-aborted", "A-agent-state-between")
@pytest.mark.parametrize(("turn", "tokens"), [(0, 0), (1, 2), (2, 0), (2, 7), (3, 1)])
async def test_goes_on_where_it_was_cut(bench, drive, turn, tokens):
    made = bench(AGENT, TURNS)
    whole = await made.leg(drive.Leg())

    cut = await made.leg(drive.Leg(cut={"turn": turn, "tokens": tokens}))
    assert cut.exit_status == "Aborted"
    state = AgentState.from_bytes(cut.state.encode())
    assert state.n_calls == turn
    assert state.n_format_fails == (1 if turn == 2 else 0)

    cut.cut = {"turn": turn, "had": tokens} if tokens else None
    rest = await made.leg(cut)
    assert rest.exit_status == "Submitted"
    assert told(rest) == told(whole)
    assert tokens_of(rest) == tokens_of(whole)
    assert rest.patch == whole.patch


@pytest.mark.original("B-saved-state")
@pytest.mark.slow
async def test_goes_on_in_another_process(bench, drive, process):
    made = bench(AGENT, TURNS)
    whole = await made.leg(drive.Leg())
    cut, code = process(made, drive.Leg(cut={"turn": 2, "tokens": 7}))
    assert (code, cut.exit_status) == (-signal.SIGKILL, "Aborted")
    cut.cut = {"turn": 2, "had": 7}
    rest, code = process(made, cut)
    assert (code, rest.exit_status) == (0, "Submitted")
    assert told(rest) == told(whole)
    assert tokens_of(rest) == tokens_of(whole)
    assert rest.patch == whole.patch


@pytest.mark.original("B-partial-turns")
async def test_the_call_that_was_cut_counts_once(bench, drive):
    made = bench('provider = "minisweagent"\nstep_limit = 4', TURNS)
    leg = drive.Leg()
    for turn in (1, 1, 3):
        leg.cut = {"turn": turn}
        leg = await made.leg(leg)
        assert leg.exit_status == "Aborted"
    leg.cut = None
    assert (await made.leg(leg)).exit_status == "Submitted"


async def test_time_is_what_was_spent_and_not_what_passed(bench, drive):
    made = bench(AGENT, TURNS)
    began = anyio.current_time()
    cut = await made.leg(drive.Leg(cut={"turn": 2}))
    state = AgentState.from_bytes(cut.state.encode())
    assert 0 < state.spent_s < anyio.current_time() - began
    cut.state = msgspec.structs.replace(state, spent_s=1000.0).to_bytes().decode()
    cut.cut = {"turn": 3}
    later = AgentState.from_bytes((await made.leg(cut)).state.encode())
    assert 1000.0 < later.spent_s < 1000.0 + anyio.current_time() - began


async def test_cancelling_ends_the_command_and_the_scaffold(bench, drive):
    made = bench(AGENT, [call("touch begun; sleep 60")])
    scope = anyio.CancelScope()
    root = Path((made.folder / "root").read_text())

    async def cancel():
        while not any("begun" in files for _, _, files in os.walk(root)):
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            done = await made.leg(drive.Leg(), scope=scope)
    assert done.exit_status == "cancelled"


async def test_the_state_of_another_agent_is_refused(bench, drive):
    made = bench(AGENT, TURNS)
    cut = await made.leg(drive.Leg(cut={"turn": 1}))
    cut.state = cut.state.replace('"agent":"minisweagent"', '"agent":"sweagent"')
    with pytest.raises(AgentError, match="made by sweagent"):
        await made.leg(cut)


async def test_an_engine_failure_is_itself(bench, drive):
    made = bench(AGENT, TURNS)
    engine = made.engine(raises={1: EngineError("down", "no answer", retryable=True)})
    with pytest.raises(EngineError, match="no answer"):
        await made.leg(drive.Leg(), engine=engine)
