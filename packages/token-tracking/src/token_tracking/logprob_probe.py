"""Which log-probability an engine returns: the model's own, after temperature, or over the kept ids.

Engines differ, and change with a version or a flag; documentation is often silent. This asks: `requests`
gives settings for one new token after one fixed prompt, `classify` reads the answers. No engine is called
here, so that any client, sync or async, can be used:

    answers = []
    for request in requests():
        token, logprob = await ask(prompt, request.temperature, request.top_k, max_new_tokens=1)
        answers.append(ProbeAnswer(request, token, logprob))
    verdict = classify(answers)

A prompt after which several tokens are plausible ("Name a colour:") shows most. Only conclusions that hold
whatever the model's logits are drawn; else the verdict is "cannot tell", with the reason.

*Temperature.* The normaliser cancels in the gap between the log-probabilities of two ids at one setting. The
gap shrinks with the temperature if that was applied, and stays if not. Of a single id: a probability p at
temperature T becomes at most p^(1/r) / (p^(1/r) + (1-p)^(1/r)) at r T (r > 1), whatever the other logits are:
the 1/r-th powers of parts sum to at least that of their sum.

*Truncation.* With top_k 2 the probabilities of the two ids sum to 1 if they were normalised over them, and to
less by what the model gives to all others if not. That others have mass shows in the ids that are sampled
without truncation.

Neither uses top_k 1 or temperature 0: engines have a shortcut for greedy decoding, whose log-probabilities
may be of another kind (SGLang 0.5 returns the model's own there).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from token_tracking.sample import LogprobKind

LogprobBasis = Literal["raw", "temperature", "renormalised", "renormalised_raw"]
"""`raw`: the model's softmax. `temperature`: after temperature, over the whole vocabulary. `renormalised`:
after temperature, over the kept ids alone. `renormalised_raw`: over the kept ids, without temperature."""

TOP_K_OFF = -1
ODDS = 1e-6
"""Chance below which something that was sampled counts as impossible."""
_OUTSIDE = 0.1
"""Probability of the ids beyond the kept two that is shown before a sum of 1 means anything."""


class ProbeRequest(NamedTuple):
    """One call for one new token; `top_p` 1 and `min_p` 0."""

    temperature: float
    top_k: int
    """-1: no truncation."""


class ProbeAnswer(NamedTuple):
    """What came back."""

    request: ProbeRequest
    token_id: int
    logprob: float


class LogprobVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers show."""

    basis: LogprobBasis | None
    """None: cannot tell."""
    temperature: bool | None
    """Whether temperature is applied. None: cannot tell."""
    truncation: bool | None
    """Whether log-probabilities are normalised over the kept ids. None: cannot tell."""
    evidence: tuple[str, ...]
    """What was seen, in sentences with numbers; of what cannot be told, why."""

    @property
    def logprob_kind(self) -> LogprobKind | None:
        """What to write into `GenerationRecord.logprob_kind`; None: cannot tell."""
        if self.basis is None:
            return None
        return "raw" if self.basis == "raw" else "processed"


PLAIN = ProbeRequest(1.0, TOP_K_OFF)
COLD, WARM, HOT = (ProbeRequest(temperature, 2) for temperature in (0.25, 1.0, 2.0))


def requests(repeats: int = 16) -> tuple[ProbeRequest, ...]:
    """The calls to make after one prompt, in any order, each for one new token.

    Args:
        repeats: calls for each of the four settings. More shows more of a model that is certain.
    """
    return tuple(setting for setting in (PLAIN, COLD, WARM, HOT) for _ in range(repeats))


def classify(answers: Sequence[ProbeAnswer], *, tolerance: float = 0.01) -> LogprobVerdict:
    """Say what the answers show.

    Args:
        answers: of `requests`; missing settings only make the verdict less certain.
        tolerance: how much the log-probability of one id at one setting may vary (nats; half precision and
            batching do that). Five times as much counts as different, less than once as equal.
    """
    try:
        seen = _Seen(answers, tolerance)
    except _UnusableError as error:
        return LogprobVerdict(basis=None, temperature=None, truncation=None, evidence=(str(error),))
    temperature, cool = _temperature(seen)
    truncation, cut = _truncation(seen)
    basis: LogprobBasis | None = None
    if temperature is not None and truncation is not None:
        applied: LogprobBasis = "renormalised" if truncation else "temperature"
        basis = applied if temperature else "renormalised_raw" if truncation else "raw"
    return LogprobVerdict(basis=basis, temperature=temperature, truncation=truncation, evidence=(cool, cut))


class _UnusableError(Exception):
    """The answers contradict what was asked for."""


