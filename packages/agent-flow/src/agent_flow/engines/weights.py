"""Which weights are the current ones: the rule by which a replica may be called."""

from __future__ import annotations

from collections.abc import Mapping

from token_tracking.sample import UNKNOWN_VERSION

from agent_flow.engines.version import VersionReader
from agent_flow.errors import UsageError


class CurrentWeights:
    """What the replicas have to report.

    Before a version is known all have to report the same text (`default`, of servers that were just started).
    Once one is known, only that version of that policy run counts, or a later one: a server that was started
    again has the weights of its disk and says `default`; a trainer that went back counts on from an older
    number, in a new policy run (miles#2244).
    """

    def __init__(self, reader: VersionReader) -> None:
        self._reader = reader
        self.text = ""
        """What replicas with the current weights report. Empty: nothing is known yet."""
        self.version = UNKNOWN_VERSION

    @property
    def policy_run(self) -> str:
        """Empty: it will be that of the first version that is seen."""
        return self._reader.policy_run

    def read(self, text: str) -> int:
        """The version in a replica's text; -2 where it is none, or of another policy run."""
        version = (self._reader if self.policy_run else VersionReader(_run(text))).number(text)
        return UNKNOWN_VERSION if version is None else version

    def agree(self, reports: Mapping[str, str]) -> None:
        """Take over what the replicas report at the start, by address.

        Raises:
            UsageError: they report different weights, or those of another policy run.
        """
        each = "; ".join(f"{address}: {text!r}" for address, text in sorted(reports.items()))
        if len(set(reports.values())) > 1:
            raise UsageError(
                f"the servers have different weights: {each}",
                where="addresses",
                fix="load one version into all of them, or leave some addresses out",
            )
        text = next(iter(reports.values()))
        objection = self.objection(text)
        if objection:
            raise UsageError(
                objection,
                where="policy_run",
                fix=f"set it to {_run(text)!r}, or load weights of {self.policy_run!r}",
            )
        self.see(text)

    def objection(self, text: str) -> str:
        """Why a replica that reports this may not be called; empty: it may."""
        version = self.read(text)
        if self.version != UNKNOWN_VERSION:
            return "" if version >= self.version else f"it has weights {text!r}, current are {self.text!r}"
        if version != UNKNOWN_VERSION:
            return ""
        if self.policy_run and "/" in text:
            return f"it has weights {text!r}, which are not of policy run {self.policy_run!r}"
        return "" if text == self.text or not self.text else f"it has weights {text!r}, others {self.text!r}"

    def see(self, text: str) -> bool:
        """A replica with these weights is called. Returns whether they are newer than what was current."""
        version = self.read(text)
        newer = version > self.version
        if newer:
            self._reader.policy_run = self.policy_run or _run(text)
        if newer or not self.text:
            self.text, self.version = text, version
        return newer

    def advance(self, version: int, policy_run: str) -> bool:
        """An answer has tokens of this version. Returns whether that is newer than the current.

        Args:
            version: of the answer.
            policy_run: the one that was current when its call was sent. The version of another one, which
                was replaced meanwhile, says nothing.
        """
        current = policy_run == self.policy_run
        return current and version > self.version and self.see(self._reader.text(version))

    def set(self, text: str) -> None:
        """These are the current weights, whatever was before.

        Raises:
            UsageError: the text is no version.
        """
        version = VersionReader(_run(text)).number(text)
        if version is None:
            raise UsageError(
                f"{text!r} is no weight version", fix="POLICY_RUN/n, with n from 0 to 2147483647"
            )
        self.text, self.version, self._reader.policy_run = text, version, _run(text)


def _run(text: str) -> str:
    return text.rpartition("/")[0]
