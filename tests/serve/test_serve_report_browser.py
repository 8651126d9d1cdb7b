"""The HTML report opened from the disk in a real browser."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from serve_browser import watch
from serve_fakes import FakeRecognizer, FakeVocabulary

from ramatch.assets import photo_paths, vocabulary
from ramatch.data.images import load_image
from ramatch.viz.report import write_report

HOSTILE = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    paths = photo_paths()[:4]
    words = FakeVocabulary([*vocabulary("coco80")[:12], HOSTILE])
    found = FakeRecognizer().predict([load_image(path) for path in paths], vocabulary=words, maps=True)
    named = [dataclasses.replace(each, source=path.name) for each, path in zip(found, paths, strict=True)]
    return write_report(named, paths, tmp_path_factory.mktemp("report") / "r.html", threshold=0.3, top=13).as_uri()


def open_page(browser: Any, url: str, **options: Any) -> tuple[Any, list[str]]:
    page = browser.new_context(**options).new_page()
    trouble = watch(page)
    page.goto(url)
    return page, trouble


def test_maps_on_hover_focus_and_click(browser: Any, report: str) -> None:
    page, trouble = open_page(browser, report)
    assert page.locator(".heat.lit").count() == 0
    page.hover(".label >> nth=1")
    assert page.locator(".heat.lit").count() == 1
    assert page.evaluate("document.querySelector('canvas').width") == 9 * 8
    page.mouse.move(1, 1)
    assert page.locator(".heat.lit").count() == 0
    page.focus(".label >> nth=0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator(".label >> nth=1").get_attribute("aria-pressed") == "true"
    page.focus("#filter")
    assert page.locator(".heat.lit").count() == 1  # held
    assert page.evaluate("window.hacked") is None
    assert trouble == []


def test_filter_by_label(browser: Any, report: str) -> None:
    page, trouble = open_page(browser, report)
    assert page.inner_text("#count") == "4 images"
    chip = page.locator("#common button").first
    label, count = chip.inner_text().rsplit(" ", 1)
    chip.click()
    assert page.input_value("#filter") == label
    assert page.inner_text("#count") == f"{count} of 4 images"
    assert page.locator(".card:visible").count() == int(count)
    assert page.locator(".card:visible .heat.lit").count() == int(count)  # the label's map is shown on each
    page.fill("#filter", "no such label")
    assert page.locator("#nothing").is_visible()
    page.fill("#filter", "")
    assert page.locator(".card:visible").count() == 4
    assert trouble == []


def test_phone_and_dark(browser: Any, report: str) -> None:
    page, trouble = open_page(
        browser, report, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, color_scheme="dark"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 15, 20)"
    page.tap(".label >> nth=0")
    assert page.locator(".heat.lit").count() == 1
    page.tap("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 246, 249)"
    assert trouble == []
