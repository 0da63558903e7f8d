"""Public bug reports about multi-turn tokens, one test each with the right value, over the kind of fault.

A test names its report. `ELSEWHERE` says where the others are tested, `OTHER_PACKAGES` which ones are about
something that this package does not do; both tables are checked.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_tracking import (
    ChatTemplate,
    Conversation,
    GenerationRecord,
    TemplateError,
    TokenSource,
    UnsupportedContentError,
)
from token_tracking.testing import IDENTITY

Compile = Callable[..., ChatTemplate]
Message = dict[str, Any]
QWEN = ("qwen2_5", "qwen3", "qwen3_6", "qwen3_training")
TEMPLATES = ("qwen2_5", "qwen3", "qwen3_6", "glm4moe", "deepseekv3", "llama3_1")
SYSTEM: Message = {"role": "system", "content": "sys"}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def tool(content: Any, n: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{n}", "name": "bash", "content": content}


def calls(count: int = 1, content: str = "") -> Message:
    made = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "bash", "arguments": '{"command": "ls"}'},
        }
        for n in range(count)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


class Talk:
    """A harness and a model that writes what the template prints, or any ids."""

    def __init__(self, template: ChatTemplate, *start: Message):
        self.template = template
        self.conversation = Conversation(template)
        self.history: list[Message] = list(start or (SYSTEM, user("fix it")))
        self.conversation.advance(self.history)

    @property
    def tokenizer(self) -> Any:
        return self.template.tokenizer

    @property
    def branch(self) -> Any:
        return self.conversation.branches[self.conversation.current]

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.branch.ledger.ids.tolist())

    def hear(self, *new: Message) -> "Talk":
        self.history += new
        self.conversation.advance(self.history)
        return self

    def ids(self, ids: list[int], message: Message | None = None, **change: Any) -> Message:
        """The model samples these ids."""
        values: dict[str, Any] = {"finish_reason": "stop", **change}
        record = GenerationRecord(
            prompt_ids=self.conversation.prompt_ids(), output_ids=np.array(ids, np.int32), **values
        )
        said = self.conversation.record(record, message)
        if values["finish_reason"] != "abort":
            self.history.append(dict(said))
        return said

    def say(self, text: str, **change: Any) -> Message:
        """The model samples `text` and the usual stop token."""
        assert self.template.close_id is not None
        return self.ids([*self.tokenizer.encode_plain(text), self.template.close_id], **change)

    def write(self, message: Message, *new: Message, stop: str | None = None) -> "Talk":
        """The model samples `message` as the template prints it, and hears the answers."""
        field = self.template.facts.reasoning_field
        if field is not None and message.get("tool_calls"):
            message = {field: "look", **message}
        prompt = self.template.render(self.history, add_generation_prompt=True)
        shown = self.template.render([*self.history, message], add_generation_prompt=False)
        while not shown.startswith(prompt):
            prompt = prompt[:-1]
        body = shown[len(prompt) :].removesuffix(self.template.facts.end_text or "")
        stop_id = self.template.close_id if stop is None else self.tokenizer.token_to_id(stop)
        if new and stop is None:
            full = self.template.render([*self.history, message, *new], add_generation_prompt=True)
            after = self.tokenizer.encode(full[len(prompt) + len(body) :])[:1]
            stop_id = after[0] if after and after[0] in self.template.stop_ids else stop_id
        ids = self.tokenizer.encode(body)
        if ids[-1] not in self.template.stop_ids:
            ids.append(stop_id)
        self.ids(ids, message)
        return self.hear(*new) if new else self

    def samples(self) -> Any:
        return self.conversation.samples(**IDENTITY)

    def full(self) -> list[int]:
        """The ids of the whole history, rendered anew."""
        return self.tokenizer.encode(self.template.render(self.history, add_generation_prompt=True))

    def continues_as_rendered(self) -> bool:
        """Whether the prompt is the full render; from the last turn's end on where turns lose a prefill."""
        held, full = self.conversation.prompt_ids().tolist(), self.full()
        prefill = self.template.facts.prefill
        if prefill and prefill not in self.template.render(self.history, add_generation_prompt=False):
            held = held[self.branch.turns[-1].end - 1 :]
            return full[-len(held) :] == held
        return held == full


