"""Any schedule of aborts, deaths, refusals, slow answers and new weights gives the uninterrupted run's ids.

The scripted model's next id is a function of everything before it, so that a token that was lost, doubled or
asked for after another prompt shows in all that follow (promise 4 of the design).
"""

from itertools import pairwise

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Happening(msgspec.Struct, frozen=True):
    """Something that befalls a server at some time, whatever runs there."""

    at_s: float
    server: int
    what: str
    """`update`: the next weight version, in place. `restart`: unseen by whoever calls it next."""


SECONDS = st.integers(0, 60).map(lambda tenths: tenths / 10)
PLANS = st.tuples(
    st.sampled_from(["abort", "abort", "die", "cut", "refuse", ""]),
    st.integers(0, 25),
    SECONDS,
    SECONDS,
    SECONDS,
)
HAPPENINGS = st.builds(
    Happening, at_s=SECONDS, server=st.integers(0, 2), what=st.sampled_from(["update", "restart"])
)


class Agent:
    """A rollout of several turns, each after the whole of the ones before. It may be aborted now and then."""

    def __init__(self, name, router, model, turn, ids_of, most, context):
        self.name, self.router, self.model, self.turn, self.ids_of = name, router, model, turn, ids_of
        self.most, self.context = most, context
        self.requests = []
        self.ended = False

    async def run(self, turns):
        prompt = [1 + ord(self.name[-1]), 3, 5]
        for n in range(turns):
            prompt = [*prompt, *await self.sample(prompt), 50 + n]
        self.ended = True

    async def sample(self, prompt):
        """One turn, asked for again with what is left of it as often as it is aborted."""
        room = min(self.most, self.context - len(prompt))
        ids, reason = self.model(prompt, max(room, 0))
        got, records = [], []
        while not records or records[-1].finish_reason == "abort":
            request = self.turn(self.name, [*prompt, *got], self.most - len(got))
            before = request.prompt_ids.copy()
            records = await self.router.generate(request)
            assert np.array_equal(request.prompt_ids, before)
            new = self.ids_of(records, [*prompt, *got])
            self.check_versions(records)
            got += new
            if not len(new) and records[-1].finish_reason == "abort":
                await anyio.sleep(0.1)
        assert got == ids
        assert records[-1].finish_reason == reason
        return got

    def check_versions(self, records):
        versions = [record.weight_version for record in records if len(record.output_ids)]
        assert all(earlier <= later for earlier, later in pairwise(versions))
        assert -2 not in versions

    async def abort_at(self, times_s):
        for at_s in sorted(times_s):
            await anyio.sleep(max(0.0, at_s - anyio.current_time()))
            if not self.ended:
                await self.router.abort(self.turn(self.name).rollout_id)


async def befall(servers, happenings):
    for happening in sorted(happenings, key=lambda happening: happening.at_s):
        await anyio.sleep(max(0.0, happening.at_s - anyio.current_time()))
        server = servers[happening.server % len(servers)]
        if happening.what == "update":
            server.weights = f"run/{int(server.weights.rpartition('/')[2]) + 1}"
        else:
            server.die(0.0, 2.5)


def check_calls(servers, most, context):
    """Of everything that was sent: never beyond budget or context, an id of its own, and no stale salt."""
    seen = set()
    for server in servers:
        for request in server.requests:
            assert request.rid not in seen
            seen.add(request.rid)
            assert 1 <= request.max_new_tokens <= most
            assert len(request.prompt_ids) + request.max_new_tokens <= context
            assert request.salt.startswith("run/")


@pytest.mark.original("A-budget-context", "B-generate-continues", "B-generate-budget")
@settings(max_examples=150, deadline=None)
@given(
    plans=st.lists(st.lists(PLANS, max_size=6), min_size=1, max_size=3),
    happenings=st.lists(HAPPENINGS, max_size=5),
    aborts=st.lists(st.lists(SECONDS, max_size=3), min_size=1, max_size=4),
    turns=st.integers(1, 3),
    most=st.integers(1, 70),
    context=st.sampled_from([8, 40, 90, 10_000]),
    seed=st.integers(0, 3),
)
def test_any_schedule_gives_the_uninterrupted_ids(
    scripted, routed, plan, model, turn, ids_of, plans, happenings, aborts, turns, most, context, seed
):
    servers = [
        scripted(address, [plan(*fields) for fields in own], context=context)
        for address, own in zip((A, B, C), plans, strict=False)
    ]

    async def main(router):
        agents = [Agent(f"r{n}", router, model, turn, ids_of, most, context) for n in range(len(aborts))]
        async with anyio.create_task_group() as group:
            group.start_soon(befall, servers, happenings)
            for agent, times_s in zip(agents, aborts, strict=True):
                group.start_soon(agent.run, turns)
                group.start_soon(agent.abort_at, times_s)

    routed(main, *servers, seed=seed, max_empty_calls=1000, patience_s=100_000)
    check_calls(servers, most, context)
