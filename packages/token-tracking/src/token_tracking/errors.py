"""Everything this package raises, one flat tree."""


class TokenTrackingError(Exception):
    """Base of every error that this package raises on purpose."""


class SampleError(TokenTrackingError, ValueError):
    """A sample contradicts itself: lengths, dtypes, mask, versions or spans do not fit together."""


class MissingLogprobsError(TokenTrackingError, ValueError):
    """Log-probabilities of trained tokens are needed (a ratio is computed from them) but were not recorded."""
