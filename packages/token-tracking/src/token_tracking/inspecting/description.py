"""What was learnt from a template, as JSON-safe values: `ChatTemplate.describe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from token_tracking.compiler.delta import DeltaProgram
from token_tracking.compiler.joints import GENERATE

if TYPE_CHECKING:
    from token_tracking.template import ChatTemplate


def describe(template: ChatTemplate) -> dict[str, Any]:
    """See `ChatTemplate.describe`."""
    facts, program, tokenizer = template.facts, template.program, template.tokenizer
    decode = tokenizer.decode
    dropped = sorted(facts.drops) + (["assistant with tool calls"] if facts.drops_beside_calls else [])
    return {
        "fingerprint": template.fingerprint,
        "tokenizer": tokenizer.name,
        "tokenizer_backend": tokenizer.backend,
        "tokenizer_backend_because": tokenizer.backend_reason,
        "delta": "program" if program else "full renders",
        "refused_because": template.refusal,
        "random_conversations_matched": program.trials if program else 0,
        "joints": {
            f"{a} -> {b}": {"text": joint.text, "ids": [*joint.ids]}
            for (a, b), joint in (program.joints.items() if program else ())
        },
        "contents": dict(program.holes) if program else {},
        "roads": _roads(program, template.refusal),
        "rewrites_history_after": sorted(set(program.holes) - program.stable) if program else None,
        "stop_ids": {decode([i]): i for i in sorted(template.stop_ids)},
        "turn_ends": [decode(run) for run in template.closings.runs],
        "after_final_turn": facts.end_text,
        "prefill": facts.prefill,
        "system_message": facts.system,
        "tool_calls": facts.calls,
        "arguments": facts.arguments_form,
        "parser": template.parser.name,
        "parser_because": template.parser.why,
        **_calls(template),
        "content_parts": sorted(facts.prints_parts),
        "given_as_parts": sorted(facts.wrapped),
        "content_not_printed": dropped,
        "reasoning_field": facts.reasoning_field,
    }


def _calls(template: ChatTemplate) -> dict[str, Any]:
    markers, decode = template.facts.markers, template.tokenizer.decode

    def shown(token: int | None) -> str | None:
        return None if token is None else decode([token])

    around = (shown(markers.section_open), shown(markers.section_close))
    return {
        "call_layout": markers.layout,
        "call_form": None if markers.layout == "none" else msgspec.to_builtins(markers.form),
        "call_headers": msgspec.to_builtins(markers.headers, order="sorted"),
        "around_calls": [text for text in around if text is not None],
        "markers": {
            "reasoning_open": shown(markers.reasoning_open),
            "reasoning_close": shown(markers.reasoning_close),
            "call_open": shown(markers.call_open),
            "call_close": shown(markers.call_close),
        },
    }


def _roads(program: DeltaProgram | None, refusal: str | None) -> dict[str, str]:
    """For each pair of neighbours: `program`, or why its deltas are left to renders."""
    if program is None:
        return {"every pair": f"renders: {refusal}"}
    proven = {pair: "program" for pair in program.joints if pair[1] != GENERATE}
    for role, strings in program.triggers.items():
        but = f"program, but renders where a content has {' or '.join(map(repr, strings))}"
        proven |= dict.fromkeys((pair for pair in proven if role in pair or role == "assistant"), but)
    refused = {pair: f"renders: {why}" for pair, why in program.refused.items()}
    return {f"{before} -> {after}": road for (before, after), road in (proven | refused).items()}
