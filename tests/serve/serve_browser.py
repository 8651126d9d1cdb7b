"""Find and start a Chromium for the end-to-end tests, or skip with the reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

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
