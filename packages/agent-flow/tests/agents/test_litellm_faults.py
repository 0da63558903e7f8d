"""Answers that are none, options that cannot work, and secrets: what `litellm_agent` makes of each."""

import json
import logging
import threading
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from agent_flow.agents.litellm_calls import longest_call_s
from agent_flow.config import WorkerConfig, config_of
from agent_flow.errors import ConfigError, EngineError
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_agent
from agent_flow.redaction import Redactor, masked, masked_file

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BEARER = "Bearer of-the-gateway-4711"


def chat(message, finish_reason="tool_calls", **other):
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
            "usage": usage, **other}  # fmt: skip


def command(line):
    function = {"name": "bash", "arguments": json.dumps({"command": line})}
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": function}]}  # fmt: skip


GOOD = chat(command(SUBMIT))
SILENT = {"role": "assistant", "content": ""}


class Server:
    """Gives the answers that are next, `(status, body)`, and then a submission."""

    def __init__(self):
        self.answers, self.requests = [], []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append((self.headers, json.loads(body)))
                status, answer = server.answers.pop(0) if server.answers else (200, GOOD)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def work(bench, server):
    """Runs the agent against the server: `work(answers, KEY OF [agent]=VALUE)`."""

    async def run(answers=(), **keys):
        server.answers = list(answers)
        section = {"provider": "litellm_agent", "model": "openai/m", "api_base": server.url,
                   "retry_wait_s": 0.01, **keys}  # fmt: skip
        made = bench("\n".join(f"{name} = {json.dumps(value)}" for name, value in section.items()), [])
        async with AsyncExitStack() as stack:
            _, environment = await made.sandbox(stack)
            return await made.agent.run(made.task, None, environment), made

    return run


NO_ANSWERS = {
    "no choices": {**GOOD, "choices": []},
    "null": {**GOOD, "choices": None},
    "no message": chat(None),
    "abort": chat(SILENT, "abort"),  # SGLang, vLLM
    "abort in mid answer": chat({"role": "assistant", "content": "Let me lo"}, "abort"),
    "error": chat(SILENT, "error"),  # OpenRouter
    "no JSON": b"<html>502 bad gateway</html>",
    "cut": json.dumps(GOOD).encode()[:50],
}


@pytest.mark.parametrize("answer", NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_an_answer_that_is_none_is_a_failed_try(work, server, answer):
    result, _ = await work([(200, answer)])
    assert (result.exit_status, result.produced_by["agent_calls_again"]) == ("Submitted", 1)
    result, _ = await work([(200, answer)] * 2, max_retries=1)
    assert result.exit_status == "exit_api"
    assert "Traceback" not in result.messages[-1]["content"]
    assert len(server.requests) == 4


@pytest.mark.parametrize("provider", ["hosted_vllm", "openrouter", "deepseek", "azure"])
async def test_a_body_that_is_no_json_is_tried_again_whatever_the_provider(work, provider):
    result, _ = await work([(200, b"<html>502</html>")], model=f"{provider}/m")
    assert (result.exit_status, result.produced_by["agent_calls_again"]) == ("Submitted", 1)


async def test_an_answer_that_was_held_back_is_the_tasks(work, server):
    with pytest.raises(EngineError, match="held back") as caught:
        await work([(200, chat({"role": "assistant", "content": None}, "content_filter"))])
    assert (caught.value.reason, caught.value.fault) == ("engine/content_policy", "task")
    assert len(server.requests) == 1
    result, _ = await work([(200, chat(command(SUBMIT), "content_filter"))])
    assert result.exit_status == "Submitted", "what there is of it is used"


async def test_errors_of_fallbacks_are_the_providers(work):
    down = (500, {"error": {"message": "down", "type": "x"}})
    result, _ = await work([down] * 9, max_retries=0, **{"options.fallbacks": ["openai/other"]})
    assert result.exit_status == "exit_api"


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}])
async def test_a_cost_that_cannot_be_computed_is_named_and_no_failure_of_the_agent(work, usage):
    with pytest.raises(EngineError, match=r"try: agent\.cost_limit = 0") as caught:
        await work([(200, {**GOOD, "usage": usage})], model="openai/gpt-4o", cost_limit=1.0)
    assert (caught.value.reason, caught.value.fault) == ("engine/cost", "infra")


NO_ROOM = (
    "Requested token count exceeds the model's maximum context length of 4096 tokens: 9 from the messages "
    "and 5000 for the completion."
)
TOO_LONG = (400, {"error": {"message": NO_ROOM}})


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"options.max_completion_tokens": 5000}, "options.max_completion_tokens"),
        ({"options.extra_body.max_tokens": 5000}, "options.extra_body.max_tokens"),
        ({"options.extra_body.max_new_tokens": 5000}, "options.extra_body.max_new_tokens"),
    ],
)
async def test_a_limit_that_leaves_no_room_is_no_fault_of_the_agent_whatever_it_is_called(work, keys, named):
    with pytest.raises(EngineError, match="a smaller agent") as caught:
        await work([TOO_LONG], **keys)
    assert f"agent.{named}" in str(caught.value)
    assert (caught.value.reason, caught.value.fault) == ("engine/refused", "task")


