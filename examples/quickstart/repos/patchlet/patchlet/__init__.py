"""Unified diffs, applied to texts in memory."""

from patchlet.apply import apply_patch
from patchlet.model import FilePatch, Hunk, PatchError
from patchlet.parse import parse_patch

__all__ = ["FilePatch", "Hunk", "PatchError", "apply_patch", "parse_patch"]
