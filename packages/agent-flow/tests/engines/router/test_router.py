"""One turn over servers that abort, refuse and die: no token twice, none lost, none beyond the budget."""

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from agent_flow.errors import EngineError

A, B = "http://a:1", "http://b:1"


def budgets(replica):
    return [request.max_new_tokens for request in replica.requests]


@pytest.mark.original("B-generate-limit-unset")
def test_a_turn_is_one_call(scripted, routed, turn, ids_of, model):
    replica = scripted(A)
    records = routed(lambda router: router.generate(turn()), replica)
    assert (ids_of(records), records[-1].finish_reason) == model((7, 8, 32), 40)
    (request,) = replica.requests
    assert request.max_new_tokens == 40
    assert request.stop_ids == {0}
    assert request.salt == "run/1"
    assert records[0].weight_version == 1


@pytest.mark.original("A-executor-engines", "B-generate-continues", "B-server-fails")
@pytest.mark.parametrize("end", ["abort", "die", "cut"])
def test_a_turn_goes_on_from_the_tokens_that_are_held(scripted, routed, turn, ids_of, model, plan, end):
    plans = [plan(end, 3), plan(end, 4), plan(end, 5)]
    a, b = scripted(A, plans[:2]), scripted(B, plans[2:])
    records = routed(lambda router: router.generate(turn(most=20)), a, b)
    assert (ids_of(records), records[-1].finish_reason) == model((7, 8, 32), 20)
    assert sum(map(len, (record.output_ids for record in records))) <= 20


@pytest.mark.original("A-budget-after-abort", "B-generate-budget")
@pytest.mark.parametrize("most", [1, 5, 12, 13])
def test_aborts_in_a_row_stay_within_the_budget(scripted, routed, turn, ids_of, model, plan, most):
    """slime#2003, verl#7207: each call had the whole budget again."""
    replica = scripted(A, [plan("abort", 1)] * 50)
    records = routed(lambda router: router.generate(turn(most=most)), replica)
    assert (ids_of(records), records[-1].finish_reason) == model((7, 8, 32), most)
    assert budgets(replica) == list(range(most, most - len(replica.requests), -1))


@pytest.mark.original("B-generate-limit-0")
def test_a_budget_used_up_at_the_abort_is_a_length_without_another_call(scripted, routed, turn, ids_of, plan):
    """`FullyAsyncLLMServerManager.generate` called again, with a limit of 0."""
    full = scripted(A, [plan("abort", 6), plan("abort", 4)])
    records = routed(lambda router: router.generate(turn(most=10)), full)
    assert len(ids_of(records)) == 10
    assert [record.finish_reason for record in records] == ["abort", "length"]
    assert budgets(full) == [10, 4]


@pytest.mark.original("A-budget-context")
def test_a_context_that_is_full_at_the_abort_is_a_length(scripted, routed, turn, ids_of, plan):
    """slime#2260: 19202 tokens in a context of 40960, and again a budget of 24576."""
    replica = scripted(A, [plan("abort", 6), plan("abort", 3)], context=12)
    records = routed(lambda router: router.generate(turn(most=40)), replica)
    assert len(ids_of(records)) == 9
    assert records[-1].finish_reason == "length"
    assert budgets(replica) == [9, 3]


@pytest.mark.parametrize("length", [12, 13, 50])
def test_a_prompt_without_room_is_a_length_without_a_call(scripted, routed, turn, length):
    replica = scripted(A, context=12)
    (record,) = routed(lambda router: router.generate(turn(prompt=range(1, length + 1))), replica)
    assert (len(record.output_ids), record.finish_reason) == (0, "length")
    assert len(record.prompt_ids) == length
    assert replica.requests == []


def test_an_abort_that_came_with_the_stop_token_has_ended_the_turn(
    scripted, routed, turn, ids_of, model, plan
):
    prompt = next((n, 1) for n in range(1, 300) if model((n, 1), 9)[1] == "stop")
    ids, _ = model(prompt, 9)

    class Late(scripted):
        """Says `abort` with the stop token as its last id."""

        async def sample(self, request):
            *first, last = await super().sample(request)
            return (
                *first,
                type(last)(
                    prompt_ids=last.prompt_ids,
                    output_ids=last.output_ids,
                    logprobs=last.logprobs,
                    logprob_kind="raw",
                    finish_reason="abort",
                    weight_version=1,
                ),
            )

    late = Late(A)
    records = routed(lambda router: router.generate(turn(prompt=prompt, most=9)), late)
    assert ids_of(records, prompt) == ids
    assert (records[-1].finish_reason, records[-1].stop_id) == ("stop", 0)
    assert len(late.requests) == 1