async def test_litellm_says_nothing_by_itself(work, caplog):
    await work([(200, chat(SILENT, "abort")), (500, {"error": {"message": "down"}})])
    said = [record for record in caplog.records if record.name.startswith("LiteLLM")]
    assert not said
    assert not logging.getLogger("LiteLLM").isEnabledFor(logging.ERROR)


async def test_headers_are_secrets(work, server, caplog):
    headers = {"options.extra_headers.Authorization": BEARER, "options.extra_headers.X-Team": "team-of-tests"}
    refused = {"error": {"message": f"no such key: {BEARER.partition(' ')[2]} of team-of-tests"}}
    with pytest.raises(EngineError) as caught:
        await work([(401, refused)], **headers)
    assert server.requests[0][0]["Authorization"] == BEARER
    assert "no such key: *** of ***" in str(caught.value)
    result, made = await work([(500, refused)], **headers)
    everywhere = caplog.text + str(made.agent.describe()) + str(result)
    assert BEARER.partition(" ")[2] not in everywhere
    assert "team-of-tests" not in everywhere


AT_HOME = {"provider": "litellm_agent", "model": "openai/m", "api_base": "http://127.0.0.1:9/v1"}


def file_of(tmp_path, agent, **sections):
    values = {
        "tasks": {"path": "tasks.jsonl"},
        "model": {"tokenizer": "t", "chat_template": "c"},
        "agent": {**AT_HOME, **agent},
        **sections,
    }
    return config_of(values, base=tmp_path)


def agent_of(tmp_path, agent, **sections):
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    file = file_of(tmp_path, agent, **sections)
    return load_agent(ProviderContext(file=file, clock=None, tokenizer=None, scratch=scratch, mode="eval"))


def test_a_run_folder_has_no_secrets_of_options(tmp_path):
    options = {
        "extra_headers": {"Authorization": BEARER},
        "seed": 3,
        "extra_body": {"x-api-key": "key-of-it"},
    }
    other = {"provider": "litellm_agent", "options": {"headers": {"Proxy-Authorization": BEARER}}}
    file = file_of(tmp_path, {"options": options}, eval={"agent": other})
    kept = masked_file(file).resolved()
    assert "4711" not in kept
    assert "key-of-it" not in kept
    assert "seed = 3" in kept
    assert masked_file(file).run.tasks == file.run.tasks
    hidden = Redactor(file).hide(f"{BEARER} of-the-gateway-4711 key-of-it seed")
    assert hidden == "*** *** *** seed"
    assert masked({"max_tokens": 5, "seed": 3}) == {"max_tokens": 5, "seed": 3}


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (
            {"model": "openai/gpt-4", "options": {"reasoning_effort": "high"}},
            "does not support parameters: ['reasoning_effort']",
        ),
        ({"options": {"extra_body": 7}}, "extra_body is not a mapping"),
        ({"model": "openai/gpt-5", "temperature": 0.3}, "temperature=0.3"),
        ({"options": {"custom_llm_provider": "anthropic"}}, "not to be given among the options"),
    ],
)
def test_what_litellm_refuses_is_said_before_the_run(tmp_path, agent, said):
    with pytest.raises(ConfigError) as caught:
        agent_of(tmp_path, agent)
    assert said in str(caught.value)
    assert caught.value.where


@pytest.mark.parametrize(
    "options",
    [
        {"reasoning_effort": "high", "drop_params": True},
        {"metadata": {"team": "a"}},
        {"service_tier": "auto"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ],
)
def test_what_it_takes_is_not_refused(tmp_path, options):
    agent_of(tmp_path, {"options": options})


def test_all_tries_of_a_call_fit_into_a_rollout(tmp_path, caplog):
    made = agent_of(tmp_path, {})
    assert longest_call_s(made._calls) < WorkerConfig().generate_timeout_s
    assert longest_call_s(made._calls) == 5 * 300 + 4 + 8 + 16 + 32
    assert not caplog.records
    agent_of(tmp_path, {"max_retries": 9})
    assert "a call may take 3604 s with all its tries" in caplog.text
    assert "worker.generate_timeout_s = 1800 s" in caplog.text


def test_provenance_names_what_was_asked_and_how(tmp_path, monkeypatch):
    options = {"seed": 3, "extra_headers": {"Authorization": BEARER}}
    said = agent_of(tmp_path, {"max_tokens": 77, "options": options}).describe()
    assert (said["agent_api_base"], said["agent_max_tokens"]) == ("http://127.0.0.1:9/v1", 77)
    assert json.loads(said["agent_options"]) == {"seed": 3, "extra_headers": {"Authorization": "***"}}
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")
    assert agent_of(tmp_path, {"api_base": ""}).describe()["agent_api_base"] == "the provider's own"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://me:word@gateway.test/v1")
    assert agent_of(tmp_path, {"api_base": ""}).describe()["agent_api_base"] == "http://***@gateway.test/v1"
