"""Tests of a report page in a real browser: nothing missing, an empty console, nothing wider than the screen."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.report.html import frontier_page, report_page
from tests.report.browser import CHROMIUM, DRIVER, MISSING, Browser
from tests.report.html.examples import measured, pipelined, single, trade_offs

pytestmark = [pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING), pytest.mark.slow]

LINES_OVER = """
return [...document.querySelectorAll("main *")]
  .filter((each) => !each.closest(".scroll") && each.getBoundingClientRect().right > window.innerWidth + 1)
  .map((each) => each.tagName)
"""
WIDTHS = "return [document.documentElement.scrollWidth, window.innerWidth]"
PICTURE = "return document.querySelector('.view svg').getAttribute('viewBox').split(' ').map(Number)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {
        "pipelined": report_page(measured(pipelined())),
        "single": report_page(single()),
        "frontier": frontier_page(trade_offs()),
    }
    for name, page in found.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in found}


@pytest.mark.parametrize("name", ["pipelined", "single", "frontier"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_screen_and_the_console_is_silent(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.open(pages[name], width=width, dark=dark)
    assert browser.run(WIDTHS) == [width, width]
    assert browser.run(LINES_OVER) == []
    assert browser.complaints() == []


def test_light_and_dark_differ_and_text_stays_readable(browser: Browser, pages: dict[str, Path]) -> None:
    script = "const look = getComputedStyle(document.body); return [look.color, look.backgroundColor]"
    inks = []
    for dark in (False, True):
        browser.open(pages["pipelined"], dark=dark)
        ink, paper = (brightness(colour) for colour in browser.run(script))
        assert abs(ink - paper) > 150
        inks.append(ink)
    assert inks[0] < 128 < inks[1]


def brightness(colour: str) -> float:
    parts = [float(part) for part in colour.split("(")[1].rstrip(")").split(",")[:3]]
    return sum(parts) / 3


def test_every_layer_has_a_cell_with_its_strategy(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["pipelined"])
    titles = browser.run("return [...document.querySelectorAll('.cell')].map((cell) => cell.title)")
    assert len(titles) == 6
    assert titles[1] == "block 0: fsdp4 remat=full"


def test_bars_have_the_widths_of_their_terms(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["pipelined"])
    script = """
    const wide = (element) => element.getBoundingClientRect().width;
    return [...document.querySelectorAll("#time .bar")].map(
      (bar) => [...bar.children].reduce((sum, part) => sum + wide(part), 0) / wide(bar));
    """
    assert browser.run(script) == pytest.approx([1.0, 1.0], abs=0.01)


def test_the_budget_line_stands_where_the_budget_is(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["pipelined"])
    line, start, width = browser.run(
        "const line = document.querySelector('#memory .limit i').getBoundingClientRect();"
        "const bar = document.querySelector('#memory .bar').getBoundingClientRect();"
        "return [line.left, bar.left, bar.width]"
    )
    assert (line - start) / width == pytest.approx(1.0, abs=0.01)  # all stages fit, so the bar's end is the budget


def test_the_timeline_is_zoomed_by_its_buttons_and_back(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["pipelined"])
    whole = browser.run(PICTURE)
    browser.run("document.querySelector('[data-zoom=in]').click()")
    near = browser.run(PICTURE)
    assert near[2] == pytest.approx(whole[2] / 2)
    browser.run("document.querySelector('[data-zoom=end]').click()")
    end = browser.run(PICTURE)
    assert end[0] + end[2] == pytest.approx(whole[2])
    browser.run("document.querySelector('[data-zoom=whole]').click()")
    assert browser.run(PICTURE) == whole
    assert browser.complaints() == []


def test_what_is_under_the_pointer_is_named(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["pipelined"])
    script = """
    const view = document.querySelector(".view"), box = view.getBoundingClientRect();
    const at = (x, y) => {
      const place = { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true };
      view.dispatchEvent(new PointerEvent("pointermove", place));
      return document.querySelector(".tip").textContent;
    };
    return [at(0.001, 0.25), at(0.001, 0.75)];
    """
    first, second = browser.run(script)
    assert first.startswith("stage 0: forward of microbatch 0, ")
    assert second.startswith("stage 1: bubble: pipeline fills, ")


def test_numbers_and_the_schedule_need_no_script(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["pipelined"], script=False)
    found = browser.command("DOM.getDocument", depth=-1)
    text = str(found)
    for expected in ("a step of", "left", "pipeline fills", "What this rests on"):
        assert expected in text
    boxes = browser.command("DOM.querySelectorAll", nodeId=found["root"]["nodeId"], selector=".view svg path")
    assert len(boxes["nodeIds"]) >= 3
    browser.open(pages["single"])


def test_it_prints_on_light_paper(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["pipelined"], dark=True)
    browser.command("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("return getComputedStyle(document.querySelector('.controls')).display") == "none"
    browser.command("Emulation.setEmulatedMedia", media="", features=[])
