from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

for room in ("modeling", "cli"):  # tiny models and pictures
    sys.path.insert(0, str(Path(__file__).parents[1] / room))

_NEEDED = ("fastapi", "uvicorn", "python_multipart", "prometheus_client", "httpx")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_report_header() -> str | None:
    return f"tests/serve is left out: not installed: {', '.join(_MISSING)}" if _MISSING else None


@pytest.fixture
def client_for() -> Iterator[Callable[..., TestClient]]:
    """Make a client of an app around a recognizer; the app is ready when it is returned."""
    from fastapi.testclient import TestClient
    from serve_fakes import FakeRecognizer

    from ramatch.serve.app import create_app
    from ramatch.serve.settings import ServeSettings

    open_clients = []

    def make(recognizer: FakeRecognizer | None = None, **settings: object) -> TestClient:
        settings.setdefault("allowed_hosts", ("testserver",))
        app = create_app(recognizer or FakeRecognizer(), ServeSettings(**settings))  # type: ignore[arg-type]
        client = TestClient(app, raise_server_exceptions=False)
        client.__enter__()
        open_clients.append(client)
        for _ in range(200):
            if app.state.service.ready or app.state.service.failure:
                break
            time.sleep(0.01)
        return client

    yield make
    for client in open_clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(client_for: Callable[..., TestClient]) -> TestClient:
    return client_for()


@pytest.fixture(scope="module")  # no longer: while it runs, so does an event loop, and other tests start their own
def browser() -> Iterator[Any]:
    from serve_browser import chromium

    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def site(browser: Any) -> Iterator[Any]:
    from serve_browser import Site

    site = Site()
    yield site
    site.stop()


@pytest.fixture
def page(browser: Any, site: Any) -> Iterator[Any]:
    """The web page with its first example tagged; nothing may go wrong in it."""
    from serve_browser import watch

    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(8000)
    trouble = watch(page)
    page.goto(site.url)
    page.wait_for_selector(".label")
    yield page
    assert trouble == []
    context.close()
