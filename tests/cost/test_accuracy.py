"""Tests that stated prediction errors are those of the benchmarks, and depend on the source of the costs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.cost.accuracy import (
    ADAPTERS,
    AS_GOOD,
    DENSE,
    EIGHT_BIT,
    EXPERTS,
    LONG_CONTEXT,
    MEASURED,
    OF_ENGINES,
    SCALED,
    SCALED_BY_SEVERAL,
    Spread,
    interval_of,
    of_engine,
    spread_of,
)
from steelyard.hardware import parse_cluster
from steelyard.levers import Levers
from steelyard.levers.train import Train
from steelyard.model.family import Task
from steelyard.plan.strategy import Strategy, parse_strategy
from tests.cost.examples import SPREADS, chain, cluster, job, measured_profile

BENCHMARKS = (Path(__file__).parents[2] / "benchmarks" / "intervals.md").read_text(encoding="utf-8")
PLAIN, DIVIDED = [parse_strategy("fsdp4")], [parse_strategy("fsdp2-cp2")]
ON_H100 = job(parse_cluster("1x4xh100-80gb"))


def row(name: str) -> list[str]:
    """The cells of a row of `benchmarks/intervals.py`: runs, typical, low, high, level, inside."""
    table = BENCHMARKS.split("<!-- benchmarks/intervals.py -->")[1].split("<!-- end -->")[0]
    found = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


WITH_ADAPTERS = replace(chain(), changes=(Train.parse("lora"),))
WITH_EXPERTS = replace(chain(), layer_types=tuple(replace(each, num_experts=4) for each in chain().layer_types))


def like(*, device: str = "h100-80gb", strategies: Sequence[Strategy] = PLAIN, **changed: Any) -> Spread | None:
    return spread_of(job(parse_cluster(f"1x4x{device}")).on(**changed), strategies)


@pytest.mark.parametrize("spread", SPREADS, ids=lambda spread: spread.words)
def test_the_errors_are_those_of_the_benchmark(spread: Spread) -> None:
    assert [float(cell) for cell in row(spread.words)[1:4]] == [spread.typical, spread.low, spread.high]


@pytest.mark.parametrize("name", [*(spread.words for spread in SPREADS), "as good"])
def test_nine_in_ten_runs_that_were_left_out_are_inside(name: str) -> None:
    assert 87 <= float(row(name)[-1].rstrip("%")) <= 95


@pytest.mark.parametrize(("key", "own"), OF_ENGINES.items(), ids=str)
def test_the_errors_of_an_engine_are_those_of_the_benchmark(
    key: tuple[str, str], own: tuple[float, float, float] | None
) -> None:
    runs, sources, *figures, inside = row(", ".join(key))
    if own is None:
        assert figures == ["of the class", "", ""]
    else:
        assert int(runs) >= 20
        assert int(sources) > 1
        assert tuple(map(float, figures)) == own
        assert 87 <= float(inside.rstrip("%")) <= 95


def test_an_engine_without_runs_is_told_that_they_are_of_others() -> None:
    found = {name: of_engine(EIGHT_BIT, name) for name in ("megatron-bridge+float8", "torchtitan", "native")}
    assert [each.words for each in found.values()] == ["8-bit, megatron-bridge", "8-bit", "8-bit, other engines"]
    assert found["megatron-bridge+float8"].high < found["torchtitan"].high == found["native"].high
    assert of_engine(MEASURED, "native") is MEASURED


def test_plans_are_as_good_within_what_the_benchmark_found() -> None:
    assert float(row("as good")[3]) == AS_GOOD


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (like(), DENSE),
        (like(device="v100-32gb"), None),
        (like(strategies=DIVIDED), LONG_CONTEXT),
        (like(time_factor=1.1), SCALED),
        (like(time_factor=1.1, num_calibrating=3), SCALED_BY_SEVERAL),
        (like(profile=measured_profile(chain())), MEASURED),
        (like(rates=ON_H100.efficiency), None),
        (spread_of(replace(ON_H100, precision="fp8"), PLAIN), EIGHT_BIT),
        (spread_of(replace(ON_H100, precision="fp8"), DIVIDED), LONG_CONTEXT),
        (spread_of(replace(ON_H100, levers=Levers.of({"float8": "rowwise"})), PLAIN), EIGHT_BIT),
        (spread_of(replace(ON_H100, chain=WITH_EXPERTS, precision="fp8"), DIVIDED), EXPERTS),
        (spread_of(replace(ON_H100, chain=WITH_ADAPTERS), DIVIDED), ADAPTERS),
    ],
)
def test_the_errors_are_those_of_runs_that_are_like_the_plan(found: Spread | None, expected: Spread | None) -> None:
    assert found is expected


def test_an_interval_is_in_the_seconds_of_the_prediction_and_holds_it() -> None:
    found = interval_of(ON_H100, PLAIN, 10.0)
    assert found is not None
    assert (found.low_s, found.high_s) == (10 * DENSE.low, 10 * DENSE.high)
    assert found.low_s < 10 < found.high_s


def test_without_runs_to_compare_there_is_no_interval() -> None:
    assert interval_of(ON_H100.on(rates=ON_H100.efficiency), PLAIN, 10.0) is None
    masked = replace(chain(), family=replace(chain().family, task=Task.MASKED_LM))
    assert interval_of(replace(ON_H100, chain=masked), PLAIN, 10.0) is None


def test_several_measured_runs_tell_more_than_one() -> None:
    assert SCALED_BY_SEVERAL.high / SCALED_BY_SEVERAL.low < SCALED.high / SCALED.low


def test_a_calibrated_job_counts_its_runs() -> None:
    assert job(cluster(1, 4)).on(num_calibrating=2).cost_source().num_calibrating == 2
