"""`agent-flow doctor`: what would work and what would not, before a run finds out."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import anyio
import msgspec
from rich.console import Console
from rich.text import Text

from agent_flow.clock import Clock
from agent_flow.commands.ending import EXIT_OK, Commands
from agent_flow.config import load_filled_config
from agent_flow.doctor import Finding, State, examine, summary
from agent_flow.eval_section import evaluation_only
from agent_flow.events import pasteable
from agent_flow.progress import pipe_console

EXIT_NOT_READY = 3
_WORDS: dict[State, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "bold red"),
    "skip": ("-", "dim"),
}
_INDENT = 17
"""Columns before a finding's text."""


def add(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "doctor", help="look at every part of a run before there is one", parents=[debug]
    )
    parser.description = (
        "Looks at every part that a run would use, starts and stops one sandbox, and leaves nothing behind. "
        "Exit code 0: a run can start. 3: something would stop it. 2: the configuration cannot be read, or "
        "is not filled in."
    )
    parser.add_argument("config", type=Path, help="a run.toml or run.yaml")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--timeout", type=seconds, default=120.0, metavar="SECONDS", help="limit of one check (default: 120)"
    )
    parser.set_defaults(command=_doctor)


def seconds(text: str) -> float:
    """A positive, finite number."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _doctor(options: argparse.Namespace) -> int:
    file = load_filled_config(options.config)
    console = pipe_console()

    def tell(finding: Finding) -> None:
        if not options.json:
            _print(console, finding, debug=options.debug)

    async def run() -> tuple[Finding, ...]:
        return await examine(file, clock=Clock(), tell=tell, limit_s=options.timeout)

    findings = anyio.run(run)
    counts = summary(findings)
    ready = not counts["fail"]
    if options.json:
        document = {
            "kind": "agent-flow-doctor",
            "version": 1,
            "config": str(file.path),
            "ready": ready,
            "findings": findings,
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n")
    else:
        only = evaluation_only(file)
        what = "an evaluation" if only else "a run"
        wrong = f"{counts['fail']} would stop {what}, " if counts["fail"] else f"{what} can start, "
        console.print(f"\n{wrong}{counts['warn']} to know about, {counts['skip']} not checked")
        if only:
            line = f"evaluation only: {pasteable(f'agent-flow eval {options.config}')}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK if ready else EXIT_NOT_READY


def _print(console: Console, finding: Finding, *, debug: bool) -> None:
    word, style = _WORDS[finding.state]
    body = [(line, "dim" if finding.state == "skip" else "") for line in finding.text.splitlines()]
    if finding.fix:
        body.append((f"try: {finding.fix}", "bold"))
    if debug:
        body += [(line, "dim") for line in finding.traceback.splitlines()]
    wrap = textwrap.TextWrapper(
        max(console.width - _INDENT, 20), break_long_words=False, break_on_hyphens=False
    )
    lines = [(part, look) for line, look in body for part in wrap.wrap(line) or [""]]
    text = Text.assemble((f"{word:6}", style), f"{finding.check:{_INDENT - 6}}")
    text.append_text(Text(f"\n{' ' * _INDENT}").join(Text(part, style=look) for part, look in lines))
    console.print(text, soft_wrap=True)
