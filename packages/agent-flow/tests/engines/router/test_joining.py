"""Which servers are called: the join rule, the circuit breaker, affinity and load, salts and sessions."""

from itertools import pairwise

import anyio
import pytest
from agent_flow.errors import UsageError

A, B, C = "http://a:1", "http://b:1", "http://c:1"


async def _into(got, work):
    got.append(await work)


def test_servers_with_different_weights_are_refused_at_the_start(scripted, routed, turn):
    a, b = scripted(A, weights="run/2"), scripted(B, weights="default")
    with pytest.raises(UsageError, match=r"different weights: http://a:1: 'run/2'; http://b:1: 'default'"):
        routed(lambda router: router.generate(turn()), a, b)
    assert a.requests == b.requests == []


def test_servers_of_another_policy_run_are_refused_at_the_start(scripted, routed, turn):
    with pytest.raises(UsageError, match="'other/2', which are not of policy run 'run'") as caught:
        routed(lambda router: router.generate(turn()), scripted(A, weights="other/2"))
    assert "'other'" in caught.value.fix


def test_servers_with_different_contexts_are_refused_at_the_start(scripted, routed, turn):
    with pytest.raises(UsageError, match="context lengths: http://a:1: 10; http://b:1: 20"):
        routed(lambda router: router.generate(turn()), scripted(A, context=10), scripted(B, context=20))


def test_a_server_that_is_not_there_is_named_at_the_start(scripted, routed, turn):
    b = scripted(B)
    b.down_until_s = 99
    with pytest.raises(UsageError, match=r"addresses: http://b:1: connection refused\n.*start the serv"):
        routed(lambda router: router.generate(turn()), scripted(A), b)


def test_a_server_that_does_not_answer_is_named_at_the_start(scripted, routed, turn):
    class Silent(scripted):
        async def info(self):
            await anyio.sleep_forever()

    with pytest.raises(UsageError, match="http://b:1: no answer within 10 s"):
        routed(lambda router: router.generate(turn()), scripted(A), Silent(B))


@pytest.mark.parametrize("weights", ["default", "run/1", "other/9", "", "run/x", "run/3/4"])
def test_a_server_with_other_weights_than_the_current_is_not_called(scripted, routed, turn, weights):
    a, b = scripted(A, weights="run/2"), scripted(B, weights=weights)

    async def main(router):
        router.add(b)
        for n in range(8):
            await router.generate(turn(f"r{n}"))
            await anyio.sleep(20)
        assert (router.stats()["ready"], router.stats()["joins_refused"]) == (1, 1)
        assert b.requests == []
        b.weights = "run/2"
        await anyio.sleep(10)
        assert router.stats()["ready"] == 2
        await router.generate(turn("new"))

    routed(main, a)
    assert 5 < b.asked < 100
    assert len(b.requests) == 1


def test_before_a_version_is_known_a_newcomer_has_to_agree(scripted, routed, turn):
    a, b = scripted(A, weights="default"), scripted(B, weights="v7")

    async def main(router):
        router.add(b)
        await anyio.sleep(20)
        assert router.stats()["ready"] == 1
        b.weights = "default"
        await anyio.sleep(10)
        assert router.stats()["ready"] == 2
        return await router.generate(turn())

    (record,) = routed(main, a)
    assert record.weight_version == -2


def test_a_version_that_was_set_is_waited_for(scripted, routed, turn):
    a, b = scripted(A, weights="default"), scripted(B, weights="default")

    async def main(router):
        router.set_version("run/5")
        got = []
        async with anyio.create_task_group() as group:
            group.start_soon(_into, got, router.generate(turn()))
            await anyio.sleep(30)
            assert a.requests == b.requests == []
            a.weights, b.weights = "run/5", "run/4"
        assert [record.weight_version for record in got[0]] == [5]
        assert router.describe()["engine_weights"] == "run/5"

    routed(main, a, b)
    assert (len(a.requests), len(b.requests)) == (1, 0)


@pytest.mark.parametrize("text", ["default", "5", "run/", "run/-1", "run/2147483648", "/3"])
def test_what_is_no_version_cannot_be_set(scripted, routed, text):
    async def main(router):
        with pytest.raises(UsageError, match="is no weight version"):
            router.set_version(text)

    routed(main, scripted(A))


def test_a_trainer_that_went_back_counts_in_a_new_policy_run(scripted, routed, turn):
    """miles#2244: after a failover the counter goes back."""
    a, b = scripted(A, weights="run/7"), scripted(B, weights="run/7")

    async def main(router):
        router.set_version("run-2/3")
        b.weights = "run-2/3"
        await router.generate(turn())

    routed(main, a, b)
    assert (len(a.requests), len(b.requests)) == (0, 1)


def test_newer_weights_in_an_answer_make_the_others_wait_for_theirs(scripted, routed, turn, ids_of, model):
    a, b = scripted(A), scripted(B)

    async def main(router):
        got = []
        async with anyio.create_task_group() as group:
            group.start_soon(_into, got, router.generate(turn()))
            await anyio.sleep(0.205)
            a.weights = "run/2"
        (records,) = got
        assert [record.weight_version for record in records] == [1, 2]
        assert ids_of(records) == model((7, 8, 32), 40)[0]
        await anyio.sleep(5)
        for n in range(3):
            await router.generate(turn(f"r{n}"))
        assert (len(a.requests), len(b.requests)) == (4, 0)
        b.weights = "run/2"
        await anyio.sleep(6)
        assert router.stats()["ready"] == 2

    routed(main, a, b)


