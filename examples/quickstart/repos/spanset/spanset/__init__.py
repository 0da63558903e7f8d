"""Sets of half-open byte spans, and the HTTP range headers that belong to them."""

from spanset.http import RangeError, content_range, range_header
from spanset.span import Span
from spanset.spans import SpanSet

__all__ = ["RangeError", "Span", "SpanSet", "content_range", "range_header"]