@pytest.fixture
def talk(compiled: Compile) -> Callable[..., Talk]:
    def start(name: str, *messages: Message, **kwargs: Any) -> Talk:
        family = name not in (*QWEN, "qwen3_8")
        return Talk(compiled(name, family=family, **kwargs), *messages)

    return start


StartTalk = Callable[..., Talk]


# --- the text between turns


@pytest.mark.original("A-qwen-newline")
@pytest.mark.parametrize("name", TEMPLATES)
def test_verl_3720_what_the_template_prints_after_a_turn_is_there_with_mask_0(name: str, talk: StartTalk):
    """verl#3720: Qwen's newline after `<|im_end|>` was missing in training; here in every template."""
    held = talk(name).write(calls(), tool("a.py\n"))
    ids = held.conversation.prompt_ids().tolist()
    assert held.continues_as_rendered()
    turn = held.branch.turns[0]
    assert (held.branch.ledger.mask == 1).nonzero()[0].tolist() == list(range(turn.start, turn.end))
    if name in QWEN:
        assert (ids[turn.end - 1 : turn.end + 1], held.branch.ledger.mask[turn.end]) == ([151645, 198], 0)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "llama3_1"])
def test_slime_2263_parallel_results_stand_as_the_template_prints_them(
    name: str, count: int, talk: StartTalk
):
    """slime#2263: each result rendered alone opened a user block of its own."""
    held = talk(name).write(calls(count), *[tool(f"out{n}", n) for n in range(count)])
    assert held.continues_as_rendered()
    assert len(held.conversation.branches) == 1


@pytest.mark.original("A-prompt-boundary", "A-append-prefix")
@pytest.mark.parametrize("system", [None, "", "short", "a much longer system message\n" * 5])
@pytest.mark.parametrize("name", TEMPLATES)
def test_slime_1476_no_offset_is_taken_from_another_system_message(
    name: str, system: str | None, talk: StartTalk
):
    """slime#1476: the mask was cut at the length of a test system message."""
    start = [user("q")] if system is None else [{"role": "system", "content": system}, user("q")]
    held = talk(name, *start)
    assert held.conversation.prompt_ids().tolist() == held.full()
    held.say("ok")
    assert (
        held.branch.turns[0].start
        == len(held.conversation.samples(**IDENTITY)[0].token_ids)
        - len(held.tokenizer.encode_plain("ok"))
        - 1
    )


@pytest.mark.original("A-append-prefix")
@pytest.mark.parametrize("name", ["qwen3_6", "gptoss", "glm4moe"])
def test_slime_1742_a_tool_loop_needs_no_message_that_the_template_refuses_alone(name: str, talk: StartTalk):
    """slime#1742: Qwen3.5 raises `No user query found` for a tool message alone."""
    held = talk(name)
    if name in ("qwen3_6", "gptoss"):
        with pytest.raises(TemplateError):
            held.template.render([tool("out")], add_generation_prompt=True)
    for n in range(3):
        held.write(calls(), tool(f"out{n}"))
    assert held.continues_as_rendered()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "qwen3_training", "deepseekv3", "glm4moe"])
def test_nemo_rl_2821_assistant_text_stands_once(name: str, talk: StartTalk):
    """NeMo-RL#2821: a string diff without a proof of its prefix doubled the assistant's text."""
    held = talk(name)
    for n in range(3):
        held.write({"role": "assistant", "content": f"unusual answer {n}"}, user(f"unusual question {n}"))
    held.write({"role": "assistant", "content": "end"})
    decode = held.tokenizer.decode
    parts = held.samples()
    for n in range(3):
        said = f"unusual answer {n}"
        assert max(decode(part.token_ids.tolist()).count(said) for part in parts) == 1
        assert sum(decode(part.token_ids[part.loss_mask == 1].tolist()).count(said) for part in parts) == 1


# --- sampled ids are the record


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["hello", " \n\nunusual", "\u4e16\u754c", "aaaa", "1234567"])
def test_trl_5224_and_rllm_272_sampled_ids_are_never_tokenized_again(name: str, text: str, talk: StartTalk):
    """trl#5224, rllm#272: `[53122, 316]` against `[393, 30002]` for the same text: signs one by one."""
    held = talk(name)
    odd = [i for sign in text for i in held.tokenizer.encode_plain(sign)]
    odd.append(held.template.close_id)
    held.ids(odd)
    held.hear(user("go on")).say("ok")
    held.hear(user("more")).say("ok")
    part = held.samples()[0]
    assert part.token_ids[part.turns[0].start : part.turns[0].end].tolist() == odd
    assert held.conversation.report().broken == 0


