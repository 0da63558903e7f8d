"""A whole run over rows in swebench 5.x form: agent, patch, eval script, swebench's verdict, sample."""

import json
import shutil

import pytest

EVAL_SCRIPT = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
git status
git checkout {commit} {paths}
git apply -v - <<'EOF_114329324912'
{test_patch}
EOF_114329324912
: '>>>>> Start Test Output'
python3 -m unittest -v {modules}
: '>>>>> End Test Output'
git checkout {commit} {paths}
"""
"""As swebench 4.1 made it of a classic row, conda and all; what a sandbox has not is told on stderr."""
REWARDS = {"weightcache-31": 1.0, "globpath-8": 0.0}


def django_name(test):
    """A test as unittest and Django print it, which is how SWE-bench's rows name it."""
    return f"{test.rpartition('.')[2]} ({test})"


def in_form_5(row):
    tests = {name: [django_name(test) for test in row[name]] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    everything = (*row["FAIL_TO_PASS"], *row["PASS_TO_PASS"])
    brought = [line[6:] for line in row["test_patch"].splitlines() if line.startswith("+++ b/")]
    script = EVAL_SCRIPT.format(
        commit=row["base_commit"],
        paths=" ".join(brought),
        test_patch=row["test_patch"],
        modules=" ".join(sorted({test.rsplit(".", 2)[0] for test in everything})),
    )
    form = {"version": "1.0", "image": f"own/{row['instance_id']}", "eval_type": "pass_and_fail"}
    return {**row, **tests, **form, "eval_script": script, "log_parser": "parse_log_django"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_in_swebench_form_run_from_agent_to_reward(swebench, example, cli, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(example, project)
    rows = [json.loads(line) for line in (project / "tasks.jsonl").read_text().splitlines()]
    kept = [in_form_5(row) for row in rows if row["instance_id"] in REWARDS]
    (project / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    text = (project / "run.toml").read_text()
    text = text.replace('provider = "command"', 'provider = "swebench"')
    text = "".join(line for line in text.splitlines(True) if not line.startswith("test_command"))
    (project / "run.toml").write_text(text)

    ran = cli("run", project / "run.toml", "--json", cwd=tmp_path, timeout=240)
    assert ran.code == 0, ran.stderr
    assert ran.summary["rewards"] == REWARDS
    assert ran.summary["received_by_trainer"] == 2
    for path in ran.folder.glob("rollouts/*/provenance.json"):
        record = json.loads(path.read_text())
        assert record["produced_by"]["grader"].startswith("swebench/5.")
        assert set(record["tests"].values()) <= {"passed", "failed"}
        assert ">>>>> Test Exit Code" in (path.parent / "grader.log").read_text()

    again = cli("regrade", ran.folder, "--json", cwd=tmp_path, timeout=240)
    assert again.code == 0, again.stderr
    assert {row["task_id"]: row["new"] for row in again.events[:-1]} == REWARDS
