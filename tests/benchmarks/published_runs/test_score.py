"""Tests of scores of predictions with known errors, because the measurements are derived from them."""

from dataclasses import replace

import pytest
from published_runs.forecast import Forecast, Unpredicted
from published_runs.rows import PublishedRun
from published_runs.score import measured_memory, score_sources
from published_runs.targets import MIN_JUDGED, is_dense, is_recommended_dense, summarise

from steelyard.units import GB, GIB
from tests.benchmarks.published_runs.examples import outcomes, run_of


def made(
    measured_s: float, predicted_s: float, *, job: str = "j", number: int = 0, has_margin: bool = True, **cells: str
) -> Forecast:
    run = run_of(
        "vtrain",
        **{"id": f"made-{number}", "job": job, "step_time_s": str(measured_s), "recommended": "True", "status": "ok"}
        | cells,
    )
    return Forecast(run=run, step_time_s=predicted_s, peak_bytes=10 * GIB, fits=True, has_margin=has_margin)


def test_errors_are_signed_and_relative_to_the_measurement() -> None:
    (score,) = score_sources([made(2.0, 1.0), made(2.0, 3.0, number=1), made(2.0, 2.2, number=2)], is_dense)
    assert score.zero_shot is not None
    assert score.zero_shot.bias == pytest.approx(0.1)
    assert score.zero_shot.median_abs == pytest.approx(0.5)
    assert score.zero_shot.worst == pytest.approx(-0.5)


def test_a_common_factor_leaves_no_scaled_error() -> None:
    (score,) = score_sources([made(time, 3 * time, number=index) for index, time in enumerate((1.0, 2.0))], is_dense)
    assert score.scaled is not None
    assert score.scaled.worst == pytest.approx(0)


def test_regret_is_that_of_the_plan_ranked_first() -> None:
    runs = [made(1.0 + index, 2.0 - 0.1 * index, number=index) for index in range(5)]
    (score,) = score_sources(runs, is_dense)
    assert score.regret is not None
    assert score.regret.mean == pytest.approx(4.0)


def test_the_right_order_has_no_regret_whatever_the_scale() -> None:
    runs = [made(1.0 + index, 7.0 * (1 + index), number=index) for index in range(5)]
    (score,) = score_sources(runs, is_dense)
    assert score.regret is not None
    assert score.regret.worst == 0


def test_regret_is_among_plans_that_leave_their_margin_free_and_beside_it_of_all() -> None:
    """The plan that is ranked first of all has no margin; the fastest of all neither."""
    runs = [made(4.0 + index, 5.0 - 0.1 * index, number=index) for index in range(4)]
    runs += [made(9.0, 1.0, number=4, has_margin=False), made(3.5, 8.0, number=5, has_margin=False)]
    (score,) = score_sources(runs, is_dense)
    assert score.regret is not None
    assert score.regret_of_all is not None
    assert score.regret.mean == pytest.approx(7.0 / 4.0 - 1)
    assert score.regret_of_all.mean == pytest.approx(7.0 / 3.5 - 1)


def test_a_job_without_a_plan_that_leaves_its_margin_free_is_of_all_plans() -> None:
    runs = [made(1.0 + index, 2.0 - 0.1 * index, number=index, has_margin=False) for index in range(5)]
    (score,) = score_sources(runs, is_dense)
    assert score.regret is not None
    assert score.regret.mean == pytest.approx(4.0)


def test_a_job_of_four_plans_has_no_regret() -> None:
    (score,) = score_sources([made(1.0, 1.0, number=index) for index in range(4)], is_dense)
    assert score.regret is None


def test_memory_of_an_unstated_unit_has_two_readings() -> None:
    run = run_of("vtrain", peak_mem="10", mem_unit="GB?", peak_mem_gib="")
    assert measured_memory(run) == (10 * GB, 10 * GIB)


def test_out_of_memory_that_is_called_fitting_is_counted() -> None:
    oom = replace(made(1.0, 1.0), run=PublishedRun(cells={**made(1.0, 1.0).run.cells, "status": "oom"}))
    (score,) = score_sources([oom, replace(made(1.0, 1.0, number=1), fits=False)], is_dense)
    assert (score.verdicts.num_oom, score.verdicts.false_fits) == (1, 1)
    assert (score.verdicts.num_ran, score.verdicts.false_misfits) == (1, 1)


def test_sealed_rows_are_not_scored() -> None:
    assert all(score.num_runs for score in score_sources(outcomes(), is_dense))
    scored = {score.source for score in score_sources(outcomes(), is_dense)}
    assert "kempnerforge" not in scored


def test_sources_weigh_the_same_in_the_summary() -> None:
    runs = [made(1.0, 1.2, number=index) for index in range(9 * MIN_JUDGED)]
    runs += [made(1.0, 1.4, number=len(runs) + index, source_file="another") for index in range(MIN_JUDGED)]
    timed = score_sources(runs, is_recommended_dense)
    assert summarise(timed, timed, runs)[0].reached == pytest.approx(0.3)


def test_a_source_of_few_runs_has_no_say_in_the_summary() -> None:
    runs = [made(1.0, 1.2, number=index) for index in range(MIN_JUDGED)]
    few = made(1.0, 1.4, number=len(runs), source_file="another")
    timed = score_sources([*runs, few], is_recommended_dense)
    assert summarise(timed, timed, [*runs, few])[0].reached == pytest.approx(0.2)


def test_whether_runs_fit_is_judged_by_rows() -> None:
    wrong = [made(1.0, 1.0, number=index, status="oom") for index in range(3)]
    right = [
        replace(made(1.0, 1.0, number=3 + index, status="oom", source_file="another"), fits=False) for index in range(9)
    ]
    held = score_sources([*wrong, *right], is_dense)
    line = next(line for line in summarise((), held, ()) if line.name.startswith("out of memory"))
    assert line.reached == pytest.approx(0.25)


def test_a_target_that_nothing_measured_is_neither_met_nor_missed() -> None:
    lines = summarise((), (), ())
    assert all(line.is_met is None for line in lines)


def test_skipped_rows_count_against_the_part_that_is_predicted() -> None:
    run = run_of("vtrain", tier="A")
    part = summarise(
        (),
        (),
        [Unpredicted(run=run, reason="x"), Forecast(run=run, step_time_s=1, peak_bytes=1, fits=True, has_margin=True)],
    )
    assert part[-1].reached == pytest.approx(0.5)
