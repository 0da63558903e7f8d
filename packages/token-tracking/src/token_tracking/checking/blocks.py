"""`Block`: two runs of pieces that do not say the same, taken apart into differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from token_tracking.checking.difference import Difference, Kind, agreeing, short
from token_tracking.checking.layout import Piece
from token_tracking.checking.turn_words import compare_words
from token_tracking.checking.verify import TurnView
from token_tracking.checking.words import spoken_text
from token_tracking.template import ChatTemplate


class Block:
    """Two runs of pieces that do not say the same."""

    def __init__(
        self,
        ours: Sequence[Piece],
        theirs: Sequence[Piece],
        a: range,
        b: range,
        template: ChatTemplate,
        said: Callable[[int], TurnView | None] | None = None,
    ):
        """Take runs `a` of `ours` and `b` of `theirs`; `said` as in `drift`."""
        self.ours, self.theirs, self.said = ours, theirs, said
        self.left, self.right = [ours[n] for n in a], [theirs[n] for n in b]
        self.template = template
        self.ids = (_at(ours, a.start), _at(ours, a.stop))
        self.render = (_at(theirs, b.start), _at(theirs, b.stop))
        self.stops = {template.tokenizer.decode([stop]) for stop in template.stop_ids}
        before = theirs[b.start - 1] if b.start else None
        self.closed = before is not None and before.control and before.text in self.stops
        """The pieces follow a token that ends messages."""
        self.inside = before is not None and before.turn is not None and not before.closes
        seen = [piece.turn for piece in theirs[: b.start] if piece.turn is not None]
        self.turn = (seen[-1] if self.inside else seen[-1] + 1) if seen else 0
        self.ends = a.stop == len(ours)
        self.last = b.stop == len(theirs)

    def differences(self) -> list[Difference]:
        """The block as differences."""
        ours, theirs = ([p.text for p in side if p.control] for side in (self.left, self.right))
        if ours == theirs:
            return self._slots()
        have, want = ("".join(piece.text for piece in side) for side in (self.left, self.right))
        if self.ends and self.last and want.startswith(have):
            return self._end(want.removeprefix(have))
        if self._all_spoken():
            return [self._spoken(self.left, self.right)]
        return [self._make("special_tokens", _control_tokens(ours, theirs, self.stops))]

    def _end(self, lost: str) -> list[Difference]:
        in_turn = self.inside or (bool(self.right) and self.right[0].turn is not None)
        if in_turn and lost == self.template.facts.end_text:
            what = f"the last turn ends without {lost!r}: cut off, or a stop string"
            return [self._make("unclosed_end", what, in_turn=True)]
        what = f"the ids end before the render does, which goes on with {short(lost)}"
        return [self._make("cut_short", what, in_turn=in_turn)]

    def _spoken(self, left: Sequence[Piece], right: Sequence[Piece]) -> Difference:
        turn = next((piece.turn for piece in right if piece.turn is not None), self.turn)
        if self.said is None:
            what = "what the model wrote is printed with other tokens"
            return self._make("sampled_text", what, turn=turn, in_turn=True)
        # The pieces are parts of the turn; what it says is told from all of it.
        own = next((piece.turn for piece in left if piece.turn is not None), turn)
        ours, theirs = spoken_text(self.ours, own), spoken_text(self.theirs, turn)
        kind, what = compare_words(turn, ours, theirs, self.template, self.said)
        return self._make(kind, what, turn=turn, in_turn=True)

    def _all_spoken(self) -> bool:
        return all(piece.turn is not None and not piece.closes for piece in (*self.left, *self.right))

    def _slots(self) -> list[Difference]:
        """Texts between the same control tokens, one by one."""
        found: list[Difference] = []
        closed, inside, turn = self.closed, self.inside, self.turn
        i = j = 0
        ids_at, render_at = self.ids[0], self.render[0]
        while i < len(self.left) or j < len(self.right):
            a = self.left[i] if i < len(self.left) and not self.left[i].control else None
            b = self.right[j] if j < len(self.right) and not self.right[j].control else None
            i, j = i + (a is not None), j + (b is not None)
            spans = ((ids_at, a.end if a else ids_at), (render_at, b.end if b else render_at))
            if (a.text if a else "") != (b.text if b else ""):
                found += self._text(a, b, spans, closed=closed, inside=inside, turn=turn)
            if i < len(self.left) and j < len(self.right):
                stop = self.right[j]
                ids_at, render_at = self.left[i].end, stop.end
                closed, inside = stop.text in self.stops, stop.turn is not None and not stop.closes
                turn = stop.turn if inside and stop.turn is not None else turn + stop.closes
                i, j = i + 1, j + 1
        return found

    def _text(
        self,
        a: Piece | None,
        b: Piece | None,
        spans: tuple[tuple[int, int], tuple[int, int]],
        *,
        closed: bool,
        inside: bool,
        turn: int,
    ) -> list[Difference]:
        ours, theirs = (a.text if a else ""), (b.text if b else "")
        same = agreeing(ours, theirs)
        if b is not None and b.turn is not None:
            inside, turn = True, b.turn
        header = max(b.spoken if b else 0, a.spoken if a else 0)
        if inside and same >= header:
            mine, printed = ours[header:], theirs[header:]
            if self.said is not None and a is not None and a.turn is not None and b is not None:
                mine, printed = spoken_text(self.ours, a.turn), spoken_text(self.theirs, turn)
            kind, what = compare_words(turn, mine, printed, self.template, self.said)
            return [self._make(kind, what, spans, turn, in_turn=True)]
        if closed and not ours.strip() and not theirs.strip():
            if self.ends and self.last and spans[0][0] == spans[0][1] == self.ids[1]:
                return []  # what the template prints after the last turn is not part of a rollout
            name = "a newline" if theirs == "\n" else repr(theirs)
            what = f"the template prints {name} after the token that ends a message, "
            what += f"the ids have {ours!r}" if ours else "the ids have nothing (verl-project/verl#3720)"
            return [self._make("missing_newline", what, spans, turn)]
        what = f"the template prints {short(theirs[same:])}, the ids say {short(ours[same:])}"
        return [self._make("template_text", what, spans, turn)]

    def _make(
        self,
        kind: Kind,
        what: str,
        spans: tuple[tuple[int, int], tuple[int, int]] | None = None,
        turn: int | None = None,
        *,
        in_turn: bool | None = None,
    ) -> Difference:
        ids, render = spans or (self.ids, self.render)
        return Difference(
            kind=kind,
            what=what,
            turn=self.turn if turn is None else turn,
            in_turn=self.inside if in_turn is None else in_turn,
            ids=ids,
            template=render,
        )


def _control_tokens(ours: Sequence[str], theirs: Sequence[str], stops: Collection[str]) -> str:
    have, want = Counter(ours), Counter(theirs)
    missing, added = (want - have), (have - want)
    said = [
        f"{verb} {', '.join(f'{name} x{n}' if n > 1 else name for name, n in names.items())}"
        for verb, names in (("lack", missing), ("have in addition", added))
        if names
    ]
    if not said:
        return "the same control tokens stand in another order"
    hint = "" if missing or len(added) < 2 else "; were messages rendered one by one? (THUDM/slime#2263)"
    if not added and missing:
        hint = "; a cut-off turn has to be closed, with mask 0 (PrimeIntellect-ai/renderers#139)"
    if not missing and len(added) == 1 and set(added) <= set(stops):
        hint = "; was a stop token that is the next header written twice? (huggingface/trl#6044)"
    return f"the ids {' and '.join(said)}{hint}"


def _at(pieces: Sequence[Piece], index: int) -> int:
    return pieces[index].start if index < len(pieces) else pieces[-1].end if pieces else 0
