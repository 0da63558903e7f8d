"""`Meter`: what a receiver counts, and the numbers a training run logs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from trainer_bridge.member import Member
from trainer_bridge.stats import ReceiverStats


class Meter(msgspec.Struct, eq=False):
    """Counters since the start; rollouts, unless said otherwise."""

    arrived: int = 0
    samples: int = 0
    tokens: int = 0
    restored: int = 0
    leases: int = 0
    """Steps handed out."""
    nacks: int = 0
    overdue_groups: int = 0
    """Groups that were not complete at their deadline."""
    partial_groups: int = 0
    """Groups handed out incomplete."""
    dropped: dict[str, int] = {}
    """Reason -> rollouts."""
    tokens_trained: int = 0
    wait_s: float = 0.0
    """Time that the consumer spent waiting."""
    event_faults: int = 0
    letters_not_kept: int = 0
    """Exceptions that came out of `on_event`."""
    staleness_sum: int = 0
    staleness_count: int = 0
    """Rollouts in `staleness_sum`: handed out, of a known version."""
    staleness_mean: float = math.nan
    """Over the rollouts of the last step, in weight versions. NaN: of none is it known."""
    staleness_max: float = math.nan

    def arrive(self, samples: int, tokens: int) -> None:
        """A rollout came."""
        self.arrived += 1
        self.samples += samples
        self.tokens += tokens

    def drop(self, reason: str, count: int = 1) -> None:
        """Rollouts were dropped."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def handed_out(self, members: Sequence[Member], weights_version: int) -> None:
        """A step was handed out."""
        behind = [m.age.behind(weights_version) for m in members if m.age is not None]
        known = [n for n in behind if n is not None]
        self.staleness_sum += sum(known)
        self.staleness_count += len(known)
        self.staleness_mean = sum(known) / len(known) if known else math.nan
        self.staleness_max = float(max(known)) if known else math.nan

    def trained(self, member: Member) -> None:
        """The trainer committed a rollout."""
        if member.data is not None:
            self.tokens_trained += sum(
                int(np.count_nonzero(sample.loss_mask.view(bool)))
                for sample in member.data.samples
                if sample.in_loss
            )


def flat_metrics(stats: ReceiverStats, meter: Meter, weights_version: int) -> dict[str, float]:
    """Everything as floats under fixed names; names that end in `_total` only rise."""
    out = {
        "queued": stats.queued,
        "leased": stats.leased,
        "trained_not_saved": stats.trained,
        "producers_connected": sum(p.presence == "connected" for p in stats.producers),
        "producers_lost": len(stats.lost_producers),
        "producers_unsettled": sum(p.unsettled for p in stats.producers),
        "weights_version": weights_version,
        "staleness_mean": meter.staleness_mean,
        "staleness_max": meter.staleness_max,
        "staleness_sum_total": meter.staleness_sum,
        "staleness_count_total": meter.staleness_count,
        "wait_s_total": meter.wait_s,
        "tokens_trained_total": meter.tokens_trained,
        "tokens_received_total": stats.tokens,
        "rollouts_received_total": stats.messages,
        "samples_received_total": stats.samples,
        "rollouts_restored_total": stats.restored,
        "rollouts_committed_total": stats.committed,
        "rollouts_dropped_total": sum(stats.dropped.values()),
        "steps_total": meter.leases,
        "nacks_total": meter.nacks,
        "groups_overdue_total": meter.overdue_groups,
        "groups_partial_total": meter.partial_groups,
        "duplicates_total": stats.duplicates,
        "fenced_total": stats.fenced,
        "rejected_total": sum(stats.rejected.values()),
        "unread_total": stats.unread,
        "quarantines_total": stats.quarantines,
        "connections_refused_total": stats.connections_refused,
        "unavailable_total": stats.unavailable,
        "unaccounted": stats.unaccounted,
        "groups_ready": stats.groups_ready,
        "groups_incomplete": stats.groups_incomplete,
        "groups_unsized": stats.groups_unsized,
        "oldest_incomplete_s": stats.oldest_incomplete_s,
        "credit_beyond_queue_total": stats.credit_beyond_queue,
        "observers": stats.observers,
        "skipped_copies_total": stats.skipped_copies,
        "rollouts_forgotten_total": stats.forgotten_rollouts,
        "stored": stats.stored,
        "store_bytes": stats.store_bytes,
        "store_left_bytes": math.nan if stats.store_left_bytes is None else stats.store_left_bytes,
        "store_trimmed_total": stats.trimmed,
        "store_faults_total": stats.store_faults,
        "store_damaged_total": stats.store_damaged,
        "letters_not_kept_total": stats.letters_not_kept,
        "event_faults_total": stats.event_faults,
    }
    out.update({f"dropped_{reason}_total": count for reason, count in sorted(stats.dropped.items())})
    return {name: float(value) for name, value in out.items()}
