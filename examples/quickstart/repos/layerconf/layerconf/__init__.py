"""Configuration in layers."""

from layerconf.config import Config, ConfigError
from layerconf.merge import MergeError, merge
from layerconf.sources import environment_layer, toml_layer

__all__ = ["Config", "ConfigError", "MergeError", "environment_layer", "merge", "toml_layer"]
