"""The provider `sglang`: its configuration, and turns over servers that are lost, aborted and taken out."""

import os

import anyio
import numpy as np
import pytest
from agent_flow.clock import Clock
from agent_flow.config import SamplingConfig, config_of
from agent_flow.engines.sglang import SglangEngine
from agent_flow.engines.sglang_replica import SglangReplica
from agent_flow.engines.version import VersionReader
from agent_flow.errors import ConfigError, EngineError, UsageError
from agent_flow.protocols import Engine, GenerateRequest, ProviderContext
from agent_flow.providers import load_engine

pytestmark = pytest.mark.anyio
PROMPT = (151644, 872, 198, 9707, 151645, 198, 151644, 77091, 198)


@pytest.fixture
def engine(tmp_path, qwen_tokenizer):
    """Builds the engine of a configuration's `[engine]` table."""

    def build(*addresses, sampling=None, **section) -> SglangEngine:
        values = {
            "tasks": {"path": "tasks.jsonl"},
            "model": {"tokenizer": "t", "chat_template": "c"},
            "engine": {"provider": "agent_flow.engines.sglang:SglangEngine", **section},
            "sampling": sampling or {"temperature": 0.0},
        }
        if addresses:
            values["engine"]["addresses"] = list(addresses)
        file = config_of(values, base=tmp_path)
        context = ProviderContext(file=file, clock=Clock(), tokenizer=qwen_tokenizer, scratch=tmp_path)
        return load_engine(context)

    return build


def turn(most=20, rollout="0" * 32, prompt=PROMPT):
    return GenerateRequest(
        rollout_id=rollout,
        attempt=0,
        task_id="t",
        member=0,
        turn=0,
        prompt_ids=np.array(prompt, dtype=np.int32),
        stop_ids=frozenset(),
        sampling=SamplingConfig(temperature=0.0, max_new_tokens=most),
        max_new_tokens=most,
    )


def ids_of(records, prompt=PROMPT):
    held = list(prompt)
    for record in records:
        assert record.prompt_ids.tolist() == held
        assert record.logprobs is None or len(record.logprobs) == len(record.output_ids)
        held += record.output_ids.tolist()
    return held[len(prompt) :]


async def _into(got, work):
    got.append(await work)


@pytest.mark.parametrize(
    ("addresses", "what", "fix"),
    [
        (["localhost:30000"], "not the base URL", "http://host:30000"),
        (["http://me:secret@host:1"], "credentials in the address", "token file"),
        (["http://host:1", "http://host:1/"], "http://host:1 stands there twice", "name each server once"),
    ],
)
def test_addresses_that_cannot_work(engine, addresses, what, fix):
    with pytest.raises(UsageError, match=what) as caught:
        engine(*addresses)
    assert "configuration" in caught.value.where
    assert fix in caught.value.fix
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "section", [{}, {"addresses": []}, {"addresses": ["http://h:1"], "kv_rule": "never"}, {"adresses": ["x"]}]
)
def test_sections_that_cannot_work(engine, section):
    with pytest.raises(ConfigError):
        engine(**section)


def test_truncated_sampling_without_kept_ids_is_refused_before_the_run(engine):
    with pytest.raises(UsageError, match=r"top_p = 0\.9"):
        engine("http://host:1", sampling={"top_p": 0.9})


def test_it_is_an_engine_and_names_what_it_is(engine):
    built: Engine = engine("http://host:1", "http://host:2")
    built.check([])
    assert built.source == "sampled"
    assert built.describe() == {
        "engine": "sglang",
        "engine_replicas": 2,
        "engine_weights": "",
        "engine_kv_rule": "salt_now",
        "policy_run": "",
    }
    assert built.stats()["tokens_thrown_away"] == 0


async def test_a_server_that_is_not_there_is_named(engine, scripted):
    server = await scripted()
    gone = await scripted()
    await gone.stop()
    with pytest.raises(UsageError, match=gone.address) as caught:
        async with engine(server.address, gone.address).session():
            pass
    assert "configuration" in caught.value.where
    assert "start the servers" in caught.value.fix


async def test_servers_with_different_weights_are_named(engine, scripted):
    one, two = await scripted(), await scripted()
    two.version = "run/3"
    with pytest.raises(UsageError, match=f"different weights: .*{one.address}: 'default'"):
        async with engine(one.address, two.address).session():
            pass


async def test_a_turn_says_weights_salt_and_session(engine, scripted):
    server = await scripted()
    server.version = "run/3"
    built = engine(server.address, session_header="X-SMG-Routing-Key")
    async with built.session():
        records = await built.generate(turn())
        assert built.describe()["engine_weights"] == "run/3"
    assert len(ids_of(records)) == 20
    assert [record.weight_version for record in records] == [3]
    headers, body = next((head, body) for path, head, body in server.requests if path == "/generate")
    assert headers["X-SMG-Routing-Key"] == "0" * 32 + "-0"
    assert body["cache_salt"] == body["extra_key"] == "run/3"


