"""What only SWE-agent itself has: its history processors and its tool bundles."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.sweagent]

CONFIG = Path(__file__).parent / "agent.yaml"


def agent(config, **keys):
    lines = ['provider = "agent_flow.agents.sweagent:SweAgent"', f'config = "{config}"']
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in keys.items())])


def call(name="bash", thought="Next.", **arguments):
    return f"{thought}\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TURNS = [
    *(call(command=f"echo number {number}", thought=f"Step {number}.") for number in range(5)),
    call(command="sed -i s/41/42/ answer.py"),
    call("submit"),
]


def written(tmp_path, processors="[]", bundles=("tools/submit",), **more):
    config = tmp_path / "agent.yaml"
    text = CONFIG.read_text()
    text = text.replace("  max_requeries: 3", f"  history_processors: {processors}")
    paths = "".join(f"      - path: {bundle}\n" for bundle in bundles)
    text = text.replace("      - path: tools/submit\n      - path: tools/forfeit\n", paths)
    for old, new in more.items():
        text = text.replace(f"    {old}:", f"    {new}\n    {old}:")
    config.write_text(text)
    return config


async def test_a_processor_that_rewrites_old_observations_begins_branches(bench, drive, tmp_path):
    config = written(tmp_path, '[{"type": "last_n_observations", "n": 2, "polling": 2}]')
    made = bench(agent(config), TURNS)
    done = await made.leg(drive.Leg())
    assert done.exit_status == "submitted"
    assert len(done.samples) > 1
    texts = [made.context.tokenizer.decode(ids[:-1]) for sample in done.samples for ids in sample["sampled"]]
    assert sorted(texts) == sorted(TURNS)  # each once, as it was sampled
    report = made.last.conversation.report(render_all=True)
    assert report.broken == 0
    prompts = [
        made.context.tokenizer.decode(request.prompt_ids.tolist()) for request in made.engine_of_last.requests
    ]
    assert "Old environment output" in prompts[-1]


async def test_a_processor_that_only_marks_for_caching_begins_none(bench, drive, tmp_path):
    config = written(tmp_path, '[{"type": "cache_control", "last_n_messages": 2}]')
    made = bench(agent(config), TURNS)
    done = await made.leg(drive.Leg())
    assert len(done.samples) == 1


async def test_bundles_with_state_and_python_tools(bench, drive, tmp_path):
    config = written(
        tmp_path,
        bundles=("tools/registry", "tools/windowed", "tools/diff_state", "tools/review_on_submit_m"),
        parse_function="env_variables: {WINDOW: 100, OVERLAP: 2}",
        execution_timeout='registry_variables: {SUBMIT_REVIEW_MESSAGES: ["Look again: {{diff}}"]}',
    )
    turns = [
        call("open", path="answer.py"),
        call(command="sed -i s/41/42/ answer.py"),
        call("submit"),
        call("submit"),
    ]
    made = bench(agent(config), turns)
    done = await made.leg(drive.Leg())
    assert done.exit_status == "submitted"
    shown = [message["content"] for message in done.messages if message["role"] == "tool"]
    assert "1:ANSWER = 41" in shown[0]
    assert "Look again" in shown[2]
    assert "+ANSWER = 42" in shown[2]

    cut = await made.leg(drive.Leg(cut={"turn": 3, "tokens": 2}))
    cut.cut = {"turn": 3, "had": 2}
    rest = await made.leg(cut)  # the review is not asked for again: the registry lives on
    assert (rest.exit_status, rest.messages) == ("submitted", done.messages)


async def test_its_own_default_configuration_is_read(bench):
    made = bench('provider = "agent_flow.agents.sweagent:SweAgent"', TURNS)
    names = [tool["function"]["name"] for tool in made.agent.tools]
    assert names == ["bash", "str_replace_editor", "submit"]
