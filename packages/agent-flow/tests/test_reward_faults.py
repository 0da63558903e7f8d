"""Reward functions that cancel, exit, swallow, change their episode, or answer what no file can hold."""

import asyncio
import json
import math
import sys

import anyio
import numpy as np
import pytest
from agent_flow.errors import GraderError
from agent_flow.reward import Episode, RewardConfig, RewardFunction
from agent_flow.task import Task, copied

pytestmark = pytest.mark.anyio


def episode(turns=2):
    return Episode(
        task=Task(instance_id="t-1", problem_statement="6 x 7?", row={"answer": 42, "deep": {"a": [1]}}),
        messages=({"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "42"}),
        text="42",
        exit_status="Submitted",
        turns=turns,
        artifacts={"patch.diff": b""},
        mode="train",
        rollout_id="0" * 32,
        member=0,
    )


@pytest.fixture
def function(tmp_path, monkeypatch):
    """Makes a module with a reward function and loads it."""

    def make(source, **config):
        module = f"faults_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(
            "import asyncio, anyio, decimal, enum, math, sys\nimport numpy as np\n"
            f"from agent_flow.reward import Reward, RewardUnavailable\n{source}\n"
        )
        monkeypatch.delitem(sys.modules, module, raising=False)
        config = {"reward_attempts": 1, "reward_wait_s": 0.001, **config}
        config = RewardConfig(reward=f"{module}:judged", **config)
        return RewardFunction(config, where="run.toml:9", python_path=(tmp_path,))

    return make


async def fault(judged, *, turns=2):
    with anyio.fail_after(10), pytest.raises(GraderError) as caught:
        await judged.judge(episode(turns))
    return caught.value


SHARED = """
async def judged(e):
    shared = asyncio.ensure_future(asyncio.sleep(60))
    shared.cancel()
    await shared
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SHARED, "raised RuntimeError: CancelledError"),
        ("async def judged(e): raise asyncio.CancelledError('shared')", "CancelledError: shared"),
        ("async def judged(e): sys.exit(3)", "raised RuntimeError: SystemExit: 3"),
        ("class Own(BaseException): pass\nasync def judged(e): raise Own('x')", "Own: x"),
        ("def judged(e): raise asyncio.CancelledError('shared')", "CancelledError: shared"),
        ("def judged(e): return next(iter([]))", "raised RuntimeError: StopIteration"),
        ("async def judged(e): return next(iter([]))", "StopIteration"),
        ("async def later(e): sys.exit(4)\ndef judged(e): return later(e)", "SystemExit: 4"),
        (
            "class Mute(Exception):\n    def __str__(self): return 3\ndef judged(e): raise Mute",
            "raised Mute (call 1 of 1)",
        ),
        (
            "class Mute(SystemExit):\n    def __str__(self): return 3\ndef judged(e): raise Mute",
            "raised RuntimeError: Mute (call 1 of 1)",
        ),
    ],
)
async def test_whatever_a_function_raises_is_said_at_once(function, source, said):
    error = await fault(function(source))
    assert (error.reason, error.fault) == ("grader/reward_raised", "infra")
    assert said in error.message
    assert "faults_test_whatever" in error.evidence


async def test_it_ends_no_other_call(function):
    """In a task group a stray `CancelledError` ends its task without a word, `SystemExit` all tasks."""
    judged = function(
        "async def judged(e):\n"
        "    if e.member == 1: raise asyncio.CancelledError\n"
        "    if e.member == 2: sys.exit(3)\n"
        "    await anyio.sleep(0)\n    return 1.0"
    )
    ends = {}

    async def call(member):
        one = episode()
        try:
            made, _ = await judged.judge(_with(one, member=member))
            ends[member] = made.reward
        except GraderError as error:
            ends[member] = error.cause

    async with anyio.create_task_group() as group:
        for member in range(4):
            group.start_soon(call, member)
    assert ends == {0: 1.0, 1: "reward_raised", 2: "reward_raised", 3: 1.0}


def _with(one, **values):
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    return Episode(**{**fields, **values})


SWALLOWS = [
    "async def judged(e):\n    try: await asyncio.sleep(60)\n    except asyncio.CancelledError: return 0.0",
    "async def judged(e):\n    try: await asyncio.sleep(60)\n    except BaseException: raise ValueError('x')",
    "async def judged(e):\n    try: await asyncio.sleep(60)\n"
    "    except BaseException: raise RewardUnavailable('x')",
    "async def judged(e):\n    try: await asyncio.sleep(60)\n    except BaseException: sys.exit(1)",
    "async def later():\n    try: await asyncio.sleep(60)\n    except BaseException: return 0.0\n"
    "def judged(e): return later()",
]


@pytest.mark.parametrize("source", SWALLOWS)
async def test_a_function_that_swallows_its_time_out_gives_no_reward(function, source):
    error = await fault(function(source, reward_timeout_s=0.02))
    assert error.reason == "grader/reward_timeout"


@pytest.mark.parametrize("source", SWALLOWS)
@pytest.mark.parametrize("how", ["scope", "task"])
async def test_nor_does_one_that_swallows_an_interrupt(function, source, how):
    """By an anyio scope, as the worker's, or by `Task.cancel`, as of a program around it."""
    judged = function(
        "class Waiting(asyncio.Event): pass\nwaiting = Waiting()\n"
        + source.replace("    try: await", "    waiting.set()\n    try: await")
    )
    waiting = sys.modules[judged.describe()["grader_function"].partition(":")[0]].waiting
    ends = []

    async def call(scope):
        try:
            with scope:
                ends.append(await judged.judge(episode()))
        except BaseException as error:
            ends.append(type(error))
            raise

    with anyio.fail_after(10):
        scope = anyio.CancelScope()
        task = asyncio.ensure_future(call(scope))
        await waiting.wait()
        (scope if how == "scope" else task).cancel()
        await asyncio.wait([task])
    assert task.cancelled() if how == "task" else scope.cancelled_caught
    assert ends == ([asyncio.CancelledError] if how == "task" else [])


async def test_after_a_swallowed_time_out_the_next_call_is_as_new(function):
    judged = function(
        "calls = []\nasync def judged(e):\n    calls.append(e)\n    if len(calls) > 1: return 0.5\n"
        "    try: await asyncio.sleep(60)\n    except asyncio.CancelledError: return 0.0",
        reward_timeout_s=0.02,
        reward_attempts=2,
    )
    made, calls = await judged.judge(episode())
    assert (made.reward, calls) == (0.5, 2)
    assert asyncio.current_task().cancelling() == 0


async def test_scalars_of_numpy_are_made_plain(function):
    judged = function(
        "class Kind(str, enum.Enum): A = 'a'\n"
        "def judged(e):\n"
        "    return Reward(reward=np.float32(1), turn_rewards=np.array([0.5, 1]), details={\n"
        "        'f64': np.float64(0.5), 'f32': np.float32(0.5), 'long': np.longdouble(0.5),\n"
        "        'i': np.int64(3), 'u': np.uint64(2**64 - 1), 'b': np.bool_(True),\n"
        "        np.str_('s'): np.str_('t'), 'none': None,\n"
        "        'int': enum.IntEnum('E', 'X').X, 'kind': Kind.A, 'least': -2**63})"
    )
    made, _ = await judged.judge(episode())
    assert made.details == {
        **{"f64": 0.5, "f32": 0.5, "long": 0.5, "i": 3, "u": 2**64 - 1, "b": True, "s": "t", "none": None},
        **{"int": 1, "kind": "a", "least": -(2**63)},
    }
    values = [*made.details, *made.details.values()]
    assert {type(value) for value in values} == {str, int, float, bool, type(None)}
    assert made.turn_rewards == (0.5, 1.0)
    assert type(made.turn_rewards[0]) is float


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("10**400", "what it returns is too large: need a finite number"),
        ("10**5000", "what it returns is too large"),
        ("np.inf", "what it returns is inf: need a finite number"),
        ("np.float32('nan')", "what it returns is nan"),
        ("np.array([0.5])", "what it returns is array([0.5]) (ndarray), need a number or a Reward"),
        ("Reward(reward=None)", "reward is None (NoneType)"),
        ("Reward(reward=10**400)", "reward is too large"),
        ("Reward(reward=1, details=None)", "details is None (NoneType), need a dict"),
        ("Reward(reward=1, details=['a'])", "details is ['a'] (list), need a dict"),
        (
            "Reward(reward=1, details={1: 2.0})",
            "details has the key 1 (int) for 2.0 (float), need text",
        ),
        (
            "Reward(reward=1, details={'n': 2**64})",
            "details['n'] is 18446744073709551616 (int), need an",
        ),
        (
            "Reward(reward=1, details={'n': 10**5000})",
            "details['n'] is what cannot be shown (int), need",
        ),
        ("Reward(reward=1, details={'n': -2**63 - 1})", "need an integer of 64 bits"),
        (
            "Reward(reward=1, details={'n': math.nan})",
            "details['n'] is nan (float), need a finite number",
        ),
        ("Reward(reward=1, details={'n': np.float64('inf')})", "need a finite number, or None"),
        (
            "Reward(reward=1, details={'n': {'a': 1}})",
            "details['n'] is {'a': 1} (dict), need text or a",
        ),
        ("Reward(reward=1, details={'n': np.array([1])})", "details['n'] is array([1]) (ndarray)"),
        ("Reward(reward=1, details={'n': decimal.Decimal(1)})", "details['n'] is Decimal('1') (Decimal)"),
        (
            "Reward(reward=1, details={'n': np.datetime64('2026-01-01')})",
            "(datetime64), need text or a",
        ),
        ("Reward(reward=1, details={'n': '\\ud800'})", "details['n'] is '\\ud800' (str), need text without"),
        ("Reward(reward=1, details={'\\ud800': 1})", "need text without halves of surrogate pairs"),
        ("Reward(reward=1, turn_rewards=3)", "turn_rewards is 3 (int), need one for each turn, or None"),
        ("Reward(reward=1, turn_rewards='12')", "turn_rewards is '12' (str)"),
        ("Reward(reward=1, turn_rewards={1: 2, 2: 3})", "turn_rewards is {1: 2, 2: 3} (dict)"),
        ("Reward(reward=1, turn_rewards=(1, 10**400))", "turn_rewards[1] is too large"),
        ("Reward(reward=1, turn_rewards=(1, math.nan))", "turn_rewards[1] is nan"),
        ("Reward(reward=1, log=None)", "log is None (NoneType), need text"),
        ("Reward(reward=1, log='\\ud800')", "what it returns cannot be read: UnicodeEncodeError"),
    ],
)
async def test_what_no_sample_can_hold_is_said_at_once(function, answer, said):
    error = await fault(function(f"def judged(e):\n    return {answer}", reward_attempts=3))
    assert (error.reason, error.fault, error.retryable) == ("grader/reward_type", "task", False)
    assert said in error.message
    assert ":judged for task t-1: " in error.message
    assert len(error.message) < 300


