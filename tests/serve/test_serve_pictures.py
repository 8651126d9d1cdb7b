"""The web page with many pictures: each has its own answer or error, all of it survives a reload, all goes into a CSV;
and its search over a photo library."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import put_photos
from PIL import Image
from serve_browser import Site, until, watch
from serve_fakes import picture
from tiny_models import tiny_ram

from ramatch.assets import vocabulary
from ramatch.cli._shared import cell
from ramatch.library import Library
from ramatch.recognizer import Recognizer

DONE = "!document.body.classList.contains('busy') && !document.querySelector('.shot.pending')"

# how many pictures with an answer or an error the browser keeps; it writes them a little after they are shown
KEPT = """new Promise((done) => { const open = indexedDB.open('ramatch', 1); open.onsuccess = () => {
  const all = open.result.transaction('pictures').objectStore('pictures').getAll();
  all.onsuccess = () => done(all.result.filter((each) => each.asked).length); }; })"""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three pictures that differ, and one file that is none between them."""
    paths = [tmp_path / name for name in ("red.png", "bad.jpg", "green.png", "=1+1.png")]
    for path, colour in zip(paths, ((200, 30, 60), None, (20, 200, 60), (20, 20, 200)), strict=True):
        path.write_bytes(picture(90, 60, colour, "PNG") if colour else b"not a picture")
    return paths


