"""The `agent-flow` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from agent_flow.commands import check_tasks, doctor, evaluate, init, outcomes, regrade, run, tasks, view
from agent_flow.commands.ending import EXIT_INCOMPLETE, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, close_stdout
from agent_flow.errors import AgentFlowError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: every rollout was delivered and the trainer has it. 1: not all were. 2: what was given cannot work.
    130: interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except BrokenPipeError:
        close_stdout()
        return EXIT_OK  # whoever read it had seen enough
    except KeyboardInterrupt:
        sys.stderr.write("agent-flow: interrupted\n")
        return EXIT_INTERRUPTED
    except AgentFlowError as error:
        if options.debug:
            raise
        sys.stderr.write(f"agent-flow: {error}\n")
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_INCOMPLETE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agent-flow", description="From tasks to token-exact training samples in any trainer."
    )
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (init, doctor, run, evaluate, check_tasks, regrade, tasks, view, outcomes):
        command.add(commands, debug)
    return parser
