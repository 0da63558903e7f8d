"""`agent-flow tasks convert`: classic SWE-bench rows into the form of swebench 5.x."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from agent_flow.commands.ending import EXIT_INCOMPLETE, EXIT_OK, Commands
from agent_flow.errors import UsageError


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    tasks = commands.add_parser("tasks", help="work on task files", parents=[debug])
    below = tasks.add_subparsers(required=True, metavar="COMMAND")
    parser = below.add_parser(
        "convert",
        help="fill in the columns that swebench 5 wants of a classic SWE-bench row",
        parents=[debug],
    )
    parser.add_argument("file", type=Path, help="a .jsonl or .parquet file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the new .jsonl file")
    parser.add_argument(
        "--python",
        default="",
        metavar="PYTHON",
        help="interpreter of an environment with swebench 4.1.0 (default: uv makes one)",
    )
    parser.set_defaults(command=_convert)


def _convert(options: argparse.Namespace) -> int:
    from agent_flow.convert import convert  # loads what other commands do without

    out: Path = options.out
    if out.exists():
        raise UsageError("the file is there already", where=str(out), fix="another --out")
    converted = convert(options.file, python=options.python)
    lines = b"".join(msgspec.json.encode(row, enc_hook=str) + b"\n" for row in converted.rows)
    try:
        out.write_bytes(lines)
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=str(out)) from error
    for name, reason in converted.left_out.items():
        sys.stderr.write(f"agent-flow: left out {name}: {reason}\n")
    sys.stdout.write(f"{len(converted.rows)} rows written to {out}, {len(converted.left_out)} left out\n")
    return EXIT_INCOMPLETE if converted.left_out else EXIT_OK
