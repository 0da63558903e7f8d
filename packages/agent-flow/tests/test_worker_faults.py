"""Whatever code of a user's leaves or raises: one rollout's end, in the journal, and the others go on."""

import json
import re
from pathlib import Path

import pytest
from agent_flow.clock import Clock
from agent_flow.errors import AgentError, UsageError, text_of
from agent_flow.journal import Journal, read_events, read_ledger
from trainer_bridge import read_samples

FLOW = Path(__file__).parents[3] / "examples" / "own-agent" / "my_flow.py"
FAULTY = '''
import asyncio, sys
import numpy as np
from contextlib import asynccontextmanager
from agent_flow.errors import AgentError, ConfigError, TaskRowError, UsageError
from agent_flow.reward import RewardUnavailable

class Faulty(Guess):
    """The first rollout of the group meets the fault, the second one does not."""

    async def converse(self, rollout, model):
        await super().converse(rollout, model)
        if not rollout.member:
            await self.after(rollout)

    async def after(self, rollout): ...

    async def reward(self, rollout):
        await super().reward(rollout)
        if not rollout.member:
            await self.judged(rollout)

    async def judged(self, rollout): ...

class It(Faulty):
'''


@pytest.fixture
def faulty(own_agent):
    """Runs the example with a fault: the source of methods of its flow."""

    def call(methods, *edits, command="eval"):
        own_agent.source(FLOW.read_text() + FAULTY + re.sub("^", "    ", methods, flags=re.MULTILINE))
        own_agent.config(
            ('provider = "my_flow:Guess"', 'provider = "my_flow:It"'),
            ("[runtime]", "[worker]\nmax_refills = 0\n\n[runtime]"),
            *edits,
        )
        return own_agent.call(command, "run.toml", "--json")

    return call


def after(body):
    return f"async def after(self, rollout):\n    {body}"


def judged(body):
    return f"async def judged(self, rollout):\n    {body}"


def ended(done, event):
    """The journal's lines."""
    lines = (done.folder / "journal" / "worker-0.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line.get("event") == event]


def one_dropped(done, reason, fault="infra"):
    """The journal's line of the one drop; the other rollout was delivered."""
    assert done.code == 1, done.stderr
    ledger = read_ledger(done.folder / "journal")
    assert (ledger.started, ledger.live, ledger.delivered, ledger.dropped) == (2, 0, 1, {reason: 1})
    (row,) = [event["row"] for event in done.events if event.get("event") == "rollout_dropped"]
    assert row["fault"] == fault
    (line,) = ended(done, "dropped")
    return line


def warnings_of(done):
    return [event["text"] for event in done.events if event.get("event") == "warning"]


def test_a_row_that_cannot_work_is_found_in_mid_run_and_costs_its_rollout(faulty):
    done = faulty(
        after('raise TaskRowError("no column limit", where="tasks.jsonl:1", fix="add it")'), command="run"
    )
    line = one_dropped(done, "flow/usage", "task")
    assert line["message"] == "tasks.jsonl:1: no column limit\n  try: add it"
    assert len(list(read_samples(done.folder))) == 1


def test_an_error_that_comes_out_of_a_task_group_is_itself(faulty):
    """As a group it would be a fault of the flow, and never tried again."""
    body = "async with asyncio.TaskGroup():\n        raise AgentError('x', 'y')"
    one_dropped(faulty(after(body)), "agent/x")


SESSION = """
@asynccontextmanager
async def {name}():
    {before}
    yield
    {after}
return {name}()
"""


def session(*, before="pass", after="pass"):
    body = SESSION.format(name="opened", before=before, after=after)
    return "def session(self):" + body.replace("\n", "\n    ")


def test_a_folder_with_rollouts_stays_whatever_ends_the_run(faulty):
    done = faulty(session(after='raise ConfigError("no way to close")'), command="run")
    assert done.code == 2
    assert "no way to close" in done.stderr
    (folder,) = Path("runs").iterdir()
    assert read_ledger(folder / "journal").delivered == 2
    assert len(list(read_samples(folder))) == 2


def test_a_folder_without_rollouts_goes(faulty):
    done = faulty(session(before='raise ConfigError("no way to open")'), command="run")
    assert done.code == 2
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('raise AgentError("x", b"503 \\xff", evidence=b"body")', "503 \N{REPLACEMENT CHARACTER}"),
        ('raise AgentError("x", "caf\\udce9", evidence="\\udce9")', "caf?"),
        ('raise AgentError("x", {1: np.float32(0.5)}, evidence=None)', "{1: np.float32(0.5)}"),
    ],
)
def test_a_drop_can_be_written_whatever_its_error_carries(faulty, body, message):
    assert one_dropped(faulty(after(body)), "agent/x")["message"] == message


