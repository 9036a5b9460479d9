"""The page of a study in a browser: it fits, its sections unfold, its methods can be switched off. Needs Playwright and a Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import study_world as made
from test_report_browser import open_page

from tad.evaluation.report import write_report

pytestmark = pytest.mark.slow
pytest.importorskip("playwright.sync_api", reason="needs Playwright (extra `long`)")


@pytest.fixture(scope="module")
def study_file(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("browser-study")
    return write_report([made.write_tuned_study(world, root / "study")], root / "page.html").page


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_study_fits_its_screen_folded_and_unfolded(
    browser: Any, study_file: Path, width: int, theme: str
) -> None:
    page, trouble = open_page(browser, study_file, width, theme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") < (3000 if width > 1000 else 4500)
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert trouble == []


def test_a_link_to_a_folded_section_unfolds_it(browser: Any, study_file: Path) -> None:
    page, trouble = open_page(browser, study_file, 1280, "light")
    table = page.locator("#training table")
    assert not table.is_visible()
    page.locator("nav a", has_text="Training").click()
    table.wait_for(state="visible", timeout=20_000)
    assert trouble == []


def test_a_method_of_a_study_can_be_switched_off_in_its_charts(browser: Any, study_file: Path) -> None:
    page, _ = open_page(browser, study_file, 1280, "light")
    shown = "parts => parts.map((part) => getComputedStyle(part).display !== 'none')"
    parts = page.locator("#part-0 > .board figure g.slot-tad-q")
    assert parts.count() > 0
    assert all(parts.evaluate_all(shown))
    page.locator("#part-0 > .board .legend button", has_text="TAD-Q").click()
    assert not any(parts.evaluate_all(shown))
