import unittest

from patchlet import PatchError, parse_patch

GIT_DIFF = """\
diff --git a/app/main.py b/app/main.py
index 5d1c4a1..9f6ad3a 100644
--- a/app/main.py
+++ b/app/main.py
@@ -1,3 +1,3 @@ def main():
 import os
-import sys
+import json
 
@@ -9 +9,2 @@
-x = 1
+x = 2
+y = 3
diff --git a/new.txt b/new.txt
new file mode 100644
--- /dev/null
+++ b/new.txt
@@ -0,0 +1 @@
+hello
"""


class ParseTests(unittest.TestCase):
    def test_files_and_hunks(self):
        first, second = parse_patch(GIT_DIFF)
        self.assertEqual((first.old_path, first.new_path), ("app/main.py", "app/main.py"))
        self.assertEqual([hunk.old_start for hunk in first.hunks], [1, 9])
        self.assertEqual(first.hunks[1].old, ["x = 1\n"])
        self.assertEqual(first.hunks[1].new, ["x = 2\n", "y = 3\n"])
        self.assertEqual((second.old_path, second.new_path), (None, "new.txt"))

    def test_plain_diff_with_time_stamps(self):
        [patch] = parse_patch("--- old.txt\t2026-01-01\n+++ new.txt\t2026-01-02\n@@ -1 +1 @@\n-a\n+b\n")
        self.assertEqual((patch.old_path, patch.new_path), ("old.txt", "new.txt"))

    def test_removed_line_that_looks_like_a_header(self):
        [patch] = parse_patch("--- a/q.sql\n+++ b/q.sql\n@@ -1,2 +1 @@\n--- a comment\n select 1;\n")
        self.assertEqual(patch.hunks[0].old, ["-- a comment\n", "select 1;\n"])

    def test_malformed(self):
        head = "--- a/x\n+++ b/x\n"
        for body in ("", "@@ nonsense @@\n", "@@ -1,2 +1,2 @@\n a\n", "@@ -1 +1 @@\n?a\n"):
            with self.subTest(body), self.assertRaises(PatchError):
                parse_patch(head + body)


if __name__ == "__main__":
    unittest.main()
