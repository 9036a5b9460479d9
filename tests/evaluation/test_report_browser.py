"""The page in a browser: no request, no error, no sideways scrolling, and a replay that plays. Needs Playwright and a Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import report_world as made

from tad.evaluation.report import write_report

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright (extra `long`)").expect


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("browser")
    made.write_study(root / "study", examples=12)
    return write_report([root / "study"], root / "page.html", resamples=10).page


def open_page(browser: Any, file: Path, width: int, theme: str) -> tuple[Any, list[str]]:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
    page, trouble = context.new_page(), []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: trouble.append(request.url) if request.url != file.as_uri() and not request.url.startswith("data:") else None)  # fmt: skip
    page.goto(file.as_uri())
    return page, trouble


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_loaded_nothing_fails_and_nothing_scrolls_sideways(
    browser: Any, page_file: Path, width: int, theme: str
) -> None:
    page, trouble = open_page(browser, page_file, width, theme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = page.evaluate(
        "Math.min(...[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height))"
    )
    assert small >= 9  # labels of charts can be read
    assert trouble == []


def test_charts_take_the_colours_of_the_theme(browser: Any, page_file: Path) -> None:
    read = "getComputedStyle(document.querySelector('figure svg text')).fill"
    light, dark = (
        open_page(browser, page_file, 1280, theme)[0].evaluate(read) for theme in ("light", "dark")
    )
    assert light != dark


def test_the_replay_steps_plays_and_jumps(browser: Any, page_file: Path) -> None:
    page, trouble = open_page(browser, page_file, 1280, "light")
    replay = page.locator(".replay")
    masked = page.locator(".scene:not([hidden]) .cell.masked")
    assert masked.count() == 0  # the finished text is what a reader without scripts sees
    replay.focus()
    page.keyboard.press("Home")
    cells = page.locator(".scene:not([hidden]) .cell").count()
    assert masked.count() == cells
    page.keyboard.press("ArrowRight")
    assert 0 < cells - masked.count() < cells
    assert page.locator(".scrub output").inner_text() == "1"
    page.keyboard.press("End")
    assert masked.count() == 0
    page.locator('[data-do="speed"]').select_option("20")
    replay.focus()
    page.keyboard.press(" ")
    assert page.locator('[data-do="play"]').inner_text() == "Pause"
    expect(page.locator('[data-do="play"]')).to_have_text("Play", timeout=20_000)
    assert masked.count() == 0
    page.locator('[data-do="scene"]').select_option("1")
    assert page.locator(".scene:not([hidden]) .which b").inner_text().startswith("nano-math")
    assert trouble == []


def test_a_method_can_be_switched_off(browser: Any, page_file: Path) -> None:
    page, _ = open_page(browser, page_file, 1280, "light")
    button = page.locator(".legend button", has_text="base, tad")
    parts = page.locator("figure g.slot-base--tad")
    assert parts.count() > 0
    button.click()
    assert not parts.first.is_visible()
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert parts.first.is_visible()
