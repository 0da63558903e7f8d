"""Chat completions by litellm: one call with its tries, its limit in time, and what its errors mean here.

litellm is asked on the event loop, where a call can be cancelled.
"""

# pyright: basic
# litellm's functions take and give `Any`.

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import msgspec
from token_tracking.sample import Scalar

from agent_flow.agents.mini_scaffold import import_scaffold
from agent_flow.agents.variables import variables
from agent_flow.errors import ContextFullError, EngineError, text_of
from agent_flow.redaction import option_secrets
from agent_flow.stage import waiting_for

logger = logging.getLogger(__name__)

_LOCAL = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_MODE": "PRODUCTION",
}
"""litellm fetches two lists from the network, and reads a `.env` of any folder above its own, unless these
are set."""
_NO_KEY = "none"
"""litellm wants a key even for a server that asks for none."""
_NOT_NOW = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 that may be gone at the next try."""
_BROKEN_OFF = frozenset({"abort", "error", "ERROR", "network_error"})
"""Finish reasons of an answer that the server did not end: of SGLang and vLLM, of OpenRouter, of Cohere.
litellm makes `stop` of them, and keeps the word as `native_finish_reason`."""
_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens"})
"""What an answer's length is called, by one server or another."""
_LOGGERS = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy")
_LONGEST_WAIT_S = 120.0
_MASK = "***"
_CONTEXT_FULL = re.compile(
    r"context[ _](length|window|limit|size)|maximum context|prompt is too long|too many (input )?tokens", re.I
)
"""Servers say it in words of their own; litellm knows some of them."""
_HELD_BACK = re.compile(r"content_policy_violation|content_filter|ResponsibleAIPolicyViolation", re.I)
"""Codes of OpenAI and Azure, which not every release of litellm knows."""
_MAPPINGS = ("extra_body", "extra_headers", "headers")


class CallConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is asked."""

    model: str
    api_base: str | None
    api_key: str
    """Empty: none, or where there is no `api_base` either, what litellm finds in the environment."""
    timeout_s: float
    max_retries: int
    retry_wait_s: float
    arguments: Mapping[str, object]
    """Further ones of `litellm.acompletion`."""


def import_litellm(scratch: Path) -> ModuleType:
    """Import litellm without what it fetches, prints and reads.

    mini-swe-agent's models for it are imported here too, since they would import it themselves.
    """
    with variables(_LOCAL):
        import_scaffold(scratch)
        import litellm
        from litellm import anthropic_beta_headers_manager

        anthropic_beta_headers_manager.reload_beta_headers_config()
    litellm.suppress_debug_info = True
    for name in _LOGGERS:
        # What it says of a call is said here, once and with the key hidden.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return litellm


def longest_call_s(config: CallConfig) -> float:
    """How long a call may take in which every try fails at its limit."""
    waits = (
        min(config.retry_wait_s * 2.0**tries, _LONGEST_WAIT_S) for tries in range(min(config.max_retries, 99))
    )
    return (config.max_retries + 1) * config.timeout_s + sum(waits)


def refused_arguments(litellm: Any, name: str, provider: str, arguments: Mapping[str, object]) -> str:
    """What litellm refuses of a provider's model by its own lists, without asking it. Empty: nothing."""
    for key in _MAPPINGS:
        if key in arguments and not isinstance(arguments[key], Mapping):
            return f"{key} is not a mapping"
    look = litellm.utils.get_optional_params
    # What is neither among those has a meaning for litellm itself, such as `metadata`.
    taken = {*inspect.signature(look).parameters}
    taken |= {*litellm.utils.get_non_default_completion_params(dict(arguments))}
    given = {key: value for key, value in arguments.items() if key in taken}
    try:
        look(model=name, custom_llm_provider=provider, **given)
    except Exception as error:  # it raises its own, and plain ones for a value of the wrong kind
        return text_of(error).partition("To drop these")[0].strip() or type(error).__name__
    return ""


