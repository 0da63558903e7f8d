import unittest

from weightcache import WeightCache, cached


class CachedTests(unittest.TestCase):
    def test_second_call_is_answered_from_the_cache(self):
        calls = []

        @cached(WeightCache(10))
        def double(x):
            calls.append(x)
            return 2 * x

        self.assertEqual([double(4), double(4), double(5)], [8, 8, 10])
        self.assertEqual(calls, [4, 5])

    def test_none_is_a_result_like_others(self):
        calls = []

        @cached(WeightCache(10))
        def nothing():
            calls.append(1)

        nothing()
        nothing()
        self.assertEqual(len(calls), 1)

    def test_functions_do_not_share_results(self):
        cache = WeightCache(10)
        plus = cached(cache)(lambda x: x + 1)
        minus = cached(cache)(lambda x: x - 1)
        self.assertEqual((plus(1), minus(1)), (2, 0))


if __name__ == "__main__":
    unittest.main()
