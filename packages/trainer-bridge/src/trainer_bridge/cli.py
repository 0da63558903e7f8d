"""The command line: `trainer-bridge receive | tail | audit | inspect | replay | bench | keygen`.

Exit codes: 0 done (for `receive` and `tail`, being stopped is done), 1 it ran and something is wrong, 2 it
could not start (one line says what, where and what to do), 130 stopped before it was done.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from trainer_bridge.commands.audit import audit
from trainer_bridge.commands.bench import bench, serve
from trainer_bridge.commands.inspect import inspect
from trainer_bridge.commands.keygen import keygen
from trainer_bridge.commands.live import Peer
from trainer_bridge.commands.output import OutputError
from trainer_bridge.commands.receive import receive
from trainer_bridge.commands.replay import replay
from trainer_bridge.commands.tail import tail
from trainer_bridge.config import MAX_INTERVAL_S
from trainer_bridge.errors import BridgeError, ConfigError
from trainer_bridge.keys import CurveKeys

EXIT_WRONG = 1
EXIT_NOT_STARTED = 2
EXIT_STOPPED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _open_streams()
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_NOT_STARTED
    logging.basicConfig(
        level=logging.DEBUG if args.debug else logging.WARNING,
        format="trainer-bridge: %(message)s",
        stream=sys.stderr,
    )
    try:
        return int(args.run(args))
    except OutputError as error:
        _say(f"trainer-bridge {args.command}: {error}")
        _drop_output()
        return EXIT_WRONG
    except BridgeError as error:
        if args.debug:
            raise
        _say(f"trainer-bridge {args.command}: {error}")
        return EXIT_NOT_STARTED
    except BrokenPipeError:
        _drop_output()  # whoever read it is gone
        return EXIT_WRONG
    except KeyboardInterrupt:
        return EXIT_STOPPED


def _open_streams() -> None:
    """A process that was started with closed outputs gets some: what they led to, sockets would take."""
    if sys.stdout is None or sys.stderr is None:
        null = os.open(os.devnull, os.O_WRONLY)
        sys.stdout = sys.stdout or os.fdopen(null, "w")
        sys.stderr = sys.stderr or os.fdopen(os.dup(null), "w")


def _drop_output() -> None:
    """What is left of the output goes nowhere: the interpreter must not stumble over it when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _receive(args: argparse.Namespace) -> int:
    keys = _keys(args.key, args.allow, "--allow")
    return receive(
        args.bind,
        out=args.out,
        as_json=args.json,
        insecure=args.insecure,
        keys=keys,
        metrics=args.metrics,
    )


def _tail(args: argparse.Namespace) -> int:
    return tail(
        args.address,
        as_json=args.json,
        count=args.count,
        timeout_s=args.timeout,
        insecure=args.insecure,
        keys=_keys(args.key, args.peer, "--peer"),
    )


def _replay(args: argparse.Namespace) -> int:
    return replay(
        args.path,
        args.to,
        as_json=args.json,
        timeout_s=args.timeout,
        insecure=args.insecure,
        keys=_keys(args.key, args.peer, "--peer"),
    )


def _keygen(args: argparse.Namespace) -> int:
    return keygen(args.folder, name=args.name, as_json=args.json)


def _keys(secret: Path | None, peers: Path | None, option: str) -> CurveKeys | None:
    if secret is None and peers is None:
        return None
    if secret is None or peers is None:
        raise ConfigError(
            f"--key and {option} belong together: this end's secret, and who is on the other end"
        )
    return CurveKeys.load(secret, peers=peers)


def _audit(args: argparse.Namespace) -> int:
    if args.live is None:
        return audit(args.path, as_json=args.json)
    keys = _keys(args.key, args.peer, "--peer")
    live = Peer(args.live, timeout_s=args.timeout, insecure=args.insecure, keys=keys)
    return audit(args.path, as_json=args.json, live=live)


def _inspect(args: argparse.Namespace) -> int:
    return inspect(args.path, record=args.record, limit=args.limit, as_json=args.json)


def _bench(args: argparse.Namespace) -> int:
    if args.serve:
        if args.address is not None or args.peer is not None:
            raise ConfigError("--serve listens at --bind, and takes no address and no --peer")
        keys = _keys(args.key, args.allow, "--allow")
        return serve(args.bind, as_json=args.json, insecure=args.insecure, keys=keys)
    return bench(
        args.address,
        seconds=args.seconds,
        as_json=args.json,
        insecure=args.insecure,
        keys=_keys(args.key, args.peer, "--peer"),
    )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _seconds(text: str) -> float:
    """A span of time to wait or to measure; argparse shows the error."""
    with suppress(ValueError):
        if 0 < float(text) <= MAX_INTERVAL_S:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no span of time: give seconds, more than 0")


