import unittest

from ratekeeper import KeyedLimiter, parse_rate

from tests.clock import ManualClock


class LimiterTests(unittest.TestCase):
    def setUp(self):
        self.clock = ManualClock()
        self.limiter = KeyedLimiter(rate=1, burst=2, clock=self.clock)

    def test_keys_do_not_share(self):
        self.assertEqual([self.limiter.allow("a") for _ in range(3)], [True, True, False])
        self.assertTrue(self.limiter.allow("b"))

    def test_full_buckets_are_forgotten(self):
        self.limiter.allow("a")
        self.limiter.allow("b", 2)
        self.clock.now += 1
        self.assertEqual(self.limiter.prune(), 1)
        self.assertEqual(len(self.limiter), 1)

    def test_memory_follows_the_busy_keys(self):
        for key in range(5000):
            self.limiter.allow(key)
            self.clock.now += 1
        self.assertLessEqual(len(self.limiter), 1024)

    def test_restore(self):
        self.limiter.allow("a", 2)
        other = KeyedLimiter(rate=1, burst=2, clock=self.clock)
        other.restore(self.limiter.state())
        self.assertFalse(other.allow("a"))


class RateTests(unittest.TestCase):
    def test_units(self):
        self.assertEqual([parse_rate(text) for text in ("5/s", "120/min", "1.5 / 3 s")], [5, 2, 0.5])

    def test_malformed(self):
        for text in ("", "5", "5/week", "0/s", "5/0s", "-1/s"):
            with self.subTest(text), self.assertRaises(ValueError):
                parse_rate(text)


if __name__ == "__main__":
    unittest.main()
