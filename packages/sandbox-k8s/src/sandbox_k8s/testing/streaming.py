"""An answer that comes piece by piece: a log that is followed, a watch."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web


async def streamed(
    request: web.Request, pieces: AsyncGenerator[bytes], content_type: str
) -> web.StreamResponse:
    """Send what the generator gives, as it comes; it is closed when the client goes away."""
    response = web.StreamResponse(headers={"Content-Type": content_type})
    response.enable_chunked_encoding()
    await response.prepare(request)
    async with aclosing(pieces):
        async for piece in pieces:
            await response.write(piece)
    await response.write_eof()
    return response
