"""`SglangReplica` against a server: the same tests for the scripted one and, marked slow, for a real SGLang.

The real one: `SGLANG_URL`, or `SGLANG_VENV`, `SGLANG_MODEL` and `SGLANG_SERVE` (see conftest).
"""

import json
import urllib.request
from itertools import pairwise

import anyio
import numpy as np
import pytest
from agent_flow.engines.sglang_replica import SglangReplica
from agent_flow.engines.version import VersionReader
from agent_flow.errors import EngineError, UsageError
from token_tracking.sample import UNKNOWN_VERSION

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]
LONG = 2000


class Pending:
    """One `sample` in a task: what it gave."""

    def __init__(self):
        self.records, self.error, self.done = None, None, anyio.Event()

    async def run(self, replica, request):
        try:
            self.records = await replica.sample(request)
        except EngineError as error:
            self.error = error
        self.done.set()

    async def result(self):
        with anyio.fail_after(30):
            await self.done.wait()
        assert self.error is None, (self.error, self.error.evidence)
        return self.records

    async def failure(self):
        with anyio.fail_after(30):
            await self.done.wait()
        assert self.error is not None, self.records
        return self.error


@pytest.fixture
async def replica(server, wire):
    """A client behind a relay, with weights `policy-a/1` loaded."""
    async with SglangReplica(wire.address, versions=VersionReader("policy-a"), stream_interval=4) as client:
        await client.update_from_disk(server.weights, "policy-a/1", flush_cache=True)
        yield client


@pytest.fixture
async def start(replica, wire):
    """Starts a call and waits until some of it has come."""
    async with anyio.create_task_group() as tasks:

        async def begin(request, chunks=3):
            pending = Pending()
            seen = wire.events
            tasks.start_soon(pending.run, replica, request)
            if chunks:
                with anyio.fail_after(30):
                    await wire.seen(seen + chunks)
            return pending

        yield begin


async def until(condition):
    with anyio.fail_after(30):
        while not await condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


def ids_of(records):
    return [int(i) for record in records for i in record.output_ids]


def follows(request, records):
    """Each record goes on where the one before it ended."""
    prompt = request.prompt_ids.tolist()
    for record in records:
        assert record.prompt_ids.tolist() == prompt
        prompt = prompt + record.output_ids.tolist()
    assert all(record.finish_reason == "abort" for record in records[:-1])


