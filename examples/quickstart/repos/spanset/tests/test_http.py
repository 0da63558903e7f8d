import unittest

from spanset import RangeError, Span, SpanSet, content_range, range_header


class RangeHeaderTests(unittest.TestCase):
    def test_both_ends_are_included_on_the_wire(self):
        self.assertEqual(range_header([Span(0, 100), Span(200, 201)]), "bytes=0-99,200-200")

    def test_gaps_become_a_header(self):
        done = SpanSet([Span(0, 4096), Span(8192, 12288)])
        self.assertEqual(range_header(done.gaps(Span(0, 16384))), "bytes=4096-8191,12288-16383")

    def test_nothing_to_ask_for(self):
        with self.assertRaises(RangeError):
            range_header([])


class ContentRangeTests(unittest.TestCase):
    def test_known_length(self):
        self.assertEqual(content_range("bytes 0-99/1000"), (Span(0, 100), 1000))

    def test_unknown_length(self):
        self.assertEqual(content_range("bytes 5-5/*"), (Span(5, 6), None))

    def test_malformed(self):
        for value in ("bytes 0-99", "items 0-1/2", "bytes 9-0/10", "bytes 0-10/10"):
            with self.subTest(value), self.assertRaises(RangeError):
                content_range(value)


if __name__ == "__main__":
    unittest.main()
