"""Every limit, every refusal: the status, the code, and that it says what to do."""

from __future__ import annotations

import base64
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serve_fakes import FakeRecognizer, picture

from ramatch.errors import RamatchError
from ramatch.serve.settings import ServeSettings


def post(client: TestClient, image: bytes = b"", **fields: str):  # type: ignore[no-untyped-def]
    return client.post("/v1/tag", files={"image": ("p", image or picture())}, data={"labels": "cat", **fields})


def encoded() -> str:
    return base64.b64encode(picture()).decode()


def refused(answer, status: int, code: str) -> str:  # type: ignore[no-untyped-def]
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["message"]
    assert error["hint"]
    return error["message"] + " " + error["hint"]


def huge_png(width: int, height: int) -> bytes:
    """A few bytes whose header promises width x height pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 99)) + chunk(b"IEND", b"")
    )


def test_body_too_large_by_its_header(client_for: Callable[..., TestClient]) -> None:
    client = client_for(max_body_bytes=2000)
    assert post(client).status_code == 200
    assert "2,000" in refused(post(client, b"x" * 3000), 413, "body_too_large")


def test_body_too_large_is_noticed_while_it_streams(client_for: Callable[..., TestClient]) -> None:
    client = client_for(max_body_bytes=10_000)
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b"x" * 1000

    refused(
        client.post("/v1/tag", content=endless(), headers={"Content-Type": "application/json"}), 413, "body_too_large"
    )
    refused(client.put("/v1/vocabularies/a", content=b"x" * 20_000), 413, "body_too_large")


def test_bodies_held_together_are_capped_and_given_back(client_for: Callable[..., TestClient]) -> None:
    client = client_for(max_buffered_bytes=4000, max_body_bytes=10_000)
    for _ in range(8):  # one after the other they fit
        assert post(client).status_code == 200
    refused(client.put("/v1/vocabularies/a", content=b"x" * 5000), 429, "overloaded")
    service = client.app.state.service  # type: ignore[attr-defined]
    assert (service.active, service.buffered) == (0, 0)
    service.active = 1000
    refused(post(client), 429, "overloaded")


def test_pixels_are_capped_from_the_header(client_for: Callable[..., TestClient]) -> None:
    client = client_for(max_pixels=100_000)
    assert "6000x6000" in refused(post(client, huge_png(6_000, 6_000)), 413, "too_many_pixels")
    refused(post(client, huge_png(60_000, 60_000)), 413, "too_many_pixels")
    refused(post(client, picture(400, 300)), 413, "too_many_pixels")
    assert post(client, picture(300, 300)).status_code == 200


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_accepted_formats(client: TestClient, kind: str) -> None:
    assert post(client, picture(kind=kind)).status_code == 200


@pytest.mark.parametrize("content", [b"%PDF-1.7 ...", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"II*\0", b"hello"])
def test_other_formats_are_refused(client: TestClient, content: bytes) -> None:
    refused(post(client, content), 415, "unsupported_format")
    refused(post(client, picture(kind="TIFF")), 415, "unsupported_format")


def test_broken_and_empty_images(client: TestClient) -> None:
    refused(post(client, picture(300, 300)[:600]), 400, "unreadable_image")
    refused(client.post("/v1/tag", files={"image": ("p", b"")}, data={"labels": "a"}), 400, "empty_image")
    refused(client.post("/v1/tag", json={"image": "", "labels": ["a"]}), 400, "empty_image")
    refused(client.post("/v1/tag", json={"image": "no base64!", "labels": ["a"]}), 400, "bad_base64")


def test_large_images_are_kept_small_in_the_queue_but_reported_in_full(client_for: Callable[..., TestClient]) -> None:
    seen = []

    class Looking(FakeRecognizer):
        def predict(self, images, **options):  # type: ignore[no-untyped-def]
            seen.extend(image.size for image in images)
            return super().predict(images, **options)

    answer = post(client_for(Looking()), picture(3072, 1024))
    assert answer.json()["image"] == {"name": "p", "width": 3072, "height": 1024}
    assert seen[-1] == (1536, 512)


def test_urls_are_never_fetched(client: TestClient) -> None:
    refused(client.post("/v1/tag", json={"image": "http://127.0.0.1/x.jpg"}), 422, "no_url_fetching")
    refused(client.post("/v1/tag", json={"image_url": "http://127.0.0.1/x.jpg", "image": ""}), 422, "no_url_fetching")
    refused(client.post("/v1/tag", json={"image": "file:///etc/passwd"}), 422, "no_url_fetching")


def test_labels(client_for: Callable[..., TestClient]) -> None:
    client = client_for(max_labels=3, max_label_chars=10, vocabulary="voc20")
    assert len(post(client, labels="a, b,,c, a").json()["labels"]) == 3
    assert "4 labels" in refused(post(client, labels="a,b,c,d"), 422, "too_many_labels")
    refused(post(client, labels=",".join("x" * 50)), 422, "too_many_labels")
    refused(post(client, labels="x" * 11), 422, "label_too_long")
    refused(post(client, labels=", ,"), 422, "no_labels")
    refused(post(client, labels="a\x07b"), 422, "bad_label")
    refused(post(client, labels='["a", 3]'), 422, "bad_field")
    assert len(post(client, labels='["a, b", "c"]').json()["labels"]) == 2  # JSON keeps commas
    refused(post(client, labels="a", vocabulary="coco80"), 422, "labels_and_vocabulary")
    refused(client.put("/v1/vocabularies/x", json={"labels": list("abcd")}), 422, "too_many_labels")
    refused(client.put("/v1/vocabularies/x", json={"labels": []}), 422, "bad_field")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top": "0"}, "top"),
        ({"top": "many"}, "top"),
        ({"threshold": "1.5"}, "threshold"),
        ({"maps": "perhaps"}, "maps"),
        ({"deadline_ms": "-5"}, "deadline_ms"),
        ({"tops": "3"}, "tops"),
    ],
)
def test_wrong_fields_are_named(client: TestClient, fields: dict[str, str], named: str) -> None:
    assert f"'{named}'" in refused(post(client, **fields), 422, "bad_field")


def test_wrong_bodies(client: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    refused(client.post("/v1/tag", content=b"{", headers=headers), 400, "bad_json")
    refused(client.post("/v1/tag", content=b"[1]", headers=headers), 400, "bad_json")
    refused(client.post("/v1/tag", content=b"[" * 100_000, headers=headers), 400, "bad_json")
    refused(client.post("/v1/tag", content=b"\xff\xfe{", headers=headers), 400, "bad_json")
    refused(client.post("/v1/tag", content=b"hi", headers={"Content-Type": "text/plain"}), 415, "unsupported_body")
    refused(client.post("/v1/tag"), 415, "unsupported_body")
    form = {"Content-Type": "multipart/form-data"}
    refused(client.post("/v1/tag", content=b"hi", headers=form), 400, "bad_form")
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    refused(client.post("/v1/tag", content=b"hi", headers=form), 400, "bad_form")
    refused(client.post("/v1/tag", data={"labels": "a"}, files={"labels_file": b"x"}), 422, "bad_field")


HUGE = {
    "/v1/tag/batch": [b'{"images":[' + b"0," * 2_000_000 + b"0]}", b'{"images":[' + b"{}," * 1_000_000 + b"{}]}"],
    "/v1/tag": [b'{"image":"","labels":[' + b"0," * 2_000_000 + b"0]}"],
}


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, bodies in HUGE.items() for body in bodies])
def test_huge_lists_are_refused_at_once(client: TestClient, path: str, body: bytes) -> None:
    tracemalloc.start()
    start = time.monotonic()
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    seconds, (_, peak) = time.monotonic() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    refused(answer, 413, "body_too_large")
    assert seconds < 1
    assert peak < 10 * len(body)


def test_long_lists_are_refused_by_their_length_not_element_by_element(client: TestClient) -> None:
    many = {"images": [0] * 100_000}
    assert "100000 images" in refused(client.post("/v1/tag/batch", json=many), 422, "image_count")
    labels = {"labels": [0] * 100_000, "image": ""}
    assert "100000 labels" in refused(client.post("/v1/tag", json=labels), 422, "too_many_labels")
    refused(client.put("/v1/vocabularies/x", json={"labels": [0] * 100_000}), 422, "too_many_labels")
    text = {"Content-Type": "text/plain"}
    refused(client.put("/v1/vocabularies/x", content=b"\n" * 1_000_000, headers=text), 413, "body_too_large")
    refused(post(client, labels="," * 1_000_000), 413, "body_too_large")
    refused(post(client, labels="[" + "0," * 1_000_000 + "0]"), 413, "body_too_large")
    commas = ["," * 120]  # commas inside a label are no list
    assert client.post("/v1/tag", json={"image": encoded(), "labels": commas}).status_code == 200


@pytest.mark.parametrize("field", ["labels", "image", "text"])
def test_text_of_millions_of_words_is_not_taken_apart(client: TestClient, field: str) -> None:
    words = "abcd " * 1_600_000
    tracemalloc.start()
    if field == "labels":
        refused(client.post("/v1/tag", json={"image": encoded(), "labels": [words]}), 422, "label_too_long")
    elif field == "image":
        refused(client.post("/v1/tag", json={"image": words, "labels": ["a"]}), 415, "unsupported_format")
    else:
        text = {"Content-Type": "text/plain"}
        refused(client.put("/v1/vocabularies/x", content=words, headers=text), 422, "label_too_long")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(words)  # as separate words they would be larger than that


def test_text_that_cannot_be_sent_back(client: TestClient) -> None:
    """JSON can spell half a surrogate pair, which no answer in UTF-8 can repeat."""

    def send(fields: str) -> Any:
        body = f'{{"image": "{encoded()}", {fields}}}'.encode()
        return client.post("/v1/tag", content=body, headers={"Content-Type": "application/json"})

    refused(send(r'"labels": ["\ud800"]'), 422, "bad_label")
    refused(send(r'"labels": ["\ud800' + "x" * 200 + '"]'), 422, "bad_label")
    refused(send(r'"labels": ["a"], "name": "\ud800"'), 422, "bad_field")
    refused(send(r'"labels": ["a"], "\ud800": 1'), 422, "bad_field")
    refused(send(r'"vocabulary": "\ud800"'), 404, "unknown_vocabulary")
    refused(post(client, labels=r'["\ud800' + "x" * 200 + '"]'), 422, "bad_label")


def test_numbers_of_any_length(client: TestClient) -> None:
    for digits in (20, 400, 10_000):
        fields = {"deadline_ms": "9" * digits}
        assert "'deadline_ms'" in refused(post(client, **fields), 422, "bad_field")
    body = {"image": encoded(), "labels": ["a"], "deadline_ms": 10**400}
    assert "'deadline_ms'" in refused(client.post("/v1/tag", json=body), 422, "bad_field")
    assert client.post("/v1/tag", json={**body, "deadline_ms": 1000, "top": 10**400}).status_code == 200


def test_image_counts(client_for: Callable[..., TestClient]) -> None:
    client = client_for(max_images=2)
    image = ("image", ("p.jpg", picture()))
    refused(client.post("/v1/tag", files=[image, image]), 422, "one_image")
    refused(client.post("/v1/tag/batch", files=[image] * 3), 400, "bad_form")
    images = [{"image": encoded()}] * 3
    refused(client.post("/v1/tag/batch", json={"images": images}), 422, "image_count")
    refused(client.post("/v1/tag/batch", json={"images": []}), 422, "bad_field")
    assert client.post("/v1/tag/batch", files=[image] * 2).status_code == 200


def test_unknown_paths_and_methods_answer_in_json(client: TestClient) -> None:
    refused(client.get("/nothing"), 404, "not_found")
    refused(client.get("/v1/tag"), 405, "method_not_allowed")
    refused(client.get("/photos/..%2f__init__.py"), 404, "not_found")


def test_api_key(client_for: Callable[..., TestClient]) -> None:
    client = client_for(api_key="correct horse")
    for path in ("/v1/info", "/v1/vocabularies/coco80", "/metrics"):
        for headers in (
            {},
            {"X-API-Key": "wrong"},
            {"Authorization": "Bearer correct"},
            {"X-API-Key": "corréct horse".encode()},
        ):
            refused(client.get(path, headers=headers), 401, "bad_api_key")
        assert client.get(path, headers={"X-API-Key": "correct horse"}).status_code == 200
        assert client.get(path, headers={"Authorization": "Bearer correct horse"}).status_code == 200
    refused(post(client), 401, "bad_api_key")
    for path in ("/", "/healthz", "/readyz"):
        assert client.get(path).status_code == 200


def test_cors_is_off_unless_asked_for(client_for: Callable[..., TestClient]) -> None:
    origin = {"Origin": "https://example.org"}
    closed = client_for()
    assert "access-control-allow-origin" not in closed.get("/v1/info", headers=origin).headers
    refused(closed.put("/v1/vocabularies/x", json={"labels": ["a"]}, headers=origin), 403, "foreign_origin")
    same = {"Origin": "http://testserver"}
    assert closed.put("/v1/vocabularies/x", json={"labels": ["a"]}, headers=same).status_code == 201
    opened = client_for(cors_origins=("https://example.org",))
    assert opened.get("/v1/info", headers=origin).headers["access-control-allow-origin"] == "https://example.org"
    assert opened.put("/v1/vocabularies/x", json={"labels": ["a"]}, headers=origin).status_code == 201
    other = {"Origin": "https://example.com"}
    assert "access-control-allow-origin" not in opened.get("/v1/info", headers=other).headers


def test_only_known_hosts(client_for: Callable[..., TestClient]) -> None:
    client = client_for(allowed_hosts=("localhost", "::1"))
    assert client.get("/healthz", headers={"Host": "localhost:8000"}).status_code == 200
    assert client.get("/healthz", headers={"Host": "[::1]:8000"}).status_code == 200
    for host in ("evil.example", "localhost.evil.example", "[", ""):
        refused(client.get("/healthz", headers={"Host": host}), 421, "unknown_host")


@pytest.mark.parametrize(
    "wrong", [{"max_batch": 0}, {"queue_size": -1}, {"window_s": -1.0}, {"api_key": "short"}, {"api_key": ""}]
)
def test_settings_check_themselves(wrong: dict) -> None:
    with pytest.raises(RamatchError):
        ServeSettings(**wrong)