@pytest.mark.original("B-generate-empty")
def test_empty_aborts_change_nothing(scripted, routed, turn, ids_of, model, plan):
    replica = scripted(A, [plan("abort"), plan("abort", 3), plan("abort"), plan("abort")])
    records = routed(lambda router: router.generate(turn(most=20)), replica)
    assert (ids_of(records), records[-1].finish_reason) == model((7, 8, 32), 20)
    assert [len(record.output_ids) for record in records] == [3, 17]


@pytest.mark.original("B-generate-empty")
def test_an_engine_that_keeps_aborting_is_an_error_with_what_there_is(scripted, routed, turn, ids_of, plan):
    replica = scripted(A, [plan("abort", 3), *[plan("abort")] * 99])

    async def main(router):
        with pytest.raises(EngineError, match="keeps aborting: 5 calls in a row") as caught:
            await router.generate(turn())
        return caught.value, anyio.current_time()

    error, seconds = routed(main, replica, max_empty_calls=5)
    assert (error.cause, error.retryable) == ("keeps_aborting", True)
    assert len(ids_of(error.partial)) == 3
    assert len(replica.requests) == 6
    assert (0.1 + 0.2 + 0.4 + 0.8) / 2 < seconds < 2


def test_what_happened_is_counted(scripted, routed, turn, plan):
    replica = scripted(A, [plan("refuse"), plan("abort", 3), plan("cut", 4), plan("abort"), plan("abort", 2)])

    async def main(router):
        await router.generate(turn())
        return router.stats()

    assert routed(main, replica) == {
        "calls": 6,
        "calls_failed": 2,
        "failovers": 0,
        "retries": 2,
        "aborts_continued": 3,
        "affinity_breaks": 0,
        "salts_overtaken": 0,
        "tokens_thrown_away": 0,
        "breaker_openings": 0,
        "joins_refused": 0,
        "replicas": 1,
        "ready": 1,
        "running": 0,
    }


def test_what_is_refused_for_good_is_not_tried_again(scripted, routed, turn, ids_of, plan):
    """slime#2261: a 400 that was asked for ever."""
    a, b = scripted(A, [plan("abort", 3), plan("wrong")]), scripted(B)
    with pytest.raises(EngineError, match="status of wrong") as caught:
        routed(lambda router: router.generate(turn()), a, b)
    assert not caught.value.retryable
    assert len(ids_of(caught.value.partial)) == 3
    assert len(a.requests) + len(b.requests) == 2


def test_a_refusal_that_may_pass_is_taken_elsewhere(scripted, routed, turn, ids_of, model, plan):
    a, b = scripted(A, [plan("refuse")]), scripted(B)

    async def main(router):
        return await router.generate(turn()), router.stats()

    records, stats = routed(main, a, b)
    assert ids_of(records) == model((7, 8, 32), 40)[0]
    assert (len(a.requests), len(b.requests)) == (1, 1)
    assert (stats["calls_failed"], stats["failovers"], stats["breaker_openings"]) == (1, 1, 0)


def test_one_server_that_starts_again_is_waited_for(scripted, routed, turn, ids_of, model, plan):
    replica = scripted(A, [plan("die", 7, down_s=100)])

    async def main(router):
        return await router.generate(turn()), router.stats()

    records, stats = routed(main, replica)
    assert ids_of(records) == model((7, 8, 32), 40)[0]
    assert (stats["retries"], stats["breaker_openings"]) == (1, 0)
    assert replica.asked < 50


def test_all_servers_down_is_an_error_that_names_each(scripted, routed, turn, ids_of, plan):
    a, b = scripted(A, [plan("die", 3, down_s=9999)]), scripted(B, [plan("die", 4, down_s=9999)])

    async def main(router):
        began_s = anyio.current_time()
        with pytest.raises(EngineError) as caught:
            await router.generate(turn())
        return caught.value, anyio.current_time() - began_s

    error, seconds = routed(main, a, b, patience_s=60)
    assert (error.cause, error.retryable) == ("no_replica", True)
    assert f"{A}: connection refused" in error.message
    assert f"{B}: connection refused" in error.message
    assert len(ids_of(error.partial)) == 7
    assert 60 <= seconds < 62


def test_a_call_that_is_too_much_for_every_server_ends(scripted, routed, turn, plan):
    a, b = scripted(A, [plan("die", down_s=1)] * 99), scripted(B, [plan("die", down_s=1)] * 99)
    with pytest.raises(
        EngineError, match="6 calls in a row of one turn brought no token; the last: the conn"
    ) as e:
        routed(lambda router: router.generate(turn()), a, b, max_empty_calls=6)
    assert e.value.cause == "keeps_failing"


