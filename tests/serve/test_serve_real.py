"""The server around a real Recognizer, tiny and with random weights: the two agree with each other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from ramatch.assets import photo_paths

sys.path.append(str(Path(__file__).parents[1] / "modeling"))
tiny_models = pytest.importorskip("tiny_models")


@pytest.mark.parametrize("matcher", [None, "ot", "average"])
def test_answers_are_the_recognizers(client_for: Callable[..., TestClient], matcher: str | None) -> None:
    from ramatch.recognizer import Recognizer

    recognizer = Recognizer(tiny_models.tiny_ram(kind="dual"), name="tiny")
    client = client_for(recognizer, vocabulary="voc20")  # type: ignore[arg-type]
    photo, labels = photo_paths()[1], ["cat", "red kite", "person riding bicycle"]
    data = {"labels": ",".join(labels), "maps": "true", **({"matcher": matcher} if matcher else {})}
    answer = client.post("/v1/tag", files={"image": photo.read_bytes()}, data=data).json()
    prediction = recognizer.predict(photo, vocabulary=recognizer.encode_vocabulary(labels), matcher=matcher, maps=True)
    assert [tag["label"] for tag in answer["labels"]] == [tag.label for tag in prediction.top(3)]
    for got, expected in zip(answer["labels"], prediction.top(3), strict=True):
        assert got["relative"] == pytest.approx(expected.value, abs=1e-5 + 5e-5)  # rounded to 4 digits
        assert got["map"] == pytest.approx(prediction.heatmap(expected.label), abs=1e-3)
    assert [list(got) for got in answer["labels"]] == [list(e) for e in prediction.to_dict(top=3, maps=True)["labels"]]
    assert answer["grid"] == list(prediction.grid)
    assert answer["matcher"] == (matcher or recognizer.ram.config.matcher)
    assert (answer["model"], answer["calibrated"]) == ("tiny", False)


def test_a_vision_tower_alone_says_what_it_knows(client_for: Callable[..., TestClient]) -> None:
    import torch

    from ramatch.config import preset
    from ramatch.modeling.ram import RAM
    from ramatch.recognizer import Recognizer

    backbone = tiny_models.backbone(text=False)
    backbone.given_labels = dict(zip(("left", "right"), torch.eye(2, tiny_models.DIM), strict=True))
    recognizer = Recognizer(
        RAM(backbone, preset("ramatch").frozen(backbone.vision.config.layers)), name="blind to words"
    )
    recognizer.set_vocabulary(["left", "right"])
    client = client_for(recognizer)  # type: ignore[arg-type]
    image = {"image": photo_paths()[0].read_bytes()}
    assert client.post("/v1/tag", files=image).json()["vocabulary"]["size"] == 2
    refused = client.post("/v1/tag", files=image, data={"labels": "up"})
    assert refused.status_code == 422
    assert "'up'" in refused.json()["error"]["message"]


def test_the_interface_names_the_matchers_that_there_are(client: TestClient) -> None:
    from ramatch.modeling.matching import MATCHERS
    from ramatch.serve import schema

    info = client.get("/v1/info").json()
    assert set(info["matchers"]) == set(info["matcher_titles"]) == set(MATCHERS)
    for name in MATCHERS:
        assert schema.parse(schema.TagOptions, {"matcher": name}).matcher == name


def test_masks_are_the_recognizers_and_tags_stay_as_they_are(client_for: Callable[..., TestClient]) -> None:
    from ramatch.recognizer import Recognizer

    recognizer = Recognizer(tiny_models.tiny_ram(kind="dual"), name="tiny")
    client = client_for(recognizer, vocabulary="voc20")  # type: ignore[arg-type]
    photo, labels = photo_paths()[1], ["cat", "red kite"]
    request = {"files": {"image": photo.read_bytes()}, "data": {"labels": ",".join(labels), "threshold": "0"}}
    answer, tagged = (client.post(f"/v1/{path}", **request).json() for path in ("segment", "tag"))
    assert answer["labels"] == tagged["labels"]
    assert "masks" not in tagged
    prediction = recognizer.predict(photo, vocabulary=recognizer.encode_vocabulary(labels), masks=True)
    height, width = answer["mask_size"]
    assert max(height, width) <= 1024
    expected = prediction.masks(0, size=(width, height)).to_dict()["masks"]
    assert expected
    assert answer["masks"] == expected
