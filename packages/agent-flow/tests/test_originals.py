"""What the originals did, or failed to do, that no other test is about: see docs/originals.md."""

import json
import shutil
import sys
import threading
from pathlib import Path

import anyio
import numpy as np
import pytest
from agent_flow.cli import main
from agent_flow.config import SamplingConfig
from agent_flow.errors import EngineError
from agent_flow.model import ConversationModel
from agent_flow.outcome import outcome_of
from agent_flow.rollout import Rollout, samples_of
from agent_flow.task import Task
from token_tracking import ChatTemplate, Conversation, GenerationRecord

WATCHED = '''
import json
from contextlib import asynccontextmanager
from agent_flow.environments.local import LocalEnvironments


class Watched(LocalEnvironments):
    """Writes down who opens a sandbox, what it finds in it, and how many are open."""

    open_now = 0

    @asynccontextmanager
    async def open(self, spec):
        async with super().open(spec) as environment:
            self.open_now += 1
            mark = f"{environment.workdir}/../mark"
            found = await environment.execute(["test", "-e", mark], timeout_s=60)
            line = {"purpose": spec.purpose, "marked": found.exit_code == 0, "open": self.open_now}
            await environment.write(mark, b"was here")
            commands, execute = [], environment.execute

            async def listening(command, **options):
                commands.append(" ".join(command))
                return await execute(command, **options)

            environment.execute = listening
            try:
                yield environment
            finally:
                self.open_now -= 1
                with open("opened.jsonl", "a") as file:
                    file.write(json.dumps({**line, "commands": commands}) + "\\n")
'''


@pytest.fixture
def project(example, tmp_path, monkeypatch, capfd):
    """One task of the quickstart. Called with edits of its configuration: exit code, last line, stderr."""
    folder = tmp_path / "quickstart"
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("runs"))
    (folder / "watched_environments.py").write_text(WATCHED)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    rows = (folder / "tasks.jsonl").read_text().splitlines()
    (folder / "tasks.jsonl").write_text(next(row for row in rows if "spanset-14" in row) + "\n")

    def call(*edits, command="run"):
        text = (folder / "run.toml").read_text()
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        (folder / "run.toml").write_text(text)
        code = main([command, "run.toml", "--json"])
        said = capfd.readouterr()
        return code, json.loads(said.out.splitlines()[-1]) if said.out else {}, said.err

    return call


@pytest.mark.original("A-eval-only")
def test_a_configuration_may_have_an_agent_for_measuring_alone(project):
    code, summary, said = project(("[agent]", "[eval.agent]"), command="eval")
    assert (code, summary.get("mean_reward")) == (0, 1.0), said
    code, _, said = project()
    assert code == 2
    assert "missing key 'agent.provider'" in said


@pytest.mark.original("A-reward-own-sandbox", "A-handle-leak", "A-eval-flag", "A-k8s-skip-reset")
def test_a_grader_never_sees_the_sandbox_of_a_rollout(project):
    """What marked a sandbox as the grader's, or led to the agent's, was written into what both shared."""
    edits = [('provider = "local"', 'provider = "watched_environments:Watched"')]
    edits += [("rollouts_per_task = 1", "rollouts_per_task = 2"), ("max_rollouts = 2", "max_rollouts = 1")]
    code, summary, said = project(*edits)
    assert (code, summary["rewards"]) == (0, {"spanset-14": 1.0}), said
    opened = [json.loads(line) for line in Path("opened.jsonl").read_text().splitlines()]
    assert [line["purpose"] for line in opened] == ["agent", "grader"] * 2
    assert not any(line["marked"] for line in opened)
    assert {line["open"] for line in opened} == {1}, "the agent's is gone before the grader's comes"
    changes = ("update-ref", "git reset", "git clean", "git stash")
    changed = [any(word in command for command in line["commands"] for word in changes) for line in opened]
    assert changed == [True, False] * 2, "what an agent may not see is taken out; a grader has all of it"


STEPS = """
from agent_flow.plain_flow import PlainFlow
from agent_flow.reward import Reward

seen = []

class Guess(PlainFlow):
    class Config(PlainFlow.Config):
        max_guesses: int = 6

    async def preprocess(self, rollout):
        seen.append((rollout.rollout_id, rollout.mode, "preprocess", rollout.conversation.turns))

    async def converse(self, rollout, model):
        seen.append((rollout.rollout_id, rollout.mode, "generate", rollout.conversation.turns))
        await model.ask(self.opening(rollout.task))

    async def reward(self, rollout):
        seen.append((rollout.rollout_id, rollout.mode, "reward", rollout.conversation.turns))
        rollout.reward = 0.5

def efficient(episode):
    raise AssertionError("the flow judges by itself")
"""


@pytest.mark.original("A-three-steps")
@pytest.mark.parametrize(("command", "mode"), [("run", "train"), ("eval", "eval")])
def test_a_flow_is_three_steps_over_one_rollout(own_agent, command, mode):
    own_agent.source(STEPS)
    own_agent.config(("rollouts_per_task = 2", "rollouts_per_task = 1"))
    done = own_agent.call(command, "run.toml", "--json")
    assert done.code == 0, done.stderr
    seen = sys.modules[own_agent.module].seen
    (rollout_id,) = {line[0] for line in seen}
    assert seen == [
        (rollout_id, mode, "preprocess", 0),
        (rollout_id, mode, "generate", 0),
        (rollout_id, mode, "reward", 1),
    ]