async def test_a_number_whose_own_code_raises(function):
    error = await fault(
        function(
            "class Odd(float):\n    def __float__(self): raise KeyError('x')\ndef judged(e): return Odd(1)"
        )
    )
    assert error.message.endswith("what it returns cannot be read: KeyError: 'x'")


async def test_each_call_has_the_episode_to_itself(function):
    judged = function(
        "calls = []\n"
        "def judged(e):\n"
        "    calls.append((e.task.row.pop('answer'), e.task.row['deep']['a'].pop(), \n"
        "        e.messages[1].pop('content'), e.artifacts.pop('patch.diff')))\n"
        "    if len(calls) < 3: raise RewardUnavailable('down')\n"
        "    return len(set(calls)) == 1",
        reward_attempts=3,
    )
    given = episode()
    made, calls = await judged.judge(given)
    assert (made.reward, calls) == (1.0, 3)
    assert given == episode()


def test_copies_go_to_every_depth_and_leave_what_is_no_container():
    handle, array = object(), np.zeros(2)
    row = {"a": [{"b": (1, [2], {3})}], "handle": handle, "array": array, "text": "x"}
    task = Task(instance_id="t", problem_statement="p", row=row, chat_template_kwargs={"k": True})
    fresh = task.fresh()
    assert fresh.row["handle"] is handle
    assert fresh.row["array"] is array
    assert {**fresh.row, "array": 0} == {**row, "array": 0}
    fresh.row["a"][0]["b"][1].append(4)
    fresh.row["a"][0]["b"][2].add(5)
    fresh.row["new"] = fresh.chat_template_kwargs["new"] = 1
    assert row["a"] == [{"b": (1, [2], {3})}]
    assert "new" not in row
    assert task.chat_template_kwargs == {"k": True}
    assert math.isnan(copied([math.nan])[0])


