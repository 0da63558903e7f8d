import unittest

from spanset import Span, SpanSet


def spans(*pairs):
    return SpanSet(Span(start, stop) for start, stop in pairs)


class AddTests(unittest.TestCase):
    def test_disjoint_spans_stay_apart_and_sorted(self):
        self.assertEqual(list(spans((20, 30), (0, 10))), [Span(0, 10), Span(20, 30)])

    def test_overlapping_spans_are_joined(self):
        self.assertEqual(list(spans((0, 10), (5, 15))), [Span(0, 15)])

    def test_contained_span_changes_nothing(self):
        self.assertEqual(list(spans((0, 100), (40, 60))), [Span(0, 100)])

    def test_one_span_can_swallow_several(self):
        self.assertEqual(list(spans((10, 20), (30, 40), (50, 60), (15, 55))), [Span(10, 60)])

    def test_empty_span_is_ignored(self):
        self.assertEqual(len(spans((5, 5))), 0)

    def test_total_counts_an_offset_once(self):
        self.assertEqual(spans((0, 10), (5, 15), (20, 25)).total, 20)


class DiscardTests(unittest.TestCase):
    def test_cut_in_two(self):
        done = spans((0, 100))
        done.discard(Span(40, 60))
        self.assertEqual(list(done), [Span(0, 40), Span(60, 100)])

    def test_neighbours_that_only_touch_are_left_alone(self):
        done = spans((0, 10), (20, 30))
        done.discard(Span(10, 20))
        self.assertEqual(list(done), [Span(0, 10), Span(20, 30)])

    def test_across_several_spans(self):
        done = spans((0, 10), (20, 30), (40, 50))
        done.discard(Span(5, 45))
        self.assertEqual(list(done), [Span(0, 5), Span(45, 50)])


class QueryTests(unittest.TestCase):
    def test_contains(self):
        done = spans((0, 10), (20, 30))
        self.assertIn(9, done)
        self.assertNotIn(10, done)
        self.assertNotIn(19, done)

    def test_covers(self):
        done = spans((0, 10), (20, 30))
        self.assertTrue(done.covers(Span(2, 10)))
        self.assertFalse(done.covers(Span(2, 11)))
        self.assertFalse(done.covers(Span(5, 25)))

    def test_gaps(self):
        done = spans((10, 20), (30, 40))
        self.assertEqual(done.gaps(Span(0, 50)), [Span(0, 10), Span(20, 30), Span(40, 50)])
        self.assertEqual(done.gaps(Span(12, 35)), [Span(20, 30)])


if __name__ == "__main__":
    unittest.main()
