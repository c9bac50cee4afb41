"""Tests of ``steelyard explore``: every point is the planner's result, and unsolved points are reported."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.plan.choices import Exploration
from tests.cli.conftest import Run, user_error

JOB = ("llama3.2-1b", "--cluster", "1x4xa100-80gb", "--seq-len", 2048, "--global-batch", 16, "--memory", "16GiB")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Exploration, Path]:
    page = tmp_path_factory.mktemp("pages") / "explore.html"
    arguments = ["explore", *JOB, "--devices", "2,4", "--price", 2, "--time-limit", 6, "--json", "-o", page]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return Exploration.model_validate(json.loads(result.stdout)), page


@pytest.mark.slow
def test_more_memory_is_never_slower(found: tuple[Exploration, Path]) -> None:
    columns: dict[tuple[int, ...], list[tuple[int, float]]] = {}
    for point in found[0].points:
        step_s = float("inf") if point.plan is None else found[0].plans[point.plan].step_s
        columns.setdefault(point.place[:3], []).append((point.place[3], step_s))
    assert len(columns) >= 4
    for column in columns.values():
        times = [step_s for _, step_s in sorted(column)]
        assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_every_plan_fits_where_it_is_shown_and_has_a_certificate(found: tuple[Exploration, Path]) -> None:
    for point in found[0].points:
        if point.plan is None:
            assert point.reason
            continue
        plan = found[0].plans[point.plan]
        assert plan.prediction is not None
        assert max(stage.total_bytes for stage in plan.prediction.stages) <= found[0].axes[3].values[point.place[3]]
        assert plan.num_devices == found[0].axes[2].values[point.place[2]]
        assert plan.seq_len == found[0].axes[1].values[point.place[1]]
        assert plan.prediction.certificate.status != "priced"


@pytest.mark.slow
def test_a_point_is_the_plan_of_the_command_that_it_shows(found: tuple[Exploration, Path], run: Run) -> None:
    axes = found[0].axes
    own = tuple(axis.own for axis in axes)
    tighter = (*own[:3], own[3] - 1)
    for place in (own, tighter):
        plan = next(
            found[0].plans[each.plan] for each in found[0].points if each.place == place and each.plan is not None
        )
        options = " ".join(axis.options[at] for axis, at in zip(axes, place, strict=True))
        words = f"{found[0].command.removeprefix('steelyard ')} {options}".split()
        again = json.loads(run(*words, "--simplify", 0, "--json").stdout)
        assert plan.step_s == again["prediction"]["step_time_s"]


@pytest.mark.slow
def test_what_was_not_solved_is_counted_and_said(found: tuple[Exploration, Path]) -> None:
    exploration, page = found
    places = set(itertools.product(*(range(len(axis.words)) for axis in exploration.axes)))
    solved = {point.place for point in exploration.points}
    assert solved < places
    assert f"{len(solved)} of {exploration.num_places} places are solved" in page.read_text()
    assert f"The time ran out before {len(places - solved)}" in page.read_text()


@pytest.mark.slow
def test_switches_are_other_engines_and_levers(found: tuple[Exploration, Path]) -> None:
    options = found[0].axes[0].options
    assert options[0] == ""
    assert any(each.startswith("--engine ") for each in options)
    assert len(set(options)) == len(options) <= 5


def test_without_time_nothing_is_solved_and_that_is_no_plan(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("explore", *JOB, "--time-limit", 0, "-o", page)
    assert result.exit_code == 1
    assert "0 of " in result.output
    assert "The time ran out before" in page.read_text()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--vary", "batch"), "--vary"),
        (("--devices", "3"), "devices"),
        (("--cluster", "1x8xh100-80gb+1x8xa100-40gb"), "--cluster"),
    ],
)
def test_what_cannot_be_explored_is_refused(run: Run, tmp_path: Path, options: tuple[str, ...], field: str) -> None:
    assert user_error(run("explore", *JOB[:-2], *options, "-o", tmp_path / "page.html")).field == field


def test_a_page_is_asked_for(run: Run, tmp_path: Path) -> None:
    assert user_error(run("explore", *JOB, "-o", tmp_path / "page.json")).field == "--output"
