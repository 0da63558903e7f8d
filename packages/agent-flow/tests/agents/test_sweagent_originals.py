"""`sweagent` where the original design had faults: see docs/originals.md.

Runs against SWE-agent itself where SWE_AGENT_SRC names a checkout, else against `scaffold/`.
"""

import json
from pathlib import Path

import pytest
from agent_flow.errors import ConfigError
from agent_flow.providers import load_agent

pytestmark = pytest.mark.anyio

CONFIG = Path(__file__).parent / "agent.yaml"


def agent(config=CONFIG, **keys):
    lines = ['provider = "agent_flow.agents.sweagent:SweAgent"', f'config = "{config}"']
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in keys.items())])


def call(command, name="bash"):
    arguments = {"command": command} if name == "bash" else {}
    return f"Next.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


BAD = "I forgot to call a tool."
FIX = call("sed -i s/41/42/ answer.py")
SUBMIT = call("", name="submit")


def written(tmp_path, line):
    """The configuration with one more line in its section `agent`."""
    config = tmp_path / "agent.yaml"
    config.write_text(CONFIG.read_text() + f"  {line}\n")
    return config


def forbidden(name):
    def called(*args, **kwargs):
        raise AssertionError(f"{name} was called")

    return called


@pytest.mark.original("A-builder-twice", "A-builder-name")
async def test_a_section_builds_any_number_of_agents(bench):
    made = bench(agent(), [])
    before = dict(made.context.file.run.agent)
    agents = [load_agent(made.context)._build(made.task, None) for _ in range(3)]
    assert {one.name for one in agents} == {"worker"}
    assert made.context.file.run.agent == before


@pytest.mark.original("A-history-processors")
async def test_rollouts_share_no_history_processor(bench, tmp_path):
    processors = "history_processors: [{type: cache_control, last_n_messages: 2}]"
    made = bench(agent(written(tmp_path, processors)), [])
    one, other = (made.agent._build(made.task, None).history_processors for _ in range(2))
    assert len(one) == len(other) == 1
    assert one[0] == other[0]
    assert one[0] is not other[0]


@pytest.mark.original("A-tools-once")
async def test_tools_are_made_once_for_a_rollout(bench, drive, monkeypatch):
    made = bench(agent(), [FIX, SUBMIT])
    counted = []

    class Counting(made.agent._swe.Tools):
        def __init__(self, *args, **kwargs):
            counted.append(1)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(made.agent._swe, "Tools", Counting)
    assert (await made.leg(drive.Leg())).exit_status == "submitted"
    assert len(counted) == 1


@pytest.mark.original("A-resume-order", "A-resume-no-setup")
async def test_going_on_is_no_second_beginning(bench, drive, monkeypatch):
    """No tool is uploaded again, no state of the tools is asked for, no hook hears of a second start."""
    made = bench(agent(), [FIX, SUBMIT])
    cut = await made.leg(drive.Leg(cut={"turn": 1}))
    cut.cut = None
    swe = made.agent._swe
    for kind, name in ((swe.RLTokenAgent, "run"), (swe.RLTokenAgent, "setup"), (swe.Tools, "install")):
        monkeypatch.setattr(kind, name, forbidden(name))
    assert (await made.leg(cut)).exit_status == "submitted"


@pytest.mark.original("A-resume-repository")
async def test_what_is_submitted_after_going_on_is_of_the_repository(bench, drive):
    """An attached environment knew no repository, so that `git add` was run in `/`."""
    made = bench(agent(step_limit=2), [FIX, call("true")])
    cut = await made.leg(drive.Leg(cut={"turn": 1}))
    cut.cut = None
    rest = await made.leg(cut)
    assert rest.exit_status == "submitted (exit_max_iter_out)"
    assert "+ANSWER = 42" in rest.patch


@pytest.mark.original("A-query-one-answer", "A-action-sampler")
@pytest.mark.parametrize("line", ["action_sampler: {type: ask_colleagues}", "type: retry"])
async def test_several_answers_to_one_prompt_are_refused(bench, tmp_path, line):
    with pytest.raises(ConfigError, match="ask for several answers to one prompt"):
        bench(agent(written(tmp_path, line)), [])


@pytest.mark.original("A-response-turn")
async def test_turns_are_what_was_sampled(bench, drive):
    """Failed tries were steps too, and a step that was cut was counted again when it went on."""
    turns = [FIX, BAD, SUBMIT]
    made = bench(agent(), turns)
    cut = await made.leg(drive.Leg(cut={"turn": 1, "tokens": 3}))
    cut.cut = {"turn": 1, "had": 3}
    rest = await made.leg(cut)
    assert rest.exit_status == "submitted"
    assert made.last.conversation.turns == len(turns)
