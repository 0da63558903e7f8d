"""The command line: `trainer-bridge receive | tail | replay | audit`.

Exit codes: 0 done (for `receive` and `tail`, being stopped is done), 1 it ran and something is wrong, 2 it
could not start (one line says what, where and what to do), 130 stopped before it was done.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_bridge.commands.audit import audit
from trainer_bridge.commands.receive import receive
from trainer_bridge.commands.replay import replay
from trainer_bridge.commands.tail import tail
from trainer_bridge.errors import BridgeError

EXIT_WRONG = 1
EXIT_NOT_STARTED = 2
EXIT_STOPPED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if args.debug else logging.WARNING,
        format="trainer-bridge: %(message)s",
        stream=sys.stderr,
    )
    try:
        return int(args.run(args))
    except BridgeError as error:
        if args.debug:
            raise
        _say(f"trainer-bridge {args.command}: {error}")
        return EXIT_NOT_STARTED
    except BrokenPipeError:
        # Whoever read our output is gone; the interpreter must not stumble over it once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_WRONG
    except KeyboardInterrupt:
        return EXIT_STOPPED


def _receive(args: argparse.Namespace) -> int:
    return receive(args.bind, out=args.out, as_json=args.json, insecure=args.insecure)


def _tail(args: argparse.Namespace) -> int:
    return tail(
        args.address, as_json=args.json, count=args.count, timeout_s=args.timeout, insecure=args.insecure
    )


def _replay(args: argparse.Namespace) -> int:
    return replay(args.path, args.to, as_json=args.json, timeout_s=args.timeout, insecure=args.insecure)


def _audit(args: argparse.Namespace) -> int:
    return audit(args.path, as_json=args.json)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer-bridge",
        description="Rollout samples to any trainer: acknowledged, deduplicated, bounded.",
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="log everything, and show tracebacks")
    common.add_argument("--json", action="store_true", help="one JSON object per line")
    network = argparse.ArgumentParser(add_help=False)
    network.add_argument(
        "--insecure", action="store_true", help="allow other machines, without encryption or authentication"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    sub = commands.add_parser(
        "receive",
        parents=[common, network],
        help="take samples and print a line for each",
        description=receive.__doc__,
    )
    sub.add_argument("--bind", default="tcp://127.0.0.1:0", metavar="ADDRESS", help="default: %(default)s")
    sub.add_argument("--out", type=Path, metavar="DIR", help="keep a copy of everything in DIR/samples")
    sub.set_defaults(run=_receive)

    sub = commands.add_parser(
        "tail", parents=[common, network], help="look at what arrives at a receiver", description=tail.__doc__
    )
    sub.add_argument("address", metavar="tcp://HOST:PORT")
    sub.add_argument("--count", type=int, metavar="N", help="end after N samples")
    sub.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="wait for the receiver (default: 5 s)"
    )
    sub.set_defaults(run=_tail)

    sub = commands.add_parser(
        "replay", parents=[common, network], help="send stored samples again", description=replay.__doc__
    )
    sub.add_argument("path", type=Path, metavar="SEGMENT_OR_DIR")
    sub.add_argument("--to", required=True, metavar="ADDRESS", help="the receiver")
    sub.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="wait for the receiver (default: 30 s)"
    )
    sub.set_defaults(run=_replay)

    sub = commands.add_parser(
        "audit", parents=[common], help="check stored samples", description=audit.__doc__
    )
    sub.add_argument("path", type=Path, metavar="SEGMENT_OR_DIR")
    sub.set_defaults(run=_audit)
    return parser