def test_evidence_of_a_judge_may_be_the_bytes_of_its_answer(faulty):
    done = faulty(judged('raise RewardUnavailable("down", evidence=b"503 body")'))
    assert one_dropped(done, "grader/reward_unavailable")["evidence"] == "503 body"


def test_an_error_that_cannot_be_shown_is_a_drop_too(faulty):
    body = "class Bad(Exception):\n        def __str__(self):\n            raise KeyError\n    raise Bad"
    line = one_dropped(faulty(after(body)), "flow/raised:Bad")
    assert "<Bad that cannot be shown: KeyError>" in line["message"]


@pytest.mark.parametrize(
    ("name", "data"),
    [("board.txt", "'a str'"), ("../x", "b''"), ("a/b", "b''"), ("view.html", "b''"), ("n" * 300, "b''")],
)
@pytest.mark.parametrize("dropped", [False, True])
def test_an_artifact_that_is_no_file_costs_itself_alone(faulty, name, data, dropped):
    body = f"rollout.artifacts['ok.txt'] = b'ok'\n    rollout.artifacts[{name!r}] = {data}"
    done = faulty(after(body + ("\n    raise AgentError('x', 'y')" if dropped else "")))
    if dropped:
        one_dropped(done, "agent/x")
    else:
        assert done.code == 0, done.stderr
    (said,) = warnings_of(done)
    assert f"not written: {name}: " in said
    (other,) = done.folder.glob("rollouts/*/ok.txt")
    assert other.read_bytes() == b"ok"
    assert (other.parent / "view.html").stat().st_size > 1000
    assert not list(done.folder.rglob("x"))


def test_what_was_not_written_stands_in_the_table(faulty, own_agent, capfd):
    assert faulty(after("rollout.artifacts['board.txt'] = 1")).code == 0
    done = own_agent.call("run", "run.toml")
    assert "note: guess-37: not written: board.txt: TypeError: int, need bytes" in " ".join(
        done.stdout.split()
    )


@pytest.mark.parametrize("dropped", [False, True])
def test_messages_that_are_no_utf_8_are_written_as_far_as_they_go(faulty, dropped):
    body = "rollout.messages = ({'role': 'user', 'content': b'caf\\xe9'.decode('utf-8', 'surrogateescape')},)"
    done = faulty(after(body + ("\n    raise AgentError('x', 'y')" if dropped else "")))
    assert warnings_of(done) == []
    said = [
        json.loads(path.read_text())["messages"][0] for path in done.folder.glob("rollouts/*/messages.json")
    ]
    assert {"role": "user", "content": "caf?"} in said
    assert len(said) == len(list(done.folder.glob("rollouts/*/view.html"))) == 2


def test_a_flow_that_cannot_describe_itself_any_more_does_not_end_the_run(faulty):
    """Its files are not written; the rollout was dropped before."""
    methods = "def describe(self):\n    raise KeyError('gone')\n"
    done = faulty(methods + after("raise AgentError('x', 'y')"))
    assert done.code == 1
    assert read_ledger(done.folder / "journal").dropped == {"agent/x": 1, "flow/raised:KeyError": 1}
    assert any("not written: KeyError: 'gone'" in text for text in warnings_of(done))


@pytest.mark.parametrize(
    ("value", "command"), [("np.float32(0.5)", "run"), ("np.float32(0.5)", "eval"), ("np.array(0.5)", "eval")]
)
def test_a_reward_of_another_kind_of_number_is_a_number(faulty, value, command):
    done = faulty(judged(f"rollout.reward = {value}"), command=command)
    assert done.code == 0, done.stderr
    rewards = [line["reward"] for line in ended(done, "delivered")]
    assert len(rewards) == 2
    assert 0.5 in rewards


@pytest.mark.parametrize("value", ["'0.5'", "float('nan')", "np.array([1.0, 2.0])", "10**400", "object()"])
def test_a_reward_that_is_no_number_is_a_counted_drop_and_no_sample(faulty, value):
    done = faulty(judged(f"rollout.reward = {value}"))
    line = one_dropped(done, "grader/reward_type", "task")
    assert "need a finite number or None" in line["message"]
    assert len(list(done.folder.glob("rollouts/*/view.html"))) == 2, "there to be looked at"


