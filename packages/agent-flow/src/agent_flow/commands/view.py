"""`agent-flow view`: the page of a rollout, or a run's index."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from agent_flow.commands.ending import EXIT_INCOMPLETE, EXIT_OK, Commands
from agent_flow.commands.running import short


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "view", help="write the page of a rollout, or a run's index, and print its path", parents=[debug]
    )
    parser.add_argument("folder", type=Path, help="a run's folder, or one of its rollouts/ID")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.set_defaults(command=_view)


def _view(options: argparse.Namespace) -> int:
    from agent_flow.view_run import view_rollout, view_run  # loads tokenizers

    folder: Path = options.folder.resolve()
    broken: tuple[str, ...] = ()
    if folder.parent.name == "rollouts":
        page = view_rollout(folder)
    else:
        page, broken = view_run(folder)
    sys.stdout.write(f"{short(page)}\n")
    for text in broken:
        sys.stderr.write(f"agent-flow: broken: {text}\n")
    if options.open and not webbrowser.open(page.as_uri()):
        sys.stderr.write("agent-flow: no browser was found here\n")
    return EXIT_INCOMPLETE if broken else EXIT_OK
