"""HTTP byte ranges (RFC 9110, section 14). On the wire both ends of a range are included."""

import re
from collections.abc import Iterable

from spanset.span import Span

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class RangeError(ValueError):
    """A header that is not a byte range, or not one that can be used."""


def range_header(spans: Iterable[Span]) -> str:
    """Return the value of a ``Range`` header that asks for all of ``spans``.

    Raises:
        RangeError: if there is nothing to ask for.
    """
    parts = [f"{span.start}-{span.stop - 1}" for span in spans if span]
    if not parts:
        raise RangeError("no bytes to ask for")
    return "bytes=" + ",".join(parts)


def content_range(value: str) -> tuple[Span, int | None]:
    """Read a ``Content-Range`` header.

    Returns:
        The span that the response carries, and the length of the whole file or None if the
        server does not know it.

    Raises:
        RangeError: if the header is malformed or its range is not inside the file.
    """
    match = _CONTENT_RANGE.fullmatch(value.strip())
    if match is None:
        raise RangeError(f"not a Content-Range header: {value!r}")
    first, last = int(match[1]), int(match[2])
    length = None if match[3] == "*" else int(match[3])
    if last < first or (length is not None and last >= length):
        raise RangeError(f"range outside the file: {value!r}")
    return Span(first, last + 1), length
