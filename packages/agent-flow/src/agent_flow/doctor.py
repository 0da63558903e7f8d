"""`agent-flow doctor`: looks at every part of a run before there is one, and says what will be used."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import anyio
import msgspec

from agent_flow.clock import Clock
from agent_flow.config import ConfigFile
from agent_flow.errors import AgentFlowError, RolloutError, UsageError, unwrapped
from agent_flow.redaction import Redactor
from agent_flow.scratch import scratch_folder

State = Literal["ok", "warn", "fail", "skip"]
_TOLD = "token_tracking."
"""What this logs about a template is what the template's own check says."""
_EVIDENCE = 600
"""Characters of a failure's evidence that are shown, from its end."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    check: str
    state: State
    """`fail` would stop a run; `skip`: not looked at, because of what `text` says."""
    text: str
    fix: str = ""
    """What to do. Empty: nothing, or nobody knows."""
    seconds: float = 0.0
    traceback: str = ""
    """Of an error that is none of this package's."""


class Say(msgspec.Struct, frozen=True):
    """How a check tells what it found."""

    check: str
    tell: Callable[[Finding], None]

    def ok(self, text: str) -> None:
        """It works, or will be used."""
        self.tell(Finding(check=self.check, state="ok", text=text))

    def warn(self, text: str, fix: str = "") -> None:
        """A run can start, but somebody should know."""
        self.tell(Finding(check=self.check, state="warn", text=text, fix=fix))

    def fail(self, text: str, fix: str = "") -> None:
        """A run would stop."""
        self.tell(Finding(check=self.check, state="fail", text=text, fix=fix))


class NotCheckedError(AgentFlowError):
    """A check needs what another one did not get. No failure: what did fail has a finding of its own."""


Check = Callable[[Say], Awaitable[None]]


class Examination:
    """Runs checks one after the other; a broken part is a finding and never the end of the others.

    Args:
        file: The configuration that is looked at.
        tell: Called with each finding as soon as there is one.
        limit_s: How long one check may wait.
    """

    def __init__(self, file: ConfigFile, tell: Callable[[Finding], None], limit_s: float) -> None:
        self._tell = tell
        self._limit_s = limit_s
        self._redactor = Redactor(file)
        self.findings: list[Finding] = []

    async def check(self, name: str, work: Check) -> None:
        """Carry out a check under its time limit. What is logged meanwhile are warnings of this check."""
        began_s = anyio.current_time()
        found: list[Finding] = []
        log = _Log()
        logging.getLogger().addHandler(log)
        try:
            with anyio.move_on_after(self._limit_s) as scope:
                await self._guarded(Say(name, found.append), work)
            if scope.cancelled_caught:
                text = f"no end after {self._limit_s:g} s"
                found.append(Finding(check=name, state="fail", text=text, fix="--timeout gives it longer"))
        finally:
            logging.getLogger().removeHandler(log)
        found += [Finding(check=name, state="warn", text=text) for text in log.texts]
        seconds = round(anyio.current_time() - began_s, 3)
        for finding in found:
            self._say(msgspec.structs.replace(finding, seconds=seconds))

    async def _guarded(self, say: Say, work: Check) -> None:
        try:
            with unwrapped():
                await work(say)
        except NotCheckedError as error:
            say.tell(Finding(check=say.check, state="skip", text=f"not checked: {error}"))
        except UsageError as error:
            text = f"{error.where}: {error.what}" if error.where else error.what
            say.fail(text, error.fix)
        except RolloutError as error:
            evidence = error.evidence.strip()[-_EVIDENCE:]
            say.fail(f"{error}\n{evidence}" if evidence else str(error))
        except AgentFlowError as error:
            say.fail(str(error))
        except (Exception, SystemExit) as error:
            # Broad on purpose: whatever a part does, the others are still looked at.
            frames = traceback.extract_tb(error.__traceback__)
            at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
            say.tell(
                Finding(
                    check=say.check,
                    state="fail",
                    text=f"{type(error).__name__}: {error}".rstrip(": ") + at,
                    fix="--debug shows where it comes from",
                    traceback="".join(traceback.format_exception(error)),
                )
            )

    def _say(self, finding: Finding) -> None:
        hide = self._redactor.hide
        shown = msgspec.structs.replace(
            finding,
            text=hide(finding.text),
            fix=hide(finding.fix),
            traceback=hide(finding.traceback),
        )
        self.findings.append(shown)
        self._tell(shown)


async def examine(
    file: ConfigFile, *, clock: Clock, tell: Callable[[Finding], None], limit_s: float = 120.0
) -> tuple[Finding, ...]:
    """Look at every part of a run. Starts and stops a sandbox and a receiver; leaves nothing behind.

    Args:
        file: The configuration.
        clock: Given to the providers.
        tell: Called with each finding as soon as there is one.
        limit_s: How long one check may take.
    """
    from agent_flow.checkup import Checkup  # loads tokenizers, which `import agent_flow` does without

    examination = Examination(file, tell, limit_s)
    with ExitStack() as stack:
        scratch = _scratch(stack)
        checkup = Checkup(file, clock, scratch)
        for name, check in checkup.checks():
            await examination.check(name, check)
    return tuple(examination.findings)


def _scratch(stack: ExitStack) -> Path | OSError:
    """A temporary folder, or why there is none."""
    try:
        return stack.enter_context(scratch_folder())
    except OSError as error:
        return error


class _Log(logging.Handler):
    """Keeps the warnings that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(_TOLD):
            self.texts.append(record.getMessage())


def summary(findings: tuple[Finding, ...]) -> Mapping[State, int]:
    """How many findings there are of each state."""
    states: tuple[State, ...] = ("ok", "warn", "fail", "skip")
    return {state: sum(finding.state == state for finding in findings) for state in states}
