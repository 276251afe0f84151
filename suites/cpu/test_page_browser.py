"""The page in a headless Chromium: what a person does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from oracle.report.page import write_page
from suites.browser import NAMES, browsing, find_chromium, take_screenshots
from suites.paged import CACHE, FOLDER, FRAMES, TOPOLOGIES, record_small

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu

RUNS = len(TOPOLOGIES)
MOST_CONTROLS = 200


@pytest.fixture(scope="module")
def chromium() -> str:
    found = find_chromium()
    if found is None:
        pytest.skip(f"no Chromium or Chrome on the path: none of {', '.join(NAMES)}")
    return found


@pytest.fixture(scope="module")
def report(chromium: str, ranks: RankPool, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    verified = record_small(ranks, tiny(layout="dual"), tmp_path_factory.getbasetemp() / FOLDER)
    output = tmp_path_factory.mktemp("page") / "report.html"
    write_page(verified, output)
    return output


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with browsing(chromium) as opened:
        yield opened


@pytest.fixture
def said() -> list[str]:
    """What the console said, and what was asked of the network."""
    return []


@pytest.fixture
def page(browser: Browser, report: Path, said: list[str]) -> Iterator[Page]:
    tab = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme="light")
    tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: said.append(f"error: {error}"))
    tab.on("request", lambda request: request.url.startswith("data:") or said.append(request.url))
    tab.goto(report.as_uri())
    assert said.pop(0) == report.as_uri()
    yield tab
    tab.close()


def press(page: Page, group: str, value: str) -> None:
    page.locator(f"[data-filter={group}] button", has_text=value).click()


def shown(page: Page, selector: str) -> int:
    return page.locator(f"{selector}:visible").count()


def play_and_read(page: Page) -> None:
    """Everything that a person can open or start."""
    for details in page.locator("details summary").all():
        details.click()
    page.locator(".player button").first.click()
    page.wait_for_timeout(200)


def test_it_opens_and_is_used_without_an_error_and_without_a_request(page: Page, said: list[str]) -> None:
    assert page.locator("h1").inner_text().endswith("7 of 7 claims hold")
    play_and_read(page)
    assert said == []


def test_a_filter_leaves_what_it_names_and_counts_it(page: Page) -> None:
    assert page.locator(".count").inner_text() == "all 7 claims shown"
    press(page, "topology", "pp2cfg1")
    assert page.locator(".count").inner_text() == "4 of 7 claims shown"
    assert page.locator("article:visible").get_attribute("id") == f"run-pp2cfg1-{CACHE}"
    assert shown(page, ".matrix tbody tr") == 1
    press(page, "cache", "no cache")
    assert page.locator(".count").inner_text() == "2 of 7 claims shown"
    assert shown(page, "article") == 0
    assert (
        page.locator(".matrix tbody td:visible").all_inner_texts()
        == page.locator(".matrix tbody tr[data-topology=pp2cfg1] td[data-cache='no cache']").all_inner_texts()
    )
    press(page, "topology", "all")
    press(page, "cache", CACHE)
    assert shown(page, "article") == RUNS
    assert shown(page, "[data-claim]") == 4
    press(page, "verdict", "fails")
    assert page.locator(".count").inner_text() == "0 of 7 claims shown"
    assert shown(page, "article") == 0
    for group in ("cache", "verdict"):
        press(page, group, "all")
    assert (shown(page, "article"), shown(page, "[data-claim]")) == (RUNS, 7)


def test_the_videos_of_a_run_play_together_and_stop(page: Page) -> None:
    player = page.locator(".player").first
    times = "videos => videos.map(video => video.currentTime)"
    widths = player.locator("video").evaluate_all("videos => videos.map(video => video.videoWidth)")
    assert widths == [32] * 3
    assert player.locator("video").evaluate_all(times) == [0] * 3
    player.locator("button").click()
    player.locator("video").first.evaluate(
        """video => new Promise((moved) => {
             const look = () => (video.currentTime > 0.1 ? moved() : requestAnimationFrame(look));
             look();
           })"""
    )
    assert player.locator("button").inner_text() == "Pause"
    player.locator("button").click()
    page.wait_for_timeout(100)
    stopped = player.locator("video").evaluate_all(times)
    assert all(time > 0 for time in stopped)
    assert player.locator("button").inner_text() == "Play"
    page.wait_for_timeout(300)
    assert player.locator("video").evaluate_all(times) == stopped


def test_the_slider_shows_the_same_frame_of_every_video(page: Page) -> None:
    player = page.locator(".player").last
    slider = player.locator("input")
    assert slider.get_attribute("max") == str(FRAMES - 1)
    slider.focus()
    for frame in (2, 3, 4):
        page.keyboard.press("ArrowRight")
        expect(player.locator("output")).to_have_text(f"frame {frame} of {FRAMES}")
    times = player.locator("video").evaluate_all("videos => videos.map(video => Math.floor(video.currentTime * 16))")
    assert times == [3] * 3


def test_the_difference_view_shows_something_where_the_runs_differ(page: Page) -> None:
    """Of the last frame's pixels, drawn on a canvas of the test's own, the brightest of each video."""
    player = page.locator(".player").last
    player.evaluate(
        """player => {
             const moved = [...player.querySelectorAll("video")].map((video) =>
               new Promise((done) => video.addEventListener("seeked", done, { once: true })));
             const slider = player.querySelector("input");
             slider.value = slider.max;
             slider.dispatchEvent(new Event("input"));
             return Promise.all(moved);
           }"""
    )
    brightest = player.locator("video").evaluate_all(
        """videos => videos.map((video) => {
             const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
             const drawing = canvas.getContext("2d");
             drawing.drawImage(video, 0, 0);
             const { data } = drawing.getImageData(0, 0, canvas.width, canvas.height);
             return Math.max(...data.filter((_, i) => i % 4 < 3));
           })"""
    )
    assert len(brightest) == 3
    assert all(value > 10 for value in brightest)


def test_the_keyboard_reaches_every_control_and_focus_is_seen(page: Page) -> None:
    reached: list[tuple[str, str]] = []
    for _ in range(MOST_CONTROLS):
        page.keyboard.press("Tab")
        tag, text, outline = page.evaluate(
            """() => { const element = document.activeElement;
                 return [element.tagName, element.innerText.trim(), getComputedStyle(element).outlineStyle]; }"""
        )
        if tag == "BODY":
            break
        assert outline == "solid", f"{tag} {text}"
        reached.append((tag, text))
    assert len(reached) == page.locator("a, button, input, summary, .scroll").filter(visible=True).count()
    assert reached[0] == ("A", "To the claims")
    assert [name for tag, name in reached if tag == "BUTTON"][:4] == ["all", *TOPOLOGIES, "all"]
    assert [tag for tag, _ in reached].count("SUMMARY") == RUNS
    assert [tag for tag, _ in reached].count("INPUT") == RUNS

    page.locator("[data-filter=topology] button").nth(1).focus()
    page.keyboard.press("Enter")
    assert shown(page, "article") == 1
    assert page.locator("[data-filter=topology] [aria-pressed=true]").inner_text() == TOPOLOGIES[0]


def test_decisions_come_when_they_are_asked_for(page: Page) -> None:
    details = page.locator(f"article#run-pp2cfg1-{CACHE} details")
    assert details.locator("table").count() == 0
    details.locator("summary").press("Enter")
    details.locator("tbody tr").first.wait_for()
    assert f"{details.locator('tbody tr').count()} decisions" == details.locator("summary").inner_text()
    assert {"compute", "reuse"} == set(details.locator("tbody td:nth-child(5)").all_inner_texts())


def test_dark_mode_turns_the_page_dark(page: Page) -> None:
    colours = """() => ["body", "h1", ".plot .computed", "button"].map((selector) => {
        const style = getComputedStyle(document.querySelector(selector));
        const found = selector.startsWith(".") ? style.fill : selector === "h1" ? style.color : style.backgroundColor;
        return found.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3; })"""
    paper, ink, computed, _ = page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    dark_paper, dark_ink, dark_computed, _ = page.evaluate(colours)
    assert dark_paper < 40 < 200 < paper
    assert ink < 60 < 200 < dark_ink
    assert dark_computed < computed


def test_on_paper_everything_is_open_and_nothing_is_a_control(page: Page) -> None:
    assert shown(page, ".decisions table") == 0
    page.emulate_media(media="print")
    expect(page.locator(".decisions table:visible")).to_have_count(RUNS)
    assert shown(page, "button") == shown(page, "input") == 0
    page.emulate_media(media="screen")
    expect(page.locator(".decisions table:visible")).to_have_count(0)
    assert shown(page, "fieldset button") > 0


def test_a_narrow_window_needs_no_scrolling_sideways_and_keeps_plots_readable(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    letters = page.locator(".plot text").evaluate_all("texts => texts.map(text => text.getBoundingClientRect().height)")
    assert min(letters) >= 9
    edges = page.locator(".plot").evaluate_all(
        """plots => plots.map((plot) => Math.min(...[...plot.querySelectorAll("text")].map(
             (text) => text.getBoundingClientRect().left - plot.getBoundingClientRect().left)))"""
    )
    assert min(edges) >= 0


def test_screenshots_are_taken_light_and_dark(browser: Browser, report: Path, tmp_path: Path) -> None:
    from PIL import Image

    shots = take_screenshots(browser, report, tmp_path)
    assert [shot.name for shot in shots] == ["page-light.png", "run-light.png", "page-dark.png", "run-dark.png"]
    light, _, dark, _ = (Image.open(shot).convert("L") for shot in shots)
    assert light.size == (2200, 1800)
    assert light.getpixel((5, 5)) > 200 > 40 > dark.getpixel((5, 5))
