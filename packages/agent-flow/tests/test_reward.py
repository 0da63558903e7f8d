"""Reward functions: what they are given, what they may return, and a judge that is down is never a 0."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from agent_flow.errors import ConfigError, GraderError
from agent_flow.reward import Episode, Reward, RewardConfig, RewardFunction, RewardUnavailable
from agent_flow.task import Task

pytestmark = pytest.mark.anyio


def episode(text="42", turns=2):
    task = Task(instance_id="t-1", problem_statement="6 x 7?", row={"answer": 42})
    return Episode(
        task=task,
        messages=({"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": text}),
        text=text,
        exit_status="Submitted",
        turns=turns,
        artifacts={},
        mode="train",
        rollout_id="0" * 32,
        member=0,
    )


@pytest.fixture
def function(tmp_path, monkeypatch):
    """Makes a module with a reward function and loads it."""

    def make(source, *, name="judged", **config):
        module = f"rewards_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
        config = RewardConfig(reward=f"{module}:{name}", reward_wait_s=0.001, **config)
        return RewardFunction(config, where="run.toml:9", python_path=(tmp_path,))

    return make


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("def judged(e): return 0.5", 0.5),
        ("def judged(e): return int(e.text) == e.task.row['answer']", 1.0),
        ("async def judged(e): return e.turns", 2.0),
        ("import numpy as np\ndef judged(e): return np.float32(0.25)", 0.25),
        ("import numpy as np\ndef judged(e): return np.bool_(True)", 1.0),
        ("async def later(e): return 3\ndef judged(e): return later(e)", 3.0),
        ("class Judge:\n    async def __call__(self, e): return 4\njudged = Judge()", 4.0),
        ("def judged(e, *, scale): return scale * 2", 6.0),
    ],
)
async def test_numbers_of_sync_and_async_functions(function, body, want):
    kwargs = {"reward_kwargs": {"scale": 3}} if "scale" in body else {}
    made, calls = await function(body, **kwargs).judge(episode())
    assert (made.reward, calls) == (want, 1)
    assert type(made.reward) is float


async def test_a_reward_may_say_more_than_a_number(function):
    source = (
        "from agent_flow.reward import Reward\n"
        "def judged(e):\n"
        "    return Reward(reward=True, details={'words': 2}, turn_rewards=(None, 0.5), log='short')"
    )
    made, _ = await function(source).judge(episode())
    assert made == Reward(reward=1.0, details={"words": 2}, turn_rewards=(None, 0.5), log="short")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", "what it returns is None (NoneType), need a number or a Reward"),
        ("'1.0'", "what it returns is '1.0' (str)"),
        ("(1.0, {})", "what it returns is (1.0, {}) (tuple)"),
        ("float('nan')", "what it returns is nan: need a finite number"),
        ("float('inf')", "what it returns is inf"),
        ("Reward(reward=float('nan'))", "reward is nan"),
        ("Reward(reward=1.0, turn_rewards=(1.0,))", "1 turn_rewards for 2 turns"),
        ("Reward(reward=1.0, turn_rewards=(1.0, 'x'))", "turn_rewards[1] is 'x' (str)"),
        ("Reward(reward=1.0, details={'a': [1]})", "details['a'] is [1] (list)"),
    ],
)
async def test_what_is_no_reward_is_a_named_error_at_once(function, answer, said):
    source = (
        "from agent_flow.reward import Reward\ncalls = []\n"
        f"def judged(e):\n    calls.append(e)\n    return {answer}"
    )
    judged = function(source)
    with pytest.raises(GraderError) as caught:
        await judged.judge(episode())
    error = caught.value
    assert (error.cause, error.fault, error.retryable) == ("reward_type", "task", False)
    assert said in error.message
    assert "task t-1" in error.message


async def test_an_exception_is_tried_again_and_then_an_infrastructure_error(function):
    judged = function("def judged(e): return 1 / 0", reward_attempts=2)
    with pytest.raises(GraderError) as caught:
        await judged.judge(episode())
    error = caught.value
    assert (error.cause, error.fault, error.retryable) == ("reward_raised", "infra", False)
    assert "ZeroDivisionError: division by zero (call 2 of 2)" in error.message
    assert "judged" in error.evidence


async def test_sys_exit_in_a_function_does_not_end_the_run(function):
    judged = function("import sys\ndef judged(e): sys.exit(3)", reward_attempts=1)
    with pytest.raises(GraderError, match="SystemExit: 3"):
        await judged.judge(episode())


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_function_that_hangs_is_left_behind(function, kind):
    wait = "threading.Event().wait()" if kind == "def" else "await anyio.sleep_forever()"
    source = f"import anyio, threading\n{kind} judged(e): {wait}"
    judged = function(source, reward_timeout_s=0.05, reward_attempts=2)
    with pytest.raises(GraderError) as caught:
        await judged.judge(episode())
    assert (caught.value.cause, caught.value.fault) == ("reward_timeout", "infra")
    hung = [thread for thread in threading.enumerate() if thread.name == "agent-flow reward"]
    assert all(thread.daemon for thread in hung), "or the process would never end"


class Judge(ThreadingHTTPServer):
    """A real small judge; `answers` says what each request gets."""

    def __init__(self, *answers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = list(answers)
        self.asked = []
        self.release = threading.Event()
        self.daemon_threads = True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/judge"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        answer = self.server.answers.pop(0)
        if answer == "hang":
            self.server.release.wait(10)
            return
        self.send_response(answer if isinstance(answer, int) else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": answer}).encode())

    def log_message(self, *_):
        """Quiet."""


JUDGED = """
import json, urllib.error, urllib.request
from agent_flow.reward import Reward, RewardUnavailable

