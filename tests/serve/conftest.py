from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

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
