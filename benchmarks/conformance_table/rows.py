"""What is compared: templates, situations and the names of outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OUTCOMES = {
    "equal": "those of a full render, the sampled ones as sampled",
    "kept": "the same, and said: the full render now prints earlier template tokens otherwise (an empty "
    "think pair or a prefill dropped)",
    "branch": "those of the full render, as a new branch, and why: the template changes what was sampled",
    "cross-stop": "the sampled stop token and the other one that the template prints, and said",
    "needless": "those of the full render, as a branch that was not needed",
    "re-render": "none: the caller renders everything again, what was sampled included",
    "unsaid": "as `kept` or `cross-stop`, or where a branch is due, without a word",
    "injects": "control tokens written in a message became control tokens (as in a plain full render)",
    "wrong": "others",
    "raises": "none: an error",
    "not run": "the contestant could not be set up here",
    "-": "the template refuses these messages, or has no such case",
}
GOOD = ("equal", "kept", "branch", "cross-stop")


@dataclass(frozen=True)
class Row:
    """A template of trl and what is known of its model."""

    name: str
    stop: str = "<|im_end|>"
    call_stop: str = ""
    """What ends a turn with calls; empty: `stop`."""
    vocabulary: str = "family"
    renderer: str = "Default"
    """What `renderers` has for the model: its `…Renderer` class."""
    hub: str = ""
    bos: str = ""
    eos: str = ""
    """Empty: `stop`."""
    sampled_stop: str = ""
    """What the model samples where the template prints `stop`; empty: the same."""
    inline_reasoning: bool = False
    """Reasoning stands in the content, which the template cuts off at `</think>`."""
    parts: bool = False
    """Content is given as a list of parts."""


QWEN = "qwen3"
NEW = "qwen3_6"
ROWS = (
    Row("qwen2_5", vocabulary=QWEN),
    Row("qwen3", vocabulary=QWEN, renderer="Qwen3", hub="Qwen/Qwen3-8B"),
    Row("qwen3_training", vocabulary=QWEN, renderer="Qwen3", hub="Qwen/Qwen3-8B"),
    Row("qwen3_instruct_2507", vocabulary=QWEN, renderer="Qwen3", hub="Qwen/Qwen3-4B-Instruct-2507"),
    Row("qwen3_5_think", vocabulary=NEW, renderer="Qwen35", hub="Qwen/Qwen3.5-4B"),
    Row("qwen3_5_nothink", vocabulary=NEW, renderer="Qwen35", hub="Qwen/Qwen3.5-0.8B"),
    Row("qwen3_6", vocabulary=NEW, renderer="Qwen36", hub="Qwen/Qwen3.6-35B-A3B"),
    Row("qwen3_8", vocabulary=NEW, renderer="Qwen38", hub="Qwen/Qwen3.8-27B"),
    Row(
        "glm4moe",
        "<|user|>",
        "<|observation|>",
        renderer="GLM45",
        hub="zai-org/GLM-4.5-Air",
        eos="<|endoftext|>",
    ),
    Row(
        "deepseekv3",
        "<｜end▁of▁sentence｜>",
        renderer="DeepSeekR1",
        hub="deepseek-ai/DeepSeek-R1",
        inline_reasoning=True,
    ),
    Row("deepseek_r1_distill", "<｜end▁of▁sentence｜>", inline_reasoning=True),
    Row(
        "gptoss",
        "<|end|>",
        "<|call|>",
        renderer="GptOss",
        hub="openai/gpt-oss-20b",
        eos="<|return|>",
        sampled_stop="<|return|>",
    ),
    Row("llama3_1", "<|eot_id|>", bos="<|begin_of_text|>"),
    Row(
        "llama3_2",
        "<|eot_id|>",
        renderer="Llama3",
        hub="meta-llama/Llama-3.2-3B-Instruct",
        bos="<|begin_of_text|>",
    ),
    Row("phi3_5", "<|end|>", eos="<|endoftext|>"),
    Row("gemma3", "<end_of_turn>", bos="<bos>"),
    Row(
        "gemma4_v5",
        "<turn|>",
        "<|tool_response>",
        renderer="Gemma4",
        hub="google/gemma-4-E4B-it",
        bos="<bos>",
    ),
    Row("cohere2", "<|END_OF_TURN_TOKEN|>", bos="<bos>"),
    Row("lfm2_v2"),
    Row("lfm2_2_5_v2"),
    Row("nemotron_3_nano", renderer="Nemotron3", hub="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    Row("nemotron_3_ultra", renderer="Nemotron3Ultra", hub="nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"),
    Row(
        "nemotron_3_5_lightning",
        renderer="Nemotron35",
        hub="nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
    ),
    Row("smolvlm", "<end_of_utterance>", parts=True),
)
QUICK = ("qwen3", "glm4moe", "deepseekv3", "gptoss", "nemotron_3_nano")


@dataclass(frozen=True)
class Situation:
    name: str
    roles: tuple[str, ...]
    content: str | None = None
    """Of the new messages; None: a few words."""
    reasoning: bool = False
    cut: str = ""
    """Where the turn is cut off: `text`, `reasoning` or `call`."""
    cross_stop: bool = False
    variables: tuple[tuple[str, Any], ...] = ()
    needs_reasoning: bool = False
    any_role: bool = False
    """The message may come from a user where the template prints no calls."""


T, U = "tool", "user"
SITUATIONS = (
    Situation("one tool result", (T,), reasoning=True),
    Situation("two tool results", (T, T), reasoning=True),
    Situation("five parallel results", (T,) * 5, reasoning=True),
    Situation("tool result, then user", (T, U)),
    Situation("user", (U,)),
    Situation("two users", (U, U)),
    Situation("newlines at both ends", (T,), content="\n\n  a\nb\n\n", reasoning=True, any_role=True),
    Situation("empty content", (T,), content="", reasoning=True, any_role=True),
    Situation("unicode", (T,), content="e\u0301 \u4e16\u754c 🙂 \u0627\u0644", reasoning=True, any_role=True),
    Situation("control tokens as text", (T,), content="x {stop} y", reasoning=True, any_role=True),
    Situation("thinking turned off, user", (U,), variables=(("enable_thinking", False),)),
    Situation("thinking turned off, tool result", (T,), variables=(("enable_thinking", False),)),
    Situation("reasoning, then user", (U,), reasoning=True, needs_reasoning=True),
    Situation("cut off in text, then user", (U,), cut="text"),
    Situation("cut off in reasoning, then user", (U,), reasoning=True, needs_reasoning=True, cut="reasoning"),
    Situation("cut off after a call, then tool", (T,), reasoning=True, cut="call"),
    Situation("the other stop token, then user", (U,), cross_stop=True),
)
