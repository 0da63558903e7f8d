"""`litellm_agent`: the real litellm against a server with OpenAI's API, and what its failures become."""

import json
import re
import socket
import threading
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import pytest
from agent_flow.agents.litellm_agent import LitellmAgent
from agent_flow.agents.state import AgentState
from agent_flow.config import config_of
from agent_flow.errors import AgentError, ConfigError, EngineError
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_agent, load_engine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

KEY = "sk-of-the-tests-4711"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FIX = ["cat answer.py", "sed -i s/41/42/ answer.py", SUBMIT]


class Fault:
    """One answer that is none."""

    def __init__(self, status, message, *, code=None, kind="invalid_request_error", headers=None):
        self.status, self.headers = status, headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}


RATE_LIMIT = Fault(429, "Rate limit reached for requests", kind="requests", code="rate_limit_exceeded")
OVERLOADED = Fault(503, "The engine is currently overloaded", kind="server_error")
WRONG_KEY = Fault(401, f"Incorrect API key provided: {KEY}.", code="invalid_api_key")
NO_MODEL = Fault(404, "The model `tiny` does not exist", code="model_not_found")
REFUSED = Fault(400, "Unsupported value: 'temperature'", code="unsupported_value")
FILTERED = Fault(400, "Your request was rejected as a result of our safety system. content_policy_violation")
CONTEXT = [
    # OpenAI
    Fault(
        400,
        "This model's maximum context length is 4096 tokens. However, your messages resulted in 5009 tokens.",
        code="context_length_exceeded",
    ),
    # SGLang 0.5.23
    Fault(400, "The input (5009 tokens) is longer than the model's context length (4096 tokens)."),
    Fault(
        400,
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a "
        "total of 5009 tokens: 9 tokens from the input messages and 5000 tokens for the completion.",
    ),
    # llama.cpp's server
    Fault(400, "the request exceeds the available context size, try increasing it"),
]


class Provider:
    """Speaks OpenAI's chat completions: the n-th answer of a conversation is the n-th turn.

    A fault that is next stands in for it; None is no fault.
    """

    def __init__(self):
        self.turns, self.faults, self.requests, self.answered = [], [], [], 0
        self.held = None
        """Set to an event: requests wait for it."""
        self.arrived = threading.Event()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                provider.answer(self, json.loads(body))

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def answer(self, handler, body):
        self.requests.append((handler.path, handler.headers, body))
        self.arrived.set()
        if self.held is not None:
            self.held.wait()
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            return self._send(handler, fault.status, fault.body, fault.headers)
        past = [message for message in body["messages"] if message["role"] in ("tool", "user")]
        turn = self.turns[len(past) - 1]
        message, finish_reason = turn if isinstance(turn, tuple) else (turn, "tool_calls")
        if isinstance(message, str):
            call = {"name": "bash", "arguments": json.dumps({"command": message})}
            tool_call = {"id": f"call_{self.answered}", "type": "function", "function": call}
            message = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
        self.answered += 1
        choice = {"index": 0, "message": message, "finish_reason": finish_reason}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        answer = {"id": "chat", "object": "chat.completion", "created": 1, "model": "tiny-2026"}
        return self._send(handler, 200, {**answer, "choices": [choice], "usage": usage}, {})

    def _send(self, handler, status, body, headers):
        data = json.dumps(body).encode()
        handler.send_response(status)
        for name, value in {**headers, "Content-Type": "application/json"}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def close(self):
        if self.held is not None:
            self.held.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def provider():
    server = Provider()
    yield server
    server.close()


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    return path


@pytest.fixture
def work(bench, provider, key_file):
    """Runs the agent on a task of the bench: `work(turns, faults, KEY OF [agent]=VALUE)`."""

    async def run(turns=FIX, faults=(), state=None, **keys):
        provider.turns, provider.faults = list(turns), list(faults)
        section = {
            "provider": "litellm_agent",
            "model": "openai/tiny",
            "api_base": provider.url,
            "api_key_file": str(key_file),
            "retry_wait_s": 0.01,
            **keys,
        }
        made = bench("\n".join(f"{name} = {json.dumps(value)}" for name, value in section.items()), [])
        async with AsyncExitStack() as stack:
            _, environment = await made.sandbox(stack)
            result = await made.agent.run(made.task, None, environment, state)
            answer = await environment.read(f"{environment.workdir}/answer.py")
        return result, answer.decode(), made

    return run


