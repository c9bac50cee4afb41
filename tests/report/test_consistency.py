"""Tests that adjacent figures agree: parts sum to the whole, percentages refer to the printed figures."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.plan.choices import Explanation, PlanStudy
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.planning.choose import plan_job
from steelyard.planning.explain import explain_plan
from steelyard.planning.frontier import find_trade_offs
from steelyard.planning.price import describe, with_price
from steelyard.planning.problem import make_tables
from steelyard.planning.variants import FREE_CHOICE, Study
from steelyard.report.explain_view import fullest_terms, step_terms
from steelyard.report.html.bars import stage_seconds
from steelyard.report.html.contents import ReportContents
from steelyard.search import OnDemand
from steelyard.units import format_bytes
from tests.cost.examples import cluster, job, plan
from tests.jobs import request_of

SLOW, FAST = 1e6, 100e9
"""Bytes/s between nodes: with the first, handing over takes longer than the work that may hide it."""
NOT_THERE = 1e-9

layouts = st.lists(st.sampled_from(["dp2", "fsdp2", "tp2", "fsdp2 remat=full"]), min_size=6, max_size=6)


@st.composite
def priced(draw: st.DrawFn) -> tuple[Plan, Job]:
    """A plan by hand of two or four stages, over links of any speed, on processes that share cores or do not."""
    of = job(cluster(2, 4, inter_bytes_per_s=draw(st.sampled_from([SLOW, 1e8, FAST]))), global_batch=16)
    shares = draw(st.booleans())
    if shares:
        speeds = (3.0, 2.0, 1.5, 1.3, 1.2, 1.1, 1.05, 1.0)
        identity = of.profile.identity.model_copy(update={"num_devices": 8})
        of = of.on(profile=of.profile.model_copy(update={"busy_speeds": speeds, "identity": identity}))
    first = draw(st.integers(1, 5))
    layers = [text.replace("2", "4", 1) for text in draw(layouts)]
    stages = [", ".join(layers[:first]), ", ".join(layers[first:])]
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    made = plan(of, *stages, num_microbatches=draw(st.sampled_from([2, 4])), schedule=schedule)
    return with_price(made, of), of


@pytest.mark.slow
@given(priced())
@settings(max_examples=60, deadline=None)
def test_no_stage_works_longer_than_the_step_takes(found: tuple[Plan, Job]) -> None:
    made, _ = found
    assert made.prediction is not None
    for stage in made.prediction.stages:
        assert stage.total_time_s * made.num_microbatches <= made.prediction.step_time_s * (1 + NOT_THERE)


@given(priced())
@settings(max_examples=30, deadline=None)
def test_terms_of_time_sum_to_the_step_and_none_is_negative(found: tuple[Plan, Job]) -> None:
    made, of = found
    assert made.prediction is not None
    study = PlanStudy(scope="", explanation=Explanation(binds=""))
    timeline = predict(made, of).timeline
    page = ReportContents(plan=made, plan_file="plan.json", job=of, timeline=timeline, study=study)
    for terms in (step_terms(made, made.prediction), *stage_seconds(page)):
        assert min(terms.values()) >= 0
        assert sum(terms.values()) == pytest.approx(made.prediction.step_time_s, rel=1e-9)


@given(priced())
@settings(max_examples=20, deadline=None)
def test_terms_of_memory_sum_to_what_is_said_of_a_device(found: tuple[Plan, Job]) -> None:
    made, _ = found
    assert made.prediction is not None
    assert sum(fullest_terms(made.prediction).values()) == max(each.total_bytes for each in made.prediction.stages)
    assert all(size > 0 for each in made.prediction.stages for size in each.memory_bytes.values())


def tight(share: float) -> Job:
    """A job whose memory binds, the more the smaller the share."""
    of = job(cluster(1, 4), global_batch=16)
    return of.on(budget_bytes=int(1_360_000_000 + share * 1_000_000))


def studied(of: Job, *tables: OnDemand) -> Study:
    """The variants of a job, in all of its pipeline configurations or in these alone."""
    return Study(request_of(of), of, tables=tables or None)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_less_time_is_less_than_this_plan_takes(share: float) -> None:
    """By more memory for the best plan, and by other settings for one that is far from it."""
    of = tight(share)
    best = plan_job(of, Decisions()).plan
    assert best is not None
    by_hand = with_price(plan(of, ", ".join(["fsdp4 remat=full"] * 6), num_microbatches=4), of)
    for each, limit in ((best, "Memory limits it"), (by_hand, "Its settings limit it")):
        assert each.prediction is not None
        said = explain_plan(each, studied(of))
        found = re.search(r"(?:would|can) take (\S+) (\S+), (\S+)% less", said.binds)
        assert found is not None, said.binds
        assert said.binds.startswith(limit)
        units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
        free_s = float(found[1].replace(",", "")) * units[found[2]]
        assert float(found[3]) == pytest.approx(100 * (1 - free_s / each.prediction.step_time_s), abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_how_much_slower_a_baseline_is_agrees_with_both_step_times(share: float) -> None:
    of = tight(share)
    best = plan_job(of, Decisions()).plan
    assert best is not None
    assert best.prediction is not None
    said = explain_plan(best, studied(of))
    timed = [each for each in (*said.rivals, *said.budgets) if each.step_time_s is not None]
    assert timed
    for each in timed:
        assert each.step_time_s is not None
        assert each.slowdown == pytest.approx(each.step_time_s / best.prediction.step_time_s - 1, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_a_candidate_is_no_faster_where_it_is_searched_to_the_end_than_its_step_says(share: float) -> None:
    of = tight(share)
    result = plan_job(of, Decisions())
    assert result.plan is not None
    assert result.plan.prediction is not None
    timed = [each for each in result.plan.prediction.alternatives if each.step_time_s is not None]
    configs = make_tables(of, Decisions())
    for each in timed:
        tables = next(one for one in configs if describe(one.pipeline) == each.description)
        mine = studied(of, tables).answer(FREE_CHOICE)
        assert mine.plan is not None
        assert each.step_time_s is not None
        assert ("at most" in each.reason) == each.is_bound
        if not each.is_bound:
            assert mine.step_s == pytest.approx(each.step_time_s, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.7])
def test_the_chosen_row_of_a_frontier_is_the_plan_and_no_row_is_dominated(share: float) -> None:
    of = tight(share)
    best = plan_job(of, Decisions()).plan
    assert best is not None
    assert best.prediction is not None
    points = find_trade_offs(request_of(of), of, max_searches=8, device_counts=(4,)).points
    assert [point.step_time_s for point in points if point.is_chosen] == [best.prediction.step_time_s]
    for point in points:
        assert not any(
            other.memory_bytes <= point.memory_bytes and other.step_time_s <= point.step_time_s
            for other in points
            if other is not point
        )


def test_what_a_candidate_misses_or_more_is_no_more_than_its_nearest_plan_does() -> None:
    of = tight(0.08)
    best = plan_job(of, Decisions()).plan
    assert best is not None
    assert best.prediction is not None
    said = {each.description: each.reason for each in best.prediction.alternatives if "does not fit" in each.reason}
    assert said
    assert all(re.match(r"does not fit: misses \S+ \S+ or more; ", reason) for reason in said.values())
    configs = make_tables(of, Decisions())
    for tables in configs:
        if describe(tables.pipeline) in said:
            missing = studied(of, tables).answer(FREE_CHOICE).missing_bytes
            assert missing is not None
            assert format_bytes(missing) in said[describe(tables.pipeline)]


def test_a_config_without_a_legal_strategy_is_called_so() -> None:
    of = job(cluster(1, 8), global_batch=16)
    best = plan_job(of, Decisions(max_degrees={"tp": 2, "cp": 1})).plan
    assert best is not None
    assert best.prediction is not None
    reasons = {each.description: each.reason for each in best.prediction.alternatives}
    assert reasons["1 stage, 16 microbatches"] == "has a layer without a legal strategy"
    assert not any("inf" in reason.split() for reason in reasons.values())
