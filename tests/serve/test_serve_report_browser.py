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
    words = FakeVocabulary([*vocabulary("coco80")[:12], HOSTILE, "blue, small"])
    found = FakeRecognizer().predict([load_image(path) for path in paths], vocabulary=words, maps=True)
    named = [dataclasses.replace(each, source=path.name) for each, path in zip(found, paths, strict=True)]
    return write_report(named, paths, tmp_path_factory.mktemp("report") / "r.html", threshold=0.3, top=14).as_uri()


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


def names(page: Any) -> list[str]:
    return page.locator(".card:visible h2").all_text_contents()


def found(page: Any) -> dict[str, dict[str, float]]:
    """What each card counts as found, as the page has it."""
    code = """() => [...document.querySelectorAll('.card')].map((card) => [card.querySelector('h2').textContent,
      [...card.querySelectorAll('.label:not(.below)')].map((each) => [each.dataset.label, Number(each.dataset.p)])])"""
    return {name: dict(labels) for name, labels in page.evaluate(code)}


def test_filter_by_several_labels_and_by_file_names(browser: Any, report: str) -> None:
    page, trouble = open_page(browser, report)
    labels, everyone = found(page), names(page)
    one, two = next((a, b) for has in labels.values() for a in has for b in has if a < b and a != HOSTILE)
    both = [name for name in everyone if {one, two} <= labels[name].keys()]
    page.fill("#filter", f" {one.upper()} ,{two}, ")
    assert 0 < len(both) == len(names(page))
    assert names(page) == both
    assert page.inner_text("#count") == f"{len(both)} of 4 images"
    assert page.locator("#common button[aria-pressed=true]").count() == 2
    page.fill("#filter", f"-{one}")
    assert names(page) == [name for name in everyone if one not in labels[name]]
    page.fill("#filter", "BARN.j")
    assert names(page) == ["barn.jpg"]
    page.fill("#filter", f"barn, {next(iter(labels['barn.jpg']))}")
    assert names(page) == ["barn.jpg"]
    page.fill("#filter", "")
    chips = page.locator("#common button")
    chips.nth(0).click()
    chips.nth(1).click()
    first, second = (chips.nth(i).inner_text().rsplit(" ", 1)[0] for i in range(2))
    assert page.input_value("#filter") == f"{first.lower()}, {second}"
    chips.nth(0).click()
    assert page.input_value("#filter") == second.lower()
    chips.nth(1).click()
    page.click("#common button:has-text('blue, small')")
    assert page.input_value("#filter") == '"blue, small"'
    assert names(page) == [name for name in everyone if "blue, small" in labels[name]]
    page.click("#common button:has-text('blue, small')")
    assert names(page) == everyone
    assert page.evaluate("window.hacked") is None
    assert trouble == []


def test_sorting(browser: Any, report: str) -> None:
    page, trouble = open_page(browser, report)
    labels, everyone = found(page), names(page)
    count = {name: len(has) for name, has in labels.items()}
    page.select_option("#sort", "Most labels first")
    assert [count[name] for name in names(page)] == sorted(count.values(), reverse=True)
    page.select_option("#sort", "Fewest labels first")
    assert [count[name] for name in names(page)] == sorted(count.values())
    page.select_option("#sort", "By name")
    assert names(page) == sorted(everyone)
    label = max(labels["boats.jpg"], key=labels["boats.jpg"].__getitem__)
    page.fill("#filter", label)
    page.select_option("#sort", "Most likely first")
    have = {name: has[label] for name, has in labels.items() if label in has}
    assert names(page) == sorted(have, key=have.__getitem__, reverse=True)
    page.fill("#filter", "")
    assert names(page) == sorted(everyone, key=lambda name: -max(labels[name].values(), default=0))
    page.select_option("#sort", "As tagged")
    assert names(page) == everyone
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
