"""Chat templates, compiled once per set of template arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping

from token_tracking import ChatTemplate, Tokenizer, load_tokenizer
from token_tracking.errors import TokenTrackingError

from agent_flow.config import ConfigFile
from agent_flow.errors import ConfigError
from agent_flow.protocols import ProviderContext
from agent_flow.task import Task


class Templates:
    """The chat template of a run, for the tools of its flow."""

    def __init__(self, context: ProviderContext, tools: tuple[Mapping[str, object], ...]) -> None:
        self._model = context.file.run.model
        self._path = context.file.resolve(self._model.chat_template)
        self._tokenizer = context.tokenizer
        self._tools = tools
        try:
            self._text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the chat template: {error}",
                where=str(self._path),
                fix="set model.chat_template",
            ) from error
        self._compiled: dict[str, ChatTemplate] = {}

    def of(self, task: Task) -> ChatTemplate:
        """The compiled template for a task's own template arguments. Slow the first time.

        Raises:
            ConfigError: the template cannot be compiled.
        """
        variables = {**self._model.chat_template_kwargs, **task.chat_template_kwargs}
        key = json.dumps(variables, sort_keys=True)
        if key not in self._compiled:
            try:
                compiled = ChatTemplate.compile(
                    self._tokenizer, self._text, tools=self._tools or None, template_kwargs=variables
                )
                # As every rollout will do it: text of a tool must not become a control token.
                compiled.control("escape")
                self._compiled[key] = compiled
            except TokenTrackingError as error:
                raise ConfigError(
                    f"the chat template cannot be used: {error}", where=str(self._path)
                ) from error
        return self._compiled[key]

    def describe(self, template: ChatTemplate) -> dict[str, str]:
        """What goes into a sample's provenance."""
        tokenizer = self._tokenizer
        return {
            "tokenizer": tokenizer.name,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "tokenizer_backend": tokenizer.backend,
            "tokenizer_backend_because": tokenizer.backend_reason,
            "chat_template": self._model.chat_template,
            "template_fingerprint": template.fingerprint,
            "template_delta": delta_road(template),
        }


def tokenizer_of(file: ConfigFile) -> Tokenizer:
    """The tokenizer that `[model]` names.

    Raises:
        ConfigError: it cannot be loaded.
    """
    name = file.run.model.tokenizer
    path = file.resolve(name)
    try:
        return load_tokenizer(path if path.exists() else name)
    except TokenTrackingError as error:
        raise ConfigError(str(error), where=file.where(("model", "tokenizer"))) from error


def delta_road(template: ChatTemplate) -> str:
    """How new messages become ids: by the compiled program, or by full renders and why."""
    return "program" if template.program is not None else f"full renders: {template.refusal}"
