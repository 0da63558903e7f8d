"""`agent-flow run --replay RUN`: the same run again, and where it first differs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent_flow.commands.ending import EXIT_INCOMPLETE
from agent_flow.commands.running import carry_out, exit_code, short
from agent_flow.config import ConfigFile, load_config
from agent_flow.progress import JsonLines, pipe_console


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of `--json`. All counts are rollouts."""

    rollouts: int
    same: int
    """The same ids, masks, log-probabilities, weight versions, exit status and reward."""
    ended_same: int
    """The same exit status, reward and number of engine calls, whatever commands printed."""
    same_but_for_times: int
    """Of these, those whose tokens differ in time figures that commands printed alone, or not at all."""
    differ: dict[str, list[str]]
    """By rollout id: what differs, the first difference first."""
    dropped: dict[str, int]
    """Replays that did not come to their end, by reason."""
    left_out: int
    """Rollouts of the recorded run that had no samples."""


def replay_command(folder: Path, *, as_json: bool) -> int:
    """Replay a run folder and print what differs; exit code 1 if anything does."""
    from agent_flow.replay_run import Replay  # loads numpy and token_tracking

    replay = Replay.read(folder.resolve())  # first: it says what is no run
    file = _with_name(load_config(folder / "run.toml"))
    console = pipe_console()
    result = carry_out(console, file, as_json=as_json, replay=replay)
    differ = {name: item.differs for name, item in replay.rollouts.items() if item.differs}
    summary = ReplaySummary(
        rollouts=len(replay.rollouts),
        same=replay.same,
        ended_same=replay.ended_same,
        same_but_for_times=replay.same_but_for_times,
        differ=differ,
        dropped=dict(result.ledger.dropped),
        left_out=replay.left_out,
    )
    if result.folder is not None:
        document = {"kind": "agent-flow-replay", "version": 1, "of": str(replay.folder)}
        text = msgspec.json.encode({**document, **msgspec.structs.asdict(summary)})
        (result.folder / "replay.json").write_bytes(msgspec.json.format(text, indent=1) + b"\n")
    if as_json:
        JsonLines().line(summary)
    else:
        total = summary.rollouts
        lines = [
            f"{summary.ended_same} of {total} rollouts ended the same (exit status, reward, engine calls), "
            f"{summary.same_but_for_times} of them with the same tokens but for times that commands printed",
            f"{summary.same} of {total} rollouts are the same, token for token",
        ]
        for name, texts in differ.items():
            task = replay.rollouts[name].dump.task_id
            lines.append(f"{task} ({name[:12]}) differs, first in: {texts[0]}")
            lines += [f"  {text}" for text in texts[1:4]]
        lines += [f"{count} not replayed to the end: {reason}" for reason, count in summary.dropped.items()]
        if summary.left_out:
            lines.append(f"{summary.left_out} rollouts of the run had no samples and were not replayed")
        if result.folder is not None:
            lines.append(f"run folder: {short(result.folder)}")
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    code = exit_code(result)
    return code or (0 if summary.same == summary.rollouts else EXIT_INCOMPLETE)


def _with_name(file: ConfigFile) -> ConfigFile:
    """A refill would be a rollout that was never recorded, and the folder says what it is."""
    run = file.run
    worker = msgspec.structs.replace(run.worker, max_refills=0)
    return msgspec.structs.replace(
        file, run=msgspec.structs.replace(run, name=f"{run.name[:90]}-replay", worker=worker)
    )
