"""The typical errors that reports state are those that the benchmarks found."""

import re
from pathlib import Path

import pytest

from steelyard.cost.accuracy import CATALOGUE, MEASURED, SCALED, typical_error
from tests.cost.examples import chain, cluster, job, measured_profile

BENCHMARKS = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text(encoding="utf-8")


def columns(figure: str) -> tuple[float, float]:
    """Of a figure of published runs: for the sources that were fitted, and for the others."""
    row = next(line for line in BENCHMARKS.splitlines() if line.startswith(f"| {figure}"))
    cells = [cell.strip() for cell in row.replace(r"\|error\|", "error").strip("|").split("|")]
    return float(cells[2].removesuffix(" %")), float(cells[4].removesuffix(" %"))


@pytest.mark.parametrize(
    ("error", "figure"),
    [(CATALOGUE, r"time, zero-shot: median \|error\|"), (SCALED, r"time, scaled: median \|error\|")],
)
def test_the_error_of_catalogue_rates_is_that_of_published_runs(error: float, figure: str) -> None:
    assert 100 * error == pytest.approx(max(columns(figure)))


def test_the_error_of_a_measured_profile_is_that_of_the_runs_on_this_kind_of_machine() -> None:
    found = re.findall(r"^time: median error ([\d.]+)%", BENCHMARKS, flags=re.MULTILINE)
    assert pytest.approx(max(map(float, found))) == 100 * MEASURED


def test_the_error_depends_on_where_the_costs_come_from() -> None:
    source = job(cluster(1, 4)).cost_source()
    assert typical_error(source) is None, "the device is of no generation that was fitted"
    assert typical_error(source.model_copy(update={"time_factor": 1.1})) == SCALED
    measured = source.model_copy(update=measured_profile(chain()).identity.model_dump())
    assert typical_error(measured) == MEASURED
