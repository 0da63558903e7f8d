"""An abort that the server refuses or never answers ends the call here, with the tokens that had come."""

import asyncio

import anyio
import pytest
from agent_flow.engines.sglang_replica import SglangReplica
from agent_flow.engines.version import VersionReader
from agent_flow.errors import EngineError
from aiohttp import web

pytestmark = pytest.mark.anyio


async def refuses(request, body):
    return web.Response(status=503, text="busy")


async def is_silent(request, body):
    await asyncio.Event().wait()


async def hangs_up(request, body):
    request.transport.abort()
    return web.Response()


ANSWERS = pytest.mark.parametrize(
    ("answer", "cause"), [(refuses, "unavailable"), (is_silent, "timeout"), (hangs_up, "cut")]
)


async def held(server, client, request, *, tokens):
    """Start a call and freeze the server before its first token, or after some."""
    if not tokens:
        await client.pause("in_place")
    task = asyncio.ensure_future(client.sample(request))
    with anyio.fail_after(60):
        if tokens:
            while not any(call.answer.ids for call in client._calls):  # noqa: ASYNC110
                await anyio.sleep(0.005)
            await client.pause("in_place")
        while not server.at_the_door:  # noqa: ASYNC110
            await anyio.sleep(0.005)
    return task


@ANSWERS
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("every", [False, True])
async def test_the_read_ends_with_what_there_is(scripted, make_request, answer, cause, tokens, every):
    server = await scripted()
    server.on_abort_request = answer
    replica = SglangReplica(
        server.address, versions=VersionReader("run-a"), stream_interval=1, control_timeout_s=1.0
    )
    async with replica as client:
        request = make_request(4000, temperature=0)
        task = await held(server, client, request, tokens=tokens)
        with pytest.raises(EngineError) as failed:
            await (client.abort_all() if every else client.abort(request.rid))
        with anyio.fail_after(60):
            records = await task
        assert failed.value.cause == cause
        assert records[-1].finish_reason == "abort"
        ids = [token for record in records for token in record.output_ids.tolist()]
        assert bool(ids) == tokens
        await client.resume()
        if ids:
            (whole,) = await client.sample(make_request(len(ids), temperature=0))
            assert whole.output_ids.tolist() == ids


async def test_other_calls_go_on(scripted, make_request):
    server = await scripted()
    server.on_abort_request = refuses
    async with SglangReplica(server.address, versions=VersionReader("run-a")) as client:
        await client.pause("in_place")
        kept = asyncio.ensure_future(client.sample(make_request(3)))
        with pytest.raises(EngineError):
            await client.abort(make_request().rid)
        await client.resume()
        (record,) = await kept
        assert (len(record.output_ids), record.finish_reason) == (3, "length")
