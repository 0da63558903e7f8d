"""Task files: real SWE-bench shapes in, errors with file and line out."""

import datetime as dt
import json
import sys

import pytest
from agent_flow.errors import TaskRowError
from agent_flow.runtimes.rows import repository_row
from agent_flow.task import load_tasks

ROW = {
    "instance_id": "demo-1",
    "repo": "demo",
    "base_commit": "a" * 40,
    "problem_statement": "it breaks",
    "FAIL_TO_PASS": ["tests.test_a.T.test_x"],
    "PASS_TO_PASS": [],
    "patch": "",
    "test_patch": "",
}


def write(tmp_path, *rows):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_swe_bench_writes_test_lists_as_json_text(tmp_path):
    row = {**ROW, "FAIL_TO_PASS": json.dumps(ROW["FAIL_TO_PASS"]), "PASS_TO_PASS": "[]", "version": "3.0"}
    (task,) = load_tasks(write(tmp_path, row))
    row = repository_row(task)
    assert row.FAIL_TO_PASS == ("tests.test_a.T.test_x",)
    assert row.PASS_TO_PASS == ()
    assert task.row["version"] == "3.0"


def test_blank_lines_are_no_rows(tmp_path):
    assert len(load_tasks(write(tmp_path, ROW, "", {**ROW, "instance_id": "demo-2"}))) == 2


@pytest.mark.original("A-parse-row")
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{nope", "not JSON"),
        ("[1]", "must be a JSON object, got list"),
        ({**ROW, "FAIL_TO_PASS": []}, "FAIL_TO_PASS is empty"),
        ({**ROW, "FAIL_TO_PASS": "not a list"}, "FAIL_TO_PASS is neither a list"),
        ({**ROW, "FAIL_TO_PASS": [1]}, "Expected `str`, got `int`"),
        ({**ROW, "base_commit": "HEAD; rm -rf /"}, "base_commit"),
        ({**ROW, "instance_id": "../escape"}, "instance_id"),
        ({k: v for k, v in ROW.items() if k != "problem_statement"}, "problem_statement"),
    ],
)
def test_a_malformed_row_names_file_and_line(tmp_path, row, said):
    path = write(tmp_path, {**ROW, "instance_id": "fine"}, row)
    with pytest.raises(TaskRowError) as caught:
        [repository_row(task) for task in load_tasks(path)]
    assert said in str(caught.value)
    assert f"{path}:2" in str(caught.value)


PARTS = [
    {"type": "text", "text": "see"},
    {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
]
ASSETS = {"problem_statement": ["https://example.com/a.png"], "patch": [], "test_patch": []}
"""As SWE-bench Multimodal has them: JSON text in the JSON."""


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"image_assets": json.dumps(ASSETS)}, "comes with images (image_assets)"),
        ({"image_assets": {"test_patch": [{"path": "a.png", "url": "x"}]}}, "comes with images"),
        ({"image_assets": ["https://example.com/a.png"]}, "comes with images"),
        ({"image_assets": "{"}, "image_assets is not JSON"),
        ({"problem_statement": PARTS}, "holds images or sound (image_url)"),
        ({"problem_statement": [{"type": "input_audio", "input_audio": {}}]}, "(input_audio)"),
        ({"problem_statement": PARTS[:1]}, "holds a list of content parts"),
    ],
)
def test_a_task_with_images_is_named_with_its_line(tmp_path, columns, said):
    path = write(tmp_path, {**ROW, "instance_id": "fine"}, {**ROW, **columns})
    with pytest.raises(TaskRowError) as caught:
        load_tasks(path)
    assert said in str(caught.value)
    assert f"{path}:2 (demo-1)" in str(caught.value)


@pytest.mark.parametrize("assets", ["", "{}", "null", {}, {"test_patch": []}, [], None])
def test_no_images_is_no_obstacle(tmp_path, assets):
    statement = "![a link](https://example.com/a.png) is text"
    assert load_tasks(write(tmp_path, {**ROW, "problem_statement": statement, "image_assets": assets}))


def test_a_name_that_is_used_twice_is_refused(tmp_path):
    with pytest.raises(TaskRowError, match="already used in line 1"):
        load_tasks(write(tmp_path, ROW, ROW))


def test_an_empty_or_missing_file_is_refused(tmp_path):
    with pytest.raises(TaskRowError, match="holds no rows"):
        load_tasks(write(tmp_path, ""))
    with pytest.raises(TaskRowError, match="cannot read the task file"):
        load_tasks(tmp_path / "nowhere.jsonl")


def test_json_lines_end_at_line_feeds_only(tmp_path):
    """U+2028 and U+0085 are line ends to str.splitlines and plain characters to JSON."""
    statement = "one\u2028two\u0085three\x0cfour"
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({**ROW, "problem_statement": statement}, ensure_ascii=False) + "\r\n", "utf-8")
    assert load_tasks(path)[0].problem_statement == statement


def test_text_that_cannot_be_encoded_is_refused_before_the_run(tmp_path):
    row = json.dumps(ROW).replace("it breaks", "it \\ud800 breaks")
    with pytest.raises(TaskRowError, match="surrogate"):
        load_tasks(write(tmp_path, row))


def parquet(tmp_path, *rows):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: agent-flow[parquet]")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), tmp_path / "tasks.parquet")
    return tmp_path / "tasks.parquet"


def test_a_parquet_file_gives_the_same_tasks_as_json_lines(tmp_path):
    other = {**ROW, "instance_id": "demo-2", "chat_template_kwargs": {"enable_thinking": False}}
    read = load_tasks(parquet(tmp_path, other, ROW))
    for task, line in zip(read, load_tasks(write(tmp_path, other, ROW)), strict=True):
        assert dict(task.row) == dict(line.row)
        assert repository_row(task) == repository_row(line)
        assert task.chat_template_kwargs == line.chat_template_kwargs


def test_what_json_has_not_becomes_text_or_is_absent(tmp_path):
    """SWE-bench's files hold dates and nulls."""
    row = {
        **ROW,
        "created_at": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        "hints_text": None,
        "test_patch": None,
    }
    (task,) = load_tasks(parquet(tmp_path, {**row, "problem_statement": "caf\u00e9\u2028"}))
    assert task.problem_statement == "caf\u00e9\u2028"
    assert task.row["created_at"] == "2026-01-02T00:00:00Z"
    assert "hints_text" not in task.row
    assert repository_row(task).test_patch == ""


def test_errors_in_a_parquet_file_name_the_row(tmp_path, monkeypatch):
    path = parquet(tmp_path, ROW, {**ROW, "instance_id": "../x"})
    with pytest.raises(TaskRowError, match=r"tasks\.parquet: row 2 \(\.\./x\)"):
        load_tasks(path)
    with pytest.raises(TaskRowError, match="already used in row 1"):
        load_tasks(parquet(tmp_path, ROW, ROW))
    path.write_bytes(b"PAR1 not at all")
    with pytest.raises(TaskRowError, match="not a Parquet file"):
        load_tasks(path)
    with pytest.raises(TaskRowError, match="cannot read the task file"):
        load_tasks(tmp_path / "nowhere.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskRowError) as caught:
        load_tasks(path)
    assert "pip install 'agent-flow[parquet]'" in str(caught.value)