def test_verl_2165_drift_in_sampled_text_alone_is_no_error(talk: StartTalk):
    """verl#2165: a warning for every rollout hid the real ones."""
    for text in ("ok \n", '<tool_call>\n{"name":  "bash", "arguments": {"command":"ls"}}\n</tool_call>'):
        held = talk("qwen2_5")
        message = held.say(text)
        held.hear(tool("out") if "tool_calls" in message else user("more")).say("done")
        report = held.conversation.report()
        assert (report.broken, len(held.samples())) == (0, 1)
        assert report.equal + report.rewritten == 2


@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, {}])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_6"])
def test_verl_2189_a_think_pair_that_the_model_repeats_is_kept_once(
    name: str, kwargs: dict[str, Any], talk: StartTalk
):
    """verl#2189: SGLang's multi-turn path rendered it again: a second empty pair."""
    held = talk(name, **kwargs)
    text = "<think>\n\n</think>\n\nyes"
    before = held.tokenizer.decode(held.conversation.prompt_ids().tolist()).count("<think>")
    ids = [*held.tokenizer.encode(text), held.template.close_id]
    held.ids(ids)
    held.hear(user("more")).say("ok")
    part = held.samples()[0]
    assert part.token_ids[part.turns[0].start : part.turns[0].end].tolist() == ids
    assert held.tokenizer.decode(part.token_ids[: part.turns[0].end].tolist()).count("<think>") == before + 1
    assert held.conversation.report().broken == 0


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "glm4moe"])
def test_verl_3960_calls_that_the_harness_drops_change_no_id(name: str, talk: StartTalk):
    """verl#3960: the rollout cleared `tool_calls`: the ids are the record, messages are a view of them."""
    held = talk(name)
    written = talk(name).write(calls())
    ids = written.branch.ledger.ids[written.branch.turns[0].start :].tolist()
    held.ids(ids, {"role": "assistant", "content": ""})
    held.hear(user("more")).say("ok")
    report = held.conversation.report()
    assert report.broken == 0
    (part, *_) = held.samples()
    assert part.token_ids[part.turns[0].start : part.turns[0].end].tolist() == ids
    assert sum(p.trained_tokens for p in held.samples()) == held.conversation.sampled_tokens


@pytest.mark.parametrize("spelling", ['{"b": 1, "a": [1, 2]}', '{"a":[1,2],"b":1}', '{ "a" : [1,2], "b":1 }'])
@pytest.mark.parametrize("name", ["qwen2_5", "glm4moe"])
def test_dynamo_10624_key_order_and_blanks_of_arguments_change_no_id(
    name: str, spelling: str, talk: StartTalk
):
    """dynamo#10624: `tojson` of two renderers differs; the message says the same."""
    held = talk(name)
    message = calls()
    message["tool_calls"][0]["function"]["arguments"] = spelling
    held.write(message)
    before = held.branch.ledger.ids.tolist()
    handed = json.loads(json.dumps(held.history[-1]))
    handed["tool_calls"][0]["function"]["arguments"] = {"a": [1, 2], "b": 1}
    held.history[-1] = handed
    held.hear(tool("out"))
    held.say("ok")
    assert len(held.conversation.branches) == 1
    assert held.branch.ledger.ids[: len(before)].tolist() == before
    assert held.conversation.report().broken == 0


# --- stop tokens, prefills and repairs


@pytest.mark.parametrize("name", [*TEMPLATES, "gptoss", "phi3_5"])
def test_trl_7039_every_stop_token_of_the_template_ends_the_turn(name: str, talk: StartTalk):
    """trl#7039: Phi-3.5 stops on 32007 (`<|end|>`), which is not its `eos_token`.

    slime#1490, slime#514, renderers#66, tinker-cookbook#932: sampled, so trained, GLM's header too.
    """
    stops = talk(name).template.stop_ids
    assert stops
    for stop in stops:
        held = talk(name)
        ids = [*held.tokenizer.encode_plain("ok"), stop]
        logprobs = -np.arange(len(ids), dtype=np.float32)
        held.ids(ids, logprobs=logprobs, logprob_kind="raw")
        held.hear(user("more"))
        held.conversation.prompt_ids()
        branch = held.conversation.branches[0]
        turn, ledger = branch.turns[0], branch.ledger
        assert (turn.last.stop_id, ledger.ids[turn.end - 1]) == (stop, stop)
        assert ledger.mask[turn.end - 1] == 1
        assert ledger.logprobs[turn.end - 1] == logprobs[-1]
        assert not (ledger.sources == TokenSource.REPAIR).any()
        # Once: where it is the next header it is not printed again.
        assert ledger.ids[turn.end : turn.end + 1].tolist() != [stop]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_training", "qwen3_6", "glm4moe", "deepseekv3"])
