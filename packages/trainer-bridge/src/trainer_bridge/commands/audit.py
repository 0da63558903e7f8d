"""`trainer-bridge audit`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from trainer_bridge.commands.balance import Balance, balance_of
from trainer_bridge.commands.books import Book, read_books
from trainer_bridge.commands.live import Live, Peer, asked
from trainer_bridge.commands.output import write_json, write_line

LEASED_OR_QUEUED = (
    "leased or queued: one figure, because leases live in the receiver's memory; queued, all of it, if no "
    "receiver runs. A running one tells them apart: --live ADDRESS"
)


def audit(path: Path, *, as_json: bool, live: Peer | None = None) -> int:
    """Check every record of spools and stores, and that all messages are accounted for. Changes nothing.

    Given a run folder with both, each message of a spool is looked for in the stores. Exit code 1: damage, a
    missing or doubled rollout, or a sum that does not come out.

    Leases live in the receiver's memory: in its files, what is leased and what is queued are one figure (and
    queued all of it once it has ended). With --live, the running receiver tells them apart.
    """
    said: Live | None = None
    if live is None:
        books = read_books(path)
    else:
        with asked(live) as said:
            books = read_books(path)
    balance = balance_of(books)
    loose = all(book.loose for book in books)
    faults = [fault for book in books for fault in book.faults]
    if said is not None:
        faults += said.faults(balance.waiting)
    (_write_json if as_json else _write_lines)(books, None if loose else balance, faults, said)
    return 1 if faults or not balance.adds_up else 0


def _write_json(books: list[Book], balance: Balance | None, faults: list[str], said: Live | None) -> None:
    event: dict[str, object] = {
        "event": "audit",
        "records": sum(len(book.entries) for book in books),
        "rollouts": _rollouts(books),
        "samples": sum(book.samples for book in books),
        "tokens": sum(book.tokens for book in books),
        "producers": dict(_producers(books)),
        "folders": [{"kind": book.kind, "path": str(book.path), "deleted": book.trimmed} for book in books],
        "faults": faults,
        "torn": [torn for book in books for torn in book.torn],
    }
    if balance is not None:
        event["ledger"] = {
            "sent": balance.sent,
            "committed": balance.committed,
            "dropped": dict(balance.dropped),
            "leased_or_queued": balance.waiting,
            "in_flight_or_spooled": balance.spooled,
            "adds_up": balance.adds_up,
        }
        event["missing"] = balance.missing
        event["doubled"] = balance.doubled
        event["repeated"] = balance.repeated
    if said is not None:
        event["live"] = said.event()
    write_json(event)


def _write_lines(books: list[Book], balance: Balance | None, faults: list[str], said: Live | None) -> None:
    for book in books:
        gone = f"; {book.trimmed} before them were deleted (keep_committed)" if book.trimmed else ""
        write_line(
            f"{len(book.entries)} records, {_rollouts([book])} rollouts, {book.samples} samples, "
            f"{book.tokens} tokens in {book.kind} {book.path}{gone}"
        )
    for producer, count in _producers(books).items():
        write_line(f"producer {producer}: {count} records")
    if balance is not None:
        _write_balance(balance, said)
    for book in books:
        for torn in book.torn:
            write_line(f"torn end, as a killed or running writer leaves it: {torn}")
    for fault in faults:
        write_line(f"FAULT {fault}")
    if balance is not None and balance.adds_up and not faults:
        write_line("it adds up")


def _write_balance(balance: Balance, said: Live | None) -> None:
    if balance.repeated:
        write_line(f"{balance.repeated} rollouts stand again in a spool: a receiver keeps one of each")
    write_line(balance.equation())
    if said is not None:
        write_line(said.line())
    elif balance.waiting:
        write_line(LEASED_OR_QUEUED)
    for line in balance.missing:
        write_line(f"MISSING {line}")
    for line in balance.doubled:
        write_line(f"DOUBLED {line}")


def _rollouts(books: list[Book]) -> int:
    return len({(entry.rollout_id, entry.attempt) for book in books for entry in book.entries})


def _producers(books: list[Book]) -> Counter[str]:
    return Counter(entry.producer.hex() for book in books for entry in book.entries)