def test_an_answer_beyond_the_budget_is_not_taken(scripted, routed, turn, ids_of, model):
    class Greedy(scripted):
        async def sample(self, request):
            more = type(request)(
                **{
                    **{f: getattr(request, f) for f in request.__struct_fields__},
                    "max_new_tokens": request.max_new_tokens + 1,
                }
            )
            return await super().sample(more)

    records = routed(lambda router: router.generate(turn(most=20)), Greedy(A), scripted(B))
    assert (ids_of(records), records[-1].finish_reason) == model((7, 8, 32), 20)


@pytest.mark.original("B-generate-for-partial")
def test_abort_of_a_rollout_ends_its_turn_with_what_there_is(scripted, routed, turn, ids_of, model):
    replica = scripted(A)
    mine, other = turn("mine"), turn("other", prompt=(5, 5))

    async def main(router):
        got = {}

        async def run(request):
            got[request.rollout_id] = await router.generate(request)

        async with anyio.create_task_group() as group:
            group.start_soon(run, mine)
            group.start_soon(run, other)
            await anyio.sleep(0.055)
            await router.abort(mine.rollout_id)
            assert mine.rollout_id in got or router.stats()["running"] == 1
        return got

    got = routed(main, replica)
    ids = ids_of(got[mine.rollout_id])
    assert ids == model((7, 8, 32), 40)[0][: len(ids)]
    assert 0 < len(ids) < 10
    assert got[mine.rollout_id][-1].finish_reason == "abort"
    assert ids_of(got[other.rollout_id], (5, 5)) == model((5, 5), 40)[0]
    assert len(replica.requests) == 2


def test_an_abort_that_comes_before_its_call_is_sent_again(scripted, routed, turn):
    """SkyRL#537: a request that was not in the scheduler yet escaped the abort."""

    class Slow(scripted):
        """Knows a call only a second after it was sent."""

        async def abort(self, rid):
            if anyio.current_time() > 1:
                await super().abort(rid)
            else:
                self.aborts.append(rid)

    replica = Slow(A, token_s=1000)

    async def main(router):
        got = []
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: _into(got, router.generate(turn("a"))))
            await anyio.sleep(0.001)
            await router.abort(turn("a").rollout_id)
        return got[0]

    (record,) = routed(main, replica)
    assert (record.finish_reason, len(record.output_ids)) == ("abort", 0)
    assert len(replica.aborts) > 2


def test_abort_of_a_rollout_that_waits_for_a_server(scripted, routed, turn, ids_of, plan):
    replica = scripted(A, [plan("die", 3, down_s=9999)])

    async def main(router):
        got = []
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: _into(got, router.generate(turn())))
            await anyio.sleep(50)
            await router.abort(turn().rollout_id)
            await anyio.lowlevel.checkpoint()
            assert got
        return got[0]

    records = routed(main, replica)
    assert len(ids_of(records)) == 3
    assert records[-1].finish_reason == "abort"


async def _into(got, work):
    got.append(await work)


def test_a_removed_server_hands_its_turns_on(scripted, routed, turn, ids_of, model):
    a, b = scripted(A), scripted(B)

    async def main(router):
        got = []
        async with anyio.create_task_group() as group:
            for name in "abcd":
                group.start_soon(lambda name=name: _into(got, router.generate(turn(name))))
            await anyio.sleep(0.105)
            await router.remove(A)
            calls = len(a.requests)
        assert len(a.requests) == calls
        return got

    for records in routed(main, a, b):
        assert ids_of(records) == model((7, 8, 32), 40)[0]
    assert len(a.requests) == 2
    assert len(b.requests) == 4


def test_generate_outside_the_session_is_an_error(scripted, turn):
    from agent_flow.clock import Clock
    from agent_flow.engines.router import EngineRouter, RouterConfig
    from agent_flow.engines.version import VersionReader

    router = EngineRouter([scripted(A)], VersionReader(""), RouterConfig(), Clock())
    with pytest.raises(EngineError, match="outside session"):
        anyio.run(router.generate, turn())


@pytest.mark.original("B-generate-callers-values")
def test_the_prompt_of_the_caller_is_not_changed(scripted, routed, turn, plan):
    request = turn()
    before = request.prompt_ids.copy()
    routed(lambda router: router.generate(request), scripted(A, [plan("abort", 3)]))
    assert np.array_equal(request.prompt_ids, before)


def test_calls_do_not_depend_on_the_task(scripted, routed, turn):
    seen = []
    for task in ("one", "two"):
        replica = scripted(A)
        routed(lambda router, task=task: router.generate(turn(task_id=task)), replica)
        seen.append([(r.rid, r.prompt_ids.tolist(), r.salt, r.session) for r in replica.requests])
    assert seen[0] == seen[1]