def test_turn_rewards_are_checked_alike(faulty):
    done = faulty(
        judged("rollout.turn_rewards = [np.float32(0.5)] * (rollout.conversation.turns - 1) + ['x']")
    )
    assert "rollout.turn_rewards[" in one_dropped(done, "grader/reward_type", "task")["message"]


def test_an_exit_status_is_text_wherever_it_is_written(faulty):
    done = faulty(judged("rollout.exit_status = b'caf\\xe9'.decode('utf-8', 'surrogateescape')"))
    assert done.code == 0, done.stderr
    assert "caf?" in [line["exit_status"] for line in ended(done, "delivered")]


CANCELLED = """task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task"""


@pytest.mark.original("A-executor-exception")
@pytest.mark.parametrize(
    ("body", "name"),
    [
        (CANCELLED, "CancelledError"),
        ("raise asyncio.CancelledError", "CancelledError"),
        ("asyncio.current_task().cancel()\n    await asyncio.sleep(60)", "CancelledError"),
        ("sys.exit(3)", "SystemExit"),
    ],
)
@pytest.mark.parametrize("stage", [after, judged])
def test_a_stray_cancellation_or_exit_is_the_fault_of_one_rollout(faulty, stage, body, name):
    line = one_dropped(faulty(stage(body)), f"flow/raised:{name}")
    assert "Traceback" in line["evidence"]
    assert re.search(rf"{name}.*\(own_\w+\.py:\d+, in ", line["message"])


def test_a_cancellation_that_is_left_behind_does_not_reach_the_delivery(faulty):
    """Nothing was raised by the stage; the event loop does so at the next wait."""
    one_dropped(faulty(judged("asyncio.current_task().cancel()")), "flow/bug:CancelledError")


def test_a_cancellation_that_is_left_behind_by_a_drop_costs_its_files_at_most(faulty):
    done = faulty(after("asyncio.current_task().cancel()\n    raise AgentError('x', 'y')"))
    one_dropped(done, "agent/x")
    assert "not written: CancelledError" in warnings_of(done)[-1]


@pytest.mark.parametrize("then", ["pass", "raise KeyError('cleaning up')"])
def test_a_stage_that_keeps_its_cancellation_to_itself_did_take_too_long(faulty, then):
    body = f"try:\n        await asyncio.Event().wait()\n    except BaseException:\n        {then}"
    done = faulty(judged(body), ("[worker]", "[worker]\nreward_timeout_s = 0.2"))
    line = one_dropped(done, "flow/reward_timeout", "infra")
    assert "worker.reward_timeout_s = 0.2 s" in line["message"]


@pytest.mark.parametrize("then", ["pass", "raise KeyError('cleaning up')", "raise asyncio.CancelledError"])
def test_an_interrupt_that_a_stage_keeps_to_itself_never_becomes_a_reward(faulty, then):
    body = f"""import os, signal
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.Event().wait()
    except BaseException:
        {then}
    rollout.reward = 1.0"""
    done = faulty(judged(body), ("rollouts_per_task = 2", "rollouts_per_task = 1"))
    assert done.code == 130, done.stderr
    ledger = read_ledger(done.folder / "journal")
    assert (ledger.delivered, ledger.dropped) == (0, {"flow/interrupted": 1})


def test_the_journal_takes_the_text_of_what_is_no_json(tmp_path):
    with Journal(tmp_path, "worker-0", Clock()) as journal:
        journal.write("started", "0" * 32, task=b"guess", member=float("nan"), extra={1: object, (1,): 2})
        journal.write("dropped", "0" * 32, reason="\ud800", evidence=None)
    first, second = read_events(tmp_path)
    assert (first["task"], first["member"], list(first)[:3]) == (
        "guess",
        "nan",
        ["t_ns", "event", "rollout_id"],
    )
    assert first["extra"].startswith("{1: <class 'object'>")
    assert second["evidence"] is None
    assert read_ledger(tmp_path).balanced


def test_text_of_takes_anything():
    assert text_of(b"\xff") == "\N{REPLACEMENT CHARACTER}"
    assert text_of("\ud800x") == "?x"
    assert text_of(AgentError("x", b"y")) == "agent/x: y"
    assert text_of(UsageError("a", where="b")) == "b: a"
