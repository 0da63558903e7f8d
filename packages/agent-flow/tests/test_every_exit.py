"""Every row of the outcome table, driven to its end by real runs: what became of it is what is printed."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import yaml
from agent_flow.cli import main
from trainer_bridge import read_samples

AGENTS = Path(__file__).parent / "agents"


def call(command, name="bash"):
    arguments = {"command": command} if name == "bash" else {}
    return f"Next.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FIX, NOTHING, TALK = call("sed -i s/41/42/ answer.py"), call("true"), "I forgot to call a tool."
FULL = {"text": "", "finish_reason": "length"}
LOSE = call("touch lose-this-sandbox; sleep 60")
SLOW = call("sleep 30")


class Way(msgspec.Struct, frozen=True):
    """How a row of the table is driven. Where it is graded, the patch is right: nothing but the verdict may
    give 1.0."""

    turns: list
    agent: str
    columns: dict = {}


def dying_tests(how):
    """The patch's tests end before they say anything."""
    return call(f"printf 'import os, signal\\n{how}\\n' > answer.py")


DONE = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
MINI = {
    "Submitted": Way([FIX, DONE], "mini"),
    "LimitsExceeded": Way([FIX, NOTHING, NOTHING, NOTHING], "mini"),
    "ContextExceeded": Way([FIX, FULL], "mini"),
    "RepeatedFormatError": Way([FIX, TALK, TALK, TALK], "mini"),
    "Aborted": Way([FIX, "!abort"], "mini"),
    "*": Way([FIX, DONE], "own"),
    "engine, task": Way([FIX], "mini"),
    "engine, *": Way([FIX, "!down"], "mini"),
    "environment, infra": Way([LOSE], "mini"),
    "environment, image": Way([FIX, DONE], "mini", {"repo": "partial"}),
    "environment, *": Way([FIX, DONE], "mini", {"repo": "gitless"}),
    "grader, infra": Way([dying_tests("os.kill(os.getpid(), signal.SIGKILL)"), DONE], "mini"),
    "grader, agent": Way([dying_tests("os._exit(3)"), DONE], "mini"),
    "grader, *": Way([FIX, DONE], "mini", {"FAIL_TO_PASS": ["test_answer.AnswerTests.test_typo"]}),
    "agent, *": Way([call("echo break it")], "broken"),
    "tokens, *": Way([FIX, "!mixed up"], "mini"),
    "*, *": Way(["!elsewhere"], "mini"),
}
HURRIED = {"TimeExceeded": Way([call("sleep 2"), NOTHING], "mini")}
HUNG = {"flow, *": Way([SLOW], "mini")}
HUNG_TESTS = {"flow, infra": Way([dying_tests("signal.pause()"), DONE], "mini")}

SUBMIT, FORFEIT = call("", name="submit"), call("", name="exit_forfeit")
GARBAGE = call("echo none > /root/state.json")
SWE = {
    "submitted": Way([FIX, SUBMIT], "swe"),
    "submitted (exit_context)": Way([FIX, FULL], "swe"),
    "submitted (exit_max_iter_out)": Way([FIX, *[NOTHING] * 4], "swe"),
    "submitted (exit_cost)": Way([FIX, *[NOTHING] * 4], "original"),
    "submitted (exit_format)": Way([FIX, TALK, TALK, TALK], "swe"),
    "submitted (exit_forfeit)": Way([FIX, FORFEIT], "swe"),
    "submitted (exit_total_execution_time)": Way([FIX, NOTHING], "hurried"),
    "submitted (exit_command_timeout)": Way([FIX, SLOW, SLOW], "swe"),
    "submitted (exit_api)": Way([FIX, call("raise api")], "raising"),
    "submitted (exit_environment_error)": Way([FIX, call("raise environment")], "raising"),
    "submitted (exit_error)": Way([FIX, GARBAGE], "swe"),
    "exit_context": Way([NOTHING, FULL], "swe"),
    "exit_max_iter_out": Way([NOTHING] * 5, "swe"),
    "exit_cost": Way([NOTHING] * 5, "original"),
    "exit_format": Way([TALK, TALK, TALK], "swe"),
    "exit_forfeit": Way([FORFEIT], "swe"),
    "exit_total_execution_time": Way([NOTHING, NOTHING], "hurried"),
    "exit_command_timeout": Way([SLOW, SLOW], "swe"),
    "exit_command": Way([FIX, call("exit")], "swe"),
    "exit_api": Way([call("raise api")], "raising"),
    "exit_environment_error": Way([call("raise environment")], "raising"),
    "exit_error": Way([GARBAGE], "swe"),
    "agent, infra": Way([FIX, SUBMIT], "unset"),
}
"""SWE-agent's own words. `raising`: with our model no tenacity gives up, and none of the tests' tools raises
what is SWE-ReX's; a scaffold of a user's own can, and the original's table names both."""