@pytest.mark.parametrize(
    "text",
    ["", "<think>\nlong thought", "half a sen", '<tool_call>\n{"name": "ba', "<think>\nx\n</think>\n\nso"],
)
def test_renderers_139_and_skyrl_758_a_cut_turn_is_closed_by_tokens_that_are_not_trained(
    name: str, text: str, talk: StartTalk
):
    """renderers#139: reasoning was left open. SkyRL#758: the added end had mask 1 and log-probability 0.0."""
    held = talk(name)
    ids = [*held.tokenizer.encode(text)] or [held.tokenizer.encode_plain("a")[0]]
    held.ids(ids, finish_reason="length", logprobs=np.full(len(ids), -1, np.float32), logprob_kind="raw")
    held.hear(user("go on"))
    held.conversation.prompt_ids()
    branch = held.conversation.branches[0]
    held.say("ok")
    repaired = branch.ledger.sources == TokenSource.REPAIR
    assert not branch.ledger.mask[repaired].any()
    assert np.isnan(branch.ledger.logprobs[repaired]).all()
    assert (branch.ledger.versions[repaired] == -1).all()
    if len(held.conversation.branches) == 1:
        closing = held.tokenizer.decode(branch.ledger.ids[repaired].tolist())
        assert ("</think>" in closing) == held.template.in_reasoning(ids)
        assert held.tokenizer.encode(closing)[-1] in held.template.stop_ids
    assert (held.conversation.report().broken, held.conversation.report().cut_off) == (0, 1)
    assert held.samples()[0].turns[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("qwen3_6", {}), ("deepseekv3", {}), ("qwen3", {"enable_thinking": False}), ("glm4moe", {})],
)
def test_tinker_cookbook_864_prefilled_reasoning_is_prompt(
    name: str, kwargs: dict[str, Any], talk: StartTalk
):
    """tinker-cookbook#864: the `<think>` that the generation prompt opens was trained."""
    held = talk(name, **kwargs)
    prompt = held.conversation.prompt_ids().tolist()
    assert held.tokenizer.decode(prompt).endswith(held.template.facts.prefill)
    held.say("ok")
    (part,) = held.samples()
    assert not part.loss_mask[: len(prompt)].any()
    assert part.loss_mask[len(prompt) :].all()


@pytest.mark.original("A-glm-header")
@pytest.mark.parametrize("content", ["", " ", "\n", [{"type": "text", "text": "out"}], "<|observation|>"])
@pytest.mark.parametrize("stop", ["<|observation|>", "<|user|>", "<eos>"])
def test_trl_6044_glms_header_stands_once_whatever_the_tool_says(content: Any, stop: str, talk: StartTalk):
    """trl#6044: a tool's content that was no string printed `<|observation|>` twice."""
    held = talk("glm4moe")
    stop_id = held.tokenizer.token_to_id(stop)
    assert stop_id in held.template.stop_ids
    held.ids([*held.tokenizer.encode("\n<think></think>\nlook"), stop_id], calls(content="look"))
    held.hear(tool(content))
    header = held.tokenizer.token_to_id("<|observation|>")
    held.conversation.prompt_ids()
    assert np.count_nonzero(held.branch.ledger.ids == header) == 1


# --- history that the template rewrites


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "glm4moe", "gptoss"])
def test_verl_6854_stripped_thinking_is_a_branch_and_ends_no_run(name: str, talk: StartTalk):
    """verl#6854, prime-rl#1334, NeMo-RL#3063, NeMo-RL#1903: an assertion killed the run."""
    held = talk(name)
    field = held.template.facts.reasoning_field or "reasoning_content"
    stop = "<|return|>" if name == "gptoss" else None
    held.write({"role": "assistant", "content": "One.", field: "why"}, user("more"), stop=stop)
    held.write({"role": "assistant", "content": "Two.", field: "why not"}, stop=stop)
    report = held.conversation.report()
    assert report.broken == 0
    parts = held.samples()
    assert [(part.part, part.parts) for part in parts] == [(0, 2), (1, 2)]
    assert "why" in held.tokenizer.decode(parts[0].token_ids[parts[0].loss_mask == 1].tolist())
    assert "why" not in held.tokenizer.decode(parts[1].token_ids[: parts[1].turns[-1].start].tolist())
    assert sum(part.trained_tokens for part in parts) == held.conversation.sampled_tokens
    assert report.branches[1].why


