"""The tables that show an `Inspection` to people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from token_tracking.compiler.joints import GENERATE, STARTS
from token_tracking.inspecting.inspection import Fixed, Inspection, JointPieces
from token_tracking.inspecting.tables import Cell, Piece, Section, numbers, prose, verbatim

_FORMS = {
    "json": "one JSON object",
    "named": "the name, then JSON arguments",
    "arguments": "JSON arguments",
    "elements": "one element per argument",
    "literals": "a call with literal values",
}
_FILLS = {
    "verbatim": "as it stands",
    "stripped": "without the blanks at its ends",
    "left stripped": "without the blanks before it",
    "right stripped": "without the blanks after it",
    "in JSON": "as in a JSON string",
}


def sections(inspection: Inspection) -> list[Section]:
    """The tables of an inspection."""
    return [
        _overview(inspection),
        _turns(inspection),
        *([_between(inspection)] if inspection.joints else []),
        *_left(inspection),
        _roads(inspection),
        _calls(inspection),
    ]


def _overview(inspection: Inspection) -> Section:
    learnt = inspection.described
    if learnt["delta"] == "program":
        matched = learnt["random_conversations_matched"]
        how = f"compiled program; {matched} random conversations gave the ids of full renders"
    else:
        how = f"no compiled program: {learnt['refused_because']}"
    tokenizer = f"{learnt['tokenizer']}, {inspection.vocabulary:,} ids"
    backend = f"{learnt['tokenizer_backend']}: {learnt['tokenizer_backend_because']}"
    return Section(
        title=inspection.name,
        rows=(
            (prose("deltas"), prose(how)),
            (prose("tokenizer"), prose(tokenizer)),
            (prose("encoded by"), prose(backend)),
            (prose("tools given"), prose(", ".join(inspection.tools) or "none")),
            (prose("variables"), _variables(inspection)),
            (prose("fingerprint"), prose(learnt["fingerprint"][:16])),
        ),
    )


def _variables(inspection: Inspection) -> Cell:
    shown: list[Piece] = []
    for key, value in sorted(inspection.variables.items()):
        shown += [*prose(f", {key} " if shown else f"{key} "), *verbatim(value)]
    return tuple(shown) or prose("none")


def _turns(inspection: Inspection) -> Section:
    learnt = inspection.described
    prompt, end = inspection.generation_prompt, inspection.turn_end
    first = "accepted first" if learnt["system_message"] else "refused"
    rows = (
        _fixed("generation prompt", prompt, missing="not found"),
        (prose("… of it prefill"), verbatim(learnt["prefill"]) or prose("none"), (), ()),
        _fixed("after a finished turn", end, missing=_no_end(inspection), closes=learnt["turn_ends"]),
        *(
            (prose("stop token"), verbatim(text), numbers([i]), prose("1 if sampled"))
            for text, i in learnt["stop_ids"].items()
        ),
        (prose("system message"), prose(first), (), ()),
        *_contents(learnt),
    )
    return Section(
        title="Where a turn begins and ends",
        columns=("what", "text", "ids", "loss mask"),
        rows=rows,
        note="A stop token that was sampled is the model's: mask 1. A turn that was cut off is closed with "
        "the same tokens as a repair: mask 0. Prefill is prompt.",
    )


def _contents(learnt: Mapping[str, Any]) -> Iterator[tuple[Cell, ...]]:
    """Rows on the form of contents, where it is not the usual one."""
    for name, what in (
        ("given_as_parts", "text is given as a list of one part"),
        ("content_not_printed", "text is not printed"),
    ):
        if learnt[name]:
            yield prose(what), prose(", ".join(learnt[name])), (), ()


def _fixed(what: str, fixed: Fixed | None, *, missing: str, closes: Sequence[str] = ()) -> tuple[Cell, ...]:
    if fixed is None or not fixed.text:
        return prose(what), prose(missing), (), ()
    ids = fixed.ids or ()
    sampled = len(ids) == 1 or fixed.text in closes
    mask = "0" if not fixed.sampled else "1" if sampled else "1 then 0"
    return prose(what), verbatim(fixed.text), numbers(ids), prose(mask)


def _no_end(inspection: Inspection) -> str:
    if inspection.turn_end is None:
        return "not found in the render"
    return "nothing: the stop token is the header of the next message, sampled and written once"


def _between(inspection: Inspection) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for joint in inspection.joints:
        what = prose(f"{_spoken(joint.after)} → {_spoken(joint.before)}")
        for piece in joint.pieces:
            rows.append((what, _with_contents(joint, piece), _ids_or_why(piece)))
            what = ()
    contents = inspection.described["contents"]
    fills = [f"{role} content is printed {_FILLS.get(how, how)}" for role, how in contents.items()]
    note = (
        f"{'; '.join(fills)}. Text without ids is encoded in one piece with the content beside it. "
        "calls: an assistant turn with tool calls; prompt: the generation prompt."
    )
    return Section(
        title="Between messages", columns=("from → to", "text", "ids"), rows=tuple(rows), note=note
    )


def _left(inspection: Inspection) -> list[Section]:
    roads: dict[str, str] = inspection.described["roads"]
    pairs = [(pair.split(" -> "), why) for pair, why in roads.items() if why != "program"]
    rows = tuple((prose(" → ".join(map(_spoken, pair))), prose(why)) for pair, why in pairs)
    title = "Pairs that are left to renders, always or for some contents"
    return [Section(title=title, columns=("from → to", "why"), rows=rows)] if rows else []


def _roads(inspection: Inspection) -> Section:
    rows = tuple(
        (
            prose(leg.situation),
            prose(leg.road),
            prose("; ".join(filter(None, (leg.why, *(f"kept and reported: {k}" for k in leg.kept))))),
        )
        for leg in inspection.legs
    )
    return Section(
        title="What follows an assistant turn",
        columns=("situation", "road", "why"),
        rows=rows,
        note="program: the joints above, nothing is rendered. marker: two full renders, compared. full "
        "render: the template changes what it printed before, so that a branch begins. refused: the "
        "template does not take these messages.",
    )


def _calls(inspection: Inspection) -> Section:
    learnt = inspection.described
    marks = learnt["markers"]
    reasoning = _pair(marks["reasoning_open"], marks["reasoning_close"])
    field = learnt["reasoning_field"]
    forms = {"text": "JSON text", "object": "an object"}
    rows: list[tuple[Cell, ...]] = [
        (prose("reasoning field"), prose(field or "none is printed")),
        (prose("reasoning markers"), reasoning or prose("none that are single tokens")),
    ]
    if learnt["tool_calls"]:
        rows += [
            (prose("arguments"), prose(f"given to the template as {forms[learnt['arguments']]}")),
            (prose("call markers"), _pair(marks["call_open"], marks["call_close"]) or prose("none")),
            (prose("call form"), prose(_form(inspection))),
        ]
    else:
        rows.append((prose("tool calls"), prose("not printed")))
    rows.append((prose("parsed by"), prose(f"{learnt['parser']}: {learnt['parser_because']}")))
    if inspection.call_example is not None:
        rows.append((prose("example"), verbatim(inspection.call_example)))
    return Section(title="Reasoning and tool calls", rows=tuple(rows))


def _form(inspection: Inspection) -> str:
    form = inspection.described["call_form"]
    name = "not known" if form is None else _FORMS.get(form["type"], form["type"])
    return f"{name}; parse {'reads the example back' if inspection.parses else 'leaves the example as text'}"


def _spoken(role: str) -> str:
    return {GENERATE: "prompt"}.get(role, role)


def _with_contents(joint: JointPieces, piece: Fixed) -> Cell:
    before = joint.after in piece.beside and piece is joint.pieces[0] and joint.after not in STARTS
    after = joint.before in piece.beside and piece is joint.pieces[-1]
    return (
        *((Piece(joint.after, "content"),) if before else ()),
        *verbatim(piece.text),
        *((Piece(joint.before, "content"),) if after else ()),
    )


def _ids_or_why(piece: Fixed) -> Cell:
    return prose("–") if piece.ids is None else numbers(piece.ids)


def _pair(opening: str | None, closing: str | None) -> Cell:
    if opening is None or closing is None:
        return ()
    return (*verbatim(opening), *prose(" … "), *verbatim(closing))
