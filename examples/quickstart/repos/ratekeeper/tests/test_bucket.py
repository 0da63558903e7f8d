import unittest

from ratekeeper import TokenBucket

from tests.clock import ManualClock


class BucketTests(unittest.TestCase):
    def setUp(self):
        self.clock = ManualClock()
        self.bucket = TokenBucket(rate=2, burst=10, clock=self.clock)

    def test_starts_full_and_runs_dry(self):
        self.assertTrue(all(self.bucket.take() for _ in range(10)))
        self.assertFalse(self.bucket.take())

    def test_refills_at_its_rate(self):
        self.bucket.take(10)
        self.clock.now += 1.5
        self.assertEqual(self.bucket.tokens, 3)

    def test_never_holds_more_than_its_burst(self):
        self.clock.now += 1000
        self.assertEqual(self.bucket.tokens, 10)

    def test_wait(self):
        self.assertEqual(self.bucket.wait_s(10), 0)
        self.bucket.take(10)
        self.assertEqual(self.bucket.wait_s(4), 2)
        self.clock.now += 2
        self.assertTrue(self.bucket.take(4))

    def test_a_refused_take_costs_nothing(self):
        self.bucket.take(8)
        self.assertFalse(self.bucket.take(3))
        self.assertEqual(self.bucket.tokens, 2)

    def test_impossible_counts(self):
        for count in (0, -1, 11):
            with self.subTest(count), self.assertRaises(ValueError):
                self.bucket.take(count)

    def test_time_between_save_and_restore_counts(self):
        self.bucket.take(10)
        state = self.bucket.state()
        self.clock.now += 2
        other = TokenBucket(rate=2, burst=10, clock=self.clock)
        other.restore(state)
        self.assertEqual(other.tokens, 4)


if __name__ == "__main__":
    unittest.main()
