"""Tests of the page of solved plans in a real browser: every control, link and button shows the plan of the data."""

import base64
import itertools
import json
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.plan.choices import Axis, Exploration, ExploredPoint
from steelyard.report.html import explore_page, report_page
from tests.processes.warm import HANG_LIMIT_S
from tests.report.browser import CHROMIUM, DRIVER, MISSING, Browser
from tests.report.html.examples import HOSTILE, pipelined, single
from tests.report.html.test_browser import LINES_OVER, WIDTHS, brightness

GIB = 2**30
BUDGETS = (4 * GIB, 8 * GIB, 80 * GIB)
SHAPE = (2, 2, 2, 2, 3)
UNSOLVED, TIGHT = (1, 1, 1, 1, 2), (0, 0, 0, 0, 0)


def explored() -> Exploration:
    """Two plans over all places, except one that was not reached and one in which nothing fits."""
    plans = (pipelined().plan, single().plan)
    names = (
        ("native", "other"),
        ("none added", HOSTILE),
        ("32 tokens", "64 tokens"),
        ("4 devices", "8 devices"),
        ("4 GiB", "8 GiB", "80 GiB"),
    )
    values = ((0, 1), (0, 1), (32, 64), (4, 8), BUDGETS)
    flags = ("--engine", "--compile", "--seq-len", "--cluster", "--memory")
    axes = [
        Axis(name=name, words=words, values=numbers, options=tuple(f"{flag} {each}" for each in numbers), own=0)
        for name, words, numbers, flag in zip(
            ("engine", "lever", "sequence length", "devices", "memory per device"), names, values, flags, strict=True
        )
    ]
    points = []
    for place in itertools.product(*map(range, SHAPE)):
        if place == TIGHT:
            points.append(ExploredPoint(place=place, reason=HOSTILE))
        elif place != UNSOLVED:
            points.append(ExploredPoint(place=place, plan=sum(place) % 2))
    return Exploration(
        model=HOSTILE,
        cluster="a cluster",
        precision="bf16",
        command="steelyard plan model",
        axes=tuple(axes),
        margin_bytes=0,
        plans=plans,
        points=tuple(points),
        left_out=(HOSTILE,),
        price_per_device_hour=2.5,
    )


def test_the_page_is_one_file_without_markup_of_its_data_and_without_addresses() -> None:
    page = explore_page(explored())
    assert "<script>alert" not in page
    packed = page.split('id="data">')[1].split("<")[0]
    data = zlib.decompress(base64.b64decode(packed)).decode()
    page, plans = page.replace(packed, data), json.loads(data)["plans"]  # base64 may hold // by chance
    assert len(plans) == 2
    assert all(each["html"].startswith("<section") and "<script" not in each["html"] for each in plans)
    assert re.findall(r"(?:https?:)?//[a-z]", page) == []
    assert not re.search(r"\b(?:src|href)=", page)


def test_every_input_has_a_label() -> None:
    page = explore_page(explored())
    sliders = re.findall(r'<input type="range" id="(\w+)"', page)
    assert sliders == ["memory", "devices", "size"]
    assert all(f'<label for="{each}">' in page for each in sliders)
    assert page.count('<label><input type="radio"') == 4


browsed = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)

