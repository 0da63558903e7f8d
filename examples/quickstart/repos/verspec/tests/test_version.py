import unittest

from verspec import Version, VersionError, ordered


class ParseTests(unittest.TestCase):
    def test_all_parts(self):
        version = Version.parse("v1.22.3-rc.1+build.7")
        self.assertEqual(version.release, (1, 22, 3))
        self.assertEqual(version.prerelease, ("rc", "1"))
        self.assertEqual(version.build, ("build", "7"))
        self.assertEqual(str(version), "1.22.3-rc.1+build.7")

    def test_malformed(self):
        for text in ("1.2", "1.2.3.4", "01.2.3", "1.2.3-", "1.2.3-a..b", "1.2.3-rc.01", "1.2.x"):
            with self.subTest(text), self.assertRaises(VersionError):
                Version.parse(text)


class PrecedenceTests(unittest.TestCase):
    def test_releases_compare_as_numbers(self):
        self.assertEqual(ordered(["1.10.0", "1.9.0", "0.99.0"]), ["0.99.0", "1.9.0", "1.10.0"])

    def test_prerelease_comes_before_its_release(self):
        self.assertLess(Version.parse("1.0.0-rc.1"), Version.parse("1.0.0"))
        self.assertGreater(Version.parse("1.0.1-alpha"), Version.parse("1.0.0"))

    def test_more_fields_come_after_fewer(self):
        self.assertLess(Version.parse("1.0.0-alpha"), Version.parse("1.0.0-alpha.1"))

    def test_numbers_come_before_words(self):
        self.assertLess(Version.parse("1.0.0-alpha.1"), Version.parse("1.0.0-alpha.beta"))
        self.assertLess(Version.parse("1.0.0-7"), Version.parse("1.0.0-alpha"))

    def test_build_metadata_is_ignored(self):
        self.assertEqual(Version.parse("1.0.0+a"), Version.parse("1.0.0+b"))
        self.assertEqual(hash(Version.parse("1.0.0+a")), hash(Version.parse("1.0.0")))


if __name__ == "__main__":
    unittest.main()
