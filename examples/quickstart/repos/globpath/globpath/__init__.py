"""Path patterns with ``**``."""

from globpath.filter import PathFilter
from globpath.pattern import PatternError, compile_pattern, matches
from globpath.walk import walk

__all__ = ["PathFilter", "PatternError", "compile_pattern", "matches", "walk"]
