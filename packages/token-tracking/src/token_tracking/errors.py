"""Everything this package raises, one flat tree."""

from typing import Literal


class TokenTrackingError(Exception):
    """Base of every error that this package raises on purpose."""


class TokenizerError(TokenTrackingError, ValueError):
    """A tokenizer could not be found, built, read or trusted."""


class TemplateError(TokenTrackingError, ValueError):
    """A chat template does not compile, or refuses the messages it was given."""


class UnsupportedContentError(TokenTrackingError, ValueError):
    """A message carries something other than text (an image, audio): it is refused, never dropped."""


class ControlTokenError(TokenTrackingError, ValueError):
    """Message text spells a control token and the conversation was told to refuse that."""


class LedgerError(TokenTrackingError, ValueError):
    """An append was refused: lengths, dtypes or values do not fit. The ledger is unchanged."""


RecordCode = Literal[
    "array",
    "finish_reason",
    "logprob_count",
    "logprob_kind",
    "logprob_value",
    "sampling",
    "version",
    "vocabulary",
    "counts",
    "empty",
    "prompt",
    "prompt_doubled",
    "prompt_echoed",
    "prompt_retokenized",
    "prompt_truncated",
    "stop_missing",
    "stop_passed",
    "stop_reason",
    "text",
    "kept_set",
    "kept_offsets",
    "kept_sampled",
    "kept_duplicate",
    "kept_vocabulary",
    "routed_rows",
    "routed_shape",
    "routed_padding",
    "routed_payload",
]
"""Names of what can be wrong with an engine's answer; they do not change between releases."""


class RecordError(TokenTrackingError, ValueError):
    """An engine's answer contradicts itself or the prompt it was asked to continue."""

    def __init__(self, message: str, *, code: RecordCode = "array"):
        super().__init__(message)
        self.code: RecordCode = code
        """What is wrong, for counters and for choosing a repair."""


class ConversationError(TokenTrackingError):
    """A call does not fit the state of the conversation (for example: no prompt is waiting for a record)."""


class AmbiguousHistoryError(ConversationError):
    """A message list could continue more than one branch with different tokens; the choice is not guessed."""


class SnapshotError(TokenTrackingError, ValueError):
    """Snapshot bytes are damaged, of another kind or version, or of another template."""


class SampleError(TokenTrackingError, ValueError):
    """A sample contradicts itself: lengths, dtypes, mask, versions or spans do not fit together."""


class MissingLogprobsError(TokenTrackingError, ValueError):
    """Log-probabilities of trained tokens are needed (for a ratio) but were not recorded."""
