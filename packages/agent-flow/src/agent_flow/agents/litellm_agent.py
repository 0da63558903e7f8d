"""`litellm_agent`: mini-swe-agent on any model that litellm reaches, to measure it on the same tasks.

The scaffold, its prompts and limits and the sandbox are those of `minisweagent`; the model is
mini-swe-agent's own for litellm (chat completions), with our tries and errors. No token of it is seen here,
so nothing of it can be trained: it is for evaluations alone.
"""

# pyright: basic
# mini-swe-agent and litellm are untyped.

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

import msgspec
from token_tracking.sample import Scalar

from agent_flow.agents.litellm_calls import (
    CallConfig,
    LitellmCalls,
    import_litellm,
    longest_call_s,
    refused_arguments,
)
from agent_flow.agents.mini_scaffold import require_text
from agent_flow.agents.minisweagent import MiniSweAgent
from agent_flow.agents.scaffold_thread import RolloutStopped, call
from agent_flow.agents.state import AgentState
from agent_flow.config import Seconds
from agent_flow.engines.endpoint import base_url, read_token
from agent_flow.errors import (
    AgentError,
    ConfigError,
    ContextFullError,
    EngineError,
    RolloutError,
    UsageError,
    text_of,
)
from agent_flow.protocols import AgentResult, Environment, Model, ProviderContext
from agent_flow.redaction import hide_user, masked
from agent_flow.task import Task

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONTEXT_FULL, _API = "exit_context", "exit_api"
_OURS = frozenset(
    {"model", "messages", "tools", "n", "stream", "temperature", "max_tokens", "timeout", "max_retries"}
    | {"num_retries", "api_key", "api_base", "base_url", "client", "custom_llm_provider"}
)
"""Arguments of litellm that have a key of their own, or none because of what this agent is."""