def test_miles_2378_parts_of_a_rollout_say_so(talk: StartTalk):
    """miles#2378: compaction cut a rollout in three, and it counted three times in its group's mean."""
    held = talk("qwen2_5")
    for n in range(3):
        held.say(f"long answer {n}")
        held.history = [SYSTEM, user(f"summary {n}")]
        held.conversation.advance(held.history)
    parts = held.samples()
    assert [(part.rollout_id, part.part, part.parts) for part in parts] == [
        ("0" * 32, n, 3) for n in range(3)
    ]
    other = talk("qwen2_5")
    other.say("x")
    (alone,) = other.conversation.samples(**{**IDENTITY, "rollout_id": "2" * 32, "reward": 0.0})
    rewards = {part.rollout_id: part.reward for part in (*parts, alone)}
    assert sum(rewards.values()) / len(rewards) == 0.5


# --- masks and channels


@pytest.mark.parametrize("name", ["qwen3_training", "qwen2_5", "llama3_1", "glm4moe"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_transformers_47325_the_mask_is_the_sampled_spans(name: str, reason: str, talk: StartTalk):
    """transformers#47325, transformers#34494, vllm#54539: Jinja's mask covered the rest, or nothing if cut.

    Here it comes from what was sampled, whatever the template marks.
    """
    held = talk(name)
    spans: list[tuple[int, int]] = []
    for n in range(3):
        start = len(held.conversation.prompt_ids())
        ids = held.tokenizer.encode_plain(f"answer {n}")
        stop = [] if reason == "length" and n == 2 else [held.template.close_id]
        held.ids([*ids, *stop], finish_reason="stop" if stop else "length")
        spans.append((start, start + len(ids) + len(stop)))
        if n < 2:
            held.hear(user(f"question {n}"))
    (part,) = held.samples()
    expected = np.zeros(len(part), np.uint8)
    for start, end in spans:
        expected[start:end] = 1
    assert part.loss_mask.tolist() == expected.tolist()
    assert len(part) == spans[-1][1]


@pytest.mark.original("A-weight-version")
def test_slime_2092_each_token_has_its_own_weight_version(talk: StartTalk):
    """slime#2092: an aborted turn went on under two further versions and the sample had one number."""
    held = talk("qwen3")
    ids = [*held.tokenizer.encode_plain("a rather long answer in tokens"), held.template.close_id]
    for version, (start, end) in enumerate([(0, 2), (2, 3), (3, len(ids))], 5):
        reason = "stop" if end == len(ids) else "abort"
        held.ids(ids[start:end], finish_reason=reason, weight_version=version)
    (part,) = held.samples()
    assert part.versions[part.prompt_length :].tolist() == [5, 5, 6, *[7] * (len(ids) - 3)]
    assert (part.versions[: part.prompt_length] == -1).all()


@pytest.mark.original("A-multimodal")
@pytest.mark.parametrize("role", ["user", "tool", "system", "assistant"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video", "video": "x"},
        {"type": "image", "text": "x"},
    ],
)
def test_trl_5663_an_image_is_refused_and_not_dropped(role: str, part: Message, talk: StartTalk):
    """trl#5663: the template dropped the image of a tool message, the pixels stayed."""
    held = talk("qwen2_5")
    held.say("ok")
    before = held.conversation.to_bytes()
    message = {"role": role, "content": [{"type": "text", "text": "see"}, part], "tool_call_id": "call_0"}
    with pytest.raises(UnsupportedContentError, match=rf"message 3 \({role}\)"):
        held.conversation.advance([*held.history, message])
    assert held.conversation.to_bytes() == before


# --- where the others are

GAP = "test_experts.py::test_one_turn_without_rows_is_named_and_a_full_answer_later_makes_it_good"
ELSEWHERE = {
    "verl#6719": "test_machines.py::test_a_conversation_is_what_was_said",
    "verl#6029": "test_experts.py::test_rows_are_joined_by_position_and_not_concatenated",
    "slime#1440": "test_machines.py::test_cuts_anywhere_any_number_of_times_change_nothing",
    "slime#2207": "test_machines.py::test_cuts_anywhere_any_number_of_times_change_nothing",
    "SkyRL#178": "test_machines.py::test_a_ledger_is_a_list_of_rows",
    "SkyRL#1908": "test_experts.py::test_rows_that_cannot_be_are_refused",
    "rllm#756": GAP,
    "NeMo-RL#3485": "test_experts.py::test_a_delta_that_skips_the_last_row_leaves_no_placeholder",
    "prime-rl#1807": "test_experts.py::test_a_delta_that_skips_the_last_row_leaves_no_placeholder",
    "labs-molt#5": GAP,
    "nano-rlm#73": "test_conversation.py::test_changed_tools_begin_a_branch",
    "vllm#27482": "test_record.py::test_every_lie_has_a_code",
    "vllm#29074": "test_record.py::test_every_lie_has_a_code",
    "agent-lightning#326": "test_record.py::test_every_lie_has_a_code",
    "vllm#47616": "test_record.py::test_ids_past_the_stop_are_refused_and_can_be_cut",
    "sglang#26555": "test_record.py::test_every_lie_has_a_code",
    "transformers#29279": "test_control_tokens.py::test_no_spelling_of_any_token_becomes_a_control_id",
    "transformers#47822": "test_control_tokens.py::test_no_spelling_of_any_token_becomes_a_control_id",
    "sglang#10600": "test_tool_calls.py::test_printed_ids_are_kept_verbatim",
    "vllm#50782": "test_tool_calls.py::test_printed_ids_are_kept_verbatim",
    "AReaL#1420": "test_tool_calls.py::test_arguments_as_json_text",
    "AReaL#1661": "test_conversation.py::test_turn_rewards_follow_the_turns",
    "verl#6542": "test_tool_calls.py::test_values_of_array_type_are_never_evaluated",
    "verl#7038": "test_record.py::test_a_sampled_media_placeholder_is_kept_flagged_and_not_trained",
    "trl#6789": "test_kept.py::test_the_sets_give_the_trainer_the_engines_number",
    "vllm#58228": "test_tool_calls.py::test_a_call_cut_at_the_token_limit_is_no_call",
}
OTHER_PACKAGES = {
    "omnigent#6744": ("sandbox-k8s", "disk limits of a pod"),
    "Gym#2262": ("sandbox-k8s", "processes outside the sandbox"),
    "SWE-bench_Pro-os#74": ("agent-flow", "binary files in a patch"),
    "mini-swe-agent#773": ("sandbox-k8s", "start-up files of a shell"),
    "mini-swe-agent#787": ("agent-flow", "future commits in a repository"),
    "deepagents#2879": ("sandbox-k8s", "line ends of files"),
    "SWE-smith#26": ("agent-flow", "flaky tests of a task"),
    "miles#2782": ("agent-flow", "prefix cache after a weight sync"),
    "LMCache#4670": ("trainer-bridge", "connect time-out of a socket"),
    "trl#5847": ("agent-flow", "connection limit of an HTTP client"),
    "trl#6913": ("agent-flow", "server error behind a broadcast"),
    "verifiers#2152": ("agent-flow", "a planted conftest.py"),
    "slime#2331": ("agent-flow", "order of weight groups"),
    "Repo2RLEnv#90": ("agent-flow", "test names with spaces"),
    "inspect_k8s_sandbox#206": ("sandbox-k8s", "bytes that are not UTF-8"),
}
REPORT = re.compile(r"\b([A-Za-z][\w-]*#\d+)")


def test_each_report_is_tested_where_the_table_says():
    folder = Path(__file__).parent
    for report, where in ELSEWHERE.items():
        file, _, name = where.partition("::")
        assert f"\ndef {name}(" in (folder / file).read_text(encoding="utf-8"), (report, where)
    source = Path(__file__).read_text(encoding="utf-8")
    here = set(REPORT.findall(source.partition("# --- where the others are")[0]))
    assert len(here) > 25
    assert not here & ELSEWHERE.keys()
    assert not OTHER_PACKAGES.keys() & (here | ELSEWHERE.keys())
