"""Tests that contradictory jobs and computed tables are found from measurements alone."""

from dataclasses import replace

import pytest
from published_runs.evidence import (
    RegretEvidence,
    computed_tables,
    regret_evidence,
    regret_targets,
    worst_contradictions,
)
from published_runs.forecast import Forecast
from published_runs.score import ErrorSummary, LeftOut
from published_runs.table import regret_tables
from published_runs.targets import MIN_JUDGED
from rich.console import Console

from tests.benchmarks.published_runs.test_score import made


def job(*last: Forecast, name: str = "j", first: int = 0) -> list[Forecast]:
    """Return as many dissimilar runs of one job as a source needs, ranked as measured, followed by these runs."""
    others = range(first, first + MIN_JUDGED)
    return [made(5.0 + n, 5.0 + n, job=name, number=n, dp=str(n), grad_accum="4", mbs="1") for n in others] + list(last)


def twins(measured_s: tuple[float, float], **cells: str) -> list[Forecast]:
    """Eight microbatches and half as many of twice the samples."""
    sizes = enumerate(zip(("1", "2"), ("8", "4"), measured_s, strict=True))
    return [
        made(time, 1.0, number=900 + n, **({"mbs": b, "grad_accum": m, "pp": "1"} | cells)) for n, (b, m, time) in sizes
    ]


def names(found: RegretEvidence) -> list[tuple[str, int]]:
    return [(line.name, line.jobs) for line in found.lines]


def test_half_as_many_microbatches_that_take_longer_contradict_their_twin() -> None:
    (found,) = worst_contradictions(job(*twins((1.0, 1.5))))
    assert (found.run, found.twin) == ("made-901", "made-900")
    assert found.longer == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("measured_s", "cells"),
    [
        pytest.param((1.0, 1.2), {}, id="by less than repeats may differ"),
        pytest.param((1.5, 1.0), {}, id="faster, as it should be"),
        pytest.param((1.0, 1.5), {"pp": "8"}, id="by no more than its bubble"),
        pytest.param((1.0, 1.5), {"grad_accum": ""}, id="with nothing known of the microbatches"),
    ],
)
def test_these_twins_do_not_contradict_each_other(measured_s: tuple[float, float], cells: dict[str, str]) -> None:
    assert worst_contradictions(job(*twins(measured_s, **cells))) == ()


def test_runs_that_leave_no_margin_of_memory_may_be_slow() -> None:
    first, second = twins((1.0, 1.5))
    assert worst_contradictions(job(first, replace(second, has_margin=False))) == ()


def test_runs_of_other_settings_are_no_twins() -> None:
    first, second = twins((1.0, 1.5))
    assert worst_contradictions(job(first, *twins((1.0, 1.5), zero_stage="1")[1:])) == ()
    assert worst_contradictions(job(first, second))


def test_regret_is_told_with_and_without_jobs_that_contradict_themselves() -> None:
    runs = job(*twins((1.0, 1.5)), name="j") + job(name="other", first=100)
    ranked = [replace(each, step_time_s=0.5) if each.run.id == "made-901" else each for each in runs]
    found = regret_evidence(ranked)
    assert names(found)[:2] == [("all jobs", 2), ("without jobs that contradict themselves", 1)]
    assert [line.mean for line in found.lines[:2]] == pytest.approx([0.25, 0.0])
    assert [(line.reached, line.is_met) for line in regret_targets(found)] == [(0.0, True), (None, None), (0.0, True)]


def test_nothing_is_set_apart_for_a_wrong_prediction() -> None:
    """Measurements decide: a plan that is ranked first and slow stays."""
    wrong = [replace(each, step_time_s=0.1) if each.run.id == "made-19" else each for each in job()]
    found = regret_evidence(wrong)
    assert (found.contradictions, found.computed, regret_targets(found)) == ((), {}, ())
    assert [line.mean for line in found.lines] == pytest.approx([24 / 5 - 1] * 3)


def affine(noise: float, count: int = 4) -> list[Forecast]:
    """Runs of other jobs that differ in the number of microbatches, on a line with noise."""
    times = ((m, 0.3 + 0.123456789 * m + noise * m * m) for m in range(2, 2 + count))
    return [made(t, t, job=f"j{m}", number=m, grad_accum=str(m), gbs=str(m)) for m, t in times]


def test_times_on_a_line_to_the_last_digit_were_computed() -> None:
    assert list(computed_tables([each.run for each in affine(0.0)]).values()) == [4]


@pytest.mark.parametrize("runs", [affine(1e-6), affine(0.0, count=2)], ids=["nearly on a line", "two of them"])
def test_times_that_clocks_could_show_were_measured(runs: list[Forecast]) -> None:
    assert computed_tables([each.run for each in runs]) == {}


def test_regret_of_a_source_left_out_goes_by_its_own_predictions() -> None:
    runs = job()
    errors = ErrorSummary.of([0.0])
    assert errors is not None
    ratios = {each.run.id: -3.0 if each.run.id == "made-1" else 0.0 for each in runs}
    left_out = LeftOut(source="vtrain", zero_shot=errors, scaled=errors, regret=None, log_ratios=ratios, parameters={})
    line = regret_evidence(runs, [left_out]).lines[0]
    assert (line.mean, line.left_out) == (pytest.approx(0.0), pytest.approx(6 / 5 - 1))


def test_what_is_set_apart_is_printed_with_its_rows() -> None:
    console = Console(width=120, record=True)
    for table in regret_tables(regret_evidence(job(*twins((1.0, 1.5))) + affine(0.0))):
        console.print(table)
    text = console.export_text()
    assert "made-901 took 50% longer than made-900" in text
    assert "runs of vtrain" in text