class LitellmAgent(MiniSweAgent):
    """Runs mini-swe-agent's `DefaultAgent` on mini-swe-agent's own model for litellm."""

    name: ClassVar[str] = "litellm_agent"

    class Config(MiniSweAgent.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[agent]` or `[eval.agent]` with `provider = "litellm_agent"`: for `agent-flow eval` alone."""

        model: Annotated[str, msgspec.Meta(min_length=1, examples=["openai/my-model"])]
        """As litellm names it: the provider, a slash, the model. A server with OpenAI's API is `openai`."""
        api_base: str = ""
        """Base URL of the server, such as `http://127.0.0.1:30000/v1`. Empty: the provider's own."""
        api_key_file: str = ""
        """File with the API key alone. Empty: a server named by `api_base` gets none, and a provider the one
        that litellm finds in the environment, such as OPENAI_API_KEY."""
        temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
        """0 is sent as 0. Left out: not sent, the provider's own."""
        max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
        """Of one answer. Left out: not sent."""
        options: Mapping[str, object] = {}
        """Further arguments of litellm's `completion`, such as `reasoning_effort`."""
        cost_limit: Annotated[float, msgspec.Meta(ge=0)] = 0.0
        """Of one rollout in US dollars, by litellm's list of prices: above it the scaffold ends with
        LimitsExceeded. 0: none."""
        timeout_s: Seconds = 300.0
        """Limit of one try of a call. All tries of one have to fit into `worker.generate_timeout_s`."""
        max_retries: Annotated[int, msgspec.Meta(ge=0)] = 4
        """Further tries of a call after a time-out, a lost connection, a rate limit or a failure of the
        provider's. After the last the rollout ends with exit_api."""
        retry_wait_s: Seconds = 4.0
        """Before the first further try; each time twice as long, and no less than the provider asks for, up
        to two minutes."""
        use_proxies: bool = False
        """Go through the proxies that `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY` name."""

    def __init__(self, config: Config, context: ProviderContext) -> None:
        self._file = context.file
        if context.mode == "train":
            raise ConfigError(
                f"agent provider '{self.name}' samples no tokens, so nothing of it can be trained",
                where=context.file.where(("agent", "provider")),
                fix="agent.provider = 'minisweagent'; what measures another model stands in [eval.agent], "
                "for agent-flow eval",
            )
        self._refuse_sampling()
        super().__init__(config, context)
        self._own = config
        self._cost_limit = config.cost_limit
        self._litellm: Any = import_litellm(context.scratch)
        self._litellm.disable_aiohttp_trust_env = not config.use_proxies
        self._calls = self._call_config()
        self._check_model()
        self._check_time()
        self._model_class = _model_class(self._mini, config.action_format == "text")
        self._model_settings = self._settings_of_model()

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a rollout's provenance."""
        config = self._own
        return {
            **super().describe(),
            "agent_litellm": importlib.metadata.version("litellm"),
            "agent_model": config.model,
            "agent_api_base": self._address(),
            "agent_temperature": "not sent" if config.temperature is None else config.temperature,
            "agent_max_tokens": "not sent" if config.max_tokens is None else config.max_tokens,
            "agent_options": json.dumps(masked(config.options), sort_keys=True, default=str),
            "agent_cost_limit": config.cost_limit,
        }

    async def run(
        self, task: Task, model: Model, environment: Environment, state: AgentState | None = None
    ) -> AgentResult:
        """Run the scaffold to its end in a thread; `model` is not asked.

        Raises:
            EngineError: the provider refused: a wrong key, no such model, a call that it does not take.
            RolloutError: the sandbox failed inside the scaffold; passed on as it was raised.
            AgentError: the scaffold itself raised, or there is a `state`: this agent has none.
        """
        if state is not None:
            raise AgentError("state", f"made by {state.agent}; {self.name} goes on from none")
        calls = LitellmCalls(self._litellm, self._calls)
        result = await self._carry_out(self._scaffold_model(calls), task, environment, None)
        extras: list[Any] = [message.get("extra", {}) for message in result.messages]
        produced_by = {**calls.describe(), "agent_cost": sum(extra.get("cost", 0.0) for extra in extras)}
        return msgspec.structs.replace(result, produced_by=produced_by)

    def _scaffold_model(self, calls: LitellmCalls) -> Any:
        model = self._model_class(**self._model_settings)
        model.calls, model.tools = calls, self.tools
        return model

    def _settings_of_model(self) -> dict[str, Any]:
        """Those of the scaffold's YAML file, but for what this agent has keys for."""
        name = self._own.model
        return {
            # As upstream's own choice of a model does it: such a provider reads a prompt again only if told.
            "set_cache_control": "default_end" if "claude" in name.lower() else None,
            **{key: value for key, value in self._settings["model"].items() if key != "model_kwargs"},
            "model_name": name,
            "litellm_model_registry": None,
            "cost_tracking": "default" if self._own.cost_limit else "ignore_errors",
        }

    def _call_config(self) -> CallConfig:
        config = self._own
        taken = sorted(_OURS & set(config.options))
        if taken:
            raise ConfigError(
                f"{', '.join(taken)}: not to be given among the options",
                where=self._where("options"),
                fix="the keys of agent beside them; what has none there cannot be changed",
            )
        sent = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        return CallConfig(
            model=config.model,
            api_base=self._of_file("api_base", base_url, config.api_base) if config.api_base else None,
            api_key=self._of_file("api_key_file", read_token, self._file.resolve(config.api_key_file))
            if config.api_key_file
            else "",
            timeout_s=config.timeout_s,
            max_retries=config.max_retries,
            retry_wait_s=config.retry_wait_s,
            arguments={
                **config.options,
                **{name: value for name, value in sent.items() if value is not None},
            },
        )

    def _check_model(self) -> None:
        """Say before the first rollout what litellm would say in each of them."""
        config, litellm = self._own, self._litellm
        try:
            name, provider, _, self._api_base = litellm.get_llm_provider(
                config.model, api_base=config.api_base or None
            )
        except litellm.exceptions.BadRequestError:
            raise ConfigError(
                f"litellm knows no provider of a model {config.model!r}",
                where=self._where("model"),
                fix="'openai/NAME' with api_base for a server with OpenAI's API; else as in 'anthropic/NAME'",
            ) from None
        if not config.api_key_file and not config.api_base:
            missing = litellm.validate_environment(config.model)["missing_keys"]
            if keys := [name for name in missing if name.endswith("_API_KEY")]:
                raise ConfigError(
                    f"{config.model} asks for an API key, and there is none",
                    where=self._where("model"),
                    fix=f"api_key_file, or {keys[0]} in the environment",
                )
        if config.cost_limit:
            self._check_price()
        self._check_options(name, provider)

    def _check_options(self, name: str, provider: str) -> None:
        if said := refused_arguments(self._litellm, name, provider, self._calls.arguments):
            raise ConfigError(
                f"litellm does not take these arguments for {self._own.model}: {said}",
                where=self._where("options" if self._own.options else "model"),
                fix="leave out what it names; with options.drop_params = true litellm itself leaves it out",
            )

    def _check_time(self) -> None:
        longest_s, limit_s = longest_call_s(self._calls), self._file.run.worker.generate_timeout_s
        if longest_s > limit_s:
            logger.warning(
                "%s: a call may take %g s with all its tries, and a rollout ends at "
                "worker.generate_timeout_s = %g s: fewer agent.max_retries, or a shorter agent.timeout_s",
                self._where("timeout_s"),
                longest_s,
                limit_s,
            )

    def _address(self) -> str:
        """The server that is asked, as litellm finds it: the configuration's, or that of the environment."""
        provider = self._own.model.partition("/")[0].upper()
        named = (os.environ.get(f"{provider}_{what}", "") for what in ("BASE_URL", "API_BASE"))
        found = self._own.api_base or self._api_base or next(filter(None, named), "")
        return hide_user(found) or "the provider's own"

    def _check_price(self) -> None:
        try:
            price = sum(
                self._litellm.cost_per_token(self._own.model, prompt_tokens=1000, completion_tokens=1000)
            )
        except Exception:  # it raises plain ones
            price = 0.0
        if price <= 0:
            raise ConfigError(
                f"litellm knows no price of {self._own.model}, so its cost cannot be limited",
                where=self._where("cost_limit"),
                fix="cost_limit = 0; step_limit holds in any case",
            )

    def _refuse_sampling(self) -> None:
        if self._file.run.eval.sampling:
            raise ConfigError(
                f"eval.sampling is for an engine, and agent provider '{self.name}' asks none",
                where=self._file.where(("eval", "sampling")),
                fix="temperature, max_tokens and options of the agent",
            )

    def _of_file(self, key: str, read: Callable[[T], str], value: T) -> str:
        try:
            return read(value)
        except UsageError as error:
            where = f"{error.where}: " if error.where else ""
            raise ConfigError(f"{where}{error.what}", where=self._where(key), fix=error.fix) from None

    def _where(self, key: str) -> str:
        """A key of this agent as `file:line`, in the section in which it stands."""
        run, own = self._file.run, self._file.run.eval.agent
        evaluated = key in own or ("provider" in own and key not in run.agent)
        return self._file.where(("eval", "agent", key) if evaluated else ("agent", key))


def _model_class(mini: SimpleNamespace, text: bool) -> type[Any]:
    """mini-swe-agent's model for litellm, asked on the event loop and tried again by us.

    A reply that it cannot read is forgotten, as upstream does it: providers refuse a history with a call that
    has no result.
    """
    from minisweagent.models.litellm_model import LitellmModel
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    base: Any = LitellmTextbasedModel if text else LitellmModel

    class ScaffoldModel(base):
        abort_exceptions: ClassVar[list[type[BaseException]]] = [BaseException]
        """Upstream would try again whatever is not among these."""
        asking = False
        """No turn can go on in another process: a provider keeps nothing of a call that was cut."""
        calls: LitellmCalls
        tools: Sequence[Mapping[str, object]]

        def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
            try:
                return super().query(messages, **kwargs)
            except (mini.exceptions.InterruptAgentFlow, RecursionError):
                raise  # the latter: of arguments nested too deep, which the model wrote
            except Exception as error:
                what = f"the answer cannot be used: {type(error).__name__}: {text_of(error)}"
                raise RolloutStopped(EngineError("answer", f"{self.config.model_name}: {what}")) from error

        def _query(self, messages: list[dict[str, Any]], **_: object) -> Any:
            try:
                return call(self.calls.complete, messages, self.tools)
            except ContextFullError as error:
                self._end(_CONTEXT_FULL, error)
            except EngineError as error:
                if not error.retryable:
                    raise RolloutStopped(error) from error
                self._end(_API, error)

        def _calculate_cost(self, response: Any) -> dict[str, float]:
            """Upstream's, which raises where a limit is to be kept and litellm knows no price."""
            try:
                return super()._calculate_cost(response)
            except RuntimeError as error:
                said = text_of(error.__cause__ or error)
                what = f"the cost of an answer of {self.config.model_name} cannot be computed: {said}"
                fix = "agent.cost_limit = 0; agent.step_limit holds in any case"
                raise RolloutStopped(EngineError("cost", f"{what}\n  try: {fix}")) from error

        def _end(self, exit_status: str, error: RolloutError) -> NoReturn:
            extra = {"exit_status": exit_status, "submission": ""}
            raise mini.exceptions.InterruptAgentFlow(
                {"role": "exit", "content": str(error), "extra": extra}
            ) from error

        def _parse_actions(self, response: Any) -> list[dict[str, Any]]:
            actions = super()._parse_actions(response)
            extra = {"finish_reason": response.choices[0].finish_reason}
            require_text(actions, mini, self.config.format_error_template, extra)
            return actions

    return ScaffoldModel