async def test_a_token_file_is_read_relative_to_the_configuration(engine, scripted, tmp_path):
    server = await scripted()
    (tmp_path / "key").write_text("s3cret\n")
    built = engine(server.address, token_file="key")
    async with built.session():
        await built.generate(turn())
    assert all(headers["Authorization"] == "Bearer s3cret" for _, headers, _ in server.requests)
    with pytest.raises(UsageError, match="cannot read the token file"):
        async with engine(server.address, token_file="none").session():
            pass


async def test_nothing_is_sampled_outside_the_session(engine):
    with pytest.raises(EngineError, match="outside session"):
        await engine("http://host:1").generate(turn())


@pytest.mark.original("B-generate-for-partial")
async def test_a_rollout_is_aborted_with_what_there_is(engine, server, wire):
    built = engine(wire.address, stream_interval=1)
    got = []
    async with built.session(), anyio.create_task_group() as group:
        group.start_soon(_into, got, built.generate(turn(2000)))
        await wire.seen(3)
        await built.abort("0" * 32)
    (records,) = got
    assert records[-1].finish_reason == "abort"
    assert 0 < len(ids_of(records)) < 2000


@pytest.mark.original("B-server-fails")
async def test_a_connection_that_is_lost_costs_no_token(engine, kind, server, wire):
    """Two ways to one server: the one that is used is cut in mid answer.

    At temperature 0 the real server goes on with the same tokens.
    """
    built = engine(wire.address, stream_interval=4, patience_s=20)
    async with built.session():
        whole = ids_of(await built.generate(turn(200)))
        await built.add(server.address)
        got = []
        async with anyio.create_task_group() as group:
            group.start_soon(_into, got, built.generate(turn(200)))
            await wire.seen(wire.events + 5)
            wire.cut()
        (records,) = got
        stats = built.stats()
    assert len(whole) == len(ids_of(records)) == 200
    assert kind[1] is None or ids_of(records) == whole
    assert len(records) == 2
    assert records[-1].finish_reason == "length"
    assert stats["calls_failed"] == 1
    assert stats["tokens_thrown_away"] == 0


async def test_a_server_is_taken_out_under_way(engine, server, wire):
    built = engine(wire.address, stream_interval=1)
    async with built.session():
        got = []
        async with anyio.create_task_group() as group:
            group.start_soon(_into, got, built.generate(turn(300)))
            await wire.seen(3)
            await built.add(server.address)
            await built.remove(wire.address)
        with pytest.raises(UsageError, match="no replica has this address"):
            await built.remove(wire.address)
        (records,) = got
    assert len(ids_of(records)) == 300
    assert len(records) == 2


async def test_a_prompt_that_leaves_no_room_is_a_length(engine, server):
    """What a server takes is a few tokens less than the context that it names."""
    built = engine(server.address)
    async with built.session():
        for missing in range(8):
            records = await built.generate(turn(50, prompt=[100] * (4096 - missing)))
            assert records[-1].finish_reason == "length"
            assert len(ids_of(records, [100] * (4096 - missing))) <= missing
        assert built.stats()["calls_failed"] == 0


@pytest.mark.slow
async def test_a_prompt_is_not_read_from_the_cache_of_older_weights(engine, kind, server):
    """miles#2782: an update in place leaves the cache as it is, and a later prompt matched it."""
    weights = os.environ.get("SGLANG_MODEL_2", "")
    if kind[1] is None or not weights:
        pytest.skip("needs a real SGLang, and SGLANG_MODEL_2: other weights of its model's shape")
    request = turn(4, prompt=np.random.default_rng(0).integers(1000, 4000, 512).tolist())
    salted = engine(server.address, policy_run="run")
    bare = engine(server.address, policy_run="run", kv_rule="flush")

    async def logprobs(sampler):
        (record,) = await sampler.generate(request)
        assert record.weight_version == 2
        return record.logprobs

    async with SglangReplica(server.address, versions=VersionReader("run")) as replica:
        await replica.update_from_disk(server.weights, "run/1", flush_cache=True)
        try:
            async with salted.session(), bare.session():
                for sampler in (salted, bare):
                    await sampler.generate(request)
                await replica.pause("in_place")
                await replica.update_from_disk(weights, "run/2", flush_cache=False)
                await replica.resume()
                for sampler in (salted, bare):
                    sampler.router.set_version("run/2")
                with_salt, without = await logprobs(salted), await logprobs(bare)
                assert await replica.flush_cache()
                right = await logprobs(bare)
        finally:
            await replica.update_from_disk(server.weights, "default", flush_cache=True)
    assert np.allclose(with_salt, right, atol=1e-4)
    assert not np.allclose(without, right, atol=1e-4)
