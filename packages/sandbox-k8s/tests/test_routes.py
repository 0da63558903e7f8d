"""Launchers that share a pool of connections: what one of them ends is its own."""

from collections.abc import AsyncIterator

import aiohttp
import anyio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sandbox_k8s import SandboxLostError
from sandbox_k8s.routes import AddressRoute, open_pool
from sandbox_k8s.transport import LauncherClient

pytestmark = pytest.mark.anyio


class Launchers:
    """What stands for two launchers behind one address: they answer when they are told to."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.cut = 0
        self.go = anyio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        key = request.headers["X-API-Key"]
        self.asked[key] = self.asked.get(key, 0) + 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            if request.path == "/body":
                await response.prepare(request)
                await response.write(b"{")
            await self.go.wait()
        except BaseException:
            self.cut += 1
            raise
        if request.path != "/body":
            await response.prepare(request)
            await response.write(b"{")
        await response.write(b"}")
        return response


@pytest.fixture
async def launchers() -> Launchers:
    return Launchers()


@pytest.fixture
async def server(launchers: Launchers) -> AsyncIterator[TestServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", launchers.answer)
    async with TestServer(app, handler_cancellation=True) as server:
        yield server


@pytest.mark.parametrize("path", ["/head", "/body"])
async def test_closing_one_cuts_its_own_requests_and_no_others(
    launchers: Launchers, server: TestServer, path: str
) -> None:
    pool = open_pool(aiohttp.TCPConnector(limit=0))
    clients = {
        name: LauncherClient(
            AddressRoute("127.0.0.1", server.port or 0, pool), name, 1, margin_s=5.0, where=name
        )
        for name in ("one", "other")
    }
    said: dict[str, object] = {}

    async def ask(name: str) -> None:
        try:
            said[name] = await clients[name].call(path, {})
        except SandboxLostError as problem:
            said[name] = str(problem)

    with anyio.fail_after(10):
        async with pool, anyio.create_task_group() as tasks:
            for name in clients:
                tasks.start_soon(ask, name)
            while launchers.asked != {"one": 1, "other": 1}:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            await clients["one"].close()
            while not launchers.cut:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            launchers.go.set()
        assert said["other"] == {}
        assert "was stopped or detached by this client" in str(said["one"])
        assert launchers.cut == 1
        await ask("one")
        await ask("other")
    assert "was stopped or detached by this client" in str(said["one"])
    assert launchers.asked == {"one": 1, "other": 1}
