"""The probe against a sampler whose log-probabilities are known: right, or "cannot tell", never wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_tracking.logprob_probe import (
    PLAIN,
    WARM,
    LogprobBasis,
    ProbeAnswer,
    ProbeRequest,
    classify,
    requests,
)

Array = np.ndarray[Any, Any]
BASES: tuple[LogprobBasis, ...] = ("raw", "temperature", "renormalised", "renormalised_raw")


def log_softmax(logits: Array) -> Array:
    high = logits.max()
    return logits - high - np.log(np.exp(logits - high).sum())


def sampler(logits: Array, basis: LogprobBasis, rng: Any, noise: float = 0.0) -> Any:
    """An engine with these logits whose log-probabilities are of kind `basis`."""

    def ask(request: ProbeRequest) -> ProbeAnswer:
        kept = np.argsort(-logits, kind="stable")
        kept = kept[: request.top_k] if request.top_k > 0 else kept
        drawn = log_softmax(logits[kept] / request.temperature)
        token = int(rng.choice(kept, p=np.exp(drawn)))
        applied = basis in ("temperature", "renormalised")
        scaled = logits / request.temperature if applied else logits
        if basis.startswith("renormalised"):
            value = log_softmax(scaled[kept])[list(kept).index(token)]
        else:
            value = log_softmax(scaled)[token]
        return ProbeAnswer(request, token, float(min(value + rng.uniform(-noise, noise), 0.0)))

    return ask


def probe(logits: Array, basis: LogprobBasis, seed: int = 0, noise: float = 0.0, repeats: int = 16) -> Any:
    ask = sampler(logits, basis, np.random.default_rng(seed), noise)
    return classify([ask(request) for request in requests(repeats)])


LOGITS = st.one_of(
    # Any few logits, ties and near-deterministic ones among them.
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=8).map(np.array),
    # A vocabulary, from flat (an untrained model) to certain.
    st.builds(
        lambda seed, size, scale, top: np.append(np.random.default_rng(seed).normal(0, scale, size), top),
        st.integers(0, 2**32 - 1),
        st.integers(2, 400),
        st.sampled_from([0, 0.01, 0.1, 0.5, 1, 3, 10]),
        st.floats(-5, 25),
    ),
)


@given(LOGITS, st.sampled_from(BASES), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.005]))
@settings(max_examples=150, deadline=None)
def test_a_verdict_is_never_wrong(logits: Array, basis: LogprobBasis, seed: int, noise: float):
    verdict = probe(logits, basis, seed, noise)
    assert verdict.temperature in (None, basis in ("temperature", "renormalised")), verdict
    assert verdict.truncation in (None, basis.startswith("renormalised")), verdict
    assert verdict.basis in (None, basis), verdict
    assert verdict.logprob_kind in (None, "raw" if basis == "raw" else "processed")
    assert len(verdict.evidence) == 2


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_an_ordinary_prompt_shows_all_kinds(basis: LogprobBasis, scale: float):
    for seed in range(12):
        logits = np.random.default_rng(seed).normal(0, scale, 1000)
        top = np.sort(logits)[::-1]
        if top[0] - top[1] < 0.3:
            continue  # two ids that are nearly tied show no temperature
        assert probe(logits, basis, seed).basis == basis, (seed, probe(logits, basis, seed))


@pytest.mark.parametrize("basis", BASES)
def test_a_certain_model_shows_nothing_and_the_reason_is_said(basis: LogprobBasis):
    verdict = probe(np.array([40.0, 0, 0, 0]), basis)
    assert (verdict.basis, verdict.temperature, verdict.truncation) == (None, None, None)
    assert verdict.logprob_kind is None
    assert "too certain" in verdict.evidence[0]
    assert "too certain" in verdict.evidence[1]


def test_two_words_are_all_the_words():
    """A vocabulary of two is not cut by top_k 2: the kinds are the same there."""
    assert probe(np.array([1.0, 0.0]), "renormalised").truncation is None
    assert probe(np.array([1.0, 0.0]), "temperature").truncation is None


def test_settings_that_were_not_asked_show_nothing():
    ask = sampler(np.array([1.0, 0.5, 0.2, 0.0]), "renormalised", np.random.default_rng(0))
    verdict = classify([ask(PLAIN) for _ in range(16)])
    assert verdict.basis is None
    assert "no id came at two temperatures" in verdict.evidence[0]
    assert "no answer with top_k 2" in verdict.evidence[1]
    assert classify([]).basis is None
    assert classify([ask(WARM) for _ in range(16)]).truncation is None  # perhaps the model has two words


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([ProbeAnswer(PLAIN, 1, float("nan"))], "need a finite one"),
        ([ProbeAnswer(PLAIN, 1, 0.5)], "need a finite one"),
        ([ProbeAnswer(WARM, token, -1.0) for token in (1, 2, 3)], "3 different ids"),
        ([ProbeAnswer(WARM, 1, -1.0), ProbeAnswer(WARM, 1, -1.2)], "varies by 0.200"),
    ],
)
def test_answers_that_cannot_be_are_named(answers: list[ProbeAnswer], why: str):
    verdict = classify(answers)
    assert (verdict.basis, verdict.temperature, verdict.truncation) == (None, None, None)
    assert why in verdict.evidence[0]


def test_probabilities_above_one_are_no_verdict():
    answers = [ProbeAnswer(WARM, token, -0.1) for token in (1, 2)]
    assert classify(answers).truncation is None
    assert "more than 1" in classify(answers).evidence[1]


@pytest.mark.parametrize(
    ("name", "basis", "evidence"),
    [
        ("default", "temperature", "id 204 has log-probability"),
        ("original", "raw", "apart at temperatures 0.25"),
        ("sampling", "renormalised", "ids [204, 427] have probabilities that sum to 1.000"),
    ],
)
def test_what_sglang_answered(name: str, basis: LogprobBasis, evidence: str):
    """The real SGLang 0.5.23: its default is after temperature and before truncation."""
    rows = json.loads((Path(__file__).parent / "data" / "engines" / "sglang_probe.json").read_text())[name]
    verdict = classify([ProbeAnswer(ProbeRequest(t, k), token, value) for t, k, token, value in rows])
    assert verdict.basis == basis, verdict
    assert any(evidence in line for line in verdict.evidence), verdict


@pytest.mark.parametrize("name", ["sglang_length", "vllm_length"])
def test_what_was_answered_at_one_setting_alone_shows_nothing(name: str):
    """Recorded answers of both engines are at temperature 1 without truncation: every kind agrees there."""
    recorded = json.loads((Path(__file__).parent / "data" / "engines" / f"{name}.json").read_text())
    answer = recorded["response"]
    if "choices" in answer:
        first = answer["choices"][0]["logprobs"]["content"][0]
        token, logprob = first["token_id"], first["logprob"]
    else:
        logprob, token, _ = answer["meta_info"]["output_token_logprobs"][0]
    verdict = classify([ProbeAnswer(PLAIN, token, logprob)])
    assert (verdict.basis, verdict.temperature, verdict.truncation) == (None, None, None)