def plain(server, request):
    """The same asked without a stream, without our client."""
    body = {
        "input_ids": request.prompt_ids.tolist(),
        "return_logprob": True,
        "sampling_params": {
            "temperature": request.sampling.temperature,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": sorted(request.stop_ids),
        },
    }
    call = urllib.request.Request(
        f"{server.address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=60) as answer:
        return json.load(answer)


async def test_info(replica, server):
    info = await replica.info()
    assert info.weight_version == "policy-a/1"
    assert info.model_path == server.weights
    assert 4000 < info.context_length <= 4096
    assert info.kv_tokens > 0


async def test_a_turn_up_to_its_limit(replica, make_request):
    request = make_request(9, temperature=0.7)
    (record,) = await replica.sample(request)
    assert record.prompt_ids.tolist() == request.prompt_ids.tolist()
    assert (len(record.output_ids), len(record.logprobs), record.finish_reason) == (9, 9, "length")
    assert np.isfinite(record.logprobs).all()
    assert (record.weight_version, record.logprob_kind, record.stop_id) == (1, "processed", None)
    assert (record.temperature, record.top_p, record.top_k, record.min_p) == (0.7, 1.0, -1, 0.0)


@pytest.mark.original("A-temperature-0")
async def test_temperature_0_is_repeatable_and_equals_the_answer_without_a_stream(
    replica, server, make_request
):
    request = make_request(40, temperature=0)
    (first,), (second,) = await replica.sample(request), await replica.sample(make_request(40, temperature=0))
    assert first.output_ids.tolist() == second.output_ids.tolist()
    assert first.logprob_kind == "raw"
    answer = await anyio.to_thread.run_sync(plain, server, request)
    assert first.output_ids.tolist() == answer["output_ids"]
    values = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
    assert np.allclose(first.logprobs, values, rtol=0, atol=1e-4)
    assert np.array_equal(second.logprobs, np.array(values, np.float32))


async def test_a_stop_token_ends_the_turn_and_is_its_last_id(replica, make_request):
    whole = make_request().prompt_ids.tolist()
    for length in range(len(whole), 0, -1):  # a model without training says the same token again after most
        (free,) = await replica.sample(make_request(12, prompt=whole[:length], temperature=0))
        ids = free.output_ids.tolist()
        if len(set(ids)) > 1:
            break
    place = next(place for place in range(1, len(ids)) if ids[place] not in ids[:place])
    request = make_request(12, prompt=whole[:length], temperature=0, stop_ids=[ids[place], 7])
    (record,) = await replica.sample(request)
    assert record.output_ids.tolist() == ids[: place + 1]
    assert (record.finish_reason, record.stop_id) == ("stop", ids[place])


async def test_truncated_sampling_comes_with_what_was_kept(replica, make_request):
    (record,) = await replica.sample(make_request(6, top_k=4, top_p=0.9, min_p=0.1))
    kept = record.kept
    assert len(kept.offsets) == 7
    assert all(1 <= count <= 4 for count in np.diff(kept.offsets))
    for token, (low, high) in zip(record.output_ids, pairwise(kept.offsets), strict=True):
        assert token in kept.ids[low:high]
    # Over the kept ids: four nearly equal ones (or a random model's), not over 150,000.
    assert record.logprob_kind == "processed"
    assert (record.logprobs > -4).all()


async def test_truncated_sampling_without_kept_ids_is_refused(replica, make_request):
    with pytest.raises(UsageError, match="top_k from 1 to 4096"):
        await replica.sample(make_request(6, top_p=0.9))


async def test_abort_in_mid_stream_keeps_what_came(replica, start, make_request):
    request = make_request(LONG)
    pending = await start(request)
    await replica.abort(request.rid)
    (record,) = await pending.result()
    assert record.finish_reason == "abort"
    assert 8 <= len(record.output_ids) < LONG
    assert record.weight_version == 1


async def test_abort_of_another_call_leaves_this_one_alone(replica, start, make_request):
    ours, other = make_request(40, rid="a" * 32), make_request(LONG, rid="a" * 31 + "b")
    second = await start(other)
    first = await start(ours, chunks=1)
    await replica.abort("a" * 31 + "b")
    await replica.abort("f" * 32)
    assert (await second.result())[0].finish_reason == "abort"
    assert (await first.result())[0].finish_reason == "length"


@pytest.mark.parametrize("rid", ["", "a", "a" * 31, "A" * 32, "a" * 33])
async def test_an_id_that_would_abort_others_is_refused(replica, rid):
    with pytest.raises(UsageError, match="32 hex"):
        await replica.abort(rid)


async def test_abort_all(replica, start, make_request):
    calls = [await start(make_request(LONG)), await start(make_request(LONG))]
    await replica.abort_all()
    for pending in calls:
        (record,) = await pending.result()
        assert record.finish_reason == "abort"


async def test_pause_abort_ends_what_runs_and_holds_what_is_new(replica, start, make_request):
    pending = await start(make_request(LONG))
    await replica.pause("abort")
    (record,) = await pending.result()
    assert record.finish_reason == "abort"
    assert len(record.output_ids) > 0
    held = await start(make_request(3), chunks=0)
    await replica.update_from_disk((await replica.info()).model_path, "policy-a/2", flush_cache=True)
    assert not held.done.is_set()
    await replica.resume()
    (record,) = await held.result()
    assert (record.finish_reason, record.weight_version) == ("length", 2)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_that_keeps_calls_gives_two_versions(replica, server, start, make_request, mode):
    request = make_request(60, temperature=0)
    pending = await start(request)
    await replica.pause(mode)
    await replica.update_from_disk(server.weights, "policy-a/2", flush_cache=mode == "retract")
    assert not pending.done.is_set()
    await replica.resume()
    records = await pending.result()
    assert [record.weight_version for record in records] == [1, 2]
    assert [record.finish_reason for record in records] == ["abort", "length"]
    assert len(ids_of(records)) == 60
    follows(request, records)
    assert all(len(record.logprobs) == len(record.output_ids) for record in records)
    (whole,) = await replica.sample(make_request(60, temperature=0))
    assert ids_of(records) == whole.output_ids.tolist()  # the same weights under another name


async def test_new_weights_of_somebody_else_are_unknown(replica, server, start, make_request):
    pending = await start(make_request(60))
    await replica.pause("in_place")
    await replica.update_from_disk(server.weights, "policy-b/2", flush_cache=False)
    await replica.resume()
    records = await pending.result()
    assert [record.weight_version for record in records] == [1, UNKNOWN_VERSION]


async def test_a_call_held_by_a_pause_can_be_aborted(replica, start, make_request):
    await replica.pause("in_place")
    request = make_request(5)
    held = await start(request, chunks=0)
    await replica.abort(request.rid)
    (record,) = await held.result()
    assert (len(record.output_ids), record.finish_reason) == (0, "abort")
    await replica.resume()
    assert (await replica.sample(make_request(3)))[0].finish_reason == "length"


async def test_retracted_and_then_aborted_keeps_every_token_once(replica, start, make_request):
    request = make_request(LONG, temperature=0)
    pending = await start(request)
    await replica.pause("retract")
    await replica.abort(request.rid)
    (record,) = await pending.result()
    await replica.resume()
    assert record.finish_reason == "abort"
    (whole,) = await replica.sample(make_request(len(record.output_ids), temperature=0))
    assert record.output_ids.tolist() == whole.output_ids.tolist()
    assert np.allclose(record.logprobs, whole.logprobs, rtol=0, atol=1e-4)


async def test_weights_that_are_not_there(replica):
    with pytest.raises(EngineError) as failed:
        await replica.update_from_disk("/nonexistent/weights", "policy-a/2", flush_cache=True)
    assert (failed.value.cause, failed.value.retryable) == ("refused", False)
    assert "Failed to" in failed.value.evidence
    assert (await replica.info()).weight_version == "policy-a/1"


async def test_new_weights_on_an_old_cache_are_said(replica, server, start, make_request):
    pending = await start(make_request(60))
    await replica.pause("in_place")
    with pytest.raises(EngineError, match="policy-a/2") as failed:
        await replica.update_from_disk(server.weights, "policy-a/2", flush_cache=True)
    assert failed.value.cause == "not_flushed"
    assert (await replica.info()).weight_version == "policy-a/2"
    await replica.resume()
    assert [record.weight_version for record in await pending.result()] == [1, 2]


async def test_flush_is_refused_while_a_call_runs(replica, start, make_request):
    assert await replica.flush_cache()
    request = make_request(LONG)
    pending = await start(request)
    assert not await replica.flush_cache()
    await replica.abort(request.rid)
    await pending.result()
    await until(replica.flush_cache)


@pytest.mark.parametrize(
    ("tokens", "budget", "said"), [(5000, 4, "5000"), (9, 4090, "4099"), (4092, 1, "4092")]
)
async def test_what_does_not_fit_the_context_is_refused_for_good(replica, make_request, tokens, budget, said):
    with pytest.raises(EngineError) as failed:
        await replica.sample(make_request(budget, prompt=[5] * tokens))
    assert (failed.value.cause, failed.value.retryable) == ("too_long", False)
    assert failed.value.partial == ()
    assert said in failed.value.evidence


async def test_what_info_says_fits(replica, make_request):
    context = (await replica.info()).context_length
    (record,) = await replica.sample(make_request(1, prompt=[5] * (context - 1)))
    assert (len(record.output_ids), record.finish_reason) == (1, "length")


async def test_a_cut_connection_gives_what_had_come(replica, wire, start, make_request):
    await replica.info()
    request = make_request(LONG)
    pending = await start(request)
    wire.cut()
    error = await pending.failure()
    assert (error.cause, error.retryable, error.fault) == ("cut", True, "infra")
    (record,) = error.partial
    follows(request, error.partial)
    assert (record.finish_reason, record.weight_version) == ("abort", 1)
    assert 5 <= len(record.output_ids) < LONG
    await until(replica.flush_cache)  # the server has ended the call by itself


async def test_a_call_that_we_give_up_ends_on_the_server(replica, make_request, wire):
    seen = wire.events
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replica.sample, make_request(LONG))
        await wire.seen(seen + 3)
        tasks.cancel_scope.cancel()
    await until(replica.flush_cache)


async def test_prefixes_are_shared_under_one_salt_alone(replica, server, make_request):
    prompt = list(range(500, 564))
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "stop_token_ids": []}}
    await replica.sample(make_request(1, prompt=prompt, salt="policy-a/1"))

    def cached(salt):
        with_salt = body | ({"extra_key": salt, "cache_salt": salt} if salt else {})
        call = urllib.request.Request(
            f"{server.address}/generate", json.dumps(with_salt).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=60) as answer:
            return json.load(answer)["meta_info"]["cached_tokens"]

    assert await anyio.to_thread.run_sync(cached, "policy-a/2") == 0
    assert await anyio.to_thread.run_sync(cached, "") == 0
    assert await anyio.to_thread.run_sync(cached, "policy-a/1") == 63


async def test_a_killed_server_gives_what_had_come(replica, server, start, make_request):
    request = make_request(LONG)
    pending = await start(request)
    await server.kill()
    error = await pending.failure()
    assert (error.cause, error.retryable) == ("cut", True)
    assert len(ids_of(error.partial)) >= 5
    follows(request, error.partial)
    with pytest.raises(EngineError) as failed:
        await replica.sample(make_request(3))
    assert failed.value.retryable
    assert failed.value.partial == ()