def _count(text: str) -> int:
    with suppress(ValueError):
        if int(text) >= 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no count: give a whole number, 0 or more")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer-bridge",
        description="Rollout samples to any trainer: acknowledged, deduplicated, bounded.",
    )
    parser.add_argument("--version", action="version", version=f"trainer-bridge {version('trainer-bridge')}")
    common = argparse.ArgumentParser(add_help=False)
    for options, default in ((parser, False), (common, argparse.SUPPRESS)):  # before the command, or after it
        for name, text in (
            ("--debug", "log everything, and show tracebacks"),
            ("--json", "one JSON object per line"),
        ):
            options.add_argument(name, action="store_true", default=default, help=text)
    network = argparse.ArgumentParser(add_help=False)
    network.add_argument(
        "--insecure", action="store_true", help="allow other machines, without encryption or authentication"
    )
    network.add_argument(
        "--key", type=Path, metavar="NAME.secret", help="encrypt: this end's key, made by `keygen`"
    )
    outward = argparse.ArgumentParser(add_help=False)
    outward.add_argument(
        "--peer", type=Path, metavar="NAME.pub", help="with --key: the receiver's public key"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    sub = commands.add_parser(
        "receive",
        parents=[common, network],
        help="take samples and print a line for each",
        description=receive.__doc__,
    )
    sub.add_argument("--bind", default="tcp://127.0.0.1:0", metavar="ADDRESS", help="default: %(default)s")
    sub.add_argument("--out", type=Path, metavar="DIR", help="keep a copy of everything in DIR/samples")
    sub.add_argument(
        "--allow",
        type=Path,
        metavar="DIR",
        help="with --key: folder of the .pub files of all who may send; "
        "in it, observers/ for who may look on, and ranks/",
    )
    sub.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics, as 127.0.0.1:9108")
    sub.set_defaults(run=_receive)

    sub = commands.add_parser(
        "tail",
        parents=[common, network, outward],
        help="look at what arrives at a receiver",
        description=tail.__doc__,
    )
    sub.add_argument("address", metavar="tcp://HOST:PORT")
    sub.add_argument("--count", type=_count, metavar="N", help="end after N samples")
    sub.add_argument(
        "--timeout", type=_seconds, default=5.0, metavar="S", help="wait for the receiver (default: 5 s)"
    )
    sub.set_defaults(run=_tail)

    sub = commands.add_parser(
        "replay",
        parents=[common, network, outward],
        help="send stored samples again",
        description=replay.__doc__,
    )
    sub.add_argument("path", type=Path, metavar="SEGMENT_OR_DIR")
    sub.add_argument("--to", required=True, metavar="ADDRESS", help="the receiver")
    sub.add_argument(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="give up when the receiver has not moved on for so long (default: 30 s)",
    )
    sub.set_defaults(run=_replay)

    sub = commands.add_parser(
        "audit",
        parents=[common, network, outward],
        help="is everything accounted for?",
        description=audit.__doc__,
    )
    sub.add_argument("path", type=Path, metavar="RUN", help="run folder, spool, store or segment")
    sub.add_argument(
        "--live", metavar="ADDRESS", help="of the running receiver: tells leased from queued; looks on only"
    )
    sub.add_argument(
        "--timeout", type=_seconds, default=5.0, metavar="S", help="with --live: wait for it (default: 5 s)"
    )
    sub.set_defaults(run=_audit)

    sub = commands.add_parser(
        "inspect", parents=[common], help="show what is in a file", description=inspect.__doc__
    )
    sub.add_argument("path", type=Path, metavar="FILE", help="segment, spool, store, frame or dead letters")
    sub.add_argument("--record", type=_count, metavar="N", help="show all of record N")
    sub.add_argument(
        "--limit", type=_count, default=20, metavar="N", help="lines of a list (default: %(default)s)"
    )
    sub.set_defaults(run=_inspect)

    sub = commands.add_parser(
        "bench",
        parents=[common, network, outward],
        help="measure this machine, or a link",
        description=bench.__doc__,
    )
    sub.add_argument(
        "address", nargs="?", metavar="tcp://HOST:PORT", help="a `bench --serve` (default: none)"
    )
    sub.add_argument("--seconds", type=_seconds, default=1.0, metavar="S", help="per size (default: 1 s)")
    sub.add_argument("--serve", action="store_true", help="be the other end: take samples, throw them away")
    sub.add_argument("--bind", default="tcp://127.0.0.1:0", metavar="ADDRESS", help="with --serve")
    sub.add_argument("--allow", type=Path, metavar="DIR", help="with --serve and --key: who may connect")
    sub.set_defaults(run=_bench)

    sub = commands.add_parser(
        "keygen", parents=[common], help="make a key pair for encrypted links", description=keygen.__doc__
    )
    sub.add_argument("folder", type=Path, metavar="FOLDER")
    sub.add_argument("--name", help="of the key, as the peer shows it (default: the folder's name)")
    sub.set_defaults(run=_keygen)
    return parser
