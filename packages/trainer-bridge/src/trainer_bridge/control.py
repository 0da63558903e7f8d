"""Control as state: what the trainer wants, re-sent until replaced, so that a lost message heals itself."""

from __future__ import annotations

import msgspec

from trainer_bridge.errors import ConfigError
from trainer_bridge.messages import Control, RunState
from trainer_bridge.options import check_options

MAX_VERSION = 2**31 - 1
"""Upper bound of a weight version."""


class ControlState(msgspec.Struct, frozen=True, kw_only=True):
    """The state in which the trainer wants its workers."""

    generation: int = 0
    """Grows with each change; 0: the trainer has said nothing yet."""
    run_state: RunState = "run"
    """`run`; `pause`: start no generation; `drain`: finish what runs, start nothing; `abort`: cut what
    runs."""
    policy_run: str = ""
    """Names the training run that counts the versions."""
    weights_version: int = -1
    """Latest published weight version; -1: none yet."""
    min_version: int = -1
    """Samples below it will be refused as stale; -1: no rule."""
    weights_location: str = ""
    """Where the weights of `weights_version` lie: a path, a URL, whatever trainer and workers agree on; at
    most 2048 characters. Empty: the trainer does not say."""

    def message(self, session: int) -> Control:
        """As it travels."""
        return Control(
            session=session,
            generation=self.generation,
            run_state=self.run_state,
            weights_version=self.weights_version,
            min_version=self.min_version,
            policy_run=self.policy_run,
            weights_location=self.weights_location,
        )


class ControlBoard:
    """Trainer side: holds the state and numbers its changes.

    Args:
        base: generations start above it. The receiver passes its start time, so that a restarted trainer's
            first state is newer than anything its predecessor sent.
        max_staleness: a new `weights_version` brings the `min_version` that follows from it. None: it does
            not.
    """

    def __init__(self, base: int = 0, *, max_staleness: int | None = None) -> None:
        self._base = base
        self._max_staleness = max_staleness
        self.state = ControlState()

    def set(
        self,
        *,
        run_state: RunState | None = None,
        policy_run: str | None = None,
        weights_version: int | None = None,
        min_version: int | None = None,
        weights_location: str | None = None,
    ) -> ControlState:
        """Change what is given, keep the rest; returns the new state.

        A new `weights_version` or `policy_run` without a location has none: the old one's weights are others.

        Raises:
            ConfigError: a value that no message can carry, or a version that is none.
        """
        given = {
            "run_state": run_state,
            "policy_run": policy_run,
            "weights_version": weights_version,
            "min_version": min_version,
            "weights_location": weights_location,
        }
        check_options(ControlBoard.set, given, ConfigError)
        for name, version, least in (
            ("weights_version", weights_version, 0),
            ("min_version", min_version, -1),
        ):
            if version is not None and not least <= version <= MAX_VERSION:
                raise ConfigError(f"{name} is {version}: give a whole number from {least} to {MAX_VERSION}")
        if weights_version is not None and min_version is None and self._max_staleness is not None:
            min_version = max(weights_version - self._max_staleness, 0) or -1
        old = self.state
        if weights_location is None and (
            weights_version not in (None, old.weights_version) or policy_run not in (None, old.policy_run)
        ):
            weights_location = ""
        state = ControlState(
            generation=max(old.generation, self._base) + 1,
            run_state=old.run_state if run_state is None else run_state,
            policy_run=old.policy_run if policy_run is None else policy_run,
            weights_version=old.weights_version if weights_version is None else weights_version,
            min_version=old.min_version if min_version is None else min_version,
            weights_location=old.weights_location if weights_location is None else weights_location,
        )
        try:
            msgspec.convert(msgspec.to_builtins(state.message(0)), Control)
        except msgspec.ValidationError as error:
            raise ConfigError(f"no peer could be told {state}: {error}") from error
        self.state = state
        return state


class ControlView:
    """Worker side: the newest state seen.

    Generations of one start of a receiver are compared with each other only: a restarted trainer may count
    from less, because its machine's clock is behind.
    """

    def __init__(self) -> None:
        self.state = ControlState()
        self._receiver: bytes | None = None

    def meet(self, receiver: bytes) -> None:
        """WELCOME came; another receiver than before has said nothing yet (generation 0).

        What its predecessor wanted holds until it does: no worker starts to generate between the two.

        Args:
            receiver: its id, which is another one after each start.
        """
        if receiver != self._receiver:
            self._receiver = receiver
            self.state = msgspec.structs.replace(self.state, generation=0)

    def apply(self, message: Control) -> bool:
        """Take a state over if it is newer; True if it was. Old and repeated messages change nothing."""
        if message.generation <= self.state.generation:
            return False
        self.state = ControlState(
            generation=message.generation,
            run_state=message.run_state,
            policy_run=message.policy_run,
            weights_version=message.weights_version,
            min_version=message.min_version,
            weights_location=message.weights_location,
        )
        return True
