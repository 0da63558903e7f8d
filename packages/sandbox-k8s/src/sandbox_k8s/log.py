"""The launcher's log: who did what in a sandbox, in the order in which the launcher let it happen."""

from collections.abc import Iterable

import msgspec

BEGINNINGS = frozenset({"command", "session", "read", "write"})


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line, written under the lock that also changes the owner.

    Attributes:
        number: Counts from 1. The launcher keeps the last 4096 lines.
        at_s: Monotonic seconds of the launcher.
        what: ``command``, ``session``, ``read``, ``write`` (each has an ``end``), ``fence`` (the epoch is in
            force), ``fenced`` (nothing of older owners runs any more, and the fence is answered), ``lease``
            (its length changed), ``refused`` (requests of somebody who is not the owner), ``over``.
        epoch: The caller's; None for a guest, or a client that knows no epochs.
        owner: The epoch in force.
        of: The number of what ended, for ``end`` and ``fenced``.
        request_id: The caller's name for the request; None when it gave none.
        times: How many requests a ``refused`` line stands for, those that came later included: one line for
            each epoch that was refused under an owner. 1 for every other line.
    """

    number: int
    at_s: float
    what: str
    epoch: int | None
    owner: int
    of: int = 0
    request_id: str | None = None
    times: int = 1


def double_owners(entries: Iterable[LogEntry]) -> tuple[str, ...]:
    """What a log says against "at most one owner": empty for a whole log, unless the launcher is broken.

    Args:
        entries: Of one launcher from its first line, the oldest first.

    Returns:
        A sentence for each request that ran for an owner who was not in force, or that went on after a later
        owner's fence had been answered; and one for each gap, since nothing is proven of lines that are
        missing. A log of more than 4096 lines is whole if it was fetched in parts, in time.
    """
    found: list[str] = []
    running: dict[int, LogEntry] = {}
    answered = last = 0
    for entry in entries:
        if entry.number != last + 1:
            found.append(f"lines {last + 1} to {entry.number - 1} are missing: nothing is proven of them")
        last = entry.number
        if entry.what in BEGINNINGS:
            running[entry.number] = entry
            acts_for = entry.owner if entry.epoch is None else entry.epoch
            if acts_for != entry.owner or acts_for < answered:
                found.append(
                    f"line {entry.number}: a {entry.what} of epoch {acts_for} began under owner "
                    f"{entry.owner}, after the fence of epoch {answered}"
                )
        elif entry.what == "end":
            running.pop(entry.of, None)
        elif entry.what == "fenced":
            answered = max(answered, entry.epoch or 0)
            found += [
                f"line {one.number}: a {one.what} of owner {one.owner} ran on after line {entry.number}, "
                f"where the fence of epoch {answered} was answered"
                for one in running.values()
                if one.owner < answered
            ]
        elif entry.what == "fence" and (entry.epoch or 0) < answered:
            found.append(f"line {entry.number}: epoch {entry.epoch} became owner after {answered}")
    return tuple(found)
