"""Does a log say that the code under test could not be built or loaded, so that no test could begin?

That is a readable log and the patch's own doing: swebench's verdict on it, unresolved, stands. The lines are
those that the runners write; a log of each is in this package's tests.
"""

from __future__ import annotations

import re

_NOT_BUILT = re.compile(
    r"""
    ^FAIL[ \t]+\S+\ \[(?:build|setup)\ failed\]$          # go test
    |^error:\ could\ not\ compile\ `                       # cargo
    |^[ \t]*(?:SyntaxError|IndentationError|TabError):\    # Python without pytest; node, mocha, jest
    |Parse\ failure:\ Parse\ failed|\bTransform\ failed\ with\ \d+\ error    # vitest
    |\berror\ TS\d+:\                                      # tsc
    |^(?:PHP\ )?(?:Fatal\ error:\ +Uncaught\ ParseError|Parse\ error):\      # PHP
    |\bCOMPILATION\ ERROR\b|\bCompilation\ failed;\ see\ the\ compiler       # Maven, Gradle
    |^\S+:\d+:\d+:\ (?:fatal\ )?error:\                    # gcc, clang
    """,
    re.MULTILINE | re.VERBOSE,
)
_MACHINE = re.compile(r"No space left on device|Cannot allocate memory|\(signal: 9\b|^Killed$", re.M)
"""What ends a build that is not the patch's doing. Python's MemoryError may well be: code can ask for any
amount."""


def machine_broke(log: str) -> bool:
    """Whether the log shows that memory or space ran out."""
    return _MACHINE.search(log) is not None


def build_failed(log: str) -> bool:
    """Whether the code could not be built or loaded, by a fault in the code."""
    return _NOT_BUILT.search(log) is not None and not machine_broke(log)