def judged(episode, *, url):
    body = json.dumps({"question": episode.task.problem_statement, "answer": episode.text}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method="POST")) as answer:
            score = json.load(answer)["score"]
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise RewardUnavailable(f"the judge: {error}") from error
    return Reward(reward=score, details={"judge": "small"})
"""


@pytest.fixture
def judge():
    servers = []

    def serve(*answers):
        server = Judge(*answers)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    yield serve
    for server in servers:
        server.release.set()
        server.shutdown()
        server.server_close()


async def test_a_judge_that_fails_then_hangs_then_answers(function, judge):
    server = judge(503, "hang", 0.75)
    judged = function(JUDGED, reward_kwargs={"url": server.url}, reward_timeout_s=0.3, reward_attempts=3)
    made, calls = await judged.judge(episode())
    assert (made.reward, made.details, calls) == (0.75, {"judge": "small"}, 3)
    assert server.asked == [{"question": "6 x 7?", "answer": "42"}] * 3


async def test_a_judge_that_stays_down_is_no_reward(function, judge):
    server = judge(503, 503)
    judged = function(JUDGED, reward_kwargs={"url": server.url}, reward_attempts=2)
    with pytest.raises(GraderError) as caught:
        await judged.judge(episode())
    error = caught.value
    assert (error.reason, error.fault) == ("grader/reward_unavailable", "infra")
    assert "HTTP Error 503" in error.message
    assert not error.retryable, "to sample the rollout again would not bring the judge back"


def test_unavailable_is_the_infrastructures_fault():
    error = RewardUnavailable("down")
    assert (error.fault, error.retryable, str(error)) == ("infra", True, "grader/reward_unavailable: down")


@pytest.mark.parametrize(
    ("source", "name", "kwargs", "said"),
    [
        ("def judged(e): return 1", "juged", {}, "has no function 'juged'"),
        ("def judged(): return 1", "judged", {}, "cannot be called with (episode)"),
        ("def judged(e): return 1", "judged", {"url": "x"}, "cannot be called with (episode, url)"),
        ("import not_there", "judged", {}, "not_there"),
        ("judged = 1 / 0", "judged", {}, "ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_work_is_said_before_the_run(function, source, name, kwargs, said):
    with pytest.raises(ValueError, match=r"run\.toml:9") as caught:
        function(source, name=name, reward_kwargs=kwargs)
    assert said in str(caught.value)


@pytest.mark.parametrize("spec", ["judged", ":judged", "module:"])
def test_a_name_of_another_form(spec):
    with pytest.raises(ConfigError, match="is not 'module:function'"):
        RewardFunction(RewardConfig(reward=spec), where="run.toml")


def test_the_version_of_a_function_is_that_of_its_file(function):
    first = function("def judged(e): return 1").describe()
    second = function("def judged(e): return 2").describe()
    assert first["grader"] != second["grader"]
    assert first["grader"].startswith("reward-function/")
