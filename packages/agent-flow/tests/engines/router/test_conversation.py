"""A conversation takes a router's turns as they are: in pieces, over versions, at the end of the context."""

import anyio
import numpy as np
import pytest
from agent_flow.config import SamplingConfig
from agent_flow.errors import ContextFullError
from agent_flow.model import ConversationModel
from agent_flow.rollout import samples_of

ASKED = [{"role": "user", "content": "what is it?"}]


def sampled(rollout):
    (sample,) = samples_of(rollout, "sampled", {})
    mask = sample.loss_mask == 1
    return sample.token_ids[mask].tolist(), sample.versions[mask].tolist(), sample.logprobs[mask]


@pytest.mark.original("A-weight-version", "B-generate-logprobs", "B-partial-turns")
def test_a_turn_in_pieces_is_one_turn(scripted, routed, model, plan, rollout):
    a = scripted("http://a:1", [plan("abort", 3), plan("die", 5, down_s=1), plan("abort"), plan("cut", 4)])

    async def main(router):
        sampling = SamplingConfig(max_new_tokens=30)
        asking = ConversationModel(rollout, router, sampling, on_turn=lambda: None)
        request = asking.prepare(ASKED)

        async def update():
            await anyio.sleep(0.5)
            a.weights = "run/2"

        async with anyio.create_task_group() as group:
            group.start_soon(update)
            answer, reason = await asking.sample(request)
        return request.prompt_ids.tolist(), answer, reason

    prompt, answer, reason = routed(main, a)
    ids, versions, logprobs = sampled(rollout)
    assert (ids, reason) == model(prompt, 30)
    assert versions == [1] * 8 + [2] * (len(ids) - 8)
    assert np.all(logprobs == -1.0)
    assert answer["role"] == "assistant"
    assert rollout.conversation.turns == 1


@pytest.mark.original("A-limit-context")
def test_a_prompt_without_room_is_a_full_context(scripted, routed, rollout):
    async def main(router):
        asking = ConversationModel(rollout, router, SamplingConfig(), on_turn=lambda: None)
        await asking.sample(asking.prepare(ASKED))

    with pytest.raises(ContextFullError):
        routed(main, scripted("http://a:1", context=5))
