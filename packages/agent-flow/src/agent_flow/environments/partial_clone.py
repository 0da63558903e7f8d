"""Clones that were made with `git clone --filter`: what they lack is missing, or fetched from the network."""

from __future__ import annotations

PARTIAL = 70
"""Exit code of `REFUSE_PARTIAL` in such a clone."""
REFUSE_PARTIAL = r"""
# What a partial clone has not is missing from every list of objects, or fetched from the network.
if git config --get extensions.partialClone >/dev/null \
  || git config --get-regexp '^remote\..*\.(promisor|partialclonefilter)$' >/dev/null \
  || ls "$common"/objects/pack/*.promisor >/dev/null 2>&1
then exit 70
fi
"""
"""For a script after `base_commit.FIND_REPOSITORY`."""
PARTIAL_CLONE = "a partial clone; the image needs a whole one, made without --filter"
