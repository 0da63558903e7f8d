"""A run that goes wrong for all of its tasks: said once, with its count, and not paid for with every task."""

import json
import re
from pathlib import Path

import pytest
from agent_flow.events import Event, RolloutRow
from agent_flow.journal import read_ledger
from agent_flow.progress import notes_of
from agent_flow.streak import Streak

FLOW = """
from agent_flow.plain_flow import PlainFlow
from agent_flow.engines.replay import ReplayEngine

class It(PlainFlow):
    async def converse(self, rollout, model):
        number = int(rollout.task.instance_id.rpartition("-")[2])
        if BROKEN(number):
            raise KeyError("pawns")
        await super().converse(rollout, model)

class Counted(ReplayEngine):
    calls = 0
    async def generate(self, request):
        self.calls += 1
        return await super().generate(request)
    def stats(self):
        return {"calls": self.calls, "calls_failed": 0, "tokens_thrown_away": 1234}

def one(episode):
    return 1.0
"""
TASKS = 30


@pytest.fixture
def run(own_agent):
    """Runs thirty tasks, of which some are broken."""
    row = json.loads(Path("tasks.jsonl").read_text())
    names = [f"guess-{number}" for number in range(TASKS)]
    Path("tasks.jsonl").write_text("".join(json.dumps({**row, "instance_id": name}) + "\n" for name in names))
    recording = json.loads(Path("recordings/guess-37.json").read_text())
    for name in names:
        Path(f"recordings/{name}.json").write_text(json.dumps({**recording, "instance_id": name}))

    def call(broken, *options, stop="", command="run"):
        own_agent.source(FLOW.replace("BROKEN", f"(lambda number: {broken})"))
        own_agent.config(
            ('"my_flow:Guess"', '"my_flow:It"'),
            ("max_guesses = 4", ""),
            ('provider = "replay"', 'provider = "my_flow:Counted"'),
            ("my_flow:efficient", "my_flow:one"),
            ("rollouts_per_task = 2", "rollouts_per_task = 1"),
            ("[runtime]", f"[worker]\nmax_rollouts = 1\n{stop}\n[runtime]"),
        )
        return own_agent.call(command, "run.toml", *options)

    return call


def test_it_stops_after_ten_tasks_and_says_why(run):
    done = run("True", "--json")
    assert done.code == 1
    assert "10 tasks in a row were dropped for one reason" in done.stderr
    assert "flow/raised:KeyError" in done.stderr
    assert "pawns" in done.stderr
    (left,) = re.findall(r"(\d+) rollouts were not started", done.stderr)
    assert done.summary["started"] == TASKS - int(left) < 13
    ledger = read_ledger(done.folder / "journal")
    assert ledger.balanced
    assert not ledger.live


def test_after_how_many_is_for_the_user_to_say(run):
    done = run("True", "--json", stop="stop_after_tasks = 0")
    assert (done.code, done.summary["started"], done.stderr) == (1, TASKS, "")


def test_one_success_is_hope_enough(run):
    done = run("number != 4", "--json")
    assert (done.code, done.summary["started"], done.summary["delivered"]) == (1, TASKS, 1)


def test_the_same_note_is_one_line(run):
    done = run("number > 0")
    lines = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"note: {TASKS - 1} x flow/raised:KeyError, the first is guess-1: ")


def test_what_the_engine_counted_is_in_the_summary(run):
    done = run("False", "--json")
    counted = {"calls": TASKS, "calls_failed": 0, "tokens_thrown_away": 1234}
    assert done.summary["engine"] == counted


@pytest.mark.parametrize("command", ["run", "eval"])
def test_and_in_the_last_lines(run, command):
    assert f"engine: calls {TASKS}, tokens thrown away 1,234" in run("False", command=command).stdout


def row(task, dropped="", *, attempt=0, fault="infra", note="said"):
    return RolloutRow(
        rollout_id="0" * 32, task=task, attempt=attempt, exit_status="", reward=None, turns=0,
        prompt_tokens=0, sampled_tokens=0, seconds=0.0, dropped=dropped, fault=fault, note=note,
    )  # fmt: skip


def ends(*rows):
    """How many of a hundred places are begun if rollouts end like this, one after the other."""
    streak = Streak(3)
    listener = streak.before(lambda event: None)
    begun = 0
    for place, _ in enumerate(streak.until_broken([None] * 100)):
        begun += 1
        if place < len(rows):
            kind = "rollout_dropped" if rows[place].dropped else "rollout_delivered"
            listener(Event(event=kind, row=rows[place]))
    return begun, streak.problem


@pytest.mark.parametrize(
    ("rows", "begun"),
    [
        ([row("a", "x"), row("b", "x"), row("c", "x")], 3),
        ([row("a", "y"), row("b", "x"), row("c", "x"), row("d", "x")], 4),
        ([row("a", "x"), row("a", "x"), row("a", "x"), row("b", "x")], 100),
        ([row("a"), row("b", "x"), row("c", "x"), row("d", "x")], 100),
        ([row("a", "x", fault="agent"), row("b", "x", fault="agent"), row("c", "x", fault="agent")], 100),
        ([row("a", "x", attempt=1), row("b", "x", attempt=1), row("c", "x", attempt=1)], 100),
    ],
)
def test_what_is_a_streak(rows, begun):
    found, problem = ends(*rows)
    assert found == begun
    assert bool(problem) == (begun < 100)


def test_notes_are_grouped_by_their_reason():
    rows = [
        row("a", "environment/start", note="no node"),
        row("b", note="grader/unreadable: no tests in the log"),
        row("c", "environment/start", note="no pod"),
        row("d", note="grader/unreadable: nothing"),
        row("e", note=""),
        row("f", "flow/KeyError", note="'x'"),
    ]
    assert notes_of(rows) == [
        "note: 2 x environment/start, the first is a: no node",
        "note: 2 x grader/unreadable, the first is b: grader/unreadable: no tests in the log",
        "note: f: 'x'",
    ]
