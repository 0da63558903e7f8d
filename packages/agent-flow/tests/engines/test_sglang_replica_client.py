"""`SglangReplica` as a client: what is sent, what a failure means, secrets, certificates, proxies."""

import asyncio
import json
import logging
import shutil
import ssl
import subprocess
import traceback

import anyio
import pytest
from agent_flow.config import SamplingConfig
from agent_flow.engines.sglang_replica import SglangReplica
from agent_flow.engines.sglang_request import MAX_KEPT, check_sampling, generate_body
from agent_flow.engines.version import VersionReader
from agent_flow.errors import EngineError, UsageError
from aiohttp import web
from token_tracking.sample import UNKNOWN_VERSION

pytestmark = pytest.mark.anyio
TOKEN = "sk-not-to-be-seen-4711"


def open_client(address, **options):
    return SglangReplica(address, versions=VersionReader("run-a"), **options)


async def failure(client, request):
    with pytest.raises(EngineError) as failed:
        await client.sample(request)
    return failed.value


# -- what is sent --
@pytest.mark.original("A-temperature-0", "B-generate-limit-unset")
async def test_everything_that_shapes_the_distribution_is_sent(make_request):
    request = make_request(7, stop_ids=[9, 3], temperature=0, top_k=0, salt="run-a/3")
    body = json.loads(generate_body(request, 16))
    assert body == {
        "rid": request.rid,
        "input_ids": request.prompt_ids.tolist(),
        "stream": True,
        "return_logprob": True,
        "extra_key": "run-a/3",
        "cache_salt": "run-a/3",
        "sampling_params": {
            "temperature": 0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "max_new_tokens": 7,
            "n": 1,
            "stop": [],
            "stop_regex": [],
            "stop_token_ids": [3, 9],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "stream_interval": 16,
        },
    }


async def test_no_salt_is_no_salt(make_request):
    assert not {"extra_key", "cache_salt"} & json.loads(generate_body(make_request(), 1)).keys()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": MAX_KEPT, "top_p": 0.5},
        {"temperature": 0, "top_p": 0.5},
        {"top_k": 0},
    ],
)
async def test_sampling_that_can_be_trained(sampling):
    check_sampling(SamplingConfig(**sampling))


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": MAX_KEPT + 1}])
async def test_sampling_that_cannot(sampling):
    with pytest.raises(UsageError, match=r"run.toml \[sampling\]: .*top_k from 1 to 4096"):
        check_sampling(SamplingConfig(**sampling), "run.toml [sampling]")


@pytest.mark.parametrize(("wrong", "size"), [(-1, None), (-1, 151669), (151669, 151669)])
async def test_an_id_that_is_no_token_is_not_sent(scripted, make_request, wrong, size):
    """The scheduler of the real server dies of one, and every call on it with that."""
    server = await scripted()
    async with open_client(server.address, vocab_size=size) as client:
        with pytest.raises(EngineError, match=f"was not sent: it holds {wrong} at 2, ") as refused:
            await client.sample(make_request(2, prompt=(0, 151668, wrong, 5, -7)))
        (record,) = await client.sample(make_request(2, prompt=(0, 151668, 5)))
    assert (refused.value.cause, refused.value.fault) == ("vocabulary", "task")
    assert not refused.value.retryable
    assert len(record.output_ids) == 2
    assert sum(path == "/generate" for path, _, _ in server.requests) == 1


async def test_the_session_stands_in_a_header(scripted, make_request):
    server = await scripted()
    async with open_client(server.address, session_header="X-SMG-Routing-Key") as client:
        await client.sample(make_request(2, session="rollout-7/0"))
        await client.info()
    headers = [headers for path, headers, _ in server.requests if path == "/generate"]
    assert [header.get("X-SMG-Routing-Key") for header in headers] == ["rollout-7/0"]
    assert all(
        "X-SMG-Routing-Key" not in headers for path, headers, _ in server.requests if path != "/generate"
    )


