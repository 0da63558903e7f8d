"""What an agent needs to go on in another process: its history, its counters, its scaffold's own variables.

Tokens are not in it: they are the conversation's (`Conversation.to_bytes`), and the two are taken together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from agent_flow.errors import AgentError
from agent_flow.rollout import Message

Count = Annotated[int, msgspec.Meta(ge=0)]


class AgentState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent between two turns, or within the turn that its conversation holds open."""

    kind: Literal["agent-flow-agent-state"] = "agent-flow-agent-state"
    version: Literal[1] = 1
    agent: str
    """Which agent made it, such as `minisweagent`."""
    scaffold_version: str
    messages: tuple[Message, ...]
    """The scaffold's own history."""
    n_calls: Count
    """Model calls that were answered; the one that was cut does not count."""
    n_format_fails: Count
    """Rejected answers in a row."""
    spent_s: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds at work so far, without those it was parked."""
    scaffold: Mapping[str, object] = {}
    """What only this scaffold has. Plain JSON."""

    def to_bytes(self) -> bytes:
        """As JSON.

        Raises:
            AgentError: the scaffold's history holds something that is not JSON.
        """
        try:
            return msgspec.json.encode(self)
        except (TypeError, ValueError) as error:
            raise AgentError("state", f"the agent's state is not plain JSON: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> AgentState:
        """Read what `to_bytes` wrote.

        Raises:
            AgentError: it is damaged or of another version.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise AgentError("state", f"not an agent's state: {error}") from error

    def check(self, agent: str, scaffold_version: str) -> None:
        """Refuse the state of another agent.

        Raises:
            AgentError: another agent or another version of its scaffold made it.
        """
        if (self.agent, self.scaffold_version) != (agent, scaffold_version):
            raise AgentError(
                "state",
                f"made by {self.agent} {self.scaffold_version}, this is {agent} {scaffold_version}",
            )
