"""The page in a real browser, light and dark: every chart is drawn, nothing is loaded, no script fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.conftest import plan_of as plan_of
from cli.conftest import run as run
from helpers.browser import CHROMIUM, Tab, chromium_tab
from helpers.cli import MOE, Run

pytest.importorskip("plotly", reason="the extra 'report' is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

DRAWN = "document.documentElement?.dataset.drawnMs"
EMPTY = "[...document.querySelectorAll('.chart')].filter((chart) => !chart.querySelector('svg.main-svg')).length"
COLORS = "[document.body, document.querySelector('.chart text')].map((part) => getComputedStyle(part)).map((style) => style.backgroundColor + style.fill)"  # noqa: E501


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with chromium_tab(tmp_path / "profile") as tab:
        yield tab


@pytest.fixture
def page(run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path) -> Path:
    out = tmp_path / "report.html"
    run("report", plan_of(MOE), "-o", out, "--topology", "h200-8,gpus=4")
    return out


def loaded(tab: Tab) -> list[str]:
    """What came from elsewhere; pictures that a chart makes are inside of their address."""
    return [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))]


def test_a_browser_draws_every_chart_light_and_dark_and_loads_nothing(tab: Tab, page: Path) -> None:
    colors = []
    for dark in (False, True):
        tab.open(page, dark=dark)
        tab.wait_for(DRAWN)
        assert tab.evaluate("document.querySelectorAll('.chart').length") >= 5 and tab.evaluate(EMPTY) == 0
        colors.append(tab.evaluate(COLORS))
    assert all(light != dark for light, dark in zip(*colors, strict=True)), colors
    assert (tab.errors, loaded(tab)) == ([], [])
    assert len([url for url in tab.requests if url.startswith("file:")]) == 2


def test_a_chart_follows_a_change_of_the_theme(tab: Tab, page: Path) -> None:
    tab.open(page, dark=False)
    tab.wait_for(DRAWN)
    before = tab.evaluate(COLORS)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    tab.wait_for(f"JSON.stringify({COLORS}.map((color, i) => color !== {before!r}[i])) === '[true,true]'")


def test_a_page_that_fails_or_loads_something_is_found(tab: Tab, page: Path, tmp_path: Path) -> None:
    text, broken = page.read_text(), tmp_path / "broken.html"
    broken.write_text(
        text.replace("default-src 'none'", "").replace("</main>", '<img src="http://127.0.0.1:9/x"></main>')
    )
    tab.open(broken)
    tab.wait_for(DRAWN)
    assert loaded(tab) == ["http://127.0.0.1:9/x"] and tab.errors
    broken.write_text(text.replace('id="library">', 'id="library">A'))
    tab.open(broken)
    tab.wait_for("document.body?.innerText.includes('This chart cannot be drawn')")
    assert tab.evaluate(EMPTY) >= 5
