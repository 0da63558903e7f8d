"""Tokens of two policy runs: their versions cannot be compared, whoever counts higher."""

import anyio
from agent_flow.config import SamplingConfig
from agent_flow.engines.version import VersionReader
from agent_flow.engines.weights import CurrentWeights
from agent_flow.model import ConversationModel
from agent_flow.rollout import samples_of

ASKED = [{"role": "user", "content": "what is it?"}]
MORE = [{"role": "user", "content": "more"}]


def asking(rollout, router):
    return ConversationModel(rollout, router, SamplingConfig(max_new_tokens=20), on_turn=lambda: None)


def sample_of(rollout, router):
    (sample,) = samples_of(rollout, "sampled", router.describe())
    return sample


def went_back(router, replica):
    replica.weights = "run2/0"
    router.set_version("run2/0")


def test_turns_of_two_runs_are_not_trained(scripted, routed, rollout):
    a = scripted("http://a:1", weights="run/5")

    async def main(router):
        model = asking(rollout, router)
        first = await model.sample(model.prepare(ASKED))
        went_back(router, a)
        await model.sample(model.prepare([*ASKED, first[0], *MORE]))
        return sample_of(rollout, router)

    sample = routed(main, a)
    assert (sample.policy_run, sample.provenance["policy_runs"]) == ("run", 2)
    assert (sample.in_loss, sample.in_baseline, sample.status) == (False, False, "failed")
    assert sample.provenance["policy_run"] == rollout.produced_by["policy_run"] == "run"
    assert not rollout.in_loss


def test_one_turn_of_two_runs_is_not_trained(scripted, routed, plan, rollout):
    a = scripted("http://a:1", [plan("cut", 5)], weights="run/5")

    async def main(router):
        model = asking(rollout, router)

        async def update():
            await anyio.sleep(0.055)
            went_back(router, a)

        async with anyio.create_task_group() as group:
            group.start_soon(update)
            await model.sample(model.prepare(ASKED))
        return sample_of(rollout, router)

    sample = routed(main, a)
    assert (sample.policy_run, sample.in_loss, sample.in_baseline) == ("run", False, False)


def test_a_rollout_keeps_the_run_that_sampled_it(scripted, routed, rollout):
    a = scripted("http://a:1", weights="run/5")

    async def main(router):
        model = asking(rollout, router)
        await model.sample(model.prepare(ASKED))
        went_back(router, a)
        return sample_of(rollout, router)

    sample = routed(main, a)
    assert (sample.policy_run, sample.in_loss, sample.status) == ("run", True, "completed")
    assert "policy_runs" not in sample.provenance


def test_an_answer_of_the_run_before_is_not_the_current_weights(scripted, routed, turn):
    a = scripted("http://a:1", weights="run/5")
    b = scripted("http://b:1", weights="run/5")

    async def main(router):
        async with anyio.create_task_group() as group:
            group.start_soon(router.generate, turn(most=20))
            await anyio.sleep(0.05)
            (busy,) = [replica for replica in (a, b) if replica.requests]
            idle = b if busy is a else a
            went_back(router, idle)
        return router.describe()["engine_weights"]

    assert routed(main, a, b, patience_s=5) == "run2/0"


def test_only_the_current_run_advances():
    weights = CurrentWeights(VersionReader("run"))
    weights.see("run/5")
    assert weights.advance(6, "run")
    weights.set("run2/0")
    assert not weights.advance(7, "run")
    assert weights.text == "run2/0"
    assert weights.advance(1, "run2")
