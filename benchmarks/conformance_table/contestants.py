"""The ways of extending a conversation that are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from token_tracking import Conversation, GenerationRecord

from conformance_table.cases import TOOLS, Case, Model
from conformance_table.rows import T

Contestant = Callable[[Model, Case], str]


class NotRunError(Exception):
    """The contestant cannot be set up here, which says nothing about it."""


def ours(model: Model, case: Case) -> str:
    dialogue = case.dialogue
    conversation = Conversation(model.template(dialogue.variables))
    conversation.advance(list(map(model.shaped, dialogue.history)))
    if conversation.prompt_ids().tolist() != case.prompt:
        return "wrong"
    conversation.record(record(conversation, case.sampled, case.stop), model.shaped(dialogue.assistant))
    plan = conversation.advance(list(map(model.shaped, dialogue.whole)))
    ids = conversation.prompt_ids().tolist()
    if plan.kind == "branch":
        if ids != case.full:
            return "wrong"
        return "needless" if case.stable else "branch"
    if ids != case.expected:
        return "wrong"
    conversation.record(record(conversation, model.ours.encode("ok"), None))
    report = conversation.report()
    if case.cross_stop:
        return "cross-stop" if report.cross_stops else "unsaid"
    if case.stable:
        return "equal"
    return "wrong" if case.lost else "kept" if report.prompts[-1].rewrites else "unsaid"


def record(conversation: Conversation, ids: list[int], stop: int | None) -> GenerationRecord:
    return GenerationRecord(
        prompt_ids=conversation.prompt_ids(),
        output_ids=np.array(ids, np.int32),
        finish_reason="length" if stop is None else "stop",
        stop_id=stop,
    )


def judge(contestant: Contestant, model: Model, case: Case) -> tuple[str, str]:
    """Outcome, and what an error said."""
    try:
        return contestant(model, case), ""
    except NotRunError as error:
        return "not run", str(error)
    except Exception as error:  # whatever a contestant raises is its outcome
        return "raises", f"{type(error).__name__}: {error}".partition("\n")[0][:160]


def judged(case: Case, ids: list[int] | None) -> str:
    if ids is None:
        return "re-render"
    if ids == case.expected:
        return "equal" if case.stable and not case.cross_stop else "unsaid"
    return "injects" if ids == case.injected else "wrong"


class Renderers:
    """`renderers`, one renderer per model and variables."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def __call__(self, model: Model, case: Case) -> str:
        renderer = self._renderer(model, case.dialogue.variables)
        new = list(map(model.shaped, case.dialogue.new))
        found = renderer.bridge_to_next_turn(case.prompt, case.sampled, new, tools=TOOLS)
        return judged(case, None if found is None else list(found.token_ids))

    def _renderer(self, model: Model, variables: dict[str, Any]) -> Any:
        import renderers

        config = getattr(renderers, f"{model.row.renderer}RendererConfig")
        fields = config.template_field_names()
        given = {name: value for name, value in variables.items() if name in fields}
        key = (model.row.name, *given.items())
        if key not in self._made:
            model.hf.name_or_path = model.row.hub or "local/model"
            try:
                self._made[key] = renderers.create_renderer(model.hf, config(**given))
            except Exception as error:  # its vocabulary may have to come from the network
                self._made[key] = NotRunError(f"{type(error).__name__}: {error}")
        if isinstance(self._made[key], NotRunError):
            raise self._made[key]
        return self._made[key]


def alone(model: Model, case: Case) -> str:
    dialogue, row = case.dialogue, model.row

    def render(messages: list[Any], *, generate: bool = False) -> str:
        return model.render(messages, dialogue.variables, generate=generate, tools=None)

    question = {"role": "user", "content": "qzquestionq"}
    lone = render([question])
    head = lone[: lone.rfind("<|im_start|>user")] if "<|im_start|>user" in lone else ""
    done = model.render([*dialogue.history, dialogue.assistant], dialogue.variables, generate=False)
    closed = row.call_stop in ("", row.stop) and row.stop in done
    text = done[done.rindex(row.stop) + len(row.stop) :] if closed else ""
    for new in dialogue.new:
        printed = render([new])
        text += printed[len(head) :] if head and printed.startswith(head) else printed
    text += render([question], generate=True)[len(lone) :]
    held, ids = [*case.prompt, *case.sampled], model.encode_all(text)
    return judged(case, [*held, *(ids[1:] if ids[:1] == held[-1:] else ids)])


def dummy(model: Model, case: Case) -> str:
    variables, new = case.dialogue.variables, case.dialogue.new

    def render(messages: list[Any], *, generate: bool) -> list[int]:
        return model.encode_all(model.render(messages, variables, generate=generate, tools=None))

    made: dict[str, Any] = {"role": "assistant", "content": "dummy"}
    if new[0]["role"] == T:
        call = {"type": "function", "id": "call_0", "function": {"name": "bash", "arguments": {}}}
        made |= {"content": "", "tool_calls": [call]}
    start = [{"role": "user", "content": "dummy"}, made]
    prefix, whole = render(start, generate=False), render([*start, *new], generate=True)
    row = model.row
    texts = {row.stop, row.call_stop, row.sampled_stop, variables["eos_token"]}
    stops = {model.ours.special_tokens.get(text) for text in texts}
    ends = [at for at, i in enumerate(prefix) if i in stops]
    # A stop token that is a header stands before a message, not after it.
    if ends and not model.ours.decode(prefix[ends[-1] + 1 :]).strip():
        prefix = prefix[: ends[-1] + 1]
    if whole[: len(prefix)] != prefix:
        raise ValueError("the dummy conversation is no prefix of its continuation")
    return judged(case, [*case.prompt, *case.sampled, *whole[len(prefix) :]])


CONTESTANTS: dict[str, Contestant] = {
    "ours": ours,
    "renderers": Renderers(),
    "alone": alone,
    "dummy": dummy,
}