def test_a_server_that_started_again_unseen_gives_no_token(scripted, routed, turn, ids_of, model):
    """It answers with the weights of its disk before anybody could ask it."""
    a, b = scripted(A), scripted(B)

    async def main(router):
        await router.generate(turn())
        a.disk_until_s = 1000
        records = await router.generate(turn())
        return records, router.stats()

    records, stats = routed(main, a, b)
    assert (ids_of(records), {record.weight_version for record in records}) == (model((7, 8, 32), 40)[0], {1})
    assert stats["tokens_thrown_away"] == 40
    assert (len(a.requests), len(b.requests)) == (2, 1)


def test_a_server_that_died_is_not_called_with_the_weights_of_its_disk(scripted, routed, turn, plan):
    a = scripted(A, [plan("die", 5, down_s=3, reload_s=50)])

    async def main(router):
        records = await router.generate(turn())
        assert anyio.current_time() > 53
        return records

    records = routed(main, a)
    assert {record.weight_version for record in records} == {1}
    assert a.requests[-1].max_new_tokens == 35


def test_a_breaker_opens_and_one_small_call_closes_it(scripted, routed, turn, plan):
    a = scripted(A, [plan("refuse")] * 3)

    async def main(router):
        began_s = anyio.current_time()
        await router.generate(turn())
        assert 5 <= anyio.current_time() - began_s < 6
        return router.stats()

    stats = routed(main, a, breaker_failures=3, breaker_open_s=5)
    assert stats["breaker_openings"] == 1
    assert [request.max_new_tokens for request in a.requests] == [40, 40, 40, 1, 40]


def test_a_breaker_that_opens_again_stays_open_longer(scripted, routed, turn, plan):
    """Refused twice at once; then once after each small call, which succeeds."""
    tried_s = []

    class Timed(scripted):
        async def sample(self, request):
            if request.max_new_tokens == 1:
                tried_s.append(anyio.current_time())
            return await super().sample(request)

    a = Timed(A, [plan("refuse")] * 5)

    async def main(router):
        await router.generate(turn())
        return router.stats()

    stats = routed(main, a, breaker_failures=2, breaker_open_s=5)
    assert stats["breaker_openings"] == 4
    assert [round(later - before) for before, later in pairwise([0, *tried_s])] == [5, 10, 20, 40]


def test_an_open_breaker_of_a_server_with_other_weights_is_asked_now_and_then(scripted, routed, turn, plan):
    a, b = scripted(A, [plan("refuse")]), scripted(B)

    async def main(router):
        await router.generate(turn())
        router.set_version("run/2")
        b.weights = "run/2"
        await anyio.sleep(100)
        assert router.stats()["ready"] == 1
        asked = a.asked
        await anyio.sleep(100)
        return a.asked - asked

    assert 15 < routed(main, a, b, breaker_failures=1) < 50


def test_a_session_without_servers_is_refused(routed):
    with pytest.raises(UsageError, match="there are no servers"):
        routed(None)


def test_failures_with_a_success_in_between_open_no_breaker(scripted, routed, turn, plan):
    replica = scripted(A, [plan("refuse"), plan()] * 3)

    async def main(router):
        for n in range(3):
            await router.generate(turn(f"r{n}"))
        return router.stats()

    stats = routed(main, replica, breaker_failures=2)
    assert (stats["calls_failed"], stats["breaker_openings"]) == (3, 0)


def test_many_calls_that_fail_at_once_are_one_failure(scripted, routed, turn, plan, ids_of, model):
    a = scripted(A, [plan("die", 50, down_s=0.01), *[plan()] * 9])

    async def main(router):
        got = []
        async with anyio.create_task_group() as group:
            for n in range(10):
                group.start_soon(_into, got, router.generate(turn(f"r{n}", most=60)))
        return got, router.stats()

    got, stats = routed(main, a, breaker_failures=3)
    assert all(ids_of(records) == model((7, 8, 32), 60)[0] for records in got)
    assert (stats["calls_failed"], stats["breaker_openings"]) == (10, 0)


@pytest.mark.original("B-sticky")
def test_a_rollout_stays_where_its_prefix_is(scripted, routed, turn):
    replicas = [scripted(address) for address in (A, B, C)]

    async def main(router):
        for _ in range(5):
            for n in range(6):
                await router.generate(turn(f"r{n}"))
        return router.stats()

    stats = routed(main, *replicas)
    assert stats["affinity_breaks"] == 0
    for replica in replicas:
        assert len(replica.requests) == 10
        assert len({request.session for request in replica.requests}) == 2


