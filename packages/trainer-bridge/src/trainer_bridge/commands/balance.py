"""The ledger of a run: `sent = committed + dropped{reason} + leased + queued + in flight + spooled`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from trainer_bridge.commands.books import Book, Entry
from trainer_bridge.seqset import SeqSet


class Balance(msgspec.Struct, kw_only=True):
    """What became of every message, as the files tell."""

    sent: int = 0
    """Messages that senders with a spool took over; of others, those that arrived."""
    committed: int = 0
    """Without a store: what the receiver acknowledged as such."""
    dropped: Counter[str] = msgspec.field(default_factory=Counter[str])
    waiting: int = 0
    """In a store and not committed: leased or queued; after the receiver's end, queued."""
    spooled: int = 0
    """Still with their senders: in a spool, or on their way out of it."""
    missing: list[str] = []
    """Settled by the sender, and nowhere: each by its name."""
    doubled: list[str] = []
    """Rollouts that a store holds more than once."""
    repeated: int = 0
    """Rollouts that stand more than once in a spool: sent anew by whoever filled it. A receiver keeps one."""

    @property
    def adds_up(self) -> bool:
        """The equation holds, and nothing is doubled."""
        ends = self.committed + sum(self.dropped.values()) + self.waiting + self.spooled
        return self.sent == ends and not self.missing and not self.doubled

    def equation(self) -> str:
        """For people."""
        reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(self.dropped.items()))
        return (
            f"sent {self.sent} = committed {self.committed} + dropped {sum(self.dropped.values())}"
            f"{f' ({reasons})' if reasons else ''} + leased or queued {self.waiting} + in flight or spooled "
            f"{self.spooled}{f' + MISSING {len(self.missing)}' if self.missing else ''}"
        )


def balance_of(books: Sequence[Book]) -> Balance:
    """Add everything up that was read; loose files are left out."""
    spools = [book for book in books if book.kind == "spool"]
    stores = [book for book in books if book.kind == "store"]
    balance = Balance()
    arrived: dict[tuple[bytes, int], tuple[Book, Entry]] = {}
    attempts: dict[bytes, set[int]] = {}
    for store in stores:
        _note_doubled(store, balance)
        for entry in store.entries:
            arrived.setdefault((entry.producer, entry.sequence), (store, entry))
            attempts.setdefault(entry.rollout_id, set()).add(entry.attempt)
        for rollout_id, attempt in store.trimmed_rollouts:
            attempts.setdefault(rollout_id, set()).add(attempt)
    trimmed = _add_trimmed(stores, spools, balance)
    refused = {
        (bytes.fromhex(letter.producer), letter.sequence): letter.reason
        for store in stores
        for letter in store.letters
        if letter.producer
    }
    for spool in spools:
        gone = trimmed.get(spool.producer or b"", SeqSet())
        _add_spool(spool, balance, arrived, attempts if stores else None, refused, gone)
    known = {book.producer for book in spools}
    for key, (store, entry) in arrived.items():
        if entry.producer not in known:
            balance.sent += 1
            _add_arrived(store, entry, balance)
        elif not _is_of(key, spools):
            balance.sent += 1  # a running sender: its spool was read before this was sent
            _add_arrived(store, entry, balance)
    return balance


def _is_of(key: tuple[bytes, int], spools: Sequence[Book]) -> bool:
    return any(spool.producer == key[0] and key[1] <= spool.last for spool in spools)


def _add_trimmed(stores: Sequence[Book], spools: Sequence[Book], balance: Balance) -> dict[bytes, SeqSet]:
    """Records that stores have deleted; returns their messages, producer -> sequence numbers."""
    trimmed: dict[bytes, SeqSet] = {}
    for store in stores:
        for producer, _, seqs in store.trimmed_messages.items():
            trimmed.setdefault(producer, SeqSet()).update(seqs)
        balance.committed += store.trimmed - sum(store.trimmed_drops.values())
        balance.dropped.update(store.trimmed_drops)
    last = {spool.producer: spool.last for spool in spools}
    for producer, seqs in trimmed.items():
        balance.sent += seqs.count(last.get(producer, 0) + 1, seqs.highest)
    return trimmed


def _add_arrived(store: Book, entry: Entry, balance: Balance) -> None:
    if entry.position not in store.done:
        balance.waiting += 1
    elif entry.position in store.dropped:
        balance.dropped[store.dropped[entry.position]] += 1
    else:
        balance.committed += 1


def _add_spool(
    spool: Book,
    balance: Balance,
    arrived: dict[tuple[bytes, int], tuple[Book, Entry]],
    attempts: dict[bytes, set[int]] | None,
    refused: dict[tuple[bytes, int], str],
    trimmed: SeqSet,
) -> None:
    entries = {entry.position: entry for entry in spool.entries}
    balance.repeated += len(entries) - len({(e.rollout_id, e.attempt) for e in entries.values()})
    balance.sent += spool.last
    for number in range(1, spool.last + 1):
        key = (spool.producer or b"", number)
        found, entry = arrived.get(key), entries.get(number)
        if number in trimmed:
            continue  # committed or dropped: counted with the others of its store
        if found is not None:
            _add_arrived(*found, balance)
        elif number not in spool.done:
            balance.spooled += 1
        elif attempts is None:
            balance.committed += 1
        elif key in refused:
            balance.dropped[refused[key]] += 1
        elif entry is None:
            balance.missing.append(
                f"message {number} of producer {key[0].hex()}: settled, not in the store, and its record is "
                "not (or no longer) readable in the spool, so that its rollout cannot be named"
            )
        elif entry.attempt in attempts.get(entry.rollout_id, ()):
            balance.dropped["duplicate"] += 1
        elif entry.attempt < max(attempts.get(entry.rollout_id, {-1})):
            balance.dropped["fenced"] += 1
        else:
            balance.missing.append(
                f"rollout {entry.rollout_id.hex()}, attempt {entry.attempt} (message {number} of producer "
                f"{key[0].hex()}): settled, and not in the store"
            )


def _note_doubled(store: Book, balance: Balance) -> None:
    counts = Counter((entry.rollout_id, entry.attempt) for entry in store.entries)
    balance.doubled += [
        f"{store.path}: rollout {rollout.hex()}, attempt {attempt}: stored {n} times"
        for (rollout, attempt), n in sorted(counts.items())
        if n > 1
    ]
