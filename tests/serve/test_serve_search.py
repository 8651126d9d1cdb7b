"""Searches of a photo library over HTTP: a real library of a tiny random model."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import put_photos
from fastapi.testclient import TestClient
from PIL import Image
from tiny_models import tiny_ram

from ramatch.cli import parse
from ramatch.errors import RamatchError
from ramatch.library import Library
from ramatch.recognizer import Recognizer
from ramatch.serve import schema, serve
from ramatch.serve.app import create_app
from ramatch.serve.settings import ServeSettings

NAMES = ["img0.png", "img1.png", "img2.png", "more/=1+1.png"]


def make(seed: int = 0) -> Recognizer:
    torch.manual_seed(seed)
    return Recognizer(tiny_ram(), cache=0)


@pytest.fixture(scope="module")
def recognizer() -> Recognizer:
    return make()


@pytest.fixture
def photos(tmp_path: Path, recognizer: Recognizer) -> Path:
    put_photos(tmp_path / "photos", *NAMES)
    with Library.open(tmp_path / "photos" / ".ramatch", create=True) as library:
        library.update(tmp_path / "photos", recognizer)
    return tmp_path / "photos"


@pytest.fixture
def client(client_for: Callable[..., TestClient], recognizer: Recognizer, photos: Path) -> TestClient:
    return client_for(recognizer, vocabulary="voc20", index=str(photos / ".ramatch"), queue_size=3)


def code(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_finds_what_the_library_finds(client: TestClient, photos: Path, recognizer: Recognizer) -> None:
    assert client.get("/v1/info").json()["index"] is True
    answer = client.get("/v1/search", params={"q": "cat -dog"}).json()
    schema.SearchResponse.model_validate(answer)
    assert (answer["wanted"], answer["unwanted"], answer["calibrated"]) == (["cat"], ["dog"], False)
    with Library.open(photos / ".ramatch") as library:
        hits = library.search("cat -dog", recognizer)
        small = library.thumbnail(hits[0].photo)
    assert [hit["image"] for hit in answer["hits"]] == [str(hit.path.relative_to(photos)) for hit in hits]
    assert str(photos) not in str(answer), "where the library lies is no matter of clients"
    assert answer["hits"][0]["relative"] == round(hits[0].probability, 4)
    got = client.get("/" + answer["hits"][0]["thumbnail"])
    assert (got.content, got.headers["content-type"]) == (small, "image/webp")
    assert Image.open(io.BytesIO(got.content)).format == "WEBP"
    assert [h["image"] for h in client.get("/v1/search?q=cat&limit=2&sort=name").json()["hits"]] != []
    assert len(client.get("/v1/search?q=cat&limit=2").json()["hits"]) == 2
    assert client.get("/v1/search?q=cat&threshold=1").json()["hits"] == []
    by_name = [hit["image"] for hit in client.get("/v1/search?q=cat&sort=name").json()["hits"]]
    assert by_name == NAMES


@pytest.mark.parametrize(
    "query",
    ["", "?q=", "?q=,", "?q=%22open", "?q=a%20-a", "?q=a&limit=0", "?q=a&limit=201", "?q=a&sort=luck", "?q=a&url=b"]
    + ["?q=" + "x" * 1001, "?q=a%00b", "?q=" + "x" * 130],
)
def test_wrong_searches_are_refused_in_words(client: TestClient, query: str) -> None:
    answer = client.get(f"/v1/search{query}")
    assert answer.status_code == 422
    assert answer.json()["error"]["hint"]


@pytest.mark.parametrize("photo", ["0", "99", "-1", "1.5", "..%2Flibrary.sqlite", "img0.png", "9" * 18, "9" * 400, "²"])
def test_only_photos_of_the_library_have_thumbnails(client: TestClient, photo: str) -> None:
    assert code(client.get(f"/v1/thumbnails/{photo}")) == (404, "not_found")


def test_a_photo_that_is_gone_has_no_thumbnail(client: TestClient, photos: Path, recognizer: Recognizer) -> None:
    hit = client.get("/v1/search?q=cat&limit=1").json()["hits"][0]
    (photos / hit["image"]).unlink()
    with Library.open(photos / ".ramatch") as library:
        library.update(photos, recognizer)  # while the server runs
    assert code(client.get("/" + hit["thumbnail"])) == (404, "not_found")
    assert hit["image"] not in [h["image"] for h in client.get("/v1/search?q=cat").json()["hits"]]


def test_the_key_guards_searches_and_thumbnails(
    client_for: Callable[..., TestClient], recognizer: Recognizer, photos: Path
) -> None:
    client = client_for(recognizer, vocabulary="voc20", index=str(photos / ".ramatch"), api_key="open sesame")
    key = {"X-API-Key": "open sesame"}
    for path in ("/v1/search?q=cat", "/v1/thumbnails/1"):
        assert code(client.get(path)) == (401, "bad_api_key")
        assert client.get(path, headers=key).status_code == 200


def test_without_an_index_it_says_how_to_get_one(client_for: Callable[..., TestClient]) -> None:
    client = client_for()
    assert client.get("/v1/info").json()["index"] is False
    for path in ("/v1/search?q=cat", "/v1/thumbnails/1"):
        assert code(client.get(path)) == (404, "no_index")
        assert "--index" in client.get(path).json()["error"]["hint"]


def test_too_many_or_too_long_searches(client: TestClient) -> None:
    finder, gate = client.app.state.service.finder, threading.Event()  # type: ignore[attr-defined]
    finder._thread.submit(gate.wait, 20)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(client.get, "/v1/search?q=cat") for _ in range(3)]
        while finder.waiting < 3:
            pass
        refused = client.get("/v1/search?q=cat")
        gate.set()
        assert [each.result().status_code for each in waiting] == [200] * 3
    assert code(refused) == (429, "overloaded")
    assert refused.headers["retry-after"] == "1"
    gate.clear()
    finder.settings = dataclasses.replace(finder.settings, deadline_s=0.05)
    finder._thread.submit(gate.wait, 20)
    assert code(client.get("/v1/search?q=cat")) == (504, "deadline_exceeded")
    gate.set()


def test_a_library_that_cannot_be_searched_is_an_error_at_the_start(
    tmp_path: Path, recognizer: Recognizer, photos: Path
) -> None:
    for path, model, said in (
        (tmp_path / "none", recognizer, "not a photo library"),
        (photos / ".ramatch", make(seed=3), "was made with the model"),
    ):
        with pytest.raises(RamatchError, match=said):
            create_app(model, ServeSettings(index=str(path)))
    with pytest.raises(RamatchError, match="not a photo library"):
        serve("no-such-model", port=0, settings=ServeSettings(index=str(tmp_path / "none"), workers=2))


def test_the_command_line_finds_the_index_in_a_folder(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr("ramatch.serve.serve", lambda *_, settings, **__: found.append(settings.index))
    for given in (photos, photos / ".ramatch"):
        arguments = parse(["serve", "--index", str(given)])
        assert arguments.run(arguments) == 0
    assert found == [str(photos / ".ramatch")] * 2