@pytest.mark.original("B-select")
def test_a_rollout_leaves_a_server_that_has_much_more_to_do(scripted, routed, turn):
    a, b = scripted(A), scripted(B)

    async def main(router):
        await router.remove(B)
        for n in range(6):
            await router.generate(turn(f"r{n}"))  # all of them at a
        router.add(b)
        await anyio.sleep(1)
        async with anyio.create_task_group() as group:
            for n in range(6):
                group.start_soon(router.generate, turn(f"r{n}"))
        return router.stats()

    stats = routed(main, a, b, affinity_calls=2)
    assert stats["affinity_breaks"] == len(b.requests) == 2
    assert len(a.requests) == 6 + 4


def test_a_prefix_that_was_pushed_out_holds_nobody(scripted, routed, turn):
    """Two rollouts of 43 tokens do not fit a KV cache of 60: the first is pushed out."""
    a, b = scripted(A, kv_tokens=60), scripted(B, kv_tokens=1000)

    async def main(router):
        await router.generate(turn("first"))  # a
        await router.generate(turn("at b"))
        await router.remove(B)
        await router.generate(turn("second"))  # a, and pushes the first out
        router.add(b)
        await anyio.sleep(1)
        await router.generate(turn("first"))

    routed(main, a, b)
    assert (len(a.requests), len(b.requests)) == (2, 2)


def test_a_server_that_started_again_holds_nobody(scripted, routed, turn):
    a, b = scripted(A), scripted(B)

    async def main(router):
        await router.remove(B)
        await router.generate(turn("first"))
        a.die(1, 0)
        await router.generate(turn("second"))  # waits for a
        router.add(b)
        await anyio.sleep(1)
        async with anyio.create_task_group() as group:
            group.start_soon(router.generate, turn("second"))
            await anyio.sleep(0.1)
            await router.generate(turn("first"))

    routed(main, a, b)
    assert (len(a.requests), len(b.requests)) == (3, 1)


@pytest.mark.original("B-select")
def test_a_prompt_goes_where_the_cache_has_room(scripted, routed, turn):
    a, b = scripted(A, kv_tokens=100), scripted(B, kv_tokens=1000)

    async def main(router):
        async with anyio.create_task_group() as group:
            for n in range(10):
                group.start_soon(router.generate, turn(f"r{n}", prompt=range(1, 41)))

    routed(main, a, b)
    assert (len(a.requests), len(b.requests)) == (2, 8)


@pytest.mark.original("A-query-rid")
def test_the_session_is_one_for_an_attempt(scripted, routed, turn, plan):
    replica = scripted(A, [plan("abort", 3)])

    async def main(router):
        await router.generate(turn("a"))
        await router.generate(turn("a"))
        await router.generate(turn("a", attempt=1))
        await router.generate(turn("b"))

    routed(main, replica)
    sessions = [request.session for request in replica.requests]
    assert len({*sessions[:3]}) == 1
    assert len({*sessions}) == 3
    rids = [request.rid for request in replica.requests]
    assert len({*rids}) == 5


@pytest.mark.parametrize(
    ("rule", "salts"),
    [
        ("salt_now", ["run/1", "run/2", "run/2", "run/2"]),
        ("salt_at_start", ["run/1", "run/1", "run/2", "run/2"]),
        ("flush", ["", "", "", ""]),
    ],
)
def test_salts(scripted, routed, turn, rule, salts):
    """miles#2782: a prompt that is read from the cache of older weights, under a newer version."""
    replica = scripted(A)

    async def main(router):
        await router.generate(turn("a"))
        replica.weights = "run/2"
        router.set_version("run/2")
        await router.generate(turn("a"))
        await router.generate(turn("b"))
        await router.generate(turn("a", attempt=1))

    routed(main, replica, kv_rule=rule)
    assert [request.salt for request in replica.requests] == salts


def test_a_turn_that_goes_on_under_new_weights_has_their_salt(scripted, routed, turn, plan):
    replica = scripted(A, [plan("die", 10, down_s=1)])

    async def main(router):
        got = []
        async with anyio.create_task_group() as group:
            group.start_soon(_into, got, router.generate(turn()))
            await anyio.sleep(0.5)
            replica.weights = "run/2"
        return got[0]

    records = routed(main, replica)
    assert [record.weight_version for record in records] == [1, 2]
    assert [request.salt for request in replica.requests] == ["run/1", "run/2"]


def test_an_unset_policy_run_is_that_of_the_first_version(scripted, routed, turn):
    b = scripted(B, weights="other/4")

    async def main(router):
        router.add(b)
        await anyio.sleep(9)
        return router.describe(), router.stats()

    described, stats = routed(main, scripted(A, weights="run/3"), policy_run="")
    assert (described["engine_replicas"], described["engine_weights"]) == (2, "run/3")
    assert described["policy_run"] == "run"
    assert stats["ready"] == 1


def test_adding_and_removing_what_cannot_be(scripted, routed):
    async def main(router):
        with pytest.raises(UsageError, match="this address already"):
            router.add(scripted(A))
        with pytest.raises(UsageError, match="no replica has this address"):
            await router.remove(B)
        await router.remove(A)
        router.add(scripted(A))
        await router.remove(A)
        await anyio.sleep(30)
        assert router.stats()["replicas"] == 0

    routed(main, scripted(A))
