"""`agent-flow tasks convert`: classic rows get their columns from the specs of swebench 4.1.

That lives in an environment of its own: `SWEBENCH_4_PYTHON` names its interpreter.
"""

import json
import os
import sys

import pytest
from agent_flow.cli import main
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.protocols import ProviderContext
from agent_flow.providers import load_runtime

PYTHON = os.environ.get("SWEBENCH_4_PYTHON", "")
WITH_SPECS = pytest.mark.skipif(
    not PYTHON, reason="SWEBENCH_4_PYTHON names no environment with swebench 4.1.0"
)

REPOSITORIES = {
    "django/django": ("3.0", "tests/forms_tests/test_forms.py", "parse_log_django", "pass_and_fail"),
    "sympy/sympy": ("1.1", "sympy/core/tests/test_basic.py", "parse_log_sympy", "pass_and_fail"),
    "psf/requests": ("2.0", "test_requests.py", "parse_log_pytest_options", "pass_and_fail"),
    "sphinx-doc/sphinx": ("3.0", "tests/test_ext.py", "parse_log_pytest_v2", "pass_and_fail"),
    "markedjs/marked": ("0.3", "test/unit/marked-spec.js", "parse_log_marked", "fail_only"),
    "gin-gonic/gin": ("1805", "context_test.go", "parse_log_gotest", "pass_and_fail"),
}


def classic(repo, version, path):
    """A row in the shape of SWE-bench's own data set."""
    return {
        "instance_id": f"{repo.replace('/', '__')}-{version if version.isdigit() else 101}",
        "repo": repo,
        "base_commit": "1" * 40,
        "patch": "",
        "test_patch": f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n",
        "problem_statement": "it breaks",
        "hints_text": "",
        "created_at": "2019-10-07T20:22:38Z",
        "version": version,
        "FAIL_TO_PASS": '["test_it"]',
        "PASS_TO_PASS": "[]",
        "environment_setup_commit": "2" * 40,
    }


ROWS = [classic(repo, version, path) for repo, (version, path, *_) in REPOSITORIES.items()]


@pytest.fixture
def tasks_file(tmp_path):
    """Writes rows; returns the file."""

    def write(rows):
        path = tmp_path / "classic.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def convert(path, *arguments):
    out = path.with_name("new.jsonl")
    code = main(["tasks", "convert", str(path), "--out", str(out), *arguments])
    return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


@WITH_SPECS
def test_classic_rows_get_image_script_parser_and_kind(tasks_file, capfd):
    code, rows = convert(tasks_file(ROWS), "--python", PYTHON)
    assert code == 0
    for before, row in zip(ROWS, rows, strict=True):
        _, path, parser, kind = REPOSITORIES[row["repo"]]
        assert {name: row[name] for name in before} == before
        assert (row["log_parser"], row["eval_type"]) == (parser, kind)
        name = row["instance_id"].replace("__", "_1776_").lower()
        assert row["image"] == f"swebench/sweb.eval.x86_64.{name}:latest"
        script = row["eval_script"]
        assert script.startswith("#!/bin/bash\nset -uxo pipefail\n")
        assert f"git checkout {'1' * 40} {path}" in script
        assert before["test_patch"] in script
        assert script.index(">>>>> Start Test Output") < script.index(">>>>> End Test Output")


@WITH_SPECS
def test_what_has_no_specs_is_named_and_left_out(tasks_file, capfd):
    rows = [ROWS[0], {**ROWS[1], "version": "99"}, {**classic("own/thing", "1.0", "t.py")}]
    code, converted = convert(tasks_file(rows), "--python", PYTHON)
    assert code == 1
    assert [row["instance_id"] for row in converted] == [ROWS[0]["instance_id"]]
    said = capfd.readouterr().err
    assert "left out sympy__sympy-101: swebench 4.1 knows no '99' of sympy/sympy 99" in said
    assert "left out own__thing-101" in said


@WITH_SPECS
def test_converted_rows_run_as_they_are(swebench, tasks_file, tmp_path, capfd):
    """Every parser that the specs name is one of swebench 5."""
    convert(tasks_file(ROWS), "--python", PYTHON)
    (tmp_path / "run.toml").write_text(
        '[tasks]\npath = "new.jsonl"\n[model]\ntokenizer = "t"\nchat_template = "c"\n'
        '[engine]\nprovider = "replay"\n[runtime]\nprovider = "swebench"\n'
    )
    file = load_config(tmp_path / "run.toml")
    runtime = load_runtime(ProviderContext(file=file, clock=Clock(), tokenizer=None, scratch=tmp_path / "s"))
    assert [runtime.environment(task).base_commit for task in runtime.load()] == ["1" * 40] * len(ROWS)


def test_rows_that_are_new_already_stay_as_they_are(tasks_file, runner_row):
    row = runner_row("pytest")
    assert convert(tasks_file([row]), "--python", "/nowhere/python") == (0, [row])


def test_an_environment_without_the_specs_says_how_to_make_one(tasks_file, capfd):
    for python in ("/nowhere/python", sys.executable):
        code, rows = convert(tasks_file(ROWS), "--python", python)
        assert (code, rows) == (2, [])
        said = capfd.readouterr().err
        assert "pip install swebench==4.1.0" in said


def test_a_row_that_lacks_what_specs_are_made_from_is_named(tasks_file, capfd):
    row = {name: value for name, value in ROWS[0].items() if name != "version"}
    assert convert(tasks_file([row]), "--python", sys.executable)[0] == 2
    assert "classic.jsonl:1 (django__django-101): the row has no version" in capfd.readouterr().err


def test_an_older_result_is_not_overwritten(tasks_file, tmp_path, capfd):
    (tmp_path / "new.jsonl").write_text("{}\n")
    assert convert(tasks_file(ROWS), "--python", sys.executable) == (2, [{}])
    assert "is there already" in capfd.readouterr().err
