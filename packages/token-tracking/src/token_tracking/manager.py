"""`TokenManager`: a ledger with the list-shaped face that existing trainers know."""

from __future__ import annotations

from token_tracking.arrays import Ids, Logprobs
from token_tracking.ledger import TokenLedger
from token_tracking.sample import UNKNOWN_VERSION


class TokenManager:
    """Prompt and response tokens of one sequence, as lists. `ledger` holds the arrays."""

    def __init__(self) -> None:
        self.ledger = TokenLedger()

    def add_prompt(self, ids: Ids) -> None:
        """Append tokens that the model reads: loss mask 0, log-probability NaN.

        Raises:
            LedgerError: an id is not a non-negative integer. Nothing was appended.
        """
        self.ledger.append_prompt(ids)

    def add_response(
        self, ids: Ids, logprobs: Logprobs | None = None, *, weight_version: int = UNKNOWN_VERSION
    ) -> None:
        """Append sampled tokens: loss mask 1.

        Args:
            ids: token ids, the stop token included.
            logprobs: one finite value <= 0 per id. None: not recorded, NaN is stored.
            weight_version: of the weights that sampled them; -2: unknown.

        Raises:
            LedgerError: counts differ or a value is out of range. Nothing was appended.
        """
        self.ledger.append_sampled(ids, logprobs, weight_version)

    def reset(self) -> None:
        """Start an empty sequence; a ledger taken before stays as it is."""
        self.ledger = TokenLedger()

    @property
    def token_ids(self) -> list[int]:
        """All token ids."""
        return self.ledger.ids.tolist()

    @property
    def loss_mask(self) -> list[int]:
        """1 for each sampled token, else 0."""
        return self.ledger.mask.tolist()

    @property
    def logprobs(self) -> list[float]:
        """One per token; NaN where none was recorded."""
        return self.ledger.logprobs.tolist()

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ledger)
