"""An HTTP server of one handler on a socket that listens already."""

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def listening(
    app: web.Application,
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
    listener: socket.socket,
) -> AsyncGenerator[None]:
    """Every request goes to the handler; one whose client goes away is cancelled."""
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    try:
        yield
    finally:
        await runner.cleanup()
