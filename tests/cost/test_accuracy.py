"""The errors that predictions state are those that the benchmarks found, and depend on where the costs come from."""

from pathlib import Path

import pytest

from steelyard.cost.accuracy import (
    AS_GOOD,
    BEYOND_FIT,
    CATALOGUE,
    MEASURED,
    SCALED,
    SCALED_BY_SEVERAL,
    Spread,
    interval_of,
    spread_of,
)
from steelyard.plan.prediction import CatalogueRates, CostSource
from steelyard.plan.strategy import parse_strategy
from tests.cost.examples import SPREADS, chain, cluster, job, measured_profile

BENCHMARKS = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text(encoding="utf-8")
PLAIN, EXPERTS = [parse_strategy("fsdp4")], [parse_strategy("fsdp4 ep2")]


def row(name: str) -> list[str]:
    """The cells of a row of `benchmarks/intervals.py`: runs, typical, low, high, level, inside."""
    table = BENCHMARKS.split("<!-- benchmarks/intervals.py -->")[1].split("<!-- end -->")[0]
    found = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def source(*, assumed: bool = False, **changed: object) -> CostSource:
    rates = CatalogueRates(generation="hopper", is_assumed=assumed)
    return job(cluster(1, 4)).cost_source().model_copy(update={"rates": rates, **changed})


@pytest.mark.parametrize("spread", SPREADS, ids=lambda spread: spread.words)
def test_the_errors_are_those_of_the_benchmark(spread: Spread) -> None:
    assert [float(cell) for cell in row(spread.words)[1:4]] == [spread.typical, spread.low, spread.high]


@pytest.mark.parametrize("name", [*(spread.words for spread in SPREADS), "as good"])
def test_nine_in_ten_runs_that_were_left_out_are_inside(name: str) -> None:
    assert float(row(name)[-1].rstrip("%")) >= 90


def test_plans_are_as_good_within_what_the_benchmark_found() -> None:
    assert float(row("as good")[3]) == AS_GOOD


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (spread_of(source(), PLAIN), CATALOGUE),
        (spread_of(source(), EXPERTS), BEYOND_FIT),
        (spread_of(source(assumed=True), PLAIN), BEYOND_FIT),
        (spread_of(source(time_factor=1.1), PLAIN), SCALED),
        (spread_of(source(time_factor=1.1, num_calibrating=3), PLAIN), SCALED_BY_SEVERAL),
        (spread_of(source(**measured_profile(chain()).identity.model_dump()), PLAIN), MEASURED),
        (spread_of(source(rates=None), PLAIN), None),
    ],
)
def test_the_errors_depend_on_where_the_costs_come_from(found: Spread | None, expected: Spread | None) -> None:
    assert found is expected


def test_an_interval_is_in_the_seconds_of_the_prediction_and_holds_it() -> None:
    found = interval_of(source(), PLAIN, 10.0)
    assert found is not None
    assert (found.low_s, found.high_s) == (10 * CATALOGUE.low, 10 * CATALOGUE.high)
    assert found.low_s < 10 < found.high_s


def test_without_runs_to_compare_there_is_no_interval() -> None:
    assert interval_of(source(rates=None), PLAIN, 10.0) is None


def test_several_measured_runs_tell_more_than_one() -> None:
    assert SCALED_BY_SEVERAL.high / SCALED_BY_SEVERAL.low < SCALED.high / SCALED.low


def test_a_calibrated_job_counts_its_runs() -> None:
    assert job(cluster(1, 4)).on(num_calibrating=2).cost_source().num_calibrating == 2
