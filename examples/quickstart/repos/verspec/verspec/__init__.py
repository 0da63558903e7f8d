"""Semantic versions and requirements on them."""

from verspec.select import newest, ordered
from verspec.spec import Spec, parse_spec
from verspec.version import Version, VersionError

__all__ = ["Spec", "Version", "VersionError", "newest", "ordered", "parse_spec"]