async def test_more_calls_than_a_connection_pool_holds(scripted, make_request):
    # trl#5847: aiohttp's default of 100 connections capped 512 rollouts.
    server = await scripted()
    async with open_client(server.address) as client, anyio.create_task_group() as tasks:
        await client.pause("in_place")
        for _ in range(150):
            tasks.start_soon(client.sample, make_request(1))
        with anyio.fail_after(20):
            while server.at_the_door < 150:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await client.resume()


async def test_calls_one_after_the_other_use_one_connection(scripted, make_request):
    server = await scripted()
    async with open_client(server.address) as client:
        for _ in range(5):
            await client.sample(make_request(2))
            await client.info()
    assert len(server.peers) == 1


async def test_limits_are_asked_for_once(scripted):
    server = await scripted()
    async with open_client(server.address) as client:
        assert await client.info() == await client.info()
    assert [path for path, _, _ in server.requests].count("/server_info") == 1


# -- what a failure means --
@pytest.mark.parametrize(
    ("status", "cause", "again"),
    [
        (400, "refused", False),
        (401, "refused", False),
        (404, "refused", False),
        (307, "refused", False),
        (408, "unavailable", True),
        (429, "unavailable", True),
        (500, "unavailable", True),
        (503, "unavailable", True),
    ],
)
async def test_statuses(answering, make_request, status, cause, again):
    async def handler(request):
        return web.Response(status=status, text="the server's words", headers={"Location": "/elsewhere"})

    async with answering(handler) as address, open_client(address) as client:
        error = await failure(client, make_request())
        assert (error.cause, error.retryable, error.evidence) == (cause, again, "the server's words")
        with pytest.raises(EngineError) as failed:
            await client.info()
        assert (failed.value.cause, failed.value.retryable) == (cause, again)


@pytest.mark.parametrize(("name", "cause"), [("too_long", "too_long"), ("refused_kept", "refused")])
async def test_a_refusal_in_the_stream_under_status_200(answering, recording, make_request, name, cause):
    async def handler(request):
        return web.Response(body=recording.bytes(name), content_type="text/event-stream")

    async with answering(handler) as address, open_client(address) as client:
        error = await failure(client, make_request(rid="4" * 32, top_k=4))
        assert (error.cause, error.retryable, error.partial) == (cause, False, ())
        assert "maximum" in error.evidence or "requires" in error.evidence


@pytest.mark.parametrize(
    ("status", "cause", "again"),
    [(400, "refused", False), (500, "unavailable", True), (503, "unavailable", True)],
)
async def test_an_abort_with_a_status_is_a_failure(answering, recording, make_request, status, cause, again):
    # Out of KV memory in mid answer, a time-out in the queue: `FINISH_ABORT(message, status)`.
    events = recording("abort_cumulative")
    events[-1]["meta_info"]["finish_reason"]["status_code"] = status

    async def handler(request):
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        return web.Response(body=data + b"data: [DONE]\n\n", content_type="text/event-stream")

    async with answering(handler) as address, open_client(address) as client:
        error = await failure(client, make_request(rid="9" * 32))
    assert (error.cause, error.retryable, error.evidence) == (cause, again, "Aborted")
    held = [i for record in error.partial for i in record.output_ids]
    assert held == events[-2]["output_ids"]
    assert error.partial[-1].finish_reason == "abort"


async def test_a_prompt_of_which_one_token_was_read(answering, recording, make_request):
    # Observed: a prompt that reaches into the last places of the context is cut to one token, and refused
    # after one was sampled.
    async def handler(request):
        return web.Response(body=recording.bytes("too_long_prompt"))

    async with answering(handler) as address, open_client(address) as client:
        error = await failure(client, make_request(1, prompt=[5] * 4092, rid="d" * 32))
        assert (error.cause, error.retryable, error.partial) == ("too_long", False, ())


