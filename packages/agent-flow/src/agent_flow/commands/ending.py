"""How a command ends: exit codes, and a standard output that nobody reads any more."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Protocol

EXIT_OK, EXIT_INCOMPLETE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class Commands(Protocol):
    """What a command adds itself to."""

    def add_parser(
        self, name: str, *, help: str, parents: list[argparse.ArgumentParser]
    ) -> argparse.ArgumentParser:
        """As argparse's."""
        ...


def close_stdout() -> None:
    """Nobody reads it any more; let neither a summary nor the interpreter's last flush fail over it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
