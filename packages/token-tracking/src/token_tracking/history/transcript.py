"""`Transcript`: what is held of a conversation, to read, check and export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from token_tracking.checking import report
from token_tracking.control import ControlPolicy, ControlTokens
from token_tracking.forms import export
from token_tracking.history import findings
from token_tracking.history.branch import Branch, Message
from token_tracking.history.causes import CrossStop
from token_tracking.history.turn import sampled_count
from token_tracking.sample import Sample, Scalar, Source, Status
from token_tracking.template import ChatTemplate


class Transcript:
    """Branches with their messages and tokens. `Conversation` adds to it; nothing here changes anything."""

    def __init__(self, first: Branch, control_tokens: ControlPolicy):
        self._policy: ControlPolicy = control_tokens
        self._control = first.control
        self._branches = [first]
        self._current = 0
        self._turns = 0

    @property
    def template(self) -> ChatTemplate:
        """The template of the current branch."""
        return self._branch.template

    @property
    def control_tokens(self) -> ControlPolicy:
        """The policy for control tokens in message text."""
        return self._policy

    @property
    def cross_stop(self) -> CrossStop:
        """What becomes of a turn with another stop token than the template prints there."""
        return self._branches[0].cross_stop

    @property
    def control(self) -> ControlTokens:
        """How message text is marked and encoded."""
        return self._control

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches in the order they began. To read, not to change."""
        return tuple(self._branches)

    @property
    def current(self) -> int:
        """Index of the branch that prompts and records go to."""
        return self._current

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages of the current branch. To read, not to change."""
        return tuple(self._branch.messages)

    @property
    def turns(self) -> int:
        """Assistant turns recorded, in all branches."""
        return self._turns

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled, in all branches, each counted once."""
        return sum(sampled_count(branch.turns[branch.inherited :]) for branch in self._branches)

    @property
    def prompt_tokens(self) -> int:
        """Tokens held that were not sampled, in all branches.

        The turns that a branch shares with an earlier one count once, with the prompts before them; a branch
        that shares no turn counts whole, though its first messages may be the same.
        """
        total = 0
        for branch in self._branches:
            inherited = branch.turns[: branch.inherited]
            start = inherited[-1].end if inherited else 0
            total += len(branch.ledger) - start - sampled_count(branch.turns[branch.inherited :])
        return total

    @property
    def open_turn(self) -> bool:
        """Whether the last turn was aborted and waits to be continued."""
        return self._branch.open_turn

    @property
    def waiting(self) -> bool:
        """Whether there is something to ask the engine: an answer, or the rest of a turn that was aborted."""
        messages = self._branch.messages
        return self._branch.open_turn or (bool(messages) and messages[-1]["role"] != "assistant")

    @property
    def _branch(self) -> Branch:
        return self._branches[self._current]

    def report(self, *, render_all: bool = False) -> report.ConversationReport:
        """Check every prompt, and the whole conversation, against full renders; see `ConversationReport`.

        Args:
            render_all: render every prompt anew. False: where the template's program proves that a prompt is
                the beginning of the next one, the later prompt's render is the check of both, and a few of
                them are rendered anyway; each check says how it was made.
        """
        return report.build(self._branches, render_all=render_all)

    def samples(
        self,
        *,
        rollout_id: str,
        group_id: str,
        task_id: str,
        attempt: int = 0,
        reward: float | None,
        turn_rewards: Sequence[float | None] | None = None,
        in_loss: bool = True,
        media_in_loss: bool = False,
        in_baseline: bool = True,
        status: Status,
        source: Source,
        policy_run: str = "",
        provenance: Mapping[str, Scalar] | None = None,
        extra: Mapping[str, Scalar] | None = None,
    ) -> tuple[Sample, ...]:
        """Export one `Sample` per branch that sampled something, as parts of one rollout.

        A token is trained in one part: what a branch shares with an earlier one keeps its ids,
        log-probabilities and versions there, with loss mask 0. A part ends with its last sampled token.
        `turn_samples` makes one sample per turn of them, `prefix_tree` one tree with each token once.

        Args:
            rollout_id: 32 hex characters.
            group_id: 32 hex characters.
            task_id: the task's name.
            attempt: restarts of the rollout, from zero.
            reward: of the whole rollout; None: not graded.
            turn_rewards: one per recorded turn, in the order of recording; None: none. A turn has its reward
                in the part that trains it.
            in_loss: False keeps the samples out of the loss.
            media_in_loss: False: samples with a sampled image placeholder are out of the loss (verl#7038).
            in_baseline: False keeps the reward out of the group's baseline.
            status: how the rollout ended.
            source: whether a model sampled the turns or a recording gave them.
            policy_run: names the training run that counts the weight versions.
            provenance: what produced the rollout; the template's and tokenizer's fingerprints are added.
            extra: the user's own values.

        Raises:
            ConversationError: `turn_rewards` has another length than `turns`.
            SampleError: a value does not fit `Sample`.
        """
        common: dict[str, Any] = {
            "rollout_id": rollout_id,
            "group_id": group_id,
            "task_id": task_id,
            "attempt": attempt,
            "reward": reward,
            "in_loss": in_loss,
            "in_baseline": in_baseline,
            "status": status,
            "source": source,
            "policy_run": policy_run,
            "extra": dict(extra or {}),
        }
        return export.samples(self._branches, common, dict(provenance or {}), turn_rewards, media_in_loss)

    def findings(self) -> Mapping[str, int]:
        """What was repaired, flagged or left out so far, counted by name; absent: it did not happen."""
        return findings.count(self._branches)
