"""A rollout's page in a real headless Chromium: it draws, asks no network, and hover tells a token."""

import json
import re
import shutil
import subprocess
from contextlib import asynccontextmanager

import aiohttp
import anyio
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--window-size=1200,1600",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.anyio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium"),
]


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Page:
    """One tab over the DevTools protocol."""

    def __init__(self, socket):
        self.socket = socket
        self.events = []
        self.number = 0

    async def call(self, method, **parameters):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            message = await self.socket.receive_json()
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def value(self, expression):
        done = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def hover(self, selector):
        box = await self.value(
            "(e => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        # The page hides its tip while it scrolls; two frames later the scrolling of the line above is over.
        await self.value("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        return await self.value("document.getElementById('tip').innerText")

    async def event(self, method):
        """Wait for an event."""
        while True:
            self.events.append(await self.socket.receive_json())
            if self.events[-1].get("method") == method:
                return


async def devtools_port(process):
    """Chromium says on stderr where it listens."""
    heard = b""
    async for chunk in process.stderr:
        heard += chunk
        found = re.search(rb"DevTools listening on ws://[^:]+:(\d+)/", heard)
        if found:
            return int(found[1])
    raise AssertionError(f"Chromium did not start: {heard.decode(errors='replace')}")


@asynccontextmanager
async def open_page(file, profile):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL) as process:
        try:
            with anyio.fail_after(45):
                port = await devtools_port(process)
                async with aiohttp.ClientSession() as http:
                    async with http.get(f"http://127.0.0.1:{port}/json") as answer:
                        (tab,) = [tab for tab in await answer.json() if tab["type"] == "page"]
                    async with http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
                        page = Page(socket)
                        for domain in ("Page", "Runtime", "Log", "Network"):
                            await page.call(f"{domain}.enable")
                        await page.call("Page.navigate", url=file.as_uri())
                        await page.event("Page.loadEventFired")
                        yield page
        finally:
            process.kill()


def pages_of(run_folder):
    return {
        json.loads((folder / "provenance.json").read_text())["task_id"]: folder / "view.html"
        for folder in (run_folder / "rollouts").iterdir()
    }


async def test_every_sampled_token_is_drawn_and_told(run_folder, tmp_path):
    async with open_page(pages_of(run_folder)["spanset-14"], tmp_path / "profile") as page:
        assert "spanset-14" in await page.value("document.title")
        assert await page.value("document.querySelectorAll('article.turn').length") == 5
        told = await page.hover("article.turn b.s")
        assert "not recorded" in told
        assert "<think>" in told
        assert "151667" in told, "the id of Qwen3's <think>"
        for mode in ("logprob", "version", "source"):
            await page.value(f"document.querySelector(`.seg button[data-mode={mode}]`).click()")
            assert await page.value("document.body.dataset.mode") == mode
        assert await page.value("document.documentElement.scrollWidth <= window.innerWidth")
        events = page.events
    assert not [e for e in events if e["method"] in ("Runtime.exceptionThrown",)]
    entries = [e["params"]["entry"] for e in events if e["method"] == "Log.entryAdded"]
    assert not [entry for entry in entries if entry["level"] == "error"]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


async def test_branches_are_marked(run_folder, tmp_path):
    async with open_page(pages_of(run_folder)["patchlet-23"], tmp_path / "profile") as page:
        text = await page.value("document.body.innerText")
    assert "Branch 2" in text
    assert "thinking stripped" in text