@pytest.fixture
def table(capfd):
    """The rows of a mode by their name, as the command prints them."""

    def read(mode):
        assert main(["outcomes", "--json"]) == 0
        rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        of_mode = [row for row in rows if row["mode"] in (mode, "*")]
        return {f"{row['ends']}, {row['fault']}" if row["fault"] else row["ends"]: row for row in of_mode}

    return read


def expected(row):
    """What the table says, of a rollout whose patch passes where it is graded and whose error can pass."""
    names = ("mask", "in_loss", "in_baseline", "status", "retry", "refill")
    return {**{name: row[name] for name in names}, "reward": 1.0 if row["evaluate"] else row["reward"]}


def became(done, task, mode):
    """The same facts of what a run left behind; `how` is what it ended with."""
    events = [event for event in done.events if event.get("task") == task]
    starts = [event["rollout_id"] for event in events if event["event"] == "rollout_started"]
    again = [event["rollout_id"] for event in events if event["event"] == "attempt_failed"]
    last = [event["row"] for event in events if event["rollout_id"] == starts[-1] and "row" in event][-1]
    # An evaluation keeps none.
    kept = read_samples(done.folder) if mode == "train" else ()
    samples = [sample for sample in kept if sample.rollout_id in starts]
    facts = {
        "reward": last["reward"],
        "retry": sorted(again) == sorted(starts),
        "refill": len(starts) == 2,
    }
    assert facts["retry"] or not again
    dropped = f"{last['dropped']} ({last['fault']})"
    if mode == "train":
        assert done.summary["rewards"][task] == facts["reward"]
        counted = {f"{reason} ({last['fault']})": count for reason, count in done.summary["dropped"].items()}
    else:
        (score,) = [score for score in done.summary["per_task"] if score["task"] == task]
        assert (score["graded"], score["passed"]) == (facts["reward"] is not None, facts["reward"] == 1.0)
        counted = done.summary["failed"] | done.summary["not_graded"]
    if last["dropped"]:
        assert not samples
        assert counted[dropped] >= len(starts)
        gone = {"mask": "-", "in_loss": False, "in_baseline": False, "status": "dropped"}
        return {**facts, **gone, "how": f"{last['dropped'].partition('/')[0]}, {last['fault']}"}
    document = json.loads((done.folder / "rollouts" / starts[-1] / "provenance.json").read_text())
    ungraded = document["produced_by"]["ungraded"]
    how = f"{ungraded.partition('/')[0]}, agent" if ungraded else last["exit_status"]
    for found in samples:
        assert (found.reward, found.status) == (facts["reward"], document["status"])
        assert (found.in_loss, found.in_baseline) == (document["in_loss"], document["in_baseline"])
        sampled = sum(turn.end - turn.start for turn in found.turns)
        assert found.loss_mask.sum() == last["sampled_tokens"] == sampled
    assert len(samples) == last["samples"] == (mode == "train")
    assert last["sampled_tokens"] > 0
    flags = {name: document[name] for name in ("in_loss", "in_baseline", "status")}
    return {**facts, **flags, "mask": "sampled", "how": how}


def is_of(how, row):
    """Whether what a rollout ended with is a row's, or of those that no other row names."""
    named, _, fault = row.partition(", ")
    ended, _, blamed = how.partition(", ")
    if not fault:
        return how == row or (row == "*" and how == "Finished")
    return (named in (ended, "*")) and (fault in (blamed, "*"))


def check(done, ways, table, mode):
    assert done.events, done.stderr
    rows = table(mode)
    found = {row: became(done, name_of(row), mode) for row in ways}
    other = {row: how for row, facts in found.items() if not is_of(how := facts.pop("how"), row)}
    assert other == {}, "each ended as it is driven to"
    assert found == {row: expected(rows[row]) for row in ways}


def name_of(row):
    """As the name of a task."""
    return "".join(letter if letter.isalnum() else {"*": "other"}.get(letter, "-") for letter in row)


def add(run, ways):
    for row, way in ways.items():
        run.task(name_of(row), way.turns, agent=way.agent, **way.columns)


def test_every_row_is_driven(table):
    """One that no run can end in has no place in the table."""
    driven = [*MINI, *HURRIED, *HUNG, *HUNG_TESTS, *SWE]
    assert sorted(driven) == sorted(table("train")) == sorted(table("eval"))


