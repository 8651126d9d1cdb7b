"""The HTTP interface with a fake recognizer: answers, options, vocabularies, operations."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi.testclient import TestClient
from serve_fakes import FakeRecognizer, picture

from ramatch.assets import vocabulary
from ramatch.errors import RamatchError
from ramatch.serve import schema
from ramatch.serve.app import create_app
from ramatch.serve.settings import ServeSettings

B64 = base64.b64encode(picture()).decode()


def form(**fields: str) -> dict:
    return {"files": {"image": ("photo.jpg", picture(), "image/jpeg")}, "data": fields}


def test_multipart_and_json_give_the_same_answer(client: TestClient) -> None:
    by_form = client.post("/v1/tag", **form(labels="cat, dog,\n tree", top="2"))
    by_json = client.post(
        "/v1/tag", json={"image": B64, "labels": ["cat", "dog", "tree"], "top": 2, "name": "photo.jpg"}
    )
    by_uri = client.post(
        "/v1/tag", json={"image": "data:image/jpeg;base64," + B64, "labels": ["cat", "dog", "tree"], "top": 2}
    )
    assert by_form.status_code == by_json.status_code == by_uri.status_code == 200
    one, two = by_form.json(), by_json.json()
    schema.TagResponse.model_validate(one)
    assert one["took_ms"] > 0
    assert {**one, "took_ms": 0} == {**two, "took_ms": 0}
    assert one["labels"] == by_uri.json()["labels"]
    assert one["image"] == {"name": "photo.jpg", "width": 40, "height": 30}
    assert one["vocabulary"] == {"name": None, "size": 3}
    assert len(one["labels"]) == 2
    scores = [label["score"] for label in one["labels"]]
    assert scores == sorted(scores, reverse=True)
    assert "map" not in one["labels"][0]


def test_top_and_threshold(client: TestClient) -> None:
    everything = client.post("/v1/tag", **form(vocabulary="coco80", top="80")).json()["labels"]
    assert len(everything) == 80
    assert len(client.post("/v1/tag", **form(vocabulary="coco80")).json()["labels"]) == 10
    cut = everything[4]["probability"]
    above = client.post("/v1/tag", **form(vocabulary="coco80", threshold=str(cut))).json()["labels"]
    assert above == [label for label in everything if label["probability"] >= cut]
    assert (
        client.post("/v1/tag", **form(vocabulary="coco80", threshold=str(cut), top="2")).json()["labels"]
        == everything[:2]
    )


def test_maps_are_grids_in_the_unit_interval(client: TestClient) -> None:
    answer = client.post("/v1/tag", **form(labels="cat,dog", maps="true")).json()
    assert answer["grid"] == [7, 9]
    for label in answer["labels"]:
        assert len(label["map"]) == 7
        assert {len(row) for row in label["map"]} == {9}
        values = [value for row in label["map"] for value in row]
        assert min(values) >= 0
        assert max(values) == 1


def test_only_so_many_maps(client_for: Callable[..., TestClient]) -> None:
    labels = client_for(max_maps=1).post("/v1/tag", **form(labels="cat,dog", maps="true")).json()["labels"]
    assert "map" in labels[0]
    assert "map" not in labels[1]


def test_matcher_reaches_the_model(client_for: Callable[..., TestClient]) -> None:
    recognizer = FakeRecognizer()
    client = client_for(recognizer)
    assert client.post("/v1/tag", **form(labels="a", matcher="bipartite")).json()["matcher"] == "bipartite"
    assert recognizer.calls[-1]["matcher"] == "bipartite"
    wrong = client.post("/v1/tag", **form(labels="a", matcher="magic"))
    assert wrong.status_code == 422
    assert "kcot" in wrong.json()["error"]["message"]


def test_default_vocabulary_is_the_settings_or_the_recognizers_own(client_for: Callable[..., TestClient]) -> None:
    assert client_for().post("/v1/tag", **form()).json()["vocabulary"]["name"] == "general"
    own = FakeRecognizer(labels=["left", "right"])
    answer = client_for(own).post("/v1/tag", **form()).json()
    assert answer["vocabulary"] == {"name": None, "size": 2}
    assert own.encoded == []  # its own labels need no encoding


def test_exif_rotation_is_applied(client: TestClient) -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = picture(40, 30, exif=exif)
    answer = client.post("/v1/tag", files={"image": ("t.jpg", turned)}, data={"labels": "a"}).json()
    assert (answer["image"]["width"], answer["image"]["height"]) == (30, 40)


def test_batch_keeps_order_and_reports_bad_images_in_place(client: TestClient) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    files = [("image", (f"{i}.jpg", picture(colour=colour), "image/jpeg")) for i, colour in enumerate(colours)]
    files.insert(1, ("image", ("bad.jpg", b"\xff\xd8\xff but no", "image/jpeg")))
    answer = client.post("/v1/tag/batch", files=files, data={"labels": "cat,dog"})
    assert answer.status_code == 200
    schema.BatchResponse.model_validate(answer.json())
    results = answer.json()["results"]
    assert [r["image"]["name"] for r in results if "image" in r] == ["0.jpg", "1.jpg", "2.jpg"]
    assert results[1]["error"]["code"] == "unreadable_image"
    single = client.post("/v1/tag", files=[files[3]], data={"labels": "cat,dog"}).json()
    assert single["labels"] == results[3]["labels"]
    by_json = client.post("/v1/tag/batch", json={"images": [{"image": B64}, {"image": "!"}], "labels": ["cat"]}).json()
    assert by_json["results"][1]["error"]["code"] == "bad_base64"


def test_concurrent_requests_share_batches_by_vocabulary(client_for: Callable[..., TestClient]) -> None:
    recognizer = FakeRecognizer()
    client = client_for(recognizer, window_s=0.0, max_batch=8)
    recognizer.started.clear()
    recognizer.gate.clear()
    with ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(client.post, "/v1/tag", **form(labels="busy"))]
        recognizer.started.wait(5)
        jobs += [pool.submit(client.post, "/v1/tag", **form(labels="x,y" if i % 2 else "z")) for i in range(10)]
        service = client.app.state.service  # type: ignore[attr-defined]
        while service.batcher.waiting < 10:
            time.sleep(0.005)
        recognizer.gate.set()
        assert [job.result().status_code for job in jobs] == [200] * 11
    assert recognizer.batches == [1, 5, 5]
    assert {call["labels"] for call in recognizer.calls[-2:]} == {("z",), ("x", "y")}
    assert recognizer.threads == {"ramatch-predict_0"}


def test_overload_is_429_with_retry_after_and_the_admitted_are_served(client_for: Callable[..., TestClient]) -> None:
    recognizer = FakeRecognizer()
    client = client_for(recognizer, queue_size=2, window_s=0.0)
    recognizer.started.clear()
    recognizer.gate.clear()
    service = client.app.state.service  # type: ignore[attr-defined]
    with ThreadPoolExecutor(4) as pool:
        admitted = [pool.submit(client.post, "/v1/tag", **form(labels="a"))]
        recognizer.started.wait(5)
        for waiting in (1, 2):
            admitted.append(pool.submit(client.post, "/v1/tag", **form(labels="a")))
            while service.batcher.waiting < waiting:
                time.sleep(0.005)
        refused = client.post("/v1/tag", **form(labels="a"))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        recognizer.gate.set()
        assert [job.result().status_code for job in admitted] == [200] * 3
    assert client.post("/v1/tag", **form(labels="a")).status_code == 200
    assert 'ramatch_dropped_total{reason="overload"} 1.0' in client.get("/metrics").text


def test_deadline_is_504(client_for: Callable[..., TestClient]) -> None:
    recognizer = FakeRecognizer()
    client = client_for(recognizer)
    recognizer.gate.clear()
    threading.Timer(1.0, recognizer.gate.set).start()
    start = time.monotonic()
    answer = client.post("/v1/tag", **form(labels="a", deadline_ms="80"))
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert time.monotonic() - start < 0.9


def test_a_client_that_hangs_up_is_dropped_from_the_queue() -> None:
    recognizer = FakeRecognizer()
    app = create_app(recognizer, ServeSettings(allowed_hosts=("*",), window_s=0.0))
    body = json.dumps({"image": B64, "labels": ["gone"]}).encode()

    async def main() -> None:
        async with app.router.lifespan_context(app):
            service = app.state.service
            while not service.ready:
                await asyncio.sleep(0.005)
            recognizer.gate.clear()
            busy = asyncio.create_task(service.batcher.call(recognizer.gate.wait, 20))
            hung_up = asyncio.Event()
            messages = [{"type": "http.request", "body": body, "more_body": False}]
            sent: list = []

            async def receive() -> dict:
                if messages:
                    return messages.pop()
                await hung_up.wait()
                return {"type": "http.disconnect"}

            async def send(message: dict) -> None:
                sent.append(message)

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/tag",
                "raw_path": b"/v1/tag",
                "query_string": b"",
                "root_path": "",
                "scheme": "http",
                "http_version": "1.1",
                "server": ("t", 80),
                "client": ("c", 1),
                "headers": [(b"host", b"t"), (b"content-type", b"application/json")],
            }
            # the model's thread is busy, so the batch of this request is formed but cannot start
            second = asyncio.create_task(app(dict(scope), receive, send))
            await asyncio.sleep(0.15)
            hung_up.set()
            await asyncio.wait_for(second, 5)
            assert sent[0]["status"] == 499
            recognizer.gate.set()
            await busy
            assert 'reason="cancelled"} 1.0' in service.metrics.render().decode()

    asyncio.run(main())


def test_vocabularies_can_be_registered_used_and_deleted(client_for: Callable[..., TestClient]) -> None:
    recognizer = FakeRecognizer()
    client = client_for(recognizer)
    made = client.put("/v1/vocabularies/pets", json={"labels": ["cat", " dog ", "cat", "pet  fish"]})
    assert made.status_code == 201
    assert made.json() == {"name": "pets", "size": 3, "bundled": False}
    assert recognizer.encoded[-1] == ("cat", "dog", "pet fish")  # encoded when registered, not at the first request
    count = len(recognizer.encoded)
    answer = client.post("/v1/tag", **form(vocabulary="pets"))
    assert answer.json()["vocabulary"] == {"name": "pets", "size": 3}
    assert len(recognizer.encoded) == count
    assert client.get("/v1/vocabularies/pets").json()["labels"] == ["cat", "dog", "pet fish"]
    listed = {v["name"]: v for v in client.get("/v1/vocabularies").json()["vocabularies"]}
    assert listed["pets"]["size"] == 3
    assert listed["coco80"]["bundled"]
    text = client.put("/v1/vocabularies/pets", content="# mine\nowl\n\nbat\n", headers={"Content-Type": "text/plain"})
    assert text.status_code == 200
    assert client.get("/v1/vocabularies/pets").json()["labels"] == ["owl", "bat"]
    assert client.delete("/v1/vocabularies/pets").status_code == 204
    for gone in (client.get("/v1/vocabularies/pets"), client.post("/v1/tag", **form(vocabulary="pets"))):
        assert gone.status_code == 404
        assert "coco80" in gone.json()["error"]["hint"]


def test_bundled_vocabularies_are_there_and_read_only(client: TestClient) -> None:
    assert client.get("/v1/vocabularies/nus81").json()["labels"] == vocabulary("nus81")
    assert client.put("/v1/vocabularies/nus81", json={"labels": ["a"]}).status_code == 409
    assert client.delete("/v1/vocabularies/nus81").status_code == 409
    assert client.put("/v1/vocabularies/Not%20a%20name", json={"labels": ["a"]}).json()["error"]["code"] == "bad_name"


def test_registered_vocabularies_are_bounded(client_for: Callable[..., TestClient]) -> None:
    client = client_for(registered_vocabularies=1)
    assert client.put("/v1/vocabularies/one", json={"labels": ["a"]}).status_code == 201
    assert client.put("/v1/vocabularies/two", json={"labels": ["a"]}).json()["error"]["code"] == "too_many_vocabularies"
    assert client.put("/v1/vocabularies/one", json={"labels": ["b"]}).status_code == 200


def test_encoded_vocabularies_are_kept_least_recently_used(client_for: Callable[..., TestClient]) -> None:
    recognizer = FakeRecognizer()
    client = client_for(recognizer, cached_vocabularies=2, vocabulary="voc20")
    for labels in ("a", "b", "a", "c", "a", "b"):
        client.post("/v1/tag", **form(labels=labels))
    assert recognizer.encoded[1:] == [("a",), ("b",), ("c",), ("b",)]  # c pushed b out, a stayed
    text = client.get("/metrics").text
    assert "ramatch_vocabularies_cached 2.0" in text
    assert "ramatch_vocabulary_hits 2.0" in text


def test_info_health_ready_metrics(client: TestClient) -> None:
    info = client.get("/v1/info").json()
    assert info["model"] == "fake-mini"
    assert info["limits"]["max_labels"] == 2000
    assert "coco80" in {v["name"] for v in info["vocabularies"]}
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    client.post("/v1/tag", **form(labels="a"))
    client.get("/v1/vocabularies/voc20")
    client.get("/no/such/thing")
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    for line in (
        'ramatch_requests_total{method="POST",route="/v1/tag",status="200"} 1.0',
        "ramatch_images_total 1.0",
        'route="/v1/vocabularies/{name}",status="200"} 1.0',
        'route="other",status="404"} 1.0',
        "ramatch_ready 1.0",
        "ramatch_batch_images_count 1.0",
        "ramatch_queue_images 0.0",
    ):
        assert line in metrics.text


def test_not_ready_before_the_model_has_answered(client_for: Callable[..., TestClient]) -> None:
    slow = FakeRecognizer()
    slow.gate.clear()
    app = create_app(slow, ServeSettings(allowed_hosts=("testserver",)))
    with TestClient(app) as client:
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
        slow.gate.set()
        for _ in range(100):
            if client.get("/readyz").status_code == 200:
                break
            time.sleep(0.01)
        assert client.get("/readyz").status_code == 200
    broken = FakeRecognizer()
    broken.fail = RuntimeError("no memory")
    answer = client_for(broken).get("/readyz")
    assert answer.status_code == 503
    assert "no memory" in answer.json()["error"]["message"]


def test_draining_refuses_new_requests(client: TestClient) -> None:
    client.app.state.service.draining = True  # type: ignore[attr-defined]
    for answer in (client.get("/readyz"), client.post("/v1/tag", **form(labels="a"))):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        assert answer.headers["retry-after"]
    assert client.get("/healthz").status_code == 200


def test_refused_by_the_model_is_422_and_a_bug_is_500_without_its_text(client_for: Callable[..., TestClient]) -> None:
    recognizer = FakeRecognizer()
    client = client_for(recognizer)
    recognizer.fail = RamatchError("this model has no text tower; give --label-features")
    answer = client.post("/v1/tag", **form(labels="a"))
    assert answer.status_code == 422
    assert "text tower" in answer.json()["error"]["message"]
    recognizer.fail = ValueError("secret detail")
    answer = client.post("/v1/tag", **form(labels="a"))
    assert answer.status_code == 500
    assert "secret" not in answer.text
    recognizer.fail = None
    assert client.post("/v1/tag", **form(labels="a")).status_code == 200


def test_openapi_describes_both_bodies_and_all_routes(client: TestClient) -> None:
    spec = client.get("/openapi.json").json()
    assert set(spec["paths"]) == {
        "/v1/tag",
        "/v1/tag/batch",
        "/v1/segment",
        "/v1/vocabularies",
        "/v1/vocabularies/{name}",
        "/v1/search",
        "/v1/thumbnails/{photo}",
        "/v1/info",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    body = spec["paths"]["/v1/tag"]["post"]["requestBody"]["content"]
    assert body["multipart/form-data"]["schema"]["properties"]["image"]["format"] == "binary"
    json_body = body["application/json"]["schema"]
    assert json_body["required"] == ["image"]
    assert "kcot" in json.dumps(json_body["properties"]["matcher"])
    text = json.dumps(spec)
    refs = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert refs <= set(spec["components"]["schemas"])  # every reference resolves
    [q] = [p for p in spec["paths"]["/v1/search"]["get"]["parameters"] if p["name"] == "q"]
    assert (q["in"], q["required"]) == ("query", True)
    assert "429" in spec["paths"]["/v1/tag"]["post"]["responses"]


def test_async_transport_too() -> None:
    """The app works under another ASGI client, many requests at once."""
    recognizer = FakeRecognizer(seconds=0.01)
    app = create_app(recognizer, ServeSettings(allowed_hosts=("t",)))

    async def main() -> None:
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t") as client,
        ):
            answers = await asyncio.gather(*(client.post("/v1/tag", **form(labels="a,b")) for _ in range(24)))
            assert {answer.status_code for answer in answers} == {200}
        assert max(recognizer.batches) > 1
        assert sum(recognizer.batches) == 24

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_page_has_a_strict_policy_and_no_outside_addresses(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
