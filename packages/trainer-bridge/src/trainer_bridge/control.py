"""Control as state: what the trainer wants, re-sent until replaced, so that a lost message heals itself."""

from __future__ import annotations

import msgspec

from trainer_bridge.messages import Control, RunState


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

    def message(self, session: int) -> Control:
        """As it travels."""
        return Control(
            session=session,
            generation=self.generation,
            run_state=self.run_state,
            weights_version=self.weights_version,
            min_version=self.min_version,
            policy_run=self.policy_run,
        )


class ControlBoard:
    """Trainer side: holds the state and numbers its changes.

    Args:
        base: generations start above it. The receiver passes its start time, so that a restarted trainer's
            first state is newer than anything its predecessor sent.
    """

    def __init__(self, base: int = 0) -> None:
        self._base = base
        self.state = ControlState()

    def set(
        self,
        *,
        run_state: RunState | None = None,
        policy_run: str | None = None,
        weights_version: int | None = None,
        min_version: int | None = None,
    ) -> ControlState:
        """Change what is given, keep the rest; returns the new state."""
        old = self.state
        self.state = ControlState(
            generation=max(old.generation, self._base) + 1,
            run_state=old.run_state if run_state is None else run_state,
            policy_run=old.policy_run if policy_run is None else policy_run,
            weights_version=old.weights_version if weights_version is None else weights_version,
            min_version=old.min_version if min_version is None else min_version,
        )
        return self.state


class ControlView:
    """Worker side: the newest state seen."""

    def __init__(self) -> None:
        self.state = ControlState()

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
        )
        return True
