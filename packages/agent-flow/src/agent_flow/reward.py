"""Reward functions: `"module:function"`, given what a rollout left behind, a number or a `Reward` out.

A judge that is down says nothing about the policy: what a function raises, or a time-out, is tried again and
then a counted drop, never a reward of 0 (slime#2176, verl's `compute_score` that returns 0 on any exception).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import cast

import anyio
import msgspec
import numpy as np
from token_tracking.sample import Scalar

from agent_flow.config import Count, Seconds
from agent_flow.errors import ConfigError, GraderError, RolloutError
from agent_flow.provider_module import failure, searched
from agent_flow.reward_thread import contained, described, in_thread
from agent_flow.rollout import Message, Mode, Rollout
from agent_flow.task import Task, copied

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 30.0
_LEAST, _MOST = -(2**63), 2**64 - 1


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward function is given: a rollout that has ended. A copy, for each call anew."""

    task: Task
    """`task.row` holds every column of its row, the expected answer among them."""
    messages: tuple[Message, ...]
    """The agent's whole history."""
    text: str
    """Content of the last assistant message, without its reasoning. Empty: there is none."""
    exit_status: str
    turns: int
    """Turns that were sampled; `Reward.turn_rewards` has one entry for each."""
    artifacts: Mapping[str, bytes]
    """Files that the flow kept, such as `patch.diff`."""
    mode: Mode
    rollout_id: str
    member: int
    """Which rollout of its group, from zero."""


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward function may return in the place of a number."""

    reward: float
    details: Mapping[str, Scalar] = {}
    """Goes into the samples' `extra` and the rollout's files, by name: text, finite numbers of 64 bits or
    None. Scalars of numpy are made plain."""
    turn_rewards: tuple[float | None, ...] | None = None
    """One per sampled turn, in order; None for a turn without one. None: no turn has its own."""
    log: str = ""
    """For `grader.log`."""


class RewardUnavailable(GraderError):  # noqa: N818  (what has happened, not what is wrong)
    """To be raised by a reward function whose judge is down: tried again, then a counted drop."""

    def __init__(self, message: str, *, evidence: str = "") -> None:
        super().__init__("reward_unavailable", message, retryable=True, evidence=evidence)


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a reward function is called. Part of a runtime's own section."""

    reward: str
    """`module:function`, called with an `Episode`."""
    reward_kwargs: Mapping[str, object] = {}
    """Keyword arguments for every call, such as a judge's URL."""
    reward_timeout_s: Seconds = 60.0
    """Of one call. A thread that hangs longer is left behind."""
    reward_attempts: Count = 3
    """Calls for one rollout before it is dropped."""
    reward_wait_s: Seconds = 1.0
    """Before the second call; doubled with each further one, up to 30 s."""
    reward_at_once: Count = 16
    """Calls at the same time."""


