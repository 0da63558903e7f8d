import unittest

from weightcache import WeightCache


class ManualClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class LeastRecentlyUsedTests(unittest.TestCase):
    def test_oldest_entry_goes_first(self):
        cache = WeightCache(2)
        for key in "abc":
            cache.put(key, key.upper())
        self.assertEqual(list(cache), ["b", "c"])
        self.assertEqual(cache.stats.evicted, 1)

    def test_get_counts_as_use(self):
        cache = WeightCache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.get("a")
        cache.put("c", 3)
        self.assertEqual(list(cache), ["a", "c"])

    def test_miss_gives_the_default(self):
        cache = WeightCache(2)
        self.assertEqual(cache.get("a", 7), 7)
        self.assertEqual(cache.stats.misses, 1)


class WeightTests(unittest.TestCase):
    def test_weight_is_the_sum_of_the_values(self):
        cache = WeightCache(10, weigh=len)
        cache.put("a", b"xxx")
        cache.put("b", b"yyyy")
        self.assertEqual(cache.weight, 7)

    def test_a_heavy_value_evicts_several(self):
        cache = WeightCache(10, weigh=len)
        for key in "abc":
            cache.put(key, b"xxx")
        cache.put("d", b"x" * 7)
        self.assertEqual(list(cache), ["c", "d"])

    def test_too_heavy_a_value_is_refused_and_the_stale_one_dropped(self):
        cache = WeightCache(10, weigh=len)
        cache.put("a", b"xxx")
        self.assertFalse(cache.put("a", b"x" * 11))
        self.assertIsNone(cache.get("a"))
        self.assertEqual(cache.weight, 0)
        self.assertEqual(cache.stats.refused, 1)

    def test_discard_gives_the_room_back(self):
        cache = WeightCache(10, weigh=len)
        cache.put("a", b"xxx")
        self.assertTrue(cache.discard("a"))
        self.assertFalse(cache.discard("a"))
        self.assertEqual(cache.weight, 0)


class ExpiryTests(unittest.TestCase):
    def test_entry_is_absent_after_its_time(self):
        clock = ManualClock()
        cache = WeightCache(10, ttl_s=5, clock=clock)
        cache.put("a", 1)
        clock.now = 4.9
        self.assertEqual(cache.get("a"), 1)
        clock.now = 5.0
        self.assertIsNone(cache.get("a"))
        self.assertEqual((cache.weight, cache.stats.expired), (0, 1))


if __name__ == "__main__":
    unittest.main()