async def test_a_stream_without_its_end(answering, recording, make_request):
    whole = recording.bytes("length_cumulative")
    without_last = whole[: whole.rindex(b"data: {")] + b"data: [DONE]\n\n"
    rid = recording("length_cumulative")[0]["meta_info"]["id"]
    bodies = [without_last, whole[:-8], whole.removesuffix(b"data: [DONE]\n\n")]

    async def handler(request):
        return web.Response(body=bodies.pop(0), content_type="text/event-stream")

    async with answering(handler) as address, open_client(address) as client:
        error = await failure(client, make_request(3, rid=rid))
        assert (error.cause, error.retryable) == ("cut", True)
        assert [record.output_ids.tolist() for record in error.partial] == [[59838, 118815]]
        for _ in range(2):  # the last chunk is there: nothing is missing
            (record,) = await client.sample(make_request(3, rid=rid))
            assert record.output_ids.tolist() == [59838, 118815, 91370]


@pytest.mark.parametrize(("asked", "versions"), [(True, [1]), (False, [UNKNOWN_VERSION, 1])])
async def test_what_info_named_tells_the_version_of_a_first_chunk(
    answering, recording, make_request, asked, versions
):
    events = recording("length_incremental")[:3]
    for event in events:
        event["meta_info"]["weight_version"] = "run-a/1"
    said = {
        "/generate": "".join(f"data: {json.dumps(event)}\n\n" for event in events),
        "/model_info": json.dumps({"weight_version": "run-a/1", "model_path": "m"}),
        "/v1/models": json.dumps({"data": [{"max_model_len": 4096}]}),
        "/server_info": "{}",
    }

    async def handler(request):
        return web.Response(text=said[request.path])

    async with answering(handler) as address, open_client(address) as client:
        if asked:
            assert (await client.info()).kv_tokens is None
        error = await failure(client, make_request(rid="1" * 32))
    assert [record.weight_version for record in error.partial] == versions


async def test_a_contradiction_keeps_nothing(answering, recording, make_request):
    events = recording("length_cumulative")
    events[1]["output_ids"][0] += 1

    async def handler(request):
        return web.Response(body=b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events))

    async with answering(handler) as address, open_client(address) as client:
        error = await failure(client, make_request(3, rid=events[0]["meta_info"]["id"]))
    assert (error.cause, error.partial) == ("contradiction", ())
    assert "an earlier chunk" in str(error) or "other tokens" in str(error)


async def test_nobody_listens(make_request, free_port):
    async with open_client(f"http://127.0.0.1:{free_port}") as client:
        error = await failure(client, make_request())
        assert (error.cause, error.retryable) == ("connection", True)
        with pytest.raises(EngineError, match=str(free_port)):
            await client.info()


async def test_a_server_that_falls_silent(answering, recording, make_request):
    events = recording("length_incremental")

    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events[:2]:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.Event().wait()

    waits = {"silence_timeout_s": 0.2, "control_timeout_s": 0.2}
    async with answering(handler) as address, open_client(address, **waits) as client:
        error = await failure(client, make_request(rid="1" * 32))
        assert (error.cause, error.retryable) == ("timeout", True)
        (record,) = error.partial
        assert record.output_ids.tolist() == [i for event in events[:2] for i in event["output_ids"]]
        with pytest.raises(EngineError, match="timeout"):
            await client.info()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model_path": 3, "weight_version": "x"}', "<html>"])
async def test_an_answer_of_something_else(answering, text):
    async def handler(request):
        return web.Response(text=text)

    async with answering(handler) as address, open_client(address) as client:
        with pytest.raises(EngineError, match="/model_info") as failed:
            await client.info()
        assert failed.value.cause == "contradiction"


async def test_not_open(make_request):
    with pytest.raises(UsageError, match="async with"):
        await open_client("http://127.0.0.1:1").sample(make_request())


# -- secrets, certificates, proxies --
async def test_the_token_is_sent_and_seen_nowhere(
    answering, make_request, tmp_path, caplog, capfd, garbage_server
):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    heard = []

    async def handler(request):
        heard.append(request.headers.get("Authorization"))
        return web.Response(status=401, text=f"wrong key: {request.headers.get('Authorization')}")

    caplog.set_level(logging.DEBUG)
    told = []
    async with answering(handler) as address:
        for target in (address, garbage_server):
            async with open_client(target, token_file=file) as client:
                told.append(await failure(client, make_request()))
                with pytest.raises(EngineError) as failed:
                    await client.pause("abort")
                told.append(failed.value)
                told.append(client)
    assert heard == [f"Bearer {TOKEN}"] * 2
    assert told[0].evidence == "wrong key: Bearer ***"
    said = [repr(one) + str(one) for one in told]
    said += ["".join(traceback.format_exception(one)) for one in told if isinstance(one, Exception)]
    said += [repr(vars(one)) for one in told if isinstance(one, Exception)]
    said += [repr(one.__cause__) + repr(one.__context__) for one in told if isinstance(one, Exception)]
    assert TOKEN not in "".join(said) + caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("text", ["", "\n", "two words", "two\nlines", "caf\u00e9"])
