"""`run --dump` and `run --replay`: the same ids, masks and reward, or exactly where they first differ."""

import json
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from agent_flow.cli import main
from agent_flow.dump import NAME, read_dump
from agent_flow.engine_calls import CallLog, CallReader, error_of, records_of
from agent_flow.errors import EngineError, RecordingError
from token_tracking import GenerationRecord
from trainer_bridge import read_samples


def record(prompt, ids, **fields):
    given = {
        "logprobs": None,
        "logprob_kind": "none",
        "finish_reason": "length",
        "weight_version": 3,
        **fields,
    }
    return GenerationRecord(
        prompt_ids=np.array(prompt, np.int32), output_ids=np.array(ids, np.int32), **given
    )


def same(a, b):
    for name in GenerationRecord.__struct_fields__:
        was, now = getattr(a, name), getattr(b, name)
        if isinstance(was, np.ndarray):
            assert now.dtype == was.dtype
            assert now.tobytes() == was.tobytes(), name
        else:
            assert now == was, name


def test_calls_come_back_array_for_array():
    first = record(
        [1, 2, 3],
        [4, 5],
        logprobs=np.array([-0.1, -np.float32(1e-7)], np.float32),
        logprob_kind="raw",
        finish_reason="abort",
        temperature=1.0,
        top_p=0.9,
        top_k=20,
        min_p=0.0,
        kept_ids=np.array([4, 9, 5], np.int32),
        kept_offsets=np.array([0, 2, 3], np.int64),
    )
    rest = record([1, 2, 3, 4, 5], [6, 7], finish_reason="stop", stop_id=7, weight_version=4)
    failed = EngineError("down", "no answer", retryable=True, evidence="503")
    failed.partial = (record([1, 2, 3, 4, 5, 6, 7, 8], [9], finish_reason="abort"),)
    log = CallLog()
    log.answered(first.prompt_ids, (first, rest))
    log.failed(np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32), failed)
    log.answered(np.array([1, 9], np.int32), (record([1, 9], []),))
    assert [call.shared for call in log.calls] == [3 - 3, 7, 1], "a prompt is kept once, not with every turn"

    reader = CallReader(log.calls)
    prompt, call = reader.read()
    assert prompt.tolist() == [1, 2, 3]
    for was, now in zip((first, rest), records_of(prompt, call.records), strict=True):
        same(was, now)
    prompt, call = reader.read()
    assert prompt.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    error = error_of(prompt, call.error)
    assert (error.reason, error.retryable, error.evidence) == ("engine/down", True, "503")
    same(failed.partial[0], error.partial[0])
    prompt, call = reader.read()
    assert prompt.tolist() == [1, 9]
    assert (reader.given, reader.total) == (3, 3)


def dumped(own_agent):
    run = own_agent.run("--dump")
    assert run.code == 0, run.stderr
    return run


def replay(own_agent, folder):
    return own_agent.call("run", "--replay", folder, "--json")


def test_a_run_replayed_is_the_same(own_agent):
    run = dumped(own_agent)
    shutil.rmtree("recordings")  # nothing of the engine is needed
    again = replay(own_agent, run.folder)
    assert again.code == 0, again.stderr
    assert again.summary == {
        "rollouts": 2, "same": 2, "ended_same": 2, "same_but_for_times": 2,
        "differ": {}, "dropped": {}, "left_out": 0,
    }  # fmt: skip
    assert again.folder.name.startswith("own-agent-replay-")
    assert json.loads((again.folder / "replay.json").read_text())["of"] == str(run.folder)
    ids = {path.name for path in (run.folder / "rollouts").iterdir()}
    assert {path.name for path in (again.folder / "rollouts").iterdir()} == ids
    assert not list((again.folder / "samples").iterdir()), "nothing is sent"


def test_a_world_that_changed_is_named_at_the_first_token(own_agent):
    run = dumped(own_agent)
    text = (own_agent.folder / f"{own_agent.module}.py").read_text()
    own_agent.source(text.replace('"higher" if', '"try higher" if'))
    again = replay(own_agent, run.folder)
    assert again.code == 1
    assert (again.summary["same"], again.summary["dropped"]) == (0, {})
    for differs in again.summary["differ"].values():
        assert differs[0].startswith("prompt of call 3, token ")
        assert "user\\nhigher<|im_end|>" in differs[0]
        assert "user\\ntry higher<|im_end|>" in differs[0]
        assert differs[-1].startswith("sample 0: versions differ")
        assert not [text for text in differs if text.startswith(("reward", "exit status"))]
    said = own_agent.call("run", "--replay", run.folder).stdout
    assert "0 of 2 rollouts are the same" in said
    assert "differs, first in: prompt of call 3" in said


def test_a_reward_that_changed_is_named(own_agent):
    run = dumped(own_agent)
    text = (own_agent.folder / f"{own_agent.module}.py").read_text()
    own_agent.source(text.replace("1.0 / episode.turns", "2.0 / episode.turns"))
    again = replay(own_agent, run.folder)
    assert again.code == 1
    assert list(again.summary["differ"].values()) == [
        ["reward: recorded 0.3333333333333333, now 0.6666666666666666"]
    ]
    assert again.summary["same"] == 1


@pytest.mark.parametrize(("guesses", "said"), [(5, "engine/replay_exhausted"), (2, "calls of the engine")])
def test_a_rollout_that_asks_for_more_or_less_is_named(own_agent, guesses, said):
    run = dumped(own_agent)
    own_agent.config(("max_guesses = 4", f"max_guesses = {guesses}"), name=run.folder / "run.toml")
    again = replay(own_agent, run.folder)
    assert again.code == 1
    found = str(again.summary["dropped"] if guesses == 5 else again.summary["differ"])
    assert said in found


