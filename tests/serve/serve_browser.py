"""Find and start a Chromium for the end-to-end tests, or skip with the reason; a server for it to look at."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serve_fakes import FakeRecognizer

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("RAMATCH_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with api.sync_playwright() as playwright:
        if path is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip("no Chromium is installed (set RAMATCH_CHROMIUM to its path)")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def watch(page: Any) -> list[str]:
    """Collects what must not happen: script errors, policy violations, requests that leave the machine."""
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    page.on("console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None)

    def request(each: Any) -> None:
        if not each.url.startswith(("http://127.0.0.1", "blob:", "data:", "file:")):
            trouble.append(f"outside request: {each.url}")

    page.on("request", request)
    return trouble


class Site:
    """A server in a thread."""

    def __init__(self, recognizer: Any = None, **settings: Any) -> None:
        import uvicorn

        from ramatch.serve.app import create_app
        from ramatch.serve.settings import ServeSettings

        self.recognizer = recognizer or FakeRecognizer()
        app = create_app(self.recognizer, ServeSettings(**{"vocabulary": "everyday"} | settings))
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not (self.server.started and self.server.servers):
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


def until(page: Any, expression: str) -> None:
    """Wait for a condition in the page; wait_for_function would need eval, which the content policy forbids."""
    end = time.monotonic() + 8
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(20)
