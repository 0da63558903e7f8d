"""What a turn costs the processor: this package's whole rollout, and mini-swe-agent alone.

    python benchmarks/agent_flow.py [--quick] [--pairs 15] [--turns 40]

The model is a script in all of them: the same replies at once, the same commands, the same outputs (compared
in the run). Every command prints 40 lines (about 500 tokens) of a file of a small repository, every eighth
also changes one. Machines are shared and noisy: contestants run one after the other in alternating order,
ratios are taken within a round, and figures are medians with quartiles.

    whole        `agent-flow run`, one rollout after the other, from one's start to the next one's: a sandbox
                 (bubblewrap where it works, else a process), the base commit, mini-swe-agent over a
                 token-exact conversation, the patch, the sandbox of the grader and its verdict (the tests
                 themselves cost nothing: their log is ready), the sample, its delivery, journal, files, page.
    mini         mini-swe-agent's `DefaultAgent` and `LocalEnvironment`: no sandbox, no tokens, no patch, no
                 grading, and no file is written. Its working copy is made before.
    *_short      the same with a quarter of the turns. The difference to the long ones is what one more turn
                 costs (`one_more_turn`), the rest is what a rollout costs that has none (`rollout_cpu_ms`).
    alone        `agent-flow run` without sandbox and grader: commands answer at once. What is left is agent,
                 tokens, sample, delivery, journal, files and page.
    mini_alone   mini-swe-agent where commands answer at once.
    sandbox      one sandbox of `whole`, with its working copy: started and stopped. A rollout has two.
    rollouts_N   N rollouts of `alone` at once, of which each is a quarter (of 256: an eighth) as long: turns
                 per second, the share that the event loop's thread has of the processor time
                 (`loop_share`), and by how much the loop came around late (`loop_stall_ms`, the worst case,
                 asked every 5 ms). All scaffolds have an answer at once here, so the loop waits for the
                 interpreter's lock behind their threads; with an engine that takes its time few are awake.

Processor time is user and system, of the process and of all its children that ended, sandboxes and commands
included. Not counted: the start of a process, compiling the chat template, and the trainer's receiver, which
is a process of its own. The last line of the output is one JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This folder's scripts are named like packages, which would be imported in their place.
HERE = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry).resolve() != HERE), str(HERE)]

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from agent_flow_parts.contestants import Contestant, serve_many, serve_mini, serve_ours, serve_sandbox
from agent_flow_parts.script import write_config, write_project

SHORT = 4
"""The short rollouts have a quarter of the turns."""
MANY = {32: SHORT, 256: 2 * SHORT}
"""Rollouts at once, and which part of the turns each of them has."""


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, 3), "q1": round(low, 3), "q3": round(high, 3)}


def show(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def contestants(folder: Path, turns: int, rounds: int) -> dict[str, Contestant]:
    """All are started at once, since starting takes longer than a round."""
    long = write_project(folder / "long", turns)
    short = write_project(folder / "short", turns // SHORT)

    def ours(project: Path, name: str, *, alone: bool) -> Contestant:
        # One more than there are rounds: the last is told by nothing that begins after it.
        config = write_config(project, name, rollouts=rounds + 1, at_once=1, alone=alone)
        return Contestant(name, serve_ours, config)

    made = {
        "whole": ours(long, "whole", alone=False),
        "mini": Contestant("mini", serve_mini, long, rounds, False),
        "whole_short": ours(short, "whole_short", alone=False),
        "mini_short": Contestant("mini_short", serve_mini, short, rounds, False),
        "alone": ours(long, "alone", alone=True),
        "mini_alone": Contestant("mini_alone", serve_mini, long, rounds, True),
        "sandbox": Contestant("sandbox", serve_sandbox, long / "whole.toml", rounds),
    }
    for count, part in MANY.items():
        project = write_project(folder / f"many-{count}", turns // part)
        config = write_config(project, f"many-{count}", rollouts=count, at_once=count, alone=True)
        name = f"rollouts_{count}"
        made[name] = Contestant(name, serve_many, config, turns // part)
    for name, one in made.items():
        if not name.startswith("mini"):
            one.ready()
    return made


def play(made: dict[str, Contestant], pairs: int) -> dict[str, list[dict[str, Any]]]:
    """Each once a round; the first round warms up."""
    names = [name for name in made if not name.startswith("rollouts")]
    took: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(1 + pairs):
        for name in names if number % 2 == 0 else reversed(names):
            took[name].append(made[name].go())
    seen = {one["seen"] for name in ("mini", "mini_alone") for one in took[name]}
    for name in ("whole", "whole_short", "alone"):
        ended = made[name].go()
        assert ended["complete"]
        if name != "whole_short":
            seen |= set(ended["seen"])
    assert len(seen) == 1, "the contestants saw different outputs"
    return {name: rounds[1:] for name, rounds in took.items()}


def compare(took: dict[str, list[dict[str, Any]]], turns: int) -> dict[str, float]:
    """Ratios within a round, and processor time by turn and by rollout."""
    parts = {name: turns // SHORT if name.endswith("_short") else turns for name in took} | {"sandbox": 1}
    ms = {name: [one["cpu_s"] * 1000 / parts[name] for one in rounds] for name, rounds in took.items()}
    for name, rounds in took.items():
        own = quartiles([one["own_s"] / one["cpu_s"] for one in rounds])
        what = "cpu_ms" if name == "sandbox" else "cpu_ms_per_turn"
        show(name, **{what: quartiles(ms[name])}, share_of_own_process=own, pairs=len(rounds))

    def by_turn(name: str) -> list[float]:
        rest = turns - turns // SHORT
        pairs = zip(took[name], took[f"{name}_short"], strict=True)
        return [(long["cpu_s"] - short["cpu_s"]) * 1000 / rest for long, short in pairs]

    def ratio(top: Sequence[float], bottom: Sequence[float]) -> float:
        ratios = [a / b for a, b in zip(top, bottom, strict=True)]
        return statistics.median(ratios)

    more = {"whole": by_turn("whole"), "mini": by_turn("mini")}
    begin = {
        name: [one["cpu_s"] * 1000 - turns * each for one, each in zip(took[name], more[name], strict=True)]
        for name in more
    }
    for name in more:
        show(name, one_more_turn_cpu_ms=quartiles(more[name]), rollout_cpu_ms=quartiles(begin[name]))
    vs = [a / b for a, b in zip(ms["whole"], ms["mini"], strict=True)]
    show("whole", vs_minisweagent=quartiles(vs))
    return {
        "cpu_per_turn_vs_minisweagent": statistics.median(vs),
        "cpu_ms_per_turn": statistics.median(ms["whole"]),
        "minisweagent_cpu_ms_per_turn": statistics.median(ms["mini"]),
        "one_more_turn_vs_minisweagent": statistics.median(more["whole"]) / statistics.median(more["mini"]),
        "one_more_turn_cpu_ms": statistics.median(more["whole"]),
        "rollout_cpu_ms": statistics.median(begin["whole"]),
        "sandbox_cpu_ms": statistics.median(ms["sandbox"]),
        "alone_vs_minisweagent": ratio(ms["alone"], ms["mini_alone"]),
        "alone_cpu_ms_per_turn": statistics.median(ms["alone"]),
        "minisweagent_alone_cpu_ms_per_turn": statistics.median(ms["mini_alone"]),
    }


def at_once(made: dict[str, Contestant], turns: int) -> dict[str, float]:
    """Many rollouts at once, when nothing else runs."""
    headlines: dict[str, float] = {}
    for count, part in MANY.items():
        one = made[f"rollouts_{count}"]
        found = one.go()
        one.end()
        show(one.name, turns=turns // part, **{name: round(value, 3) for name, value in found.items()})
        for name in ("turns_per_s", "cpu_ms_per_turn", "loop_share", "loop_stall_ms"):
            headlines[f"{one.name}_{name}"] = found[name]
    headlines["loop_stall_ms"] = max(headlines[f"rollouts_{count}_loop_stall_ms"] for count in MANY)
    return headlines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 pairs, under 50 s")
    parser.add_argument("--pairs", type=int, default=15, help="rounds (at least 5)")
    parser.add_argument("--turns", type=int, default=40, help="of a rollout (at least 16)")
    args = parser.parse_args()
    if args.turns < 2 * SHORT * 2:
        parser.error("--turns: at least 16")
    pairs = 5 if args.quick else max(args.pairs, 5)
    folder = Path(tempfile.mkdtemp(prefix="afb-"))
    made: dict[str, Contestant] = {}
    try:
        made = contestants(folder, args.turns, pairs + 1)
        headlines = compare(play(made, pairs), args.turns)
        for name, one in made.items():
            if not name.startswith("rollouts"):
                one.end()
        headlines |= at_once(made, args.turns)
    finally:
        for one in made.values():
            one.end()
        shutil.rmtree(folder, ignore_errors=True)
    show("machine", pairs=pairs, turns=args.turns, cores=os.cpu_count(), load=round(os.getloadavg()[0], 2))
    print(json.dumps({name: round(value, 3) for name, value in headlines.items()}))


if __name__ == "__main__":
    main()
