import os
import tempfile
import unittest

from globpath import PathFilter, walk


class PathFilterTests(unittest.TestCase):
    def setUp(self):
        self.selected = PathFilter(["src/*/*.py", "!src/vendor/*", "src/vendor/ours.py"])

    def test_last_match_decides(self):
        self.assertTrue(self.selected("src/app/main.py"))
        self.assertFalse(self.selected("src/vendor/theirs.py"))
        self.assertTrue(self.selected("src/vendor/ours.py"))

    def test_default(self):
        self.assertFalse(self.selected("README.md"))
        self.assertTrue(PathFilter(["!*.md"], default=True)("setup.cfg"))

    def test_explain(self):
        self.assertEqual(self.selected.explain("src/vendor/theirs.py"), "!src/vendor/*")
        self.assertIsNone(self.selected.explain("README.md"))


class WalkTests(unittest.TestCase):
    def test_sorted_relative_paths(self):
        with tempfile.TemporaryDirectory() as root:
            for path in ("b.py", "a/c.py", "a/d/e.py", "a/d/f.txt"):
                os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8"):
                    pass
            self.assertEqual(list(walk(root, PathFilter(["a/**"]))), ["a/c.py", "a/d/e.py", "a/d/f.txt"])
            self.assertEqual(list(walk(root, PathFilter(["*.py", "a/*/*.py"]))), ["a/d/e.py", "b.py"])


if __name__ == "__main__":
    unittest.main()