ENGINE = '''

import numpy as np
from agent_flow.engines.replay import ReplayEngine
from agent_flow.errors import EngineError
from token_tracking import GenerationRecord


class Pieces(ReplayEngine):
    """Weights change in mid turn, and the first call of each rollout fails."""

    source = "sampled"
    failed = set()

    def describe(self):
        return {**super().describe(), "policy_run": "run-7"}

    async def generate(self, request):
        if request.rollout_id not in self.failed:
            self.failed.add(request.rollout_id)
            raise EngineError("busy", "not yet", retryable=True)
        (whole,) = await super().generate(request)
        ids = whole.output_ids
        logprobs = -np.arange(len(ids), dtype=np.float32) / 7
        prompt = request.prompt_ids
        return (
            GenerationRecord(prompt_ids=prompt, output_ids=ids[:2], logprobs=logprobs[:2],
                logprob_kind="raw", finish_reason="abort", weight_version=3, temperature=1.0),
            GenerationRecord(prompt_ids=np.concatenate([prompt, ids[:2]]), output_ids=ids[2:],
                logprobs=logprobs[2:], logprob_kind="raw", finish_reason="stop", stop_id=whole.stop_id,
                weight_version=4, temperature=1.0),
        )
'''


def test_logprobs_versions_and_pieces_of_turns_come_back(own_agent):
    path = own_agent.folder / f"{own_agent.module}.py"
    own_agent.source(path.read_text() + ENGINE)
    own_agent.config(('provider = "replay"', 'provider = "my_flow:Pieces"'))
    run = dumped(own_agent)
    dumps = [read_dump(folder / NAME) for folder in (run.folder / "rollouts").iterdir()]
    assert {dump.attempt for dump in dumps} == {1}, "the first attempt failed"
    assert {dump.source for dump in dumps} == {"sampled"}
    for dump in dumps:
        (sample,) = dump.samples
        versions = np.frombuffer(sample.versions, "<i4")
        assert set(versions.tolist()) == {-1, 3, 4}
        record = json.loads((run.folder / "rollouts" / dump.rollout_id / "provenance.json").read_text())
        assert record["produced_by"]["weight_versions"] == "3,4"
        assert record["produced_by"]["engine"] == "replay"
    assert {sample.policy_run for sample in read_samples(run.folder)} == {"run-7"}
    again = replay(own_agent, run.folder)
    assert again.summary["same"] == 2, again.summary


EMPTY = struct.pack("<8sIQI", b"AFDUMP\0\0", 1, 1, zlib.crc32(b"\x80")) + b"\x80"
"""A dump whose MessagePack is an empty map."""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1], "it was cut short or has a tail"),
        (lambda data: data[:-1] + b"\x81", "its checksum does not match"),
        (lambda data: b"no dump at all, just some text of the same sort", "not a rollout's dump"),
        (lambda data: data[:8] + b"\x09" + data[9:], "version 9, this release reads 1"),
        (lambda data: data, "does not decode: Object missing required field"),
    ],
)
def test_a_damaged_dump_is_named(tmp_path, damage, said):
    path = tmp_path / NAME
    path.write_bytes(damage(EMPTY))
    with pytest.raises(RecordingError) as caught:
        read_dump(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_run_without_dumps_says_what_to_do(own_agent):
    run = own_agent.run()
    again = replay(own_agent, run.folder)
    assert again.code == 2
    assert NAME in again.stderr
    assert "agent-flow run CONFIG --dump" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run",), "no configuration"),
        (("run", "run.toml", "--replay", "x"), "takes the configuration of its run"),
        (("run", "--replay", "nowhere"), "no run folder"),
    ],
)
def test_arguments_that_do_not_fit(own_agent, arguments, said):
    done = own_agent.call(*arguments)
    assert done.code == 2
    assert said in done.stderr


def command(text):
    call = json.dumps({"name": "bash", "arguments": {"command": text}})
    return {"text": f"<tool_call>\n{call}\n</tool_call>"}


def test_commands_are_run_for_real_and_one_whose_output_changes_is_shown(
    example, tmp_path, monkeypatch, capfd, qwen_tokenizer
):
    project = tmp_path / "quickstart"
    shutil.copytree(example, project)
    monkeypatch.chdir(project)
    monkeypatch.setattr("agent_flow.run.tokenizer_of", lambda file: qwen_tokenizer)
    rows = [json.loads(line) for line in (project / "tasks.jsonl").read_text().splitlines()]
    keep = [row for row in rows if row["instance_id"] in ("weightcache-31", "ratekeeper-40")]
    (project / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in keep))
    submit = command("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    for name, text in (
        ("weightcache-31", "ls && echo changed >> README && git status --short"),
        ("ratekeeper-40", "cat /proc/sys/kernel/random/uuid"),
    ):
        path = project / "recordings" / f"{name}.json"
        recording = json.loads(path.read_text())
        recording["rollouts"] = [{"turns": [command(text), submit]}]
        path.write_text(json.dumps(recording))

    assert main(["run", "run.toml", "--json", "--dump"]) == 0
    folder = json.loads(capfd.readouterr().out.splitlines()[0])["values"]["folder"]
    assert main(["run", "--replay", folder, "--json"]) == 1
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (summary["rollouts"], summary["same"], summary["dropped"]) == (2, 1, {})
    ((rollout_id, differs),) = summary["differ"].items()
    dump = read_dump(Path(folder) / "rollouts" / rollout_id / NAME)
    assert dump.task_id == "ratekeeper-40"
    assert differs[0].startswith("prompt of call 2, token ")
    assert differs[1].startswith("sample 0: token_ids differ first at token ")
    assert len(differs) == 2 or differs[2].startswith("sample 0: "), "reward and exit status are the same"
