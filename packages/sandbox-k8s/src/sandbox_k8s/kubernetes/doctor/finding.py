"""One line of what ``doctor`` found."""

from typing import Literal

import msgspec

from sandbox_k8s.errors import ClusterError
from sandbox_k8s.kubernetes.explain import in_words

Verdict = Literal["works", "does not", "advice"]
"""``does not``: a run needs it. ``advice``: a run does without it, or it could not be found out."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and how it is.

    Attributes:
        says: What was seen, and where it does not work what to do.
    """

    what: str
    verdict: Verdict
    says: str


def works(what: str, says: str) -> Finding:
    """It is as it should be."""
    return Finding(what=what, verdict="works", says=says)


def broken(what: str, says: str) -> Finding:
    """A run will fail by it."""
    return Finding(what=what, verdict="does not", says=says)


def advice(what: str, says: str) -> Finding:
    """It could be better, or is not known."""
    return Finding(what=what, verdict="advice", says=says)


def refused(what: str, problem: ClusterError) -> Finding:
    """What could not be read, and is not needed."""
    return advice(what, f"not known: {in_words(problem)}")
