"""The model that agents ask: the budget of a turn in pieces, and one turn at a time."""

import anyio
import msgspec
import numpy as np
import pytest
from agent_flow.config import SamplingConfig
from agent_flow.errors import AgentError, EngineError
from agent_flow.model import ConversationModel
from agent_flow.rollout import Rollout
from agent_flow.task import Task
from token_tracking import ChatTemplate, Conversation, GenerationRecord

pytestmark = pytest.mark.anyio
ASKED = [{"role": "user", "content": "hi"}]
OTHER = [{"role": "user", "content": "what else?"}]


class Given:
    """Gives these ids and finish reasons, call by call; `gate`: not before it is set."""

    source = "sampled"

    def __init__(self, *answers, gate=None):
        self._answers = list(answers)
        self._gate = gate
        self.requests = []
        self.asked = anyio.Event()

    def describe(self):
        return {}

    async def generate(self, request):
        self.requests.append(request)
        self.asked.set()
        if self._gate is not None:
            await self._gate.wait()
        ids, reason = self._answers.pop(0)
        ids = np.array(ids, dtype=np.int32)
        stop = int(ids[-1]) if reason == "stop" else None
        return (
            GenerationRecord(
                prompt_ids=request.prompt_ids,
                output_ids=ids,
                logprobs=np.full(len(ids), -1.0, dtype=np.float32),
                logprob_kind="raw",
                finish_reason=reason,
                stop_id=stop,
                weight_version=1,
            ),
        )


@pytest.fixture(scope="module")
def template(example, qwen_tokenizer):
    return ChatTemplate.compile(qwen_tokenizer, (example / "qwen3.jinja").read_text())


@pytest.fixture
def made(template):
    """`made(engine, budget) -> (model, conversation, turns that were told)`."""

    def make(engine, budget=20, conversation=None):
        rollout = Rollout(
            rollout_id="a" * 32,
            group_id="b" * 32,
            member=0,
            attempt=0,
            task=Task(instance_id="t", problem_statement="p"),
            mode="train",
            conversation=conversation or Conversation(template),
        )
        told = []
        sampling = SamplingConfig(max_new_tokens=budget)
        model = ConversationModel(rollout, engine, sampling, on_turn=lambda: told.append(1))
        return model, rollout.conversation, told

    return make


@pytest.fixture(scope="module")
def text(qwen_tokenizer):
    return qwen_tokenizer.encode("one two three four five six")[:6]


@pytest.fixture(scope="module")
def stop(template):
    return min(template.stop_ids)


@pytest.mark.original("A-budget-after-abort")
async def test_a_turn_goes_on_with_what_is_left_of_its_budget(made, template, text, stop):
    engine = Given((text[:4], "abort"), (text[4:5], "abort"), ([stop], "stop"), ([stop], "stop"))
    model, conversation, _ = made(engine)
    with pytest.raises(EngineError):
        await model.ask(ASKED)
    with pytest.raises(EngineError):
        await model.ask(ASKED)
    held = Conversation.from_bytes(conversation.to_bytes(), template)  # as in another process
    model, conversation, _ = made(engine, conversation=held)
    answer = await model.ask(ASKED)
    assert [request.max_new_tokens for request in engine.requests] == [20, 16, 15]
    await model.ask([*ASKED, answer, *OTHER])
    assert engine.requests[-1].max_new_tokens == 20


@pytest.mark.original("B-generate-limit-0")
@pytest.mark.parametrize("budget", [4, 3])
async def test_a_turn_without_budget_is_over(made, text, stop, budget):
    engine = Given((text[:4], "abort"), ([stop], "stop"))
    model, conversation, told = made(engine, budget)
    with pytest.raises(EngineError):
        await model.ask(ASKED)
    answer, reason = await model.sample(model.prepare(ASKED))
    assert (reason, answer["role"], len(told), len(engine.requests)) == ("length", "assistant", 1, 1)
    assert (conversation.open_turn, conversation.turns) == (False, 1)
    await model.ask([*ASKED, answer, *OTHER])
    assert (conversation.turns, conversation.sampled_tokens) == (2, 5)


async def test_a_second_turn_at_once_is_refused(made, text, stop):
    gate = anyio.Event()
    engine = Given(([*text, stop], "stop"), ([stop], "stop"), gate=gate)
    model, conversation, _ = made(engine)
    answers = []

    async def ask():
        answers.append(await model.ask(ASKED))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await engine.asked.wait()
        request = engine.requests[0]
        for again in (model.ask(ASKED), model.ask(OTHER), model.sample(msgspec.structs.replace(request))):
            with pytest.raises(AgentError, match="while another of the rollout") as refused:
                await again
            assert refused.value.fault == "agent"
        with pytest.raises(AgentError):
            model.prepare(OTHER)
        gate.set()
    assert len(answers) == 1
    assert conversation.turns == 1
    await model.ask([*ASKED, answers[0], *OTHER])  # one after the other is what it is for


@pytest.mark.original("A-commit-once")
async def test_a_turn_that_failed_does_not_bar_the_next(made, stop):
    engine = Given(([], "abort"), ([stop], "stop"))
    model, conversation, _ = made(engine)
    with pytest.raises(EngineError):
        await model.ask(ASKED)
    await model.ask(ASKED)
    assert conversation.turns == 1
