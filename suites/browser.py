"""Whatever Chromium or Chrome a machine has, driven headless by Playwright, and pictures of the page in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
"""It reads files of ours alone, often as root and in a container, where the sandbox cannot be set up."""


SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
PAINT_MS = 500
"""A frame that has been found is not yet a frame that is painted, and nothing tells when it is."""


def find_chromium() -> str | None:
    """The first that is on the path."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browsing(executable: str) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=[*ARGUMENTS])
        try:
            yield browser
        finally:
            browser.close()


def take_screenshots(browser: Browser, page: Path, folder: Path) -> list[Path]:
    """The page's head and its last cached run, light and dark, as PNGs in `folder`, twice as fine as CSS pixels.

    Not of the whole page at once: of videos beyond the window, Chromium paints some black.
    """
    shots = []
    for scheme in SCHEMES:
        tab = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme=scheme, device_scale_factor=2)
        tab.goto(page.resolve().as_uri())
        show_middle_frames(tab)
        shots.append(folder / f"page-{scheme}.png")
        tab.screenshot(path=shots[-1])
        runs = tab.locator(".card")
        if runs.count():
            shots.append(folder / f"run-{scheme}.png")
            runs.last.screenshot(path=shots[-1])
        tab.close()
    return shots


def show_middle_frames(tab: Page) -> None:
    """Move every video to its middle, and wait until it is there: the first frame says least."""
    tab.evaluate(
        """async () => {
             const once = (video, event) => new Promise((done) => video.addEventListener(event, done, { once: true }));
             const videos = [...document.querySelectorAll("video")];
             await Promise.all(videos.map((video) => video.readyState >= 2 || once(video, "loadeddata")));
             const moved = videos.map((video) => once(video, "seeked"));
             for (const slider of document.querySelectorAll(".player input")) {
               slider.value = Math.floor(Number(slider.max) / 2);
               slider.dispatchEvent(new Event("input"));
             }
             await Promise.all(moved);
           }"""
    )
    tab.wait_for_timeout(PAINT_MS)