async def test_a_task_is_solved_by_a_model_that_is_somewhere_else(work, provider):
    result, answer, made = await work()
    assert (result.exit_status, answer) == ("Submitted", "ANSWER = 42\n")
    assert result.state is None
    assert "ANSWER = 41" in str(result.messages[3])
    paths, headers, bodies = zip(*provider.requests, strict=True)
    assert set(paths) == {"/v1/chat/completions"}
    assert {header["Authorization"] for header in headers} == {f"Bearer {KEY}"}
    assert {body["model"] for body in bodies} == {"tiny"}
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["bash"]
    assert not {"temperature", "max_tokens", "stream"} & set(bodies[0]), "what is not configured is not sent"
    assert [message["role"] for message in bodies[-1]["messages"]] == (
        ["system", "user"] + ["assistant", "tool"] * 2
    )
    assert result.produced_by == {
        "agent_calls": 3,
        "agent_calls_again": 0,
        "agent_prompt_tokens": 300,
        "agent_completion_tokens": 30,
        "agent_answered_by": "tiny-2026",
        "agent_cost": 0.0,
    }
    said = made.agent.describe()
    assert (said["agent"], said["agent_model"], said["agent_temperature"]) == (
        "litellm_agent",
        "openai/tiny",
        "not sent",
    )
    assert KEY not in str(said) + str(result.messages)


async def test_what_is_configured_is_sent(work, provider):
    await work(temperature=0, max_tokens=77, **{"options.seed": 3})
    body = provider.requests[0][2]
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 77, 3)


async def test_the_text_format(work, provider):
    turns = [{"role": "assistant", "content": f"Next.\n```mswea_bash_command\n{line}\n```"} for line in FIX]
    result, answer, _ = await work([(turn, "stop") for turn in turns], action_format="text")
    assert (result.exit_status, answer) == ("Submitted", "ANSWER = 42\n")
    assert "tools" not in provider.requests[0][2]


async def test_a_reply_that_cannot_be_read_is_said_to_the_model(work, provider):
    silent = ({"role": "assistant", "content": "I think."}, "stop")
    no_text = {"name": "bash", "arguments": '{"command": 5}'}
    number = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": no_text}]}
    result, answer, _ = await work([silent, (number, "tool_calls"), FIX[1], SUBMIT])
    assert (result.exit_status, answer) == ("Submitted", "ANSWER = 42\n")
    last = provider.requests[2][2]["messages"]
    assert "must be a string" in last[-1]["content"]
    assert [message["role"] for message in last] == ["system", "user", "user", "user"], "nothing unanswered"
    result, _, _ = await work([silent] * 3)
    assert result.exit_status == "RepeatedFormatError"


async def test_limits_of_turns_and_of_cost(work):
    result, _, _ = await work(step_limit=2)
    assert result.exit_status == "LimitsExceeded"
    # 100 and 10 tokens of gpt-4o: 350 millionths of a dollar, by the list in litellm's package.
    result, _, _ = await work(model="openai/gpt-4o", cost_limit=0.0006)
    assert result.exit_status == "LimitsExceeded"
    assert result.produced_by["agent_calls"] == 2
    assert result.produced_by["agent_cost"] == pytest.approx(0.0007)


async def test_what_may_pass_is_tried_again(work, provider, caplog):
    later = Fault(503, "later", kind="server_error", headers={"Retry-After": "0.07"})
    result, answer, _ = await work(faults=[RATE_LIMIT, OVERLOADED, later])
    assert (result.exit_status, answer) == ("Submitted", "ANSWER = 42\n")
    assert (result.produced_by["agent_calls"], result.produced_by["agent_calls_again"]) == (3, 3)
    assert len(provider.requests) == 6
    said = [record.getMessage() for record in caplog.records if record.name.startswith("agent_flow")]
    assert len(said) == 3
    assert "try 2 in 0.01 s" in said[0]
    assert "try 4 in 0.07 s" in said[2]


