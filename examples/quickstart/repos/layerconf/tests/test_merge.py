import unittest

from layerconf import MergeError, merge


class MergeTests(unittest.TestCase):
    def test_values_are_replaced(self):
        self.assertEqual(merge({"a": 1, "b": 2}, {"b": 3, "c": 4}), {"a": 1, "b": 3, "c": 4})

    def test_tables_are_merged(self):
        base = {"db": {"host": "localhost", "pool": {"min": 1, "max": 5}}}
        over = {"db": {"pool": {"max": 50}}}
        self.assertEqual(merge(base, over), {"db": {"host": "localhost", "pool": {"min": 1, "max": 50}}})

    def test_lists_are_replaced_or_appended_to(self):
        self.assertEqual(merge({"x": [1, 2]}, {"x": [3]}), {"x": [3]})
        self.assertEqual(merge({"x": [1, 2]}, {"x+": [3]}), {"x": [1, 2, 3]})
        self.assertEqual(merge({}, {"x+": [3]}), {"x": [3]})

    def test_table_and_value_replace_each_other(self):
        self.assertEqual(merge({"x": 1}, {"x": {"y": 2}}), {"x": {"y": 2}})
        self.assertEqual(merge({"x": {"y": 2}}, {"x": 1}), {"x": 1})

    def test_append_to_something_else(self):
        with self.assertRaisesRegex(MergeError, r"db\.hosts\+"):
            merge({"db": {"hosts": "a"}}, {"db": {"hosts+": ["b"]}})


if __name__ == "__main__":
    unittest.main()