class RewardFunction:
    """A user's function, checked when it is loaded and each time it answers.

    Raises:
        ConfigError: there is no such function, or it cannot be called with one episode.
    """

    def __init__(self, config: RewardConfig, *, where: str, python_path: tuple[Path, ...] = ()) -> None:
        """`where` stands in errors; the module is sought in the folders of `python_path` first."""
        self._config = config
        with searched(python_path):
            function = _resolve(config.reward, where)
        self._function = functools.partial(function, **config.reward_kwargs)
        _check_signature(self._function, config.reward, where)
        self._limit = anyio.Semaphore(config.reward_at_once)
        self._file = Path(sys.modules[config.reward.partition(":")[0]].__file__ or "")

    def describe(self) -> dict[str, Scalar]:
        """What goes into a sample's provenance; the version is the hash of the function's file."""
        digest = sha256(self._file.read_bytes()).hexdigest()[:16] if self._file.is_file() else "no file"
        return {"grader": f"reward-function/{digest}", "grader_function": self._config.reward}

    async def judge(self, episode: Episode) -> tuple[Reward, int]:
        """The checked reward, and how many calls it took.

        Raises:
            GraderError: fault `infra` when every call failed, `task` when what it returns is no reward.
        """
        attempts = self._config.reward_attempts
        for attempt in range(1, attempts + 1):
            try:
                async with self._limit:
                    answer = await self._call(episode)
                return self._checked(answer, episode), attempt
            except GraderError as error:
                if not error.retryable:
                    raise
                if attempt == attempts:
                    # Not retryable any more: to sample the rollout again would not bring the judge back.
                    raise GraderError(
                        error.cause,
                        f"{error.message} (call {attempt} of {attempts})",
                        fault=error.fault,
                        evidence=error.evidence,
                    ) from error
                logger.info("%s: %s (call %d of %d)", episode.rollout_id, error, attempt, attempts)
            await anyio.sleep(min(self._config.reward_wait_s * 2 ** (attempt - 1), _LONGEST_WAIT_S))
        raise GraderError("reward_attempts", f"reward_attempts is {attempts}", fault="task")

    async def _call(self, episode: Episode) -> object:
        limit_s = self._config.reward_timeout_s
        answer: object = None
        failure: Exception | None = None
        with anyio.move_on_after(limit_s) as scope:
            try:
                answer = await contained(self._answer(_copy_of(episode)))
            except Exception as error:
                failure = error
        if scope.cancel_called:  # whatever it made of that: an answer that was cut is none
            raise GraderError(
                "reward_timeout",
                f"{self._config.reward} took longer than reward_timeout_s = {limit_s:g} s",
                retryable=True,
            )
        if isinstance(failure, RolloutError):
            raise failure
        if failure is not None:
            raise GraderError(
                "reward_raised",
                f"{self._config.reward} raised {described(failure)}",
                retryable=True,
                evidence="".join(traceback.format_exception(failure)),
            ) from failure
        return answer

    async def _answer(self, episode: Episode) -> object:
        if inspect.iscoroutinefunction(self._function.func):
            answer = self._function(episode)
        else:
            answer = await in_thread(functools.partial(self._function, episode))
        return await answer if inspect.isawaitable(answer) else answer

    def _checked(self, answer: object, episode: Episode) -> Reward:
        try:
            return self._read(answer, episode)
        except GraderError:
            raise
        except Exception as error:  # code of the user's too: a `__float__` that raises
            what = f"what it returns cannot be read: {described(error)}"
            raise self._wrong(episode, what) from error

    def _read(self, answer: object, episode: Episode) -> Reward:
        if not isinstance(answer, Reward):
            return Reward(reward=self._number(answer, episode, "what it returns"))
        log = cast("object", answer.log)
        if not isinstance(log, str):
            raise self._wrong(episode, f"log is {_shown(log)}, need text")
        log.encode(errors="surrogateescape")  # as it is written
        return Reward(
            reward=self._number(answer.reward, episode, "reward"),
            details=self._details(answer.details, episode),
            turn_rewards=self._turn_rewards(answer.turn_rewards, episode),
            log=log,
        )

    def _details(self, details: object, episode: Episode) -> dict[str, Scalar]:
        if not isinstance(details, Mapping):
            raise self._wrong(episode, f"details is {_shown(details)}, need a dict")
        made: dict[str, Scalar] = {}
        for name, value in cast("Mapping[object, object]", details).items():
            if not isinstance(name, str):
                raise self._wrong(
                    episode, f"details has the key {_shown(name)} for {_shown(value)}, need text as key"
                )
            try:
                made[str(_scalar(name))] = _scalar(value)
            except ValueError as error:
                raise self._wrong(episode, f"details[{name!r:.60}] is {_shown(value)}, {error}") from error
        return made

    def _turn_rewards(self, turns: object, episode: Episode) -> tuple[float | None, ...] | None:
        if turns is None:
            return None
        if isinstance(turns, str | bytes) or not isinstance(turns, Sequence | np.ndarray):
            raise self._wrong(episode, f"turn_rewards is {_shown(turns)}, need one for each turn, or None")
        values = tuple(cast("Sequence[object]", turns))
        if len(values) != episode.turns:
            raise self._wrong(episode, f"{len(values)} turn_rewards for {episode.turns} turns")
        return tuple(
            None if value is None else self._number(value, episode, f"turn_rewards[{at}]")
            for at, value in enumerate(values)
        )

    def _number(self, value: object, episode: Episode, what: str) -> float:
        if isinstance(value, np.generic):
            value = cast("object", value.item())
        if not isinstance(value, Real):
            raise self._wrong(episode, f"{what} is {_shown(value)}, need a number or a Reward")
        try:
            number = float(value)
        except OverflowError as error:
            raise self._wrong(episode, f"{what} is too large: need a finite number") from error
        if not math.isfinite(number):
            raise self._wrong(episode, f"{what} is {number}: need a finite number")
        return number

    def _wrong(self, episode: Episode, what: str) -> GraderError:
        return GraderError(
            "reward_type",
            f"{self._config.reward} for task {episode.task.instance_id}: {what}",
            fault="task",
            evidence=f"the rollout ended with:\n{episode.text}",
        )


