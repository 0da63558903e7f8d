"""A whole run on the real server: its samples hold what the server returned, token for token."""

import json
import shutil
from contextlib import asynccontextmanager

import aiohttp
import anyio.to_thread
import numpy as np
import pytest
from aiohttp import web
from trainer_bridge import read_samples

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]


@asynccontextmanager
async def listening_in(target):
    """A proxy in front of a server; gives its address and the last event of every answer to /generate."""
    answers = []

    async def forward(request):
        body = await request.read()
        async with aiohttp.ClientSession() as http:
            url = f"{target}{request.path_qs}"
            async with http.request(request.method, url, data=body, headers=request.headers) as answer:
                if request.path != "/generate":
                    return web.Response(body=await answer.read(), status=answer.status)
                response = web.StreamResponse(
                    status=answer.status, headers={"Content-Type": "text/event-stream"}
                )
                await response.prepare(request)
                events = []
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        events.append(json.loads(line[6:]))
                    await response.write(line)
                answers.append(events[-1])
                return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", answers
    finally:
        await runner.cleanup()


@pytest.mark.original("A-backfill")
async def test_the_samples_of_a_run_hold_what_the_server_returned(kind, server, cli, example, tmp_path):
    if kind[1] is None or kind[0]:
        pytest.skip("needs a real SGLang whose stream is cumulative")
    project = tmp_path / "quickstart"
    shutil.copytree(example, project)
    lines = (project / "tasks.jsonl").read_text().splitlines()[:2]
    (project / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    text = (project / "run.toml").read_text()
    # Cold: a model without training else samples the padding rows of its vocabulary, which are no tokens.
    async with listening_in(server.address) as (address, answers):
        text = text.replace(
            'provider = "replay"\nrecordings = "recordings"',
            f'provider = "sglang"\naddresses = ["{address}"]',
        )
        text = text.replace("[worker]", "[sampling]\ntemperature = 0.001\nmax_new_tokens = 60\n\n[worker]")
        (project / "run.toml").write_text(text)
        done = await anyio.to_thread.run_sync(
            lambda: cli("run", project / "run.toml", "--json", cwd=tmp_path)
        )
    assert done.code == 0, (done.stderr, done.stdout[-3000:])
    samples = list(read_samples(done.folder))
    assert len({sample.rollout_id for sample in samples}) == 2
    returned = sorted(
        (
            answer["output_ids"],
            [np.float32(entry[0]) for entry in answer["meta_info"]["output_token_logprobs"]],
        )
        for answer in answers
    )
    kept = sorted(
        (sample.token_ids[turn.start : turn.end].tolist(), list(sample.logprobs[turn.start : turn.end]))
        for sample in samples
        for turn in sample.turns
        if sample.loss_mask[turn.start]
    )
    assert len(returned) >= 4
    assert kept == returned
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == sum(len(ids) for ids, _ in returned)
    assert {turn.logprob_kind for sample in samples for turn in sample.turns} == {"processed"}
    assert {turn.temperature for sample in samples for turn in sample.turns} == {0.001}
    for sample in samples:
        sample.require_logprobs()