async def test_a_file_that_holds_no_token(tmp_path, text):
    file = tmp_path / "token"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="token") as failed:
        async with open_client("http://127.0.0.1:1", token_file=file):
            pass
    assert str(file) in str(failed.value)
    assert not text.strip() or text.strip() not in str(failed.value)


@pytest.mark.parametrize("option", ["token_file", "ca_file"])
async def test_a_file_that_is_not_there(tmp_path, option):
    with pytest.raises(UsageError, match="gone"):
        async with open_client("http://127.0.0.1:1", **{option: tmp_path / "gone"}):
            pass


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:30000", "ftp://host", "http://", "http://host/?x=1", "http://[::1", "http://host:port"],
)
async def test_addresses_that_are_none(address):
    with pytest.raises(UsageError, match="http://host:30000"):
        open_client(address)


async def test_credentials_in_an_address_are_not_repeated():
    with pytest.raises(UsageError, match="token file") as failed:
        open_client(f"http://me:{TOKEN}@host:30000")
    assert TOKEN not in str(failed.value) + repr(failed.value)


@pytest.fixture
def certificate(tmp_path):
    """A server's key and certificate, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*make, "-keyout", key, "-out", cert, *subject], check=True, capture_output=True)
    return key, cert


async def test_a_certificate_of_our_own_authority(scripted, make_request, certificate):
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = await scripted(ssl_context=context)
    async with open_client(server.address, ca_file=cert) as client:
        (record,) = await client.sample(make_request(2))
        assert len(record.output_ids) == 2
    async with open_client(server.address) as client:
        error = await failure(client, make_request(2))
        assert (error.cause, error.retryable) == ("tls", False)
    with pytest.raises(UsageError, match=r"key\.pem"):
        async with open_client(server.address, ca_file=key):
            pass


async def test_proxies_are_used_only_if_asked_for(scripted, monkeypatch, free_port):
    server = await scripted()
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with open_client(server.address) as client:
        assert (await client.info()).weight_version == "default"
    async with open_client(server.address, trust_env=True) as client:
        with pytest.raises(EngineError) as failed:
            await client.info()
    assert failed.value.cause == "connection"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    async with open_client(server.address, trust_env=True) as client:
        assert (await client.info()).weight_version == "default"


# -- the scripted server itself --
@pytest.mark.parametrize("kind", ["cumulative", "incremental"])
async def test_the_scripted_server_says_what_the_real_one_said(scripted, recording, make_request, kind):
    server = await scripted(kind == "incremental")
    async with open_client(server.address, stream_interval=1) as client:
        (record,) = await client.sample(make_request(3))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))
    body = generate_body(make_request(3), 1)
    writer.write(b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    ours = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    theirs = recording(f"length_{kind}")
    told = {"e2e_latency", "response_sent_to_client_ts"}  # times, not in every chunk
    for mine, real in zip(ours, (theirs[0], theirs[1], theirs[-1]), strict=True):
        assert mine.keys() == real.keys()
        assert mine["meta_info"].keys() - told == real["meta_info"].keys() - told
        row = mine["meta_info"]["output_token_logprobs"][0]
        assert list(map(type, row)) == list(map(type, real["meta_info"]["output_token_logprobs"][0]))
    counts = [len(event["output_ids"]) for event in ours]
    assert counts == [len(event["output_ids"]) for event in theirs[:3]]
    assert record.output_ids.tolist()[-1] == ours[-1]["output_ids"][-1]