@pytest.fixture
def tab(browser: Any, site: Site) -> Iterator[Any]:
    """A page in which requests may fail, which a browser tells as errors."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(8000)
    page.goto(site.url)
    page.wait_for_selector(".label")
    yield page
    context.close()


def cards(page: Any) -> dict[str, str]:
    names, texts = (page.locator(f".shot-text {part}").all_inner_texts() for part in ("b", "span"))
    return dict(zip(names, texts, strict=True))


def best(page: Any) -> str:
    return page.locator(".label .name").first.inner_text()


def test_several_pictures_have_a_card_each_and_an_error_stays_with_its_picture(tab: Any, files: list[Path]) -> None:
    assert tab.is_hidden("#tray")  # one example: nothing to choose from
    tab.set_input_files("#file", files)
    until(tab, DONE)
    assert list(cards(tab)) == [path.name for path in files]  # the example made room
    assert tab.inner_text("#progress") == "3 of 4 pictures done · 1 failed"
    assert "not JPEG" in cards(tab)["bad.jpg"]
    assert cards(tab)["red.png"].startswith(best(tab))
    first = best(tab)
    tab.click(".shot-main >> nth=1")
    assert tab.locator(".label").count() == 0
    assert "not JPEG" in tab.inner_text("#problem")
    assert tab.inner_text("#code") == ""
    tab.click(".shot-main >> nth=2")
    assert tab.is_hidden("#problem")
    assert cards(tab)["green.png"].startswith(best(tab))
    assert best(tab) != first
    assert tab.locator(".shot-main[aria-current=true] b").inner_text() == "green.png"


def test_results_come_one_by_one_and_a_new_question_is_asked_of_all(tab: Any, site: Site, files: list[Path]) -> None:
    held: list[Any] = []
    tab.route("**/v1/tag", lambda route: held.append(route))
    tab.set_input_files("#file", [files[0], files[2], files[3]])
    until(tab, "document.querySelectorAll('.shot.pending').length === 3")
    while len(held) < 3:
        tab.wait_for_timeout(20)
    assert tab.locator(".label").count() == 0  # not the example's
    held[1].continue_()
    until(tab, "document.querySelectorAll('.shot.pending').length === 2")
    assert "1 of 3 pictures done · 2 to do" in tab.inner_text("#progress")
    tab.unroute("**/v1/tag")
    tab.fill("#labels", "owl, bat")
    until(tab, f"document.getElementById('count').textContent.includes('of 2 labels') && {DONE}")
    for text in cards(tab).values():
        assert set(text.replace("\u00a0%", "").split(" · ")[0].split()) & {"owl", "bat", "nothing"}
    assert site.recognizer.calls[-1]["labels"] == ("owl", "bat")


def test_a_server_that_is_down_leaves_no_old_answer(tab: Any, files: list[Path]) -> None:
    before = best(tab)
    tab.route("**/v1/tag", lambda route: route.abort())
    tab.set_input_files("#file", files[:1])
    tab.wait_for_selector("#problem:not([hidden])")
    assert "does not answer" in tab.inner_text("#problem")
    assert before not in tab.inner_text(".results")
    assert tab.locator(".label").count() == 0
    tab.unroute("**/v1/tag")
    tab.click("#again")
    tab.wait_for_selector(".label")
    assert tab.is_hidden("#problem")


def test_a_busy_server_is_asked_again(tab: Any, files: list[Path]) -> None:
    refused: list[Any] = []

    def busy(route: Any) -> None:
        if refused:
            return route.continue_()
        refused.append(route)
        error = {"code": "overloaded", "message": "busy", "hint": "wait"}
        return route.fulfill(status=429, headers={"Retry-After": "1"}, json={"error": error})

    tab.route("**/v1/tag", busy)
    tab.set_input_files("#file", files[:1])
    tab.wait_for_selector(".label")
    assert refused
    assert tab.is_hidden("#problem")


def test_pictures_come_by_drop_and_paste_and_go(page: Any) -> None:
    give = """async (kind) => {
      const blob = await (await fetch('photos/coffee.jpg')).blob(), data = new DataTransfer();
      for (const name of [`${kind}1.jpg`, `${kind}2.jpg`]) data.items.add(new File([blob], name, { type: blob.type }));
      if (kind === 'paste') window.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data }));
      else window.dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true }));
    }"""
    page.evaluate(give, "drop")
    page.evaluate(give, "paste")
    until(page, DONE)
    assert list(cards(page)) == ["drop1.jpg", "drop2.jpg", "paste1.jpg", "paste2.jpg"]
    page.click("[aria-label='Remove paste1.jpg']")
    assert list(cards(page)) == ["drop1.jpg", "drop2.jpg", "paste2.jpg"]
    assert "paste2.jpg" in page.get_attribute("#picture", "alt")  # the next one takes its place
    page.focus(".shot-main >> nth=0")
    page.keyboard.press("Enter")
    assert "drop1.jpg" in page.get_attribute("#picture", "alt")
    assert page.evaluate("document.activeElement.className") == "shot-main"
    page.click("#remove-all")
    assert page.is_hidden("#tray")
    assert page.inner_text("#count") == "Choose a picture."
    assert page.locator(".label").count() == 0


def test_what_was_there_is_there_after_a_reload(tab: Any, site: Site, files: list[Path]) -> None:
    tab.set_input_files("#file", files)
    tab.fill("#labels", "owl, bat, fox")
    tab.click("#advanced summary")
    tab.locator("#threshold").fill("5")
    tab.select_option("#matcher", "average")
    tab.click("#tab-curl")
    until(tab, f"document.getElementById('count').textContent.includes('of 3 labels') && {DONE}")
    tab.click(".shot-main >> nth=2")
    before, asked = (cards(tab), tab.inner_text("#results"), tab.inner_text("#code")), len(site.recognizer.calls)
    until(tab, f"{KEPT}.then((count) => count === 4)")
    tab.reload()
    tab.wait_for_selector(".shot >> nth=3")
    until(tab, DONE)
    assert (cards(tab), tab.inner_text("#results"), tab.inner_text("#code")) == before
    assert list(cards(tab)) == [path.name for path in files]  # in the same order
    assert tab.input_value("#labels") == "owl, bat, fox"
    assert tab.input_value("#threshold") == "5"
    assert tab.input_value("#matcher") == "average"
    assert tab.locator(".shot-main[aria-current=true] b").inner_text() == "green.png"
    assert len(site.recognizer.calls) == asked  # kept answers are not asked for again
    until(tab, "document.getElementById('picture').naturalWidth === 90")
    tab.click("#remove-all")
    until(tab, f"{KEPT}.then((count) => count === 0)")
    tab.reload()
    tab.wait_for_selector(".label")
    assert "astronaut" in tab.get_attribute("#picture", "alt")


def test_whoever_is_quicker_than_the_example_keeps_the_picture(browser: Any, site: Site, files: list[Path]) -> None:
    page = browser.new_page()
    held: list[Any] = []
    page.route("**/photos/astronaut.jpg", lambda route: held.append(route))
    page.goto(site.url)
    page.wait_for_selector("#thumbs button")
    page.set_input_files("#file", files[:1])
    page.wait_for_selector(".label")
    for route in held:
        route.continue_()
    page.unroute("**/photos/astronaut.jpg")
    page.wait_for_load_state("networkidle")
    assert page.get_attribute("#picture", "alt") == "Your picture red.png"
    assert page.is_hidden("#tray")
    page.close()


def test_another_tab_sees_nothing_of_it(browser: Any, site: Site, files: list[Path]) -> None:
    context = browser.new_context()
    one, two = context.new_page(), context.new_page()
    one.goto(site.url)
    one.set_input_files("#file", files[:1])
    until(one, "document.getElementById('code').textContent.includes('red.png')")
    two.goto(site.url)
    two.wait_for_selector(".label")
    assert "astronaut" in two.get_attribute("#picture", "alt")
    context.close()


def test_answers_of_all_pictures_as_csv(tab: Any, files: list[Path], tmp_path: Path) -> None:
    tab.set_input_files("#file", files)
    tab.fill("#labels", '=cmd, "red, small", bat')
    tab.click("#advanced summary")
    tab.locator("#threshold").fill("0")
    until(tab, f"document.getElementById('count').textContent.includes('of 3 labels') && {DONE}")
    with tab.expect_download() as download:
        tab.click("#csv")
    download.value.save_as(tmp_path / "r.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text(encoding="utf-8"))))
    assert list(rows[0]) == ["image", "label", "probability", "score", "relative", "calibrated", "familiarity"]
    assert {row["image"] for row in rows} == {"red.png", "green.png", "'=1+1.png"}
    assert {row["label"] for row in rows} == {"'=cmd", "red, small", "bat"}
    assert len(rows) == 9
    assert {row["calibrated"] for row in rows} == {"True"}
    assert all(0 <= float(row["probability"]) <= 1 for row in rows)


def test_cells_are_those_of_the_command_line(page: Any) -> None:
    hostile = [
        "=1+1",
        " +1",
        "-1",
        "@a",
        "\t=1",
        "a\nb\r",
        "\x00\x1b[31m\x9b",
        "\u202e\u200b\u2028\xa0",
        'plain, "text" 日本語',
        "\U000e0001",
    ]
    code = (
        "async (all) => { const { cell } = await import(`${location.origin}/csv.js`); return all.map((t) => cell(t)); }"
    )
    shown = page.evaluate(code, hostile)
    assert shown == [cell(text) for text in hostile]


def test_small_pictures_are_enlarged_with_a_sharp_map(tab: Any, tmp_path: Path) -> None:
    Image.new("RGB", (60, 30), (90, 200, 60)).save(tmp_path / "small.png")
    Image.new("RGB", (16, 16), (90, 200, 60)).save(tmp_path / "icon.png")
    Image.new("RGB", (3000, 400), (90, 200, 60)).save(tmp_path / "wide.png")
    for name, width, height in (("small.png", 60, 30), ("icon.png", 16, 16), ("wide.png", 3000, 400)):
        tab.set_input_files("#file", tmp_path / name)
        until(tab, f"document.getElementById('picture').naturalWidth === {width} && {DONE}")
        box, stage, overlay = (tab.locator(part).bounding_box() for part in ("#picture", "#stage", "#map"))
        assert box["width"] > 400  # fills the stage, one way or the other
        assert box["width"] / box["height"] == pytest.approx(width / height, rel=0.01)
        assert box["width"] <= stage["width"] + 1
        assert overlay == pytest.approx(box, abs=1)
        tab.hover(".label >> nth=0")
        assert tab.evaluate("document.getElementById('map').width") >= box["width"] * 0.95
        assert ("tiny" in tab.get_attribute("#heat", "class")) == (name == "icon.png")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Site]:
    """A server with a library of a tiny random model."""
    torch.manual_seed(0)
    recognizer, photos = Recognizer(tiny_ram(), cache=0), tmp_path_factory.mktemp("photos")
    put_photos(photos, "one.png", "two.png", "<b>three.png")
    with Library.open(photos / ".ramatch", create=True) as filled:
        filled.update(photos, recognizer)
    site = Site(recognizer, vocabulary="voc20", index=str(photos / ".ramatch"), api_key="open sesame")
    yield site
    site.stop()


def test_search_over_an_index(browser: Any, library: Site, site: Site) -> None:
    page = browser.new_page()
    page.goto(site.url)
    page.wait_for_selector(".label")
    assert page.is_hidden("#search")  # of a server without an index
    page.goto(library.url)
    page.fill("#key", "open sesame")
    page.keyboard.press("Enter")
    page.wait_for_selector(".label")
    trouble = watch(page)
    page.fill("#words", "cat -dog")
    page.keyboard.press("Enter")
    page.wait_for_selector(".hit >> nth=2")
    until(page, "[...document.querySelectorAll('.hit img')].every((image) => image.naturalWidth > 0)")
    assert sorted(page.locator(".hit b").all_inner_texts()) == ["<b>three.png", "one.png", "two.png"]
    assert page.inner_text("#hits-said").startswith("3 photos")
    page.reload()
    page.wait_for_selector(".hit >> nth=2")
    assert page.input_value("#words") == "cat -dog"
    assert trouble == []
    page.fill("#words", "cat -cat")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('hits-said').textContent.includes('its absence')")
    assert page.locator(".hit").count() == 0
    page.close()


def test_the_vocabulary_comes_second(page: Any) -> None:
    order = "document.getElementById('labels').compareDocumentPosition(document.getElementById('vocabulary'))"
    assert page.evaluate(order) & 4  # follows it
    assert page.evaluate("document.getElementById('matcher').closest('details').open") is False
    assert str(len(vocabulary("everyday"))) in page.locator("#vocabulary option:checked").inner_text()


def test_whatever_can_be_used_has_a_name(page: Any, files: list[Path]) -> None:
    page.evaluate("document.getElementById('search').hidden = false")
    page.set_input_files("#file", [files[0], files[2]])
    until(page, DONE)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, summary, a, [role=tabpanel], ul, ol')]
        .filter((each) => !(each.labels?.length || each.ariaLabel || each.title || each.textContent.trim()
          || each.getAttribute('aria-labelledby') || each.querySelector('img[alt]:not([alt=""])')))
        .map((each) => each.outerHTML)"""
    )
    assert nameless == []
    lists = page.evaluate("[...document.querySelectorAll('main ul, main ol')].every((each) => each.ariaLabel)")
    assert lists


def test_without_storage_the_page_still_works(browser: Any, site: Site, files: list[Path]) -> None:
    context = browser.new_context()
    context.add_init_script(
        "for (const name of ['indexedDB', 'sessionStorage', 'localStorage'])"
        " Object.defineProperty(window, name, { get() { throw new DOMException('off', 'SecurityError'); } });"
    )
    page = context.new_page()
    trouble = watch(page)
    page.goto(site.url)
    page.wait_for_selector(".label")
    page.set_input_files("#file", [files[0], files[2]])
    until(page, DONE)
    assert list(cards(page)) == ["red.png", "green.png"]
    assert trouble == []
    context.close()