def test_one_row_is_shown_alone(capfd):
    assert main(["outcomes", "--json", "Aborted"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(row["mode"], row["ends"]) for row in rows] == [("train", "Aborted"), ("eval", "Aborted")]
    assert main(["outcomes", "Aborted"]) == 0
    assert rows[0]["why"] in " ".join(capfd.readouterr().out.split())
    assert main(["outcomes", "--json", "Abort"]) == 2
    said = capfd.readouterr()
    assert (said.out, "did you mean 'Aborted'?" in said.err) == ("", True)


BOTH = pytest.mark.parametrize(
    ("command", "mode"), [("run", "train"), pytest.param("eval", "eval", marks=pytest.mark.slow)]
)


def mini(folder, section="", **changes):
    """`[agent]` of mini-swe-agent, with keys of a section of its own file changed."""
    made = {"provider": "minisweagent", "step_limit": 4}
    if not section:
        return made
    (package,) = find_spec("minisweagent").submodule_search_locations
    settings = yaml.safe_load((Path(package) / "config" / "mini.yaml").read_text())
    settings[section] |= changes
    (folder / f"{section}.yaml").write_text(yaml.safe_dump(settings))
    return made | {"config": f"{section}.yaml"}


@pytest.mark.original(
    "A-should-eval-submitted",
    "A-should-eval-mask",
    "A-should-eval-none",
    "A-reward-skipped",
    "A-exit-infrastructure",
    "A-executor-failure-zero",
    "A-executor-exception",
)
@BOTH
@pytest.mark.skipif(sys.platform != "linux", reason="finds the launcher of a sandbox in /proc")
@pytest.mark.timeout(300)
def test_minisweagent(scripted_run, table, command, mode):
    add(scripted_run, MINI)
    broken = "{{ output.output }}{% if 'break it' in output.output %}{{ nowhere }}{% endif %}"
    agents = {
        "mini": mini(scripted_run.folder),
        "own": mini(scripted_run.folder) | {"provider": "scripted:OwnWord"},
        "broken": mini(scripted_run.folder, "model", observation_template=broken),
    }
    sections = {
        "agent": {"provider": "scripted:Several", "agents": agents},
        "environment": {"provider": "scripted:Spoiled"},
    }
    done = scripted_run.run(command, **sections)
    check(done, MINI, table, mode)


@BOTH
@pytest.mark.slow
def test_minisweagent_runs_out_of_time(scripted_run, table, command, mode):
    add(scripted_run, HURRIED)
    agent = mini(scripted_run.folder, "agent", wall_time_limit_seconds=2)
    check(scripted_run.run(command, agent=agent), HURRIED, table, mode)


@pytest.mark.original("A-executor-timeout")
@BOTH
def test_a_stage_that_hangs(scripted_run, table, command, mode):
    add(scripted_run, HUNG)
    done = scripted_run.run(command, worker={"generate_timeout_s": 0.5})
    check(done, HUNG, table, mode)


@pytest.mark.original("A-executor-timeout")
@BOTH
def test_a_grading_that_hangs(scripted_run, table, command, mode):
    add(scripted_run, HUNG_TESTS)
    done = scripted_run.run(command, worker={"reward_timeout_s": 0.5})
    check(done, HUNG_TESTS, table, mode)


def swe(folder):
    """`[agent]` tables of SWE-agent: the tests' own scaffold of `agents/`, which has its seams."""
    settings = yaml.safe_load((AGENTS / "agent.yaml").read_text())
    made = {"provider": "sweagent", "config": "swe.yaml", "step_limit": 5}
    (folder / "swe.yaml").write_text(yaml.safe_dump(settings))
    tools = settings["agent"]["tools"]
    hurried = {"agent": settings["agent"] | {"tools": tools | {"total_execution_timeout": 0}}}
    (folder / "hurried.yaml").write_text(yaml.safe_dump(hurried))
    (folder / "bundle").mkdir()
    (folder / "bundle" / "config.yaml").write_text("tools: {}\n")
    bundles = [
        *tools["bundles"],
        {"path": str(folder / "bundle")},
    ]  # without programs, which cannot be set up
    unset = {"agent": settings["agent"] | {"tools": tools | {"bundles": bundles}}}
    (folder / "unset.yaml").write_text(yaml.safe_dump(unset))
    return {
        "swe": made,
        "original": made | {"provider": "sweagent_original"},
        "raising": made | {"provider": "scripted:Raising"},
        "hurried": made | {"config": "hurried.yaml"},
        "unset": made | {"config": "unset.yaml"},
    }


@pytest.mark.original(
    "A-should-eval-submitted",
    "A-should-eval-context",
    "A-should-eval-context-empty",
    "A-should-eval-mask",
    "A-should-eval-else",
    "A-should-eval-validate",
    "A-reward-skipped",
)
@pytest.mark.parametrize(("command", "mode"), [("run", "train"), ("eval", "eval")])
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sweagent(scripted_run, table, command, mode):
    add(scripted_run, SWE)
    scaffold = AGENTS / "scaffold"
    env = {
        "PYTHONPATH": os.pathsep.join([str(scaffold), *filter(None, sys.path)]),
        "SWE_AGENT_CONFIG_DIR": str(scaffold / "config"),
        "SWE_AGENT_TOOLS_DIR": str(scaffold / "tools"),
    }
    agents = swe(scripted_run.folder)
    done = scripted_run.run(command, env, agent={"provider": "scripted:Several", "agents": agents})
    check(done, SWE, table, mode)
