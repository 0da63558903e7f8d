import unittest

from patchlet import PatchError, apply_patch, parse_patch


def patch_of(*body):
    [patch] = parse_patch("--- a/x\n+++ b/x\n" + "".join(body))
    return patch


class ApplyTests(unittest.TestCase):
    def test_replace_a_line(self):
        patch = patch_of("@@ -1,3 +1,3 @@\n", " a\n", "-b\n", "+B\n", " c\n")
        self.assertEqual(apply_patch(patch, "a\nb\nc\n"), "a\nB\nc\n")

    def test_create_and_delete(self):
        patch = patch_of("@@ -0,0 +1,2 @@\n", "+a\n", "+b\n")
        self.assertEqual(apply_patch(patch, ""), "a\nb\n")
        self.assertEqual(apply_patch(patch.reversed(), "a\nb\n"), "")

    def test_insert_without_context(self):
        patch = patch_of("@@ -2,0 +3 @@\n", "+new\n")
        self.assertEqual(apply_patch(patch, "a\nb\nc\n"), "a\nb\nnew\nc\n")

    def test_hunk_is_found_where_it_moved(self):
        patch = patch_of("@@ -1,2 +1,2 @@\n", " a\n", "-b\n", "+B\n", "@@ -4 +4 @@\n", "-d\n", "+D\n")
        self.assertEqual(apply_patch(patch, "x\ny\na\nb\nc\nd\n"), "x\ny\na\nB\nc\nD\n")

    def test_crlf_belongs_to_the_line(self):
        patch = patch_of("@@ -1,2 +1,2 @@\n", "-a\r\n", "+A\r\n", " b\r\n")
        self.assertEqual(apply_patch(patch, "a\r\nb\r\n"), "A\r\nb\r\n")
        with self.assertRaises(PatchError):
            apply_patch(patch, "a\nb\n")

    def test_misfit_names_hunk_and_line(self):
        patch = patch_of("@@ -1,2 +1,2 @@\n", " a\n", "-b\n", "+B\n")
        with self.assertRaisesRegex(PatchError, r"hunk 1 .* line 2 should be 'b\\n', but is 'x\\n'"):
            apply_patch(patch, "a\nx\n")

    def test_reversed_undoes(self):
        patch = patch_of("@@ -1,3 +1,4 @@\n", " a\n", "-b\n", "+B\n", "+B2\n", " c\n")
        self.assertEqual(apply_patch(patch.reversed(), apply_patch(patch, "a\nb\nc\n")), "a\nb\nc\n")


if __name__ == "__main__":
    unittest.main()
