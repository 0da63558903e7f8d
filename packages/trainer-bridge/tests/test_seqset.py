from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from trainer_bridge.messages import WireSet
from trainer_bridge.seqset import SeqSet

ranges = st.tuples(st.integers(1, 60), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1] - 1))


@given(st.integers(0, 5), st.lists(ranges, max_size=20))
def test_it_is_the_set_of_what_was_put_in(upto: int, added: list[tuple[int, int]]) -> None:
    seqs, model = SeqSet(upto), set(range(1, upto + 1))
    for first, last in added:
        seqs.add_range(first, last)
        model |= set(range(first, last + 1))
        assert {n for n in range(0, 80) if n in seqs} == model
        assert seqs.highest == max(model, default=0)
        spans = list(seqs.ranges())
        assert all(a <= b for a, b in spans)
        assert all(b + 1 < c for (_, b), (c, _) in pairwise(spans))
        assert not spans or spans[0][0] > seqs.upto + 1
    for first, last in ((1, 80), (10, 30)):
        missing = {n for a, b in seqs.missing(first, last) for n in range(a, b + 1)}
        assert missing == set(range(first, last + 1)) - model
        assert seqs.count(first, last) == len(set(range(first, last + 1)) & model)


@given(
    st.integers(0, 9), st.lists(ranges, max_size=9), st.integers(0, 9), st.lists(ranges, max_size=9), ranges
)
def test_without_is_the_difference(
    a: int, first: list[tuple[int, int]], b: int, second: list[tuple[int, int]], span: tuple[int, int]
) -> None:
    one, other = SeqSet(a), SeqSet(b)
    for added in first:
        one.add_range(*added)
    for added in second:
        other.add_range(*added)
    found = [n for low, high in one.without(other, *span) for n in range(low, high + 1)]
    assert found == [n for n in range(span[0], span[1] + 1) if n in one and n not in other]


@given(st.lists(ranges, max_size=20))
def test_add_says_whether_it_was_new(added: list[tuple[int, int]]) -> None:
    seqs, model = SeqSet(), set[int]()
    for first, _ in added:
        assert seqs.add(first) == (first not in model)
        model.add(first)


@given(st.lists(ranges, max_size=20), st.integers(1, 40), st.integers(0, 40))
def test_what_travels_is_merged_only_inside_the_span(
    added: list[tuple[int, int]], first: int, length: int
) -> None:
    theirs = SeqSet()
    for span in added:
        theirs.add_range(*span)
    ours = SeqSet()
    ours.merge(theirs.to_wire(), first, first + length)
    assert all((n in ours) == (n in theirs and first <= n <= first + length) for n in range(1, 80))


def test_a_long_tail_of_ranges_travels_in_pieces() -> None:
    theirs = SeqSet()
    for n in range(2, 2000, 2):
        theirs.add(n)
    ours = SeqSet()
    wire = theirs.to_wire()
    assert len(wire.ranges) < 999
    ours.merge(wire, 1, 3000)
    ours.merge(WireSet(upto=400), 1, 3000)
    assert 401 not in ours
    assert 400 in ours
    assert all(len(theirs.to_wire(turn).ranges) <= 256 for turn in range(4))
    for turn in range(1, 5):  # whichever was said last
        ours.merge(theirs.to_wire(turn), 1, 3000)
    assert next(theirs.without(ours, 1, 3000), None) is None