SEEN = """
return { verdict: document.getElementById("verdict").textContent,
  figures: [...document.querySelectorAll("#figures .figure")].map((each) => each.textContent),
  plan: document.querySelector("#layers b")?.textContent, line: document.getElementById("line").textContent,
  hash: location.hash, sections: document.querySelectorAll("#plan section").length,
  focus: document.activeElement.id };
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "page.html"
    path.write_text(explore_page(explored()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


def show(browser: Browser, page: Path, *, width: int = 1280, dark: bool = False) -> None:
    """Open a page and wait until its data are unpacked."""
    browser.open(page, width=width, dark=dark)
    deadline = time.monotonic() + HANG_LIMIT_S
    while not browser.run("return document.getElementById('choice').textContent"):
        assert time.monotonic() < deadline


def move(browser: Browser, place: tuple[int, ...]) -> dict[str, Any]:
    """Return the visible text after setting every control in turn, as a user would."""
    engine, lever, size, devices, memory = place
    for name, value in (("size", size), ("devices", devices), ("memory", memory)):
        browser.run(
            f"const input = document.getElementById('{name}'); input.value = {value};"
            "input.dispatchEvent(new Event('input', {bubbles: true})); return 0"
        )
    for name, value in (("engine", engine), ("lever", lever)):
        browser.run(f"document.querySelectorAll('[name={name}]')[{value}].click(); return 0")
    return dict(browser.run(SEEN))


def expected(place: tuple[int, ...], found: Exploration) -> tuple[str, int]:
    """Beginning of the text for a point, and the number of sections of its plan."""
    point = next((each for each in found.points if each.place == place), None)
    if point is None:
        return "Not solved", 0
    return ("No plan" if point.plan is None else "Fits", 0 if point.plan is None else 2)


@browsed
@pytest.mark.slow
def test_every_control_shows_the_plan_of_the_data(browser: Browser, page: Path) -> None:
    found = explored()
    show(browser, page)
    for place in itertools.product(*map(range, SHAPE)):
        seen = move(browser, place)
        start, sections = expected(place, found)
        assert seen["verdict"].startswith(start), place
        assert seen["sections"] == sections
        assert seen["hash"] == "#" + "&".join(
            f"{key}={at}" for key, at in zip(("engine", "lever", "size", "devices", "memory"), place, strict=True)
        )
        assert seen["line"].rstrip() == " ".join(
            ["steelyard plan model", *(axis.options[at] for axis, at in zip(found.axes, place, strict=True))]
        )
        if sections:
            plan = found.plans[sum(place) % 2]
            names = [str(strategy) for strategy in plan.strategies]
            assert seen["plan"] == max(dict.fromkeys(names), key=names.count)
            assert seen["figures"][0] in seen["verdict"]
            assert len(seen["figures"]) == 5
    assert browser.complaints() == []


@browsed
@pytest.mark.slow
def test_a_link_keeps_the_choice_and_buttons_change_it(browser: Browser, page: Path) -> None:
    show(browser, page)
    browser.run("location.hash = '#engine=1&lever=1&size=0&devices=1&memory=2'; return 0")
    browser.run("return new Promise((done) => setTimeout(done, 50))")
    assert browser.run("return document.getElementById('memory').getAttribute('aria-valuetext')") == "80 GiB"
    for name in ("engine", "lever"):
        assert browser.run(f"return document.querySelectorAll('[name={name}]')[1].checked")
    browser.run("document.querySelector('[type=reset]').click(); return 0")
    assert browser.run(SEEN)["verdict"].startswith("No plan")
    browser.run("document.getElementById('fits-show').click(); return 0")
    assert browser.run(SEEN)["verdict"].startswith("Fits")
    browser.run("document.querySelector('#cells tbody tr:last-child td:last-child button').click(); return 0")
    assert browser.run("return document.getElementById('devices').value") == "1"
    assert (
        browser.run("return document.querySelector('#cells [aria-current]').textContent")
        in browser.run(SEEN)["verdict"]
    )


@browsed
@pytest.mark.slow
def test_milestones_are_the_nearest_solved_places(browser: Browser, page: Path) -> None:
    found = explored()
    show(browser, page)
    texts = {}
    for key in ("fits", "twice", "half"):
        browser.run("document.querySelector('[type=reset]').click(); return 0")
        texts[key] = browser.run(f"return document.getElementById('{key}-text').textContent")
        browser.run(f"document.getElementById('{key}-show').click(); return 0")
        texts[key + " at"] = [int(each.split("=")[1]) for each in browser.run(SEEN)["hash"][1:].split("&")]
    steps = {point.place: found.plans[point.plan] for point in found.points if point.plan is not None}

    def rank(place: tuple[int, ...]) -> tuple[float, ...]:
        plan = steps[place]
        assert plan.prediction is not None
        moved = sum(at != axis.own for axis, at in zip(found.axes, place, strict=True))
        per_token = found.axes[3].values[place[3]] / (plan.prediction.tokens_per_s_per_device * plan.num_devices)
        return moved, per_token, plan.step_s

    assert rank(tuple(texts["fits at"])) == min(rank(each) for each in steps if each[2] == 0)
    assert rank(tuple(texts["twice at"])) == min(rank(each) for each in steps if each[2] == 1)
    assert "→" in texts["fits"]
    assert texts["half"] == "Nothing fits yet."


@browsed
@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True), (390, False), (1280, True)])
def test_it_fits_every_screen_in_both_schemes(browser: Browser, page: Path, width: int, dark: bool) -> None:
    show(browser, page, width=width, dark=dark)
    move(browser, (0, 1, 1, 1, 1))
    assert browser.run(WIDTHS) == [width, width]
    assert browser.run(LINES_OVER) == []
    ink, paper = (
        brightness(each)
        for each in browser.run(
            "const look = getComputedStyle(document.body); return [look.color, look.backgroundColor]"
        )
    )
    assert abs(ink - paper) > 150
    assert (paper < 128) == dark
    assert browser.run("return performance.getEntriesByType('resource').map((each) => each.name)") == []
    assert browser.complaints() == []


@browsed
@pytest.mark.slow
def test_sliders_move_by_keys_and_show_their_focus(browser: Browser, page: Path) -> None:
    show(browser, page)
    browser.run("document.getElementById('memory').focus(); return 0")
    for kind in ("keyDown", "keyUp"):
        browser.command(
            "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
        )
    seen = browser.run(SEEN)
    assert (seen["focus"], seen["hash"][-8:]) == ("memory", "memory=1")
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert browser.run("return document.getElementById('verdict').getAttribute('aria-live')") == "polite"


@browsed
@pytest.mark.slow
def test_it_prints_the_choice_without_controls(browser: Browser, page: Path) -> None:
    show(browser, page, dark=True)
    browser.command("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("return getComputedStyle(document.querySelector('.choose')).display") == "none"
    assert "32 tokens" in browser.run("return document.getElementById('choice').innerText")
    browser.command("Emulation.setEmulatedMedia", media="", features=[])


@browsed
@pytest.mark.slow
def test_controls_work_in_the_last_part_of_a_report(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_page(replace(single(), explore_page=explore_page(explored()))), encoding="utf-8")
    browser.open(path)
    inner = "document.querySelector('#explore iframe')?.contentDocument?.getElementById('choice')?.textContent"
    deadline = time.monotonic() + HANG_LIMIT_S
    while not browser.run(f"return {inner}"):
        assert time.monotonic() < deadline
    seen = browser.run(
        "const inner = document.querySelector('#explore iframe').contentDocument;"
        "const memory = inner.getElementById('memory'); const said = () => inner.getElementById('verdict').textContent;"
        "const before = said(); memory.value = 1; memory.dispatchEvent(new Event('input', {bubbles: true}));"
        "return [before, said(), location.hash]"
    )
    assert seen[0].startswith("No plan")
    assert seen[1].startswith("Fits")
    assert seen[2] == ""
