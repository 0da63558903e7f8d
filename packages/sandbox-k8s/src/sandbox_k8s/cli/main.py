"""The parser of all commands, and their errors as one line and an exit code."""

import argparse
import logging
import sys
from collections.abc import Callable

from sandbox_k8s.errors import SandboxError

from . import attach, build_tools, doctor, exec, explain, manifests, prefetch, ps, reap
from .problems import EXIT_INFRA, EXIT_NOT_FOUND, EXIT_TIMED_OUT, EXIT_USAGE, exit_code, one_line

_COMMANDS = (ps, exec, attach, explain, doctor, prefetch, reap, manifests, build_tools)
_EPILOG = f"""
Without options of a cluster the sandboxes are those of this machine. Exit codes: 0 success, {EXIT_USAGE}
a mistake in what was asked, {EXIT_INFRA} something that was needed failed or is gone, {EXIT_NOT_FOUND}
there is no such pod to explain, {EXIT_TIMED_OUT} a command timed out; exec and attach else give the
command's own. Errors are one line on standard error.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the result is the exit code (see ``sandbox-k8s --help``)."""
    options = _parser().parse_args(arguments)
    shown = logging.StreamHandler()
    shown.setFormatter(_FirstLine("sandbox-k8s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[shown])
    action: Callable[[argparse.Namespace], int] = options.action
    try:
        return action(options)
    except SandboxError as problem:
        sys.stderr.write(f"sandbox-k8s: error: {one_line(problem)}\n")
        return exit_code(problem)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # `sandbox-k8s ps | head` is no error, and nothing is left to flush
        return 141


class _FirstLine(logging.Formatter):
    """Without the evidence that follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The first line."""
        return super().format(record).partition("\n")[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox-k8s", description="Look at sandboxes, run something in them, tidy up.", epilog=_EPILOG
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.register(commands)
    return parser