@pytest.mark.original("A-exit-api")
@pytest.mark.parametrize("fault", [RATE_LIMIT, OVERLOADED])
async def test_what_does_not_pass_ends_with_exit_api(work, provider, fault):
    result, answer, _ = await work(faults=[fault] * 9, max_retries=2)
    assert (result.exit_status, answer) == ("exit_api", "ANSWER = 41\n")
    assert len(provider.requests) == 3, "neither litellm nor the scaffold tries again by itself"
    assert fault.body["error"]["message"] in result.messages[-1]["content"]


async def test_a_server_that_is_gone_is_exit_api(work, provider):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        result, _, _ = await work(api_base=address, max_retries=1)
    assert result.exit_status == "exit_api"
    assert not provider.requests


async def test_proxies_are_taken_only_where_asked_for(work, provider, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", provider.url.removesuffix("/v1"))
    monkeypatch.setenv("http_proxy", provider.url.removesuffix("/v1"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    elsewhere = {"api_base": "http://127.0.0.1:9/v1", "max_retries": 0}
    result, _, _ = await work(**elsewhere)
    assert (result.exit_status, provider.requests) == ("exit_api", [])
    result, _, _ = await work(**elsewhere, use_proxies=True)
    assert result.exit_status == "Submitted"
    assert provider.requests[0][0] == "http://127.0.0.1:9/v1/chat/completions"


async def test_a_call_has_a_limit(work, provider):
    provider.held = threading.Event()
    result, _, _ = await work(timeout_s=0.2, max_retries=1)
    assert result.exit_status == "exit_api"
    assert "engine/timeout" in result.messages[-1]["content"]
    assert result.produced_by["agent_calls_again"] == 1


@pytest.mark.original("A-exit-context")
@pytest.mark.parametrize("fault", CONTEXT, ids=range(len(CONTEXT)))
async def test_a_context_that_is_full_is_exit_context(work, provider, fault):
    result, _, _ = await work(faults=[fault])
    assert (result.exit_status, len(provider.requests)) == ("exit_context", 1)


async def test_room_for_an_answer_that_was_never_there_is_no_fault_of_the_agent(work):
    result, _, _ = await work(faults=[None, CONTEXT[2]], max_tokens=500)
    assert result.exit_status == "exit_context"
    with pytest.raises(EngineError, match=r"a smaller agent\.max_tokens") as caught:
        await work(faults=[CONTEXT[2]], max_tokens=5000)
    assert (caught.value.reason, caught.value.fault) == ("engine/refused", "task")


@pytest.mark.parametrize(
    ("fault", "cause", "said"),
    [
        (WRONG_KEY, "credentials", "agent.api_key_file"),
        (Fault(403, "You are not allowed"), "credentials", "You are not allowed"),
        (NO_MODEL, "no_model", "The model `tiny` does not exist"),
        (REFUSED, "refused", "temperature"),
        (FILTERED, "content_policy", "safety system"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_a_provider_refuses_is_an_error_and_never_tried_again(work, provider, fault, cause, said):
    with pytest.raises(EngineError, match=re.escape(said)) as caught:
        await work(faults=[fault] * 3)
    error = caught.value
    assert (error.reason, error.retryable) == (f"engine/{cause}", False)
    assert error.fault == ("task" if cause == "content_policy" else "infra")
    assert len(provider.requests) == 1
    assert KEY not in str(error)


async def test_an_interrupt_cuts_a_call(work, provider):
    provider.held = threading.Event()
    scope = anyio.CancelScope()

    async def cancel():
        await anyio.to_thread.run_sync(provider.arrived.wait)
        scope.cancel()

    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            with scope:
                await work()
    assert scope.cancelled_caught


async def test_no_state_of_another_agent(work):
    state = AgentState(
        agent="minisweagent", scaffold_version="1", messages=(), n_calls=0, n_format_fails=0, spent_s=0.0
    )
    with pytest.raises(AgentError, match="made by minisweagent"):
        await work(state=state)


def config(tmp_path, agent, mode="eval", **sections):
    values = {
        "tasks": {"path": "tasks.jsonl"},
        "model": {"tokenizer": "t", "chat_template": "c"},
        "agent": {"provider": "litellm_agent", **agent},
        **sections,
    }
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    file = config_of(values, base=tmp_path)
    return ProviderContext(file=file, clock=None, tokenizer=None, scratch=scratch, mode=mode)


AT_HOME = {"model": "openai/tiny", "api_base": "http://127.0.0.1:9/v1"}


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"model": "tiny"}, "litellm knows no provider of a model 'tiny'"),
        (
            {"model": "openai/tiny"},
            "asks for an API key, and there is none\n  try: api_key_file, or OPENAI_API_KEY",
        ),
        ({**AT_HOME, "api_key_file": "gone"}, "cannot read the token file"),
        ({**AT_HOME, "api_base": "http://me:secret@host/v1"}, "credentials in the address of host"),
        ({**AT_HOME, "api_base": "127.0.0.1:30000"}, "not the base URL of a server"),
        ({**AT_HOME, "cost_limit": 1.0}, "litellm knows no price of openai/tiny"),
        ({**AT_HOME, "options": {"stream": True, "api_key": KEY}}, "api_key, stream: not to be given among"),
        ({**AT_HOME, "temperature": -1}, "temperature"),
        ({"api_base": AT_HOME["api_base"]}, "missing key 'agent.model'"),
    ],
)
def test_what_cannot_work_is_said_before_the_run(tmp_path, monkeypatch, agent, said):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError) as caught:
        load_agent(config(tmp_path, agent))
    assert said in str(caught.value)
    assert caught.value.where
    assert "secret" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_sampling_of_an_engine_is_not_silently_left_out(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.sampling is for an engine"):
        load_agent(config(tmp_path, AT_HOME, eval={"sampling": {"temperature": 0}}))


@pytest.mark.original("A-litellm-agent")
def test_nothing_is_trained_without_an_engine(tmp_path):
    context = config(tmp_path, AT_HOME, mode="train", engine={"provider": "none"})
    with pytest.raises(ConfigError, match="nothing to train on without an engine"):
        load_engine(context)
    with pytest.raises(ConfigError, match="samples no tokens, so nothing of it can be trained"):
        load_agent(context)
    for mode in ("eval", None):
        assert isinstance(load_agent(msgspec.structs.replace(context, mode=mode)), LitellmAgent)


NO_NETWORK = '''
"""Imported by Python at its start: notes every address that this process looks up or connects to."""
import os
import sys

def note(event, given):
    if event == "socket.getaddrinfo":
        seen = f"{given[0]}:{given[1]}"
    elif event == "socket.connect" and isinstance(given[1], tuple):
        seen = f"{given[1][0]}:{given[1][1]}"
    else:
        return
    file = os.open(os.environ["SEEN"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{seen}\\n".encode())
    os.close(file)

sys.addaudithook(note)
'''


@pytest.fixture
def project(example, tmp_path, provider, key_file):
    """The quickstart with one task, and in its [eval.agent] the server, whose answers are those recorded."""
    for name in ("run.toml", "qwen3.jinja"):
        (tmp_path / name).write_text((example / name).read_text())
    (tmp_path / "repos").symlink_to(example / "repos")
    task = (example / "tasks.jsonl").read_text().splitlines()[0]
    (tmp_path / "tasks.jsonl").write_text(f"{task}\n")
    name = json.loads(task)["instance_id"]
    recording = json.loads((example / "recordings" / f"{name}.json").read_text())
    for turn in recording["rollouts"][0]["turns"]:
        made = re.search(r"<tool_call>\n(.*?)\n</tool_call>", turn["text"], re.DOTALL)
        provider.turns.append(json.loads(made[1])["arguments"]["command"])
    with (tmp_path / "run.toml").open("a") as file:
        file.write(
            f'\n[eval.agent]\nprovider = "litellm_agent"\napi_base = "{provider.url}"\n'
            'model = "openai/tiny"\napi_key_file = "key"\nstep_limit = 8\nretry_wait_s = 0.01\n'
        )
    text = (tmp_path / "run.toml").read_text()
    # There is no such engine: nothing may ask for it.
    text = text.replace(
        'provider = "replay"\nrecordings = "recordings"',
        'provider = "sglang"\naddresses = ["http://127.0.0.1:9"]',
    )
    (tmp_path / "run.toml").write_text(text)
    return tmp_path


@pytest.mark.original("A-litellm-agent")
def test_an_evaluation_of_a_model_that_is_somewhere_else(project, provider, cli):
    (project / "sitecustomize.py").write_text(NO_NETWORK)
    env = {"PYTHONPATH": str(project), "SEEN": str(project / "seen"), "HTTP_PROXY": "http://127.0.0.1:9"}
    done = cli("eval", "run.toml", "--json", "--dump", cwd=project, env=env)
    assert done.code == 0, done.stderr
    assert (done.summary["mean_reward"], done.summary["not_graded"]) == (1.0, {})
    assert done.summary["pass_at"] == {"1": 1.0}
    address = provider.url.removeprefix("http://").removesuffix("/v1")
    assert set((project / "seen").read_text().split()) == {address}

    assert not list((done.folder / "samples").iterdir())
    assert (done.folder / "run.toml").read_text().count('provider = "none"') == 1
    (rollout,) = (done.folder / "rollouts").iterdir()
    record = json.loads((rollout / "provenance.json").read_text())
    assert (record["mode"], record["exit_status"], record["in_loss"]) == ("eval", "Submitted", False)
    said = record["produced_by"]
    assert (said["engine"], said["agent_model"], said["agent_calls"]) == ("none", "openai/tiny", 5)
    assert (rollout / "patch.diff").read_bytes().startswith(b"diff --git")
    assert "bash: " in (rollout / "view.html").read_text()
    for path in done.folder.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    assert KEY not in done.stdout + done.stderr

    page = (rollout / "view.html").read_bytes()
    (rollout / "view.html").unlink()
    viewed = cli("view", done.folder, cwd=project)
    assert (viewed.code, (rollout / "view.html").read_bytes()) == (0, page), viewed.stderr
    replayed = cli("run", "--replay", done.folder, cwd=project)
    assert replayed.code == 2
    assert "there is nothing to replay" in replayed.stderr


def test_a_wrong_key_is_no_reward_of_0(project, provider, cli):
    provider.faults = [WRONG_KEY] * 9
    text = (project / "run.toml").read_text()
    engine = text.index("[engine]"), text.index("[agent]")
    (project / "run.toml").write_text(text[: engine[0]] + text[engine[1] :])  # none at all
    done = cli("eval", "run.toml", "--json", cwd=project)
    assert done.code == 1
    assert done.summary["mean_reward"] is None
    assert done.summary["not_graded"] == {"engine/credentials (infra)": 2}, "the rollout and its refill"
    assert len(provider.requests) == 2
    assert KEY not in done.stdout + done.stderr
    assert "api_key_file" in done.stdout


def test_in_training_it_is_refused_with_file_and_line(project, provider, cli):
    text = (project / "run.toml").read_text().partition("\n[eval.agent]\n")
    lines = text[0].replace('provider = "minisweagent"', text[2].rstrip("\n").replace("step_limit = 8\n", ""))
    (project / "run.toml").write_text(lines)
    done = cli("run", "run.toml", cwd=project)
    line = lines.splitlines().index('provider = "litellm_agent"') + 1
    assert done.code == 2
    assert f"run.toml:{line}: agent provider 'litellm_agent' samples no tokens" in done.stderr
    assert "agent.provider = 'minisweagent'" in done.stderr
    assert not (project / "runs").exists()
    assert not provider.requests