@pytest.mark.original("A-off-the-loop")
def test_prompts_are_made_off_the_event_loop(own_agent, monkeypatch):
    threads = []
    advance = Conversation.advance

    def watched(self, messages, *args, **kwargs):
        threads.append(threading.current_thread())
        return advance(self, messages, *args, **kwargs)

    monkeypatch.setattr(Conversation, "advance", watched)
    assert own_agent.run().code == 0
    assert threads
    assert threading.main_thread() not in threads


class Cut:
    """Aborts the first turn that it is asked for by this name, and answers all others."""

    source = "sampled"

    def __init__(self, rollout_id, stop_id):
        self._aborted = rollout_id
        self._stop_id = stop_id

    def describe(self):
        return {}

    async def generate(self, request):
        abort = request.rollout_id == self._aborted
        ids = np.array([] if abort else [self._stop_id], dtype=np.int32)
        return (
            GenerationRecord(
                prompt_ids=request.prompt_ids,
                output_ids=ids,
                logprobs=np.full(len(ids), -1.0, dtype=np.float32),
                logprob_kind="raw",
                finish_reason="abort" if abort else "stop",
                stop_id=None if abort else self._stop_id,
                weight_version=1,
            ),
        )


@pytest.fixture
def template(example, qwen_tokenizer):
    return ChatTemplate.compile(qwen_tokenizer, (example / "qwen3.jinja").read_text())


def begun(template, rollout_id):
    return Rollout(
        rollout_id=rollout_id,
        group_id="b" * 32,
        member=0,
        attempt=0,
        task=Task(instance_id="t", problem_statement="p"),
        mode="train",
        conversation=Conversation(template),
    )


@pytest.mark.original("A-prompt-boundary")
@pytest.mark.anyio
async def test_a_demonstration_is_part_of_the_prompt(template):
    """System prompt and first user message alone were the prompt, and the rest of it an answer."""
    call = {"name": "bash", "arguments": {"command": "ls"}}
    messages = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "an easier problem"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "a.py"},
        {"role": "user", "content": "the problem"},
    ]
    rollout = begun(template, "1" * 32)
    model = ConversationModel(
        rollout, Cut("", min(template.stop_ids)), SamplingConfig(), on_turn=lambda: None
    )
    prompt = model.prepare(messages).prompt_ids
    await model.ask(messages)
    (sample,) = samples_of(rollout, "sampled", {})
    assert template.tokenizer.decode(prompt.tolist()) == template.render(messages, add_generation_prompt=True)
    assert (sample.prompt_length, len(sample)) == (len(prompt), len(prompt) + 1)
    assert sample.loss_mask.tolist() == [0] * len(prompt) + [1]


@pytest.mark.original("A-abort-groups")
@pytest.mark.anyio
async def test_an_abort_ends_no_task_group_and_no_other_rollout(template):
    """A `BaseException` under a task group cancelled the siblings, and came out inside a group."""
    engine, ends = Cut("0" * 32, min(template.stop_ids)), {}

    async def ask(rollout_id):
        rollout = begun(template, rollout_id)
        model = ConversationModel(rollout, engine, SamplingConfig(), on_turn=lambda: None)
        try:
            ends[rollout_id] = (await model.ask([{"role": "user", "content": "hi"}]))["role"]
        except EngineError as error:
            ends[rollout_id] = (error.cause, error.retryable)

    async with anyio.create_task_group() as group:
        for digit in "012":
            group.start_soon(ask, digit * 32)
    assert ends == {"0" * 32: ("aborted", True), "1" * 32: "assistant", "2" * 32: "assistant"}


GRADED = ("context", "max_iter_out", "cost", "format", "forfeit", "total_execution_time", "command_timeout")


@pytest.mark.original("A-should-eval-submitted", "A-should-eval-context", "A-should-eval-context-empty")
def test_what_is_trained_of_submissions_and_full_contexts():
    names = ("evaluate", "reward", "status", "in_loss", "in_baseline")
    rows = {
        end: tuple(getattr(outcome_of(end, "train"), name) for name in names)
        for end in ("submitted", "submitted (exit_context)", "exit_context")
    }
    assert rows == {
        "submitted": (True, None, "completed", True, True),
        "submitted (exit_context)": (True, None, "truncated", False, True),
        "exit_context": (False, 0.0, "truncated", True, True),
    }


@pytest.mark.original("A-should-eval-validate")
def test_what_is_measured_is_graded_whatever_ended_it():
    for end in ("submitted", *(f"submitted (exit_{name})" for name in GRADED)):
        row = outcome_of(end, "eval")
        assert (row.ends, row.evaluate, row.in_loss, row.in_baseline) == (end, True, False, False)
    for end in ("", "None", "exit_context", "submitted (exit_api)", "submitted (exit_environment_error)"):
        assert not outcome_of(end, "eval").evaluate


@pytest.mark.original("A-should-eval-none")
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("end", ["", "None", "a word of tomorrow"])
def test_an_end_that_no_row_knows_is_no_reward(end, mode):
    row = outcome_of(end, mode)
    assert (row.evaluate, row.reward, row.in_loss, row.in_baseline) == (False, None, False, False)
