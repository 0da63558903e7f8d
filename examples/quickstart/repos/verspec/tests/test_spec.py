import unittest

from verspec import Version, VersionError, newest, parse_spec


class SpecTests(unittest.TestCase):
    def assert_allows(self, spec, yes, no):
        for text in yes.split():
            self.assertTrue(parse_spec(spec).allows(Version.parse(text)), f"{spec} should allow {text}")
        for text in no.split():
            self.assertFalse(parse_spec(spec).allows(Version.parse(text)), f"{spec} should not allow {text}")

    def test_exact(self):
        self.assert_allows("1.2.3", "1.2.3 1.2.3+x", "1.2.4 1.2.2")

    def test_caret(self):
        self.assert_allows("^1.2", "1.2.0 1.99.0", "1.1.9 2.0.0")
        self.assert_allows("^0.2.3", "0.2.3 0.2.9", "0.3.0 0.2.2")

    def test_tilde(self):
        self.assert_allows("~1.2.3", "1.2.3 1.2.9", "1.3.0 1.2.2")

    def test_all_comparisons_must_hold(self):
        self.assert_allows(">=1.2, <2", "1.2.0 1.9.9", "1.1.0 2.0.0")

    def test_prerelease_only_when_asked_for(self):
        self.assert_allows(">=1.0.0", "1.0.0", "1.1.0-rc.1")
        self.assert_allows(">=1.1.0-rc.1", "1.1.0-rc.1 1.1.0-rc.2 1.1.0 1.2.0", "1.1.0-beta 1.2.0-rc.1")

    def test_malformed(self):
        for text in ("", "latest", ">>1", "1.2.3.4", ">=1.2,"):
            with self.subTest(text), self.assertRaises(VersionError):
                parse_spec(text)


class NewestTests(unittest.TestCase):
    def test_newest_allowed(self):
        self.assertEqual(newest(["1.2.0", "1.9.3", "2.0.0"], parse_spec("^1.2")), "1.9.3")

    def test_none_allowed(self):
        self.assertIsNone(newest(["1.2.0"], parse_spec("^3")))


if __name__ == "__main__":
    unittest.main()
