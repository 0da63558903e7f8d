"""`litellm_agent` on a real SGLang's chat completions: a served model is evaluated, without its tokens."""

import json
import os
import shutil
from pathlib import Path

import anyio.to_thread
import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(400)]

AGENT = """
[eval.agent]
provider = "litellm_agent"
model = "openai/served"
api_base = "{address}/v1"
action_format = "text"
temperature = 0
{max_tokens}
step_limit = 2
max_retries = 1
"""


@pytest.fixture(scope="module")
def served(kind, example, tmp_path_factory):
    """A server of ours serves the model with a chat template, which token ids do without."""
    if kind[1] is None or kind[0]:
        pytest.skip("needs a real SGLang, and one is enough")
    if os.environ.get("SGLANG_URL"):
        return
    folder = tmp_path_factory.mktemp("served")
    for path in Path(kind[1].weights).iterdir():
        (folder / path.name).symlink_to(path.resolve())
    shutil.copy(example / "qwen3.jinja", folder / "chat_template.jinja")
    kind[1].weights = str(folder)


@pytest.fixture
def evaluate(served, server, cli, example, tmp_path):
    """Evaluates the server's model on one task; gives the run, and its rollout's provenance and messages."""
    project = tmp_path / "quickstart"
    shutil.copytree(example, project)
    task = json.loads((project / "tasks.jsonl").read_text().splitlines()[0])
    text = (project / "run.toml").read_text()

    async def run(max_tokens="max_tokens = 40", more=""):
        row = {**task, "problem_statement": task["problem_statement"] + more}
        (project / "tasks.jsonl").write_text(f"{json.dumps(row)}\n")
        agent = AGENT.format(address=server.address, max_tokens=max_tokens)
        (project / "run.toml").write_text(text + agent)
        done = await anyio.to_thread.run_sync(
            lambda: cli("eval", project / "run.toml", "--json", cwd=tmp_path, timeout=300)
        )
        for rollout in (done.folder / "rollouts").iterdir():
            names = ("provenance", "messages")
            record, messages = (json.loads((rollout / f"{name}.json").read_text()) for name in names)
            return done, record, messages["messages"]
        return done, {}, []

    return run


async def test_a_served_model_is_evaluated(evaluate):
    done, record, messages = await evaluate()
    assert done.code == 0, done.stdout
    assert record["exit_status"] in ("LimitsExceeded", "RepeatedFormatError", "Submitted")
    assert done.summary["graded"] == 1
    said = record["produced_by"]
    assert (said["engine"], said["agent_calls"]) == ("none", 2)
    assert said["agent_prompt_tokens"] > 1000
    assert 0 < said["agent_completion_tokens"] <= 80
    answers = [message["extra"]["response"] for message in messages if "response" in message.get("extra", {})]
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length", "length"]


async def test_the_servers_words_for_a_full_context_are_known(evaluate):
    done, record, messages = await evaluate(max_tokens="", more="word " * 20_000)
    assert done.code == 0, done.stdout
    assert record["exit_status"] == "exit_context", messages[-1]
    assert record["reward"] == 0.0
    done, _, _ = await evaluate(max_tokens="max_tokens = 1_000_000")
    assert done.summary["not_graded"] == {"engine/refused (task)": 1}
    assert "a smaller agent.max_tokens" in done.stdout
