"""The web page in a real browser: everything a visitor does, with the mouse, the keyboard and on a phone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from serve_browser import Site, until, watch
from serve_fakes import picture

from ramatch.assets import vocabulary
from ramatch.config import GUESS
from ramatch.serve.app import PAGE

HOSTILE = '<img src=x onerror="window.hacked=1">'


def names(page: Any) -> list[str]:
    return page.locator(".label .name").all_inner_texts()


def settled(page: Any) -> None:
    until(page, "!document.body.classList.contains('busy')")


def test_opens_with_an_example_already_tagged(page: Any) -> None:
    assert page.locator("#thumbs button").count() >= 6
    assert page.locator("#thumbs button[aria-pressed=true] img").get_attribute("alt") == "astronaut"
    count = len(vocabulary("everyday"))
    assert re.fullmatch(rf"\d+ of {count} labels at 50 % or more · \d+ ms", page.inner_text("#count"))
    values = [float(text.rstrip(" %").lstrip("<")) for text in page.locator(".label .value").all_inner_texts()]
    assert values == sorted(values, reverse=True)


def test_words_not_known_well_and_relative_scores_are_shown_for_what_they_are(page: Any) -> None:
    def change(calibrated: bool) -> Any:
        def answer(route: Any) -> None:
            response = route.fetch()
            data = response.json()
            data["calibrated"] = calibrated
            for label in data["labels"] if not calibrated else data["labels"][:1]:
                label["calibrated"] = False
                if not calibrated:
                    label["relative"] = label.pop("probability")
            route.fulfill(response=response, json=data)

        return answer

    page.route("**/v1/tag", change(calibrated=True))
    page.click("#thumbs button >> nth=2")
    until(page, "document.querySelector('.label .value')?.textContent.endsWith(' ?')")
    assert GUESS in page.locator(".label .name").first.get_attribute("title")
    assert sum(text.endswith("?") for text in page.locator(".label .value").all_inner_texts()) == 1
    assert not page.is_visible("#uncalibrated")
    page.unroute("**/v1/tag")
    page.route("**/v1/tag", change(calibrated=False))
    page.click("#thumbs button >> nth=3")
    page.wait_for_selector("#uncalibrated", state="visible")
    assert all(re.fullmatch(r"0\.\d\d", text) for text in page.locator(".label .value").all_inner_texts())


def test_hover_lights_the_map_and_leaving_puts_it_out(page: Any) -> None:
    lit = "#heat.lit"
    assert page.locator(lit).count() == 0
    page.hover(".label >> nth=1")
    assert page.locator(lit).count() == 1
    assert names(page)[1] in page.inner_text("#caption")
    # brightest where the map is: the canvas is no single colour
    shades = page.evaluate(
        "() => { const c = document.getElementById('map');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " const s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d[i]); return s.size; }"
    )
    assert shades > 40
    page.mouse.move(5, 5)
    assert page.locator(lit).count() == 0
    page.click(".label >> nth=2")
    page.mouse.move(5, 5)
    assert names(page)[2] in page.inner_text("#caption")  # held
    page.keyboard.press("Escape")
    assert page.locator(".label[aria-pressed=true]").count() == 0


def test_masks_have_sharp_edges(page: Any) -> None:
    page.click("#advanced summary")
    with page.expect_response("**/v1/segment") as answered:
        page.check("#masks")
    masks = answered.value.json()["masks"]
    page.wait_for_selector("#results:not(.stale)")
    page.hover(f'.label[data-label="{masks[0]["label"]}"]')
    found = page.evaluate(
        "() => { const c = document.getElementById('map');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i] > 200; return [c.height, c.width, n]; }"
    )
    assert found == [*masks[0]["rle"]["size"], masks[0]["area"]]
    with page.expect_response("**/v1/tag"):
        page.uncheck("#masks")


def test_keyboard_alone(page: Any) -> None:
    page.focus("#advanced summary")
    page.keyboard.press("Enter")
    for _ in range(3):  # threshold, matcher and masks, under "Advanced"
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "masks"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "label"
    assert names(page)[0] in page.inner_text("#caption")
    page.keyboard.press("ArrowDown")
    assert names(page)[1] in page.inner_text("#caption")
    page.keyboard.press("Enter")
    assert page.locator(".label >> nth=1").get_attribute("aria-pressed") == "true"
    page.focus("#tab-json")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tab-cli").get_attribute("aria-selected") == "true"
    assert "ramatch tag" in page.inner_text("#code")
    page.focus("#file")  # the real input is what Tab reaches, its label shows the ring
    assert page.evaluate("getComputedStyle(document.querySelector('label[for=file]')).outlineStyle") == "solid"


def test_threshold_moves_labels_between_the_groups(page: Any) -> None:
    before = page.locator(".label:not(.below)").count()
    page.click("#advanced summary")
    page.locator("#threshold").fill("90")
    after = page.locator(".label:not(.below)").count()
    assert 0 < after < before
    assert page.inner_text("#threshold-value") == "90 %"
    assert page.inner_text("#count").startswith(f"{after} of {len(vocabulary('everyday'))} ")
    below = page.locator(".label.below").count()
    page.click(".more")
    assert page.locator(".label.below").count() > below


def test_typed_labels_and_hostile_text(page: Any) -> None:
    everything = page.inner_text("#count")
    page.fill("#labels", " , ")
    assert page.inner_text("#count") == everything  # no label yet: still the vocabulary
    page.fill("#labels", f"dog, {HOSTILE}\numbrella, dog")
    until(page, "document.querySelectorAll('.label').length === 3")
    assert sorted(names(page)) == sorted(["dog", "umbrella", HOSTILE])
    page.hover(".label >> nth=0")
    assert page.evaluate("window.hacked") is None
    assert "not used" in page.inner_text("#vocabulary-tip")
    page.fill("#labels", "")
    until(page, f"document.getElementById('count').textContent.includes('of {len(vocabulary('everyday'))} ')")


def test_own_picture_vocabulary_matcher_and_file_of_labels(page: Any, site: Site, tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(picture(90, 60, kind="PNG"))
    page.set_input_files("#file", tmp_path / "mine.png")
    until(page, "document.getElementById('code').textContent.includes('mine.png')")
    page.select_option("#vocabulary", "coco80")
    until(page, "document.getElementById('count').textContent.includes('of 80 labels')")
    page.click("#advanced summary")
    with page.expect_response("**/v1/tag"):
        page.select_option("#matcher", "average")
    settled(page)
    assert site.recognizer.calls[-1]["matcher"] == "average"
    (tmp_path / "labels.txt").write_text("# mine\nowl\nbat\n\nfox, red\n")
    page.set_input_files("#labels-file", tmp_path / "labels.txt")
    until(page, "document.querySelectorAll('.label').length === 3")
    assert set(names(page)) == {"owl", "bat", "fox, red"}
    page.click("#tab-cli")
    assert "--labels-file labels.txt" in page.inner_text("#code")
    assert "--matcher average" in page.inner_text("#code")
    page.locator("#labels").press_sequentially("\nelk")
    until(page, "document.querySelectorAll('.label').length === 4")
    assert "--labels 'owl,bat,\"fox, red\",elk'" in page.inner_text("#code")  # no longer what the file says


def test_copy_json_and_calls(page: Any) -> None:
    page.fill("#labels", "it's, dog")
    until(page, "document.querySelectorAll('.label').length === 2")
    page.click("#advanced summary")
    page.locator("#threshold").fill("0")
    page.click("#copy")
    until(page, "document.getElementById('copy').textContent.startsWith('Copied')")
    data = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert {label["label"] for label in data["labels"]} == {"it's", "dog"}
    assert "map" not in data["labels"][0]
    page.click("#tab-cli")
    assert (
        page.inner_text("#code") == r"ramatch tag astronaut.jpg --model fake-mini --labels 'it'\''s,dog' --threshold 0"
    )
    page.click("#tab-python")
    compile(page.inner_text("#code"), "snippet", "exec")
    assert '"it\'s"' in page.inner_text("#code")
    page.click("#tab-curl")
    assert page.inner_text("#code").startswith("curl http://127.0.0.1:")


def test_bundled_pictures_and_dropped_files(page: Any) -> None:
    page.click("#thumbs button >> nth=2")
    until(page, "document.getElementById('code').textContent.includes('boats.jpg')")
    page.evaluate(
        """async () => {
          const blob = await (await fetch('photos/coffee.jpg')).blob(), data = new DataTransfer();
          data.items.add(new File([blob], 'dropped.jpg', { type: 'image/jpeg' }));
          window.dispatchEvent(new DragEvent('dragenter', { dataTransfer: data }));
          if (!document.body.classList.contains('dragging')) throw new Error('no hint while dragging');
          window.dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true }));
        }"""
    )
    until(page, "document.getElementById('code').textContent.includes('dropped.jpg')")
    assert page.locator("#thumbs button[aria-pressed=true]").count() == 0


def test_phone(browser: Any, site: Site) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, color_scheme="dark"
    )
    page = context.new_page()
    trouble = watch(page)
    page.goto(site.url)
    page.wait_for_selector(".label")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.tap(".label >> nth=6")
    assert page.locator("#heat.lit").count() == 1
    box = page.locator("#stage").bounding_box()
    assert box["y"] + box["height"] > 150  # the picture is in view while the labels scroll
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 15, 20)"
    page.tap("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 246, 249)"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    small = page.evaluate(
        "[...document.querySelectorAll('button, select, label.button')]"
        ".filter(e => e.offsetHeight && e.offsetHeight < 32).length"
    )
    assert small == 0  # all can be hit with a thumb
    assert trouble == []
    context.close()


def test_problems_are_shown_with_what_to_do(browser: Any, site: Site, tmp_path: Path) -> None:
    page = browser.new_page()
    page.goto(site.url)
    page.wait_for_selector(".label")
    (tmp_path / "fake.jpg").write_text("not a picture")
    page.set_input_files("#file", tmp_path / "fake.jpg")
    page.wait_for_selector("#problem:not([hidden])")
    assert "JPEG" in page.inner_text("#problem")
    page.click("#thumbs button >> nth=0")
    page.wait_for_selector("#problem", state="hidden")
    page.route("**/v1/tag", lambda route: route.abort())
    page.click("#advanced summary")
    page.select_option("#matcher", "ot")
    page.wait_for_selector("#problem:not([hidden])")
    assert "does not answer" in page.inner_text("#problem")
    assert page.locator(".label").count() == 0  # no answer of another question, or of another picture, stays
    assert page.inner_text("#count") == "No answer."
    assert page.inner_text("#code") == ""
    page.unroute("**/v1/tag")
    page.click("#again")
    page.wait_for_selector(".label")
    assert page.is_hidden("#problem")
    page.close()


def test_asks_for_the_api_key(browser: Any) -> None:
    site = Site(api_key="open sesame")
    page = browser.new_page()
    page.goto(site.url)
    page.wait_for_selector("#key-form:not([hidden])")
    page.fill("#key", "open sesame")
    page.keyboard.press("Enter")
    page.wait_for_selector(".label")
    assert page.locator("#key-form").is_hidden()
    page.close()
    site.stop()


def test_api_page_works_offline(browser: Any, site: Site) -> None:
    page = browser.new_page()
    trouble = watch(page)
    page.goto(site.url + "docs")
    page.wait_for_selector("details")
    assert page.locator("details").count() == 13
    assert "multipart/form-data" in page.inner_text("main")
    page.click("summary:has-text('/v1/search')")
    assert "limit" in page.inner_text("details[open]:has-text('/v1/search')")
    assert trouble == []
    page.close()


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_have_enough_contrast(theme: int) -> None:
    block = re.findall(r"color-scheme:.*?}", (PAGE / "base.css").read_text(), re.DOTALL)[theme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))

    def luminance(name: str) -> float:
        parts = [int(colours[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = [(ink, ground) for ink in ("ink", "soft", "accent") for ground in ("bg", "card", "sunken")]
    for ink, ground in [*pairs, ("accent-ink", "accent"), ("bad", "bad-bg")]:
        high, low = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://(?!127\.0\.0\.1)\w", text), path.name
        assert "innerHTML" not in text
