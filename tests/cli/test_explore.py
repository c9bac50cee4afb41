"""Tests of ``steelyard explore``: every point is the planner's result, and unsolved points are reported."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.plan.choices import Exploration
from tests.cli.conftest import Run, user_error

JOB = ("llama3.2-1b", "--cluster", "1x1xa100-80gb", "--seq-len", 2048, "--global-batch", 8, "--memory", "24GiB")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Exploration:
    page = tmp_path_factory.mktemp("pages") / "explore.html"
    arguments = ["explore", *JOB, "--devices", "1", "--price", 2, "--time-limit", 1000, "--json", "-o", page]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert "108 of 108 places are solved" in page.read_text()
    return Exploration.model_validate(json.loads(result.stdout))


@pytest.mark.slow
def test_more_memory_is_never_slower(found: Exploration) -> None:
    columns: dict[tuple[int, ...], list[tuple[int, float]]] = {}
    for point in found.points:
        step_s = float("inf") if point.plan is None else found.plans[point.plan].step_s
        columns.setdefault(point.place[:-1], []).append((point.place[-1], step_s))
    assert len(columns) >= 4
    for column in columns.values():
        times = [step_s for _, step_s in sorted(column)]
        assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_every_plan_fits_where_it_is_shown_and_has_a_certificate(found: Exploration) -> None:
    for point in found.points:
        if point.plan is None:
            assert point.reason
            continue
        plan = found.plans[point.plan]
        assert plan.prediction is not None
        assert max(stage.total_bytes for stage in plan.prediction.stages) <= found.axes[4].values[point.place[4]]
        assert plan.num_devices == found.axes[3].values[point.place[3]]
        assert plan.seq_len == found.axes[2].values[point.place[2]]
        assert (plan.engine or "native") == found.axes[0].words[point.place[0]]
        assert plan.prediction.certificate.status != "priced"


@pytest.mark.slow
def test_a_point_is_the_plan_of_the_command_that_it_shows(found: Exploration, run: Run) -> None:
    axes = found.axes
    fitting = [each.place for each in found.points if each.plan is not None]
    switched = next(each for each in fitting if all(each[:2]))
    for place in (fitting[0], fitting[1], switched):
        plan = next(found.plans[each.plan] for each in found.points if each.place == place and each.plan is not None)
        options = " ".join(axis.options[at] for axis, at in zip(axes, place, strict=True))
        words = f"{found.command.removeprefix('steelyard ')} {options}".split()
        again = json.loads(run(*words, "--simplify", 0, "--json").stdout)
        assert plan.step_s == again["prediction"]["step_time_s"]


@pytest.mark.slow
def test_what_was_not_solved_is_counted_and_said(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    exploration = Exploration.model_validate(
        json.loads(run("explore", *JOB, "--time-limit", 1, "--json", "-o", page).stdout)
    )
    places = set(itertools.product(*(range(len(axis.words)) for axis in exploration.axes)))
    solved = {point.place for point in exploration.points}
    assert solved < places
    assert f"{len(solved)} of {exploration.num_places} places are solved" in page.read_text()
    assert f"The time ran out before {len(places - solved)}" in page.read_text()


@pytest.mark.slow
def test_switches_are_other_engines_and_levers(found: Exploration) -> None:
    engines, levers = (axis.options for axis in found.axes[:2])
    assert engines[0] == levers[0] == ""
    assert all(each.startswith("--engine ") for each in engines[1:])
    assert len(set(engines)) == len(engines) == 3
    assert 2 <= len(set(levers)) == len(levers) <= 3


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
        (("--cluster", "1x4xa100-80gb", "--devices", "3"), "devices"),
        (("--cluster", "1x8xh100-80gb+1x8xa100-40gb"), "--cluster"),
    ],
)
def test_what_cannot_be_explored_is_refused(run: Run, tmp_path: Path, options: tuple[str, ...], field: str) -> None:
    assert user_error(run("explore", *JOB[:-2], *options, "-o", tmp_path / "page.html")).field == field


def test_a_page_is_asked_for(run: Run, tmp_path: Path) -> None:
    assert user_error(run("explore", *JOB, "-o", tmp_path / "page.json")).field == "--output"
