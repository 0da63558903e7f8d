import unittest

from layerconf import Config, ConfigError, environment_layer, toml_layer

DEFAULTS = """
debug = false
plugins = ["auth"]
[database]
host = "localhost"
port = 5432
"""


class ConfigTests(unittest.TestCase):
    def test_profile_and_overrides_in_order(self):
        config = Config(toml_layer(DEFAULTS), {"prod": toml_layer('database.host = "db.internal"')})
        settings = config.resolve("prod", {"database": {"port": 6000}}, {"database": {"port": 6001}})
        self.assertEqual(settings["database"], {"host": "db.internal", "port": 6001})
        self.assertIs(settings["debug"], False)

    def test_unknown_profile(self):
        with self.assertRaisesRegex(ConfigError, "no profile 'prd'; known: dev, prod"):
            Config({}, {"prod": {}, "dev": {}}).resolve("prd")

    def test_differences(self):
        config = Config(toml_layer(DEFAULTS), {"dev": {"debug": True}, "ci": {}})
        self.assertEqual(config.differences("dev", "ci"), ["debug"])


class EnvironmentTests(unittest.TestCase):
    def test_names_and_values(self):
        layer = environment_layer(
            "APP",
            {
                "APP__DEBUG": "true",
                "APP__DATABASE__HOST": "db.internal",
                "APP__DATABASE__PORT": "5433",
                "APPLE__X": "1",
                "APP": "x",
                "APP__": "y",
            },
        )
        self.assertEqual(layer, {"debug": True, "database": {"host": "db.internal", "port": 5433}})

    def test_a_value_cannot_smuggle_in_other_keys(self):
        self.assertEqual(environment_layer("APP", {"APP__A": "1\nb = 2"}), {"a": "1\nb = 2"})


if __name__ == "__main__":
    unittest.main()