class _Seen:
    """The answers by setting: how often each id came, and its log-probability."""

    def __init__(self, answers: Sequence[ProbeAnswer], tolerance: float):
        self.same, self.different = tolerance, 5 * tolerance
        values: dict[ProbeRequest, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for answer in answers:
            if not (math.isfinite(answer.logprob) and answer.logprob <= tolerance):
                raise _UnusableError(
                    f"{answer.request}: log-probability {answer.logprob} of id {answer.token_id}: need a "
                    "finite one, <= 0; ask the engine for the log-probability of the sampled token"
                )
            values[answer.request][answer.token_id].append(min(answer.logprob, 0.0))
        for request, ids in values.items():
            self._check(request, ids)
        self._values = values

    def _check(self, request: ProbeRequest, ids: Mapping[int, Sequence[float]]) -> None:
        if 0 < request.top_k < len(ids):
            raise _UnusableError(
                f"{request}: {len(ids)} different ids: the engine takes no top_k, the prompt was not the "
                "same each time, or ids change places between calls (low precision)"
            )
        token, spread = max(((token, max(v) - min(v)) for token, v in ids.items()), key=lambda pair: pair[1])
        if spread > self.same:
            raise _UnusableError(
                f"{request}: the log-probability of id {token} varies by {spread:.3f}: more than the "
                f"tolerance {self.same}; was the prompt the same each time?"
            )

    def logprobs(self, request: ProbeRequest) -> dict[int, float]:
        """The mean log-probability of each id that came."""
        return {token: sum(v) / len(v) for token, v in self._values.get(request, {}).items()}

    def counts(self, request: ProbeRequest) -> dict[int, int]:
        """How often each id came."""
        return {token: len(v) for token, v in self._values.get(request, {}).items()}


def _temperature(seen: _Seen) -> tuple[bool | None, str]:
    pairs = ((COLD, WARM), (WARM, HOT), (COLD, HOT))
    for cold, hot in pairs:
        at_cold, at_hot = seen.logprobs(cold), seen.logprobs(hot)
        for token in sorted(at_cold.keys() & at_hot.keys()):
            moved = at_hot[token] - at_cold[token]
            if abs(moved) >= seen.different:
                return True, (
                    f"temperature is applied: id {token} has log-probability {at_cold[token]:.3f} at "
                    f"temperature {cold.temperature} and {at_hot[token]:.3f} at {hot.temperature}"
                )
    for cold, hot in pairs:
        why = _unmoved(seen, cold, hot)
        if why is not None:
            return False, f"temperature is not applied: {why}"
    if not any(seen.logprobs(cold).keys() & seen.logprobs(hot).keys() for cold, hot in pairs):
        return None, "temperature: no id came at two temperatures (ask more often, or with all settings)"
    return None, (
        "temperature: the ids that came have the same log-probability at each temperature, which they would "
        "have anyway: the model is too certain after this prompt, or two ids are equally likely; take another"
    )


def _unmoved(seen: _Seen, cold: ProbeRequest, hot: ProbeRequest) -> str | None:
    """Why log-probabilities that are equal at two temperatures would differ had temperature been applied."""
    at_cold, at_hot = seen.logprobs(cold), seen.logprobs(hot)
    ratio = hot.temperature / cold.temperature
    both = sorted(at_cold.keys() & at_hot.keys())
    if any(abs(at_hot[token] - at_cold[token]) > seen.same for token in both):
        return None
    for token in both:
        bound = _warmed(at_cold[token] + seen.same, ratio)
        if at_hot[token] >= bound + seen.different:
            return (
                f"id {token} has log-probability {at_hot[token]:.3f} at temperature {hot.temperature} as at "
                f"{cold.temperature}, where it would fall to {bound:.3f} or less"
            )
    if len(both) == 2:
        gap = abs(at_cold[both[0]] - at_cold[both[1]])
        # Four means, each off by `same` at most, and two that differ by as much.
        if gap * (1 - 1 / ratio) >= seen.different + 4 * seen.same:
            return (
                f"ids {both[0]} and {both[1]} are {gap:.3f} apart at temperatures {cold.temperature} and "
                f"{hot.temperature}, where {gap / ratio:.3f} would be left"
            )
    return None


def _warmed(logprob: float, ratio: float) -> float:
    """The most that a log-probability can be when the temperature is `ratio` (> 1) times as high."""
    rest = -math.expm1(min(logprob, 0.0))
    if rest <= 0:
        return 0.0
    own, other = logprob / ratio, math.log(rest) / ratio
    high = max(own, other)
    return own - high - math.log(math.exp(own - high) + math.exp(other - high))


def _truncation(seen: _Seen) -> tuple[bool | None, str]:
    kept, counts = seen.logprobs(WARM), seen.counts(WARM)
    if not kept:
        return None, "truncation: no answer with top_k 2 at temperature 1"
    total = sum(math.exp(value) for value in kept.values())
    shown = f"with top_k 2 the ids {sorted(kept)} have probabilities that sum to {total:.3f}"
    if total > math.exp(seen.different):
        return None, f"truncation: {shown}, more than 1: these are no log-probabilities"
    if len(kept) == 2 and math.log(total) <= -seen.different:
        return False, f"truncation is not applied: {shown}, they are not normalised over them"
    if len(kept) == 1:
        # Normalised over two ids, the other one would have come: its probability is what is left.
        ((token, value),) = kept.items()
        if value <= -seen.different and counts[token] * (value + seen.same) < math.log(ODDS):
            return False, (
                f"truncation is not applied: with top_k 2 id {token} came {counts[token]} times of as many "
                f"with probability {math.exp(value):.3f}; the other id would have come as well"
            )
    if math.log(total) >= -seen.same:
        outside = _outside(seen, kept)
        if outside is not None:
            return True, f"truncation is applied: {shown}, and {outside}"
    return None, (
        f"truncation: {shown}; that the model gives probability to others after this prompt was not seen (it "
        "is too certain, or answers without truncation are missing): take another prompt, or ask more often"
    )


def _outside(seen: _Seen, kept: Mapping[int, float]) -> str | None:
    """How it was seen that ids beyond `kept` have probability without truncation; None: it was not."""
    plain, counts = seen.logprobs(PLAIN), seen.counts(PLAIN)
    mass = sum(math.exp(value) for token, value in plain.items() if token not in kept)
    if mass >= _OUTSIDE:
        return f"without truncation others have {mass:.3f}"
    total = sum(counts.values())
    came = sum(number for token, number in counts.items() if token not in kept)
    chance = sum(
        math.comb(total, k) * _OUTSIDE**k * (1 - _OUTSIDE) ** (total - k) for k in range(came, total + 1)
    )
    if came and chance < ODDS:
        return f"without truncation {came} of {total} tokens were others"
    return None