FLOW = """
from agent_flow.plain_flow import PlainFlow
import sys, asyncio


class Guess(PlainFlow):
    class Config(PlainFlow.Config):
        max_guesses: int = 6

    async def converse(self, rollout, model):
        rollout.task.row["used"] = rollout.task.row.get("used", 0) + 1
        rollout.task.row["deep"].append(rollout.member)
        await model.ask(self.opening(rollout.task))
        rollout.artifacts["row.json"] = repr(sorted(rollout.task.row.items())).encode()


def efficient(episode):
    return float(episode.task.row.pop("secret") == 37 and episode.task.row["used"])


async def leaves(episode):
    if episode.member == 1:
        sys.exit(3)
    if episode.member == 2:
        raise asyncio.CancelledError
    return 1.0
"""


def test_members_of_a_group_share_no_row(own_agent):
    own_agent.source(FLOW)
    path = own_agent.folder / "tasks.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "deep": []}) + "\n")
    own_agent.config(("rollouts_per_task = 2", "rollouts_per_task = 4"))
    done = own_agent.run()
    assert done.code == 0, done.stderr
    rows = [path.read_text() for path in (done.folder / "rollouts").glob("*/row.json")]
    assert len(rows) == 4
    assert all("('used', 1)" in row and "'secret'" in row for row in rows)
    assert sorted(row.partition("('deep', ")[2][:3] for row in rows) == ["[0]", "[1]", "[2]", "[3]"]
    ended = [event["row"] for event in done.events if event.get("event") == "rollout_delivered"]
    assert [row["reward"] for row in ended] == [1.0] * 4


def test_a_run_goes_on_when_a_function_exits_or_is_cancelled(own_agent):
    own_agent.source(FLOW.replace('rollout.task.row["deep"].append(rollout.member)', ""))
    own_agent.config(
        ("rollouts_per_task = 2", "rollouts_per_task = 4"),
        ('reward = "my_flow:efficient"', 'reward = "my_flow:leaves"\nreward_attempts = 1'),
        ("[runtime]", "[worker]\nmax_refills = 0\n\n[runtime]"),
    )
    done = own_agent.run()
    ended = [event["row"] for event in done.events if event.get("event", "").startswith("rollout_d")]
    assert sorted(row["dropped"] for row in ended) == ["", "", *["grader/reward_raised"] * 2], done.stderr