class _FailedError(Exception):
    """One try."""

    def __init__(self, error: EngineError | ContextFullError, asked_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.asked_s = asked_s
        """How long the provider asks to wait before the next."""


class LitellmCalls:
    """The calls of one rollout, and what they came to."""

    def __init__(self, litellm: ModuleType, config: CallConfig) -> None:
        self._litellm = litellm
        self._config = config
        keys = [config.api_key] if config.api_key else _keys_of_environment()
        self._secrets = sorted({*keys, *option_secrets(config.arguments)}, key=len, reverse=True)
        self._given = 0
        self._again = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._model = ""

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Any:
        """The next answer, litellm's `ModelResponse`.

        Raises:
            ContextFullError: the conversation is longer than the model takes.
            EngineError: the provider refused, or failed; `retryable`: as often as it was to be tried.
        """
        with waiting_for("the model"):
            return await self._answer(messages, tools)

    async def _answer(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Any:
        failures = 0
        while True:
            try:
                response = await self._ask(messages, tools)
                self._refuse_no_answer(response)
            except _FailedError as failed:
                failures += 1
                if not failed.error.retryable or failures > self._config.max_retries:
                    raise failed.error from None
                wait_s = self._wait_s(failures, failed.asked_s)
                logger.warning("%s; try %d in %.3g s", failed.error, failures + 1, wait_s)
                self._again += 1
                await anyio.sleep(wait_s)
            else:
                self._count(response)
                return response

    def describe(self) -> dict[str, Scalar]:
        """What the calls came to, for provenance. Tokens are as the provider counts them; 0: it does not."""
        return {
            "agent_calls": self._given,
            "agent_calls_again": self._again,
            "agent_prompt_tokens": self._prompt_tokens,
            "agent_completion_tokens": self._completion_tokens,
            "agent_answered_by": self._model,
        }

    async def _ask(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Any:
        config = self._config
        arguments: dict[str, object] = {**config.arguments, "messages": list(messages)}
        if tools:
            arguments["tools"] = list(tools)
        if config.api_base or config.api_key:
            arguments |= {"api_base": config.api_base, "api_key": config.api_key or _NO_KEY}
        try:
            with anyio.fail_after(config.timeout_s):
                return await self._litellm.acompletion(
                    model=config.model, timeout=config.timeout_s, max_retries=0, **arguments
                )
        except TimeoutError:
            what = f"{config.model} gave no answer within timeout_s = {config.timeout_s:g} s"
            raise _FailedError(EngineError("timeout", what, retryable=True)) from None
        except Exception as error:
            # Broad on purpose: most are openai's, but what litellm itself trips over is none of the agent's
            # fault either. Not chained: its own text may hold the key.
            raise _FailedError(self._meaning(error), _asked_s(error)) from None

    def _refuse_no_answer(self, response: Any) -> None:
        """An answer that is none is a failed try, whatever its status says.

        Raises:
            _FailedError: there is no choice or message in it, the server broke off, or it holds back what was
                said.
        """
        choices = getattr(response, "choices", None)
        message = getattr(choices[0], "message", None) if choices else None
        if not choices or message is None:
            raise _FailedError(self._unavailable("an answer without a message"))
        choice = choices[0]
        native = (getattr(choice, "provider_specific_fields", None) or {}).get("native_finish_reason")
        if (reason := native or choice.finish_reason) in _BROKEN_OFF:
            raise _FailedError(self._unavailable(f"the server broke off: finish_reason {reason!r}"))
        if choice.finish_reason == "content_filter" and not message.content and not message.tool_calls:
            what = f"{self._config.model}: its answer was held back: finish_reason {reason!r}"
            raise _FailedError(EngineError("content_policy", what, fault="task"))

    def _unavailable(self, what: str) -> EngineError:
        return EngineError("unavailable", f"{self._config.model}: {what}", retryable=True)

    def _meaning(self, error: Any) -> EngineError | ContextFullError:
        import openai  # litellm's errors are subclasses of its

        code = getattr(error, "status_code", None)
        status = code if isinstance(code, int) else None
        text = self._hide(text_of(error).partition("Traceback (most recent call last)")[0].rstrip())
        said = f"{self._config.model}: {text or type(error).__name__}"
        exceptions = self._litellm.exceptions
        if isinstance(error, exceptions.ContextWindowExceededError) or (
            status in (400, 413, 422) and _CONTEXT_FULL.search(text)
        ):
            if not self._given and (limit := _limit_in(self._config.arguments)):
                # With nothing said so far it may be the configuration that leaves no room: no reward of 0.
                fix = f"a smaller agent.{limit}, or none: then a prompt that is too long is exit_context"
                return EngineError("refused", f"{said}\n  try: {fix}", fault="task")
            return ContextFullError(said)
        # By status first: the class of litellm's error is a guess from the provider's words.
        if status in (401, 403) or isinstance(error, openai.AuthenticationError):
            return EngineError("credentials", f"{said}\n  try: another key in agent.api_key_file")
        if status == 404 or isinstance(error, openai.NotFoundError):
            return EngineError("no_model", f"{said}\n  try: another agent.model or agent.api_base")
        held_back = status == 400 and _HELD_BACK.search(text) is not None
        if held_back or isinstance(error, exceptions.ContentPolicyViolationError):
            return EngineError("content_policy", said, fault="task")
        if status is None or isinstance(error, openai.APIConnectionError):
            return EngineError("unavailable", said, retryable=True)
        # Below 400 is an answer that litellm cannot read, which some providers' errors carry along.
        if status < 400 or status in _NOT_NOW or status >= 500:
            return EngineError("unavailable", said, retryable=True)
        return EngineError("refused", said)

    def _wait_s(self, failures: int, asked_s: float) -> float:
        """Twice as long each time, and no less than the provider asks for; both up to a limit."""
        doubled_s = self._config.retry_wait_s * 2.0 ** (failures - 1)
        return min(max(doubled_s, asked_s), _LONGEST_WAIT_S)

    def _count(self, response: Any) -> None:
        self._given += 1
        self._model = str(response.model or "")
        usage = getattr(response, "usage", None)
        if usage is not None:
            self._prompt_tokens += usage.prompt_tokens or 0
            self._completion_tokens += usage.completion_tokens or 0

    def _hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        return text


def _limit_in(arguments: Mapping[str, object]) -> str:
    """The key of `[agent]` that limits an answer's length. Empty: there is none."""
    if "max_tokens" in arguments:
        return "max_tokens"  # no option: it is refused there
    body = arguments.get("extra_body")
    inner = body if isinstance(body, Mapping) else {}
    given = [f"options.{name}" for name in arguments if name in _LIMITS]
    given += [f"options.extra_body.{name}" for name in inner if name in _LIMITS]
    return given[0] if given else ""


def _keys_of_environment() -> list[str]:
    """What litellm may have sent."""
    return [value for name, value in os.environ.items() if name.endswith("_API_KEY") and len(value) > 5]


def _asked_s(error: Any) -> float:
    """How long the provider asks to wait; 0: it does not say."""
    headers = getattr(error, "litellm_response_headers", None) or {}
    value = str(headers.get("retry-after", ""))
    return float(value) if re.fullmatch(r"\d{1,6}(\.\d+)?", value) else 0.0
