"""The typical errors that reports state are those that the benchmarks found."""

import re
from pathlib import Path

import pytest

from steelyard.cost.accuracy import CATALOGUE, MEASURED, SCALED, typical_error
from tests.cost.examples import chain, cluster, job, measured_profile

BENCHMARKS = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text(encoding="utf-8")


def reached(figure: str) -> float:
    """A figure of published runs, in per cent."""
    row = next(line for line in BENCHMARKS.splitlines() if line.startswith(f"| {figure}"))
    return float(row.replace(r"\|error\|", "error").strip("|").split("|")[2].strip().removesuffix(" %"))


@pytest.mark.parametrize(
    ("error", "figures"),
    [
        (CATALOGUE, (r"time, zero-shot: median \|error\|", r"time, left out: median \|error\|")),
        (SCALED, (r"time, scaled: median \|error\|",)),
    ],
)
def test_the_error_of_catalogue_rates_is_that_of_published_runs(error: float, figures: tuple[str, ...]) -> None:
    assert 100 * error == pytest.approx(max(map(reached, figures)))


def test_the_error_of_a_measured_profile_is_that_of_the_runs_on_this_kind_of_machine() -> None:
    found = re.findall(r"^time: median error ([\d.]+)%", BENCHMARKS, flags=re.MULTILINE)
    assert pytest.approx(max(map(float, found))) == 100 * MEASURED


def test_the_error_depends_on_where_the_costs_come_from() -> None:
    source = job(cluster(1, 4)).cost_source()
    assert typical_error(source) is None, "the device is of no generation that was fitted"
    assert typical_error(source.model_copy(update={"time_factor": 1.1})) == SCALED
    measured = source.model_copy(update=measured_profile(chain()).identity.model_dump())
    assert typical_error(measured) == MEASURED
