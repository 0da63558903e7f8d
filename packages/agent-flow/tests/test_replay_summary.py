"""The lines in which `--replay` sums up: the same each time, though what commands print has times in it."""

import pytest

HINTS = '"no <guess>" if not said else "higher" if int(said[1]) < secret else "lower"'


def told(own_agent, example, hint):
    """Let the game say something more with each hint."""
    text = (example.parent / "own-agent" / "my_flow.py").read_text()
    assert HINTS in text
    own_agent.source(text.replace(HINTS, f"({HINTS}) + {hint!r}"))


@pytest.fixture
def recorded(own_agent, example):
    """A dumped run whose hints said how long they took."""
    told(own_agent, example, " in 0.019s, at 07:31:08 on 2026-11-30")
    done = own_agent.run("--dump")
    assert done.code == 0, done.stderr
    return done.folder


@pytest.mark.parametrize(
    ("hint", "same", "but_for_times"),
    [
        (" in 0.019s, at 07:31:08 on 2026-11-30", 2, 2),
        (" in 0.2s, at 17:01:59 on 2026-12-01", 0, 2),
        (" in 0.019s, at 07:31:08 on 2026-11-30!", 0, 0),
    ],
)
def test_times_are_told_apart_from_everything_else(own_agent, example, recorded, hint, same, but_for_times):
    told(own_agent, example, hint)
    again = own_agent.call("run", "--replay", recorded, "--json")
    assert again.code == (0 if same else 1)
    found = again.summary
    assert (found["same"], found["ended_same"], found["same_but_for_times"]) == (same, 2, but_for_times)
    assert f"2 of 2 rollouts ended the same (exit status, reward, engine calls), {but_for_times} of them" in (
        own_agent.call("run", "--replay", recorded).stdout
    )


def test_another_reward_is_another_end(own_agent, recorded):
    path = own_agent.folder / f"{own_agent.module}.py"
    own_agent.source(path.read_text().replace("1.0 / episode.turns", "2.0 / episode.turns"))
    found = own_agent.call("run", "--replay", recorded, "--json").summary
    assert (found["ended_same"], found["same_but_for_times"]) == (1, 1), "the other one has a reward of 0"
