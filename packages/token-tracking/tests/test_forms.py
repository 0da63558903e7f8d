"""Every form of export trains the same tokens, each once, with the same numbers beside it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_tracking import (
    ChatTemplate,
    Conversation,
    GenerationRecord,
    Sample,
    form_costs,
    prefix_tree,
    turn_samples,
)

Compile = Callable[..., ChatTemplate]
Message = dict[str, Any]
IDENTITY: dict[str, Any] = {
    "group_id": "1" * 32,
    "task_id": "task",
    "reward": 0.5,
    "status": "completed",
    "source": "sampled",
}
ROLLOUT = "0" * 32


def user(content: str) -> Message:
    return {"role": "user", "content": content}


class Agent:
    """Answers come token by token, each with a log-probability and a version of its own."""

    def __init__(self, template: ChatTemplate):
        self.conversation = Conversation(template)
        self.history: list[Message] = [{"role": "system", "content": "sys"}, user("q")]
        self.count = 0

    def say(self, text: str, *, cut_at: int = 0, kept: bool = False, reason: str = "stop") -> None:
        conversation = self.conversation
        conversation.advance(self.history)
        tokenizer = conversation.template.tokenizer
        ids = tokenizer.encode_plain(text)
        ids = [*ids, 151645] if reason == "stop" or not ids else ids
        pieces = [(0, cut_at, "abort"), (cut_at, len(ids), reason)] if 0 < cut_at < len(ids) else []
        for start, end, why in pieces or [(0, len(ids), reason)]:
            self.count += 1
            part = np.array(ids[start:end], np.int32)
            sets: dict[str, Any] = {}
            if kept:
                sets["kept_ids"] = np.stack([part, part - 1], axis=1).ravel()
                sets["kept_offsets"] = np.arange(0, 2 * len(part) + 1, 2, dtype=np.int64)
            message = conversation.record(
                GenerationRecord(
                    prompt_ids=conversation.prompt_ids(),
                    output_ids=part,
                    logprobs=np.full(len(part), -0.25 * self.count, np.float32),
                    finish_reason=why,  # type: ignore[arg-type]
                    weight_version=self.count,
                    logprob_kind="raw",
                    **sets,
                )
            )
        self.history.append(dict(message))

    def samples(self, rollout_id: str = ROLLOUT, **kwargs: Any) -> tuple[Sample, ...]:
        rewards = [float(n) for n in range(self.conversation.turns)]
        return self.conversation.samples(**(IDENTITY | kwargs), rollout_id=rollout_id, turn_rewards=rewards)


def trained(arrays: Any) -> list[tuple[int, float, int]]:
    at = np.flatnonzero(arrays.loss_mask)
    return sorted(
        zip(
            arrays.token_ids[at].tolist(),
            arrays.logprobs[at].tolist(),
            arrays.versions[at].tolist(),
            strict=True,
        )
    )


def check_forms(samples: tuple[Sample, ...], sampled: int) -> None:
    tree, steps, costs = prefix_tree(samples), turn_samples(samples), form_costs(samples)
    wanted = sorted(token for sample in samples for token in trained(sample))
    assert len(wanted) == sampled
    assert trained(tree) == wanted
    assert sorted(token for step in steps for token in trained(step)) == wanted
    assert {cost.trained_tokens for cost in costs.values()} == {sampled}
    assert costs["branch"].total_tokens == sum(map(len, samples))
    assert costs["turn"].total_tokens == sum(map(len, steps))
    assert costs["tree"].total_tokens == len(tree.token_ids) <= costs["branch"].total_tokens
    assert costs["tree"].rows == sum(node.parent is None for node in tree.nodes)
    for number, sample in enumerate(samples):
        at = tree.sequence(number)
        assert np.array_equal(tree.token_ids[at], sample.token_ids)
        assert np.array_equal(tree.positions[at], np.arange(len(sample)))
        mine = at[sample.loss_mask == 1]
        assert np.array_equal(tree.logprobs[mine], sample.logprobs[sample.loss_mask == 1])
        if tree.kept_offsets is not None and sample.kept_offsets is not None:
            counts = np.diff(tree.kept_offsets)[mine]
            assert np.array_equal(counts, np.diff(sample.kept_offsets)[sample.loss_mask == 1])
    assert [node.start for node in tree.nodes] == [0, *(node.end for node in tree.nodes[:-1])]
    assert all(node.parent is None or node.parent < at for at, node in enumerate(tree.nodes))
    rewards = sorted(t.reward for s in samples for t in s.turns if t.reward is not None)
    assert sorted(t.reward for s in steps for t in s.turns if t.reward is not None) == rewards
    assert sorted(t.reward for t in tree.turns if t.reward is not None) == rewards
    assert all(tree.loss_mask[t.start : t.end].all() for t in tree.turns)


STEP = st.tuples(
    st.sampled_from(["go", "go", "retry", "edit", "drop", "compact", "other"]),
    st.sampled_from(["yes", "yes, it is", "<think>\nhm\n</think>\n\nno", "yes and no, who knows"]),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["stop", "stop", "length"]),
)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
@given(steps=st.lists(STEP, max_size=6))
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_form_trains_the_same_tokens(name: str, steps: list[Any], compiled: Compile):
    """Promise 3: no token is trained twice, or lost, whatever the harness does to its history."""
    agent = Agent(compiled(name))
    agent.say("first")
    for number, (what, text, cut_at, kept, reason) in enumerate(steps):
        history = agent.history
        if what == "go":
            history.append(user(f"and {len(history)}?"))
        elif what == "retry":
            history.pop()
        elif what == "edit":
            # The beginning of what was sampled, as prompt: its ids are those of a part of a turn.
            history[-1:] = [{"role": "assistant", "content": str(history[-1]["content"])[:3]}, user("on")]
        elif what == "drop":
            del history[2:]
            history.append(user("again"))
        elif what == "compact":
            agent.history = [history[0], user("summary of all: yes"), user("go on")]
        else:
            agent.history = [{"role": "system", "content": "sub"}, user("find it")]
        # Numbered: the same text from other tokens would be ambiguous, and set aside.
        agent.say(f"{text} {number}", cut_at=cut_at, kept=kept, reason=reason)
    check_forms(agent.samples(), agent.conversation.sampled_tokens)


def test_a_turn_is_a_sample_with_all_before_it_as_prompt(compiled: Compile):
    agent = Agent(compiled("qwen2_5"))
    agent.say("one", kept=True)
    agent.history.append(user("more"))
    agent.say("two and a half", cut_at=2, kept=True)
    (whole,) = agent.samples(in_loss=False, in_baseline=False)
    first, second = turn_samples((whole,))
    assert [(s.part, s.parts, s.prompt_length) for s in (first, second)] == [
        (0, 2, whole.turns[0].start),
        (1, 2, whole.turns[1].start),
    ]
    assert np.array_equal(second.token_ids, whole.token_ids)
    assert np.isnan(second.logprobs[: second.prompt_length]).all()
    assert (second.versions[: second.prompt_length] == -1).all()
    assert [t.finish_reason for t in second.turns] == ["abort", "stop"]
    assert [t.reward for t in second.turns] == [None, 1.0]
    assert (second.reward, second.in_loss, second.in_baseline) == (0.5, False, False)
    assert second.kept_ids is not None
    assert second.kept_offsets is not None
    assert second.kept_offsets[second.prompt_length] == 0
    assert len(second.kept_ids) == 2 * second.trained_tokens


def test_a_group_shares_its_prompt_in_one_tree(compiled: Compile):
    """Rollouts of one prompt: the prompt once, equal answers apart, each weighted by its own leaf."""
    samples: list[Sample] = []
    for number, answer in enumerate(["yes", "yes", "no"]):
        agent = Agent(compiled("qwen2_5"))
        agent.say(answer)
        samples += agent.samples(f"{number:032x}", reward=float(number))
    tree = prefix_tree(samples)
    assert [(node.parent, node.sample) for node in tree.nodes] == [(None, 0), (0, 0), (0, 1), (0, 2)]
    assert tree.nodes[0].end == samples[0].prompt_length
    assert [(leaf.node, leaf.reward, leaf.part, leaf.parts) for leaf in tree.leaves] == [
        (1, 0.0, 0, 1),
        (2, 1.0, 0, 1),
        (3, 2.0, 0, 1),
    ]
    check_forms(tuple(samples), sum(sample.trained_tokens for sample in samples))


def test_the_cost_of_forms_is_what_they_hold(compiled: Compile):
    agent = Agent(compiled("qwen3"))
    for number in range(4):
        agent.say(f"<think>\nhm {number}\n</think>\n\nanswer {number}")
        agent.history.append(user(f"more {number}"))
    costs = form_costs(agent.samples())
    assert [costs[form].rows for form in ("branch", "turn", "tree")] == [4, 4, 1]
    assert costs["tree"].total_tokens < costs["branch"].total_tokens
    assert form_costs(())["tree"].total_tokens == 0
    assert len(prefix_tree(()).token_ids) == 0
