import unittest

from globpath import PatternError, compile_pattern, matches


class PatternCase(unittest.TestCase):
    def assert_matches(self, pattern, yes="", no=""):
        for path in yes.split():
            self.assertTrue(matches(path, pattern), f"{pattern} should match {path}")
        for path in no.split():
            self.assertFalse(matches(path, pattern), f"{pattern} should not match {path}")


class ComponentTests(PatternCase):
    def test_star_stays_in_its_component(self):
        self.assert_matches("src/*.py", "src/a.py src/.py", "src/a/b.py a.py")

    def test_question_mark(self):
        self.assert_matches("log.?", "log.1", "log. log.12 log./")

    def test_char_class(self):
        self.assert_matches("v[0-9]", "v7", "va v10")
        self.assert_matches("v[!0-9]", "va v-", "v7 v/")
        self.assert_matches("v[]^]", "v] v^", "va")

    def test_other_characters_are_literal(self):
        self.assert_matches("a.b+c(d)", "a.b+c(d)", "aXb+c(d)")


class DoubleStarTests(PatternCase):
    def test_several_components(self):
        self.assert_matches("src/**/test_*.py", "src/a/test_x.py src/a/b/test_x.py", "test_x.py lib/a/test_x.py")

    def test_at_the_end(self):
        self.assert_matches("build/**", "build/a build/a/b.o", "builder/a src/build/a")

    def test_alone(self):
        self.assert_matches("**", "a a/b a/b/c")


class ErrorTests(unittest.TestCase):
    def test_refused(self):
        for pattern in ("", "/abs", "a//b", "a/", "a/b**", "**.py", "v[0-9"):
            with self.subTest(pattern), self.assertRaises(PatternError):
                compile_pattern(pattern)


if __name__ == "__main__":
    unittest.main()
