"""For tests of what is built on this package: real templates, and completions written as text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from pathlib import Path

import numpy as np

from token_tracking.conversation import Conversation
from token_tracking.errors import TemplateError
from token_tracking.record import GenerationRecord
from token_tracking.sample import UNKNOWN_VERSION, FinishReason

BASH_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command <safely> & return its output",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
"""The schema of a tool that takes one shell command."""


def trl_templates() -> dict[str, Path]:
    """The chat templates in the installed `trl` package by name (`qwen3`, …), without importing it.

    Raises:
        TemplateError: `trl` is not installed.
    """
    spec = util.find_spec("trl")
    folders: Sequence[str] = (spec.submodule_search_locations if spec else None) or ()
    files = [path for folder in folders for path in Path(folder, "chat_templates").glob("*.jinja")]
    if not files:
        raise TemplateError("the package `trl` is not installed: its chat templates are test data here")
    return {path.stem: path for path in sorted(files)}


def trl_template(name: str) -> str:
    """The text of one of `trl_templates`.

    Raises:
        TemplateError: there is no such template.
    """
    found = trl_templates()
    if name not in found:
        raise TemplateError(f"trl ships no template {name!r}; it has {', '.join(found)}")
    return found[name].read_text(encoding="utf-8")


def completion(
    conversation: Conversation,
    text: str,
    *,
    finish_reason: FinishReason = "stop",
    logprob: float | None = None,
    weight_version: int = UNKNOWN_VERSION,
) -> GenerationRecord:
    """A record as if the model had sampled `text` after the waiting prompt.

    Args:
        conversation: its prompt is what the record answers.
        text: what was sampled, without stop token.
        finish_reason: `stop` ends it with the template's stop token.
        logprob: of every token. None: none recorded.
        weight_version: of the weights.
    """
    template = conversation.template
    ids = template.tokenizer.encode_plain(text)
    stop_id = template.close_id if finish_reason == "stop" else None
    if stop_id is not None:
        ids = [*ids, stop_id]
    return GenerationRecord(
        prompt_ids=conversation.prompt_ids(),
        output_ids=np.array(ids, dtype=np.int32),
        logprobs=None if logprob is None else np.full(len(ids), logprob, np.float32),
        finish_reason=finish_reason,
        stop_id=stop_id,
        weight_version=weight_version,
        logprob_kind="none" if logprob is None else "raw",
    )
