"""Tests of run classes and of the ranking of a job's plans, on small cases worked out by hand."""

import pytest
from expert_plans import orders
from published_runs.classes import ADAPTERS, CONTEXT, DENSE, EIGHT_BIT, EXPERTS, class_of
from published_runs.forecast import Forecast
from published_runs.order import distinct_plans, order_by_class, ranked_jobs, spearman
from published_runs.table import order_tables
from rich.console import Console

from tests.benchmarks.published_runs.examples import run_of
from tests.benchmarks.published_runs.test_evidence import twins
from tests.benchmarks.published_runs.test_score import made


def plans(*seconds: tuple[float, float], job: str = "j", **cells: str) -> list[Forecast]:
    """Plans of a job that differ in tp, with measured and predicted seconds."""
    numbered = enumerate(seconds)
    return [made(m, p, job=job, number=n, **{"id": f"{job}-{n}", "tp": str(2**n)} | cells) for n, (m, p) in numbered]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({}, DENSE),
        ({"precision": ""}, DENSE),
        ({"precision": "mxfp8 + bf16"}, EIGHT_BIT),
        ({"precision": "nvfp4"}, EIGHT_BIT),
        ({"precision": "mxfp8", "cp": "2"}, CONTEXT),
        ({"precision": "fp8", "cp": "2", "moe_experts": "8"}, EXPERTS),
        ({"moe_experts": "8", "lora": "16"}, ADAPTERS),
    ],
)
def test_a_run_is_of_the_first_class_that_it_belongs_to(cells: dict[str, str], expected: str) -> None:
    assert class_of(run_of("vtrain", **cells)) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((1.0, 2.0, 3.0), (10.0, 20.0, 90.0), 1.0),
        ((1.0, 2.0, 3.0), (3.0, 2.0, 1.0), -1.0),
        ((1.0, 2.0, 3.0, 4.0), (1.0, 3.0, 2.0, 4.0), 0.8),
        ((1.0, 1.0, 2.0), (1.0, 2.0, 3.0), 3**0.5 / 2),
        ((1.0, 1.0), (1.0, 2.0), None),
    ],
    ids=["the same", "reversed", "two of four exchanged", "two that are equal", "all equal"],
)
def test_rank_correlation(first: tuple[float, ...], second: tuple[float, ...], expected: float | None) -> None:
    assert spearman(first, second) == (None if expected is None else pytest.approx(expected))


def test_the_plan_that_is_predicted_fastest_is_ranked_first_and_has_the_regret() -> None:
    (job,) = ranked_jobs(plans((1.0, 3.0), (1.5, 2.0), (2.0, 4.0)))
    assert (job.kind, job.plans, job.first, job.contradicts) == (DENSE, 3, "j-1", False)
    assert job.regret == pytest.approx(0.5)
    assert job.correlation == pytest.approx(0.5)


def test_two_plans_are_too_few_unless_asked_for() -> None:
    runs = plans((1.0, 3.0), (1.5, 2.0))
    assert ranked_jobs(runs) == ()
    assert [job.plans for job in ranked_jobs(runs, 2)] == [2]


def test_repeats_of_a_plan_count_once_with_their_median() -> None:
    runs = [made(measured, 2.0, number=n) for n, measured in enumerate((1.0, 5.0, 1.2))]
    (plan,) = distinct_plans(runs)
    assert (plan.run.id, plan.run.step_time_s, plan.step_time_s) == ("made-0", 1.2, 2.0)
    assert ranked_jobs(runs) == ()


def test_versions_of_a_framework_are_one_job_of_a_class_with_few_rows() -> None:
    runs = plans((1.0, 1.0), (2.0, 2.0), job="a", framework="NeMo 25.02")
    runs += plans((3.0, 3.0), job="b", framework="NeMo 25.05", pp="4")
    assert ranked_jobs(runs) == ()
    experts = [made(r.run.step_time_s or 0, 1.0, **{**r.run.cells, "moe_experts": "8"}) for r in runs]
    assert [(job.kind, job.job, job.plans) for job in ranked_jobs(experts)] == [(EXPERTS, "a", 3)]


def test_a_job_that_contradicts_itself_is_marked_and_left_out_of_the_second_line() -> None:
    console = Console(width=120, record=True)
    other = [made(1.0 + n, 9.0 - n, job="k", number=50 + n, tp=str(2**n)) for n in range(3)]
    jobs = ranked_jobs([*twins((1.0, 1.5)), made(2.0, 2.0, number=7, tp="8"), *other])
    assert [(job.job, job.contradicts) for job in jobs] == [("j", True), ("k", False)]
    assert [each.regret for each in order_by_class(jobs)] == pytest.approx([(0.0 + 2.0) / 2])
    for table in order_tables(jobs):
        console.print(table)
    text = console.export_text()
    assert "the job contradicts itself" in text
    assert "without jobs that contradict themselves" in text


def test_every_source_weighs_the_same_in_a_class() -> None:
    wrong = plans((1.0, 3.0), (2.0, 2.0), (3.0, 4.0))
    right = [
        made(1.0 + n, 1.0 + n, job=f"k{k}", number=10 * k + n, tp=str(n), source_file="b")
        for k in (1, 2)
        for n in range(3)
    ]
    (order,) = order_by_class(ranked_jobs(wrong + right))
    assert (order.jobs, order.sources, order.regret) == (3, 2, pytest.approx(0.5))


def test_experts_plans_of_one_job_are_held_beside_each_other() -> None:
    job = {"model": "m", "device": "d", "gpus": "8", "seq": "1", "global_batch": "1", "precision": "bf16"}
    rows = [job | {"name": name, "measured_s": time} for name, time in (("a", "2"), ("b", "1"), ("c", ""))]
    found = [{"priced_s": priced, "skipped": ""} for priced in (1.0, 3.0, 0.1)]
    assert orders(rows, found) == ["2 plans of one job: a is ranked first, regret 100.0%"]
    assert orders(rows[:1], found[:1]) == []
