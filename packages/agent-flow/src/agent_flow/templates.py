"""Chat templates, compiled once per set of template arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping

from token_tracking import ChatTemplate
from token_tracking.errors import TokenTrackingError

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
                self._compiled[key] = ChatTemplate.compile(
                    self._tokenizer, self._text, tools=self._tools or None, template_kwargs=variables
                )
            except TokenTrackingError as error:
                raise ConfigError(
                    f"the chat template cannot be used: {error}", where=str(self._path)
                ) from error
        return self._compiled[key]

    def describe(self) -> dict[str, str]:
        """What goes into a sample's provenance."""
        return {
            "tokenizer": self._tokenizer.name,
            "tokenizer_fingerprint": self._tokenizer.fingerprint,
            "chat_template": self._model.chat_template,
        }