def episode_of(rollout: Rollout) -> Episode:
    """What a reward function is given of a rollout."""
    messages = rollout.messages or tuple(dict(message) for message in rollout.conversation.messages)
    said = [message.get("content") for message in messages if message.get("role") == "assistant"]
    return Episode(
        task=rollout.task,
        messages=messages,
        text=said[-1] if said and isinstance(said[-1], str) else "",
        exit_status=rollout.exit_status,
        turns=rollout.conversation.turns,
        artifacts=rollout.artifacts,
        mode=rollout.mode,
        rollout_id=rollout.rollout_id,
        member=rollout.member,
    )


def _copy_of(episode: Episode) -> Episode:
    return msgspec.structs.replace(
        episode,
        task=episode.task.fresh(),
        messages=copied(episode.messages),
        artifacts=dict(episode.artifacts),
    )


def _scalar(value: object) -> Scalar:
    """The value as JSON has it.

    Raises:
        ValueError: it has none; says what is needed.
    """
    if isinstance(value, np.generic):
        value = cast("object", value.item())
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not _LEAST <= value <= _MOST:
            raise ValueError("need an integer of 64 bits")
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if not math.isfinite(number):
            raise ValueError("need a finite number, or None")
        return number
    if not isinstance(value, str):
        raise ValueError("need text or a number")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("need text without halves of surrogate pairs") from error
    return str.__str__(value)  # of an enumeration: its value


def _shown(value: object) -> str:
    try:
        text = f"{value!r:.60}"
    except Exception:  # such as an integer of too many digits
        text = "what cannot be shown"
    return f"{text} ({type(value).__name__})"


def _resolve(spec: str, where: str) -> Callable[..., object]:
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ConfigError(f"reward = {spec!r} is not 'module:function'", where=where)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            raise ConfigError(
                f"no module {module_name!r} for reward = {spec!r}",
                where=where,
                fix='python_path = ["FOLDER"] at the top of the configuration, for a file of your own',
            ) from error
        raise failure(f"reward = {spec!r} cannot be imported", error, where) from error
    found: object = vars(module).get(name)
    if not callable(found):
        known = ", ".join(sorted(key for key, value in vars(module).items() if inspect.isfunction(value)))
        raise ConfigError(f"{module_name} has no function {name!r}", where=where, fix=f"it has: {known}")
    return found


def _check_signature(function: functools.partial[object], spec: str, where: str) -> None:
    try:
        inspect.signature(function.func).bind(None, **function.keywords)
    except TypeError as error:
        given = ", ".join(["episode", *function.keywords])
        raise ConfigError(
            f"{spec} cannot be called with ({given}): {error}",
            where=where,
            fix=f"def {spec.rpartition(':')[2]}(episode): ..., its other arguments in reward_kwargs",
        ) from error
    except ValueError:
        # A function of C has no signature to read; the first call says what is wrong.
        logger.info("the signature of %s cannot be read", spec)
