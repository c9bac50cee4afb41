"""Tests that the chosen plan is accepted, and that its certificate holds for all accepted plans."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from steelyard.cost import predict as cost
from steelyard.cost.job import Job
from steelyard.cost.predict import PlanCost, predict
from steelyard.cost.tables import CostTables
from steelyard.errors import InvalidProfileError
from steelyard.hardware import Backend
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Certificate
from steelyard.plan.strategy import Remat
from steelyard.planning import choose
from steelyard.planning.choose import PlanningResult, accept, plan_job
from steelyard.planning.complete import complete
from steelyard.planning.price import peak_bytes
from steelyard.planning.problem import make_tables
from steelyard.planning.request import make_request
from steelyard.search.evaluate import evaluate
from steelyard.search.partition import quick_bound_s
from tests.cost.examples import cluster, job
from tests.cost.test_memory import plan_of, tensor_bytes
from tests.jobs import make_job

MIB = 2**20


def fullest_bytes(found: PlanningResult) -> int:
    assert found.cost is not None
    return max(stage.total_bytes for stage in found.cost.stages)


def tightening(of: Job, count: int) -> list[Job]:
    """The job within budgets from about what the roomiest plan takes down to about what any plan needs."""
    tables = make_tables(of, Decisions())
    most = fullest_bytes(plan_job(of, tables=tables))
    least = plan_job(of.on(budget_bytes=most // 8), tables=tables).miss
    assert least is not None
    needed = least.needed_bytes * of.budget_bytes // (of.budget_bytes - 1) * 108 // 100
    return [of.on(budget_bytes=most - (most - needed) * step // count) for step in range(count + 1)]


def test_a_plan_that_the_search_proves_and_the_simulator_confirms_is_optimal_without_a_gap() -> None:
    found = plan_job(job(), Decisions())
    assert found.plan is not None
    assert found.plan.prediction is not None
    certificate = found.plan.prediction.certificate
    assert certificate == Certificate(status="optimal", gap=0.0)


@pytest.mark.slow
def test_a_time_limit_ends_the_making_of_tables_and_leaves_a_gap() -> None:
    """Without any time few configurations have tables; plans of the others take at least the time of computing."""
    of = make_job(
        "llama3-8b", "2x8xh100-80gb", global_batch=64, seq_len=8192, precision="bf16", memory=None, profile=None
    )
    whole, cut = (plan_job(of, time_limit_s=limit_s) for limit_s in (None, 0))
    made = [each for each in cut.tables if each.is_made]
    assert 1 <= len(made) < len(cut.tables) == len(whole.tables)
    assert whole.plan is not None
    assert cut.plan is not None
    assert whole.plan.prediction is not None
    assert cut.plan.prediction is not None
    prediction = cut.plan.prediction
    assert (prediction.certificate.status, prediction.certificate.time_limit_s) == ("gap", 0)
    assert 0 < prediction.lower_bound_s <= whole.search.lower_bound_s
    assert prediction.certificate.gap == 1 - prediction.lower_bound_s / cut.search.ranked[0].score_s
    assert len(prediction.alternatives) == len(cut.tables) - 1


def test_the_bound_shown_is_at_most_the_step_where_the_simulator_overlaps_more_than_the_tables() -> None:
    of = make_job(
        "tinyllama-1.1b", "2x8xa100-80gb", global_batch=64, seq_len=4096, precision="bf16", memory=None, profile=None
    )
    found = plan_job(of, Decisions(schedules=("interleaved-1f1b",), num_stages=4, num_microbatches=64))
    assert found.plan is not None
    assert found.plan.prediction is not None
    assert found.search.lower_bound_s > found.plan.step_s
    assert found.plan.prediction.lower_bound_s == found.plan.step_s


def test_nothing_fits_says_how_many_configs_the_time_was_too_short_for() -> None:
    found = plan_job(job().on(budget_bytes=MIB), time_limit_s=0)
    count, num_configs = sum(not each.is_made for each in found.tables), len(found.tables)
    assert count > 0
    assert (
        f"; {count} of {num_configs} pipeline configurations were not searched before the time was up"
        in found.miss_text
    )


@pytest.mark.slow
def test_a_plan_that_the_simulator_prefers_says_among_how_many_and_its_gap_to_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulator is made to take longer for every plan of the pipeline configuration that the search ranks first."""
    first = plan_job(job(), Decisions()).plan
    assert first is not None

    def slow_for_the_first(plan: Plan, of: Job) -> PlanCost:
        found = cost.predict(plan, of)
        is_first = (plan.num_stages, plan.num_microbatches) == (first.num_stages, first.num_microbatches)
        return replace(found, step_time_s=found.step_time_s * 100) if is_first else found

    monkeypatch.setattr(choose, "predict", slow_for_the_first)
    found = plan_job(job(), Decisions())
    assert found.plan is not None
    assert found.plan.prediction is not None
    certificate = found.plan.prediction.certificate
    assert certificate.status == "simulated"
    most = choose.NUM_RESCORED + choose.MOST_AGAIN
    assert choose.NUM_RESCORED <= (certificate.num_simulated or 0) <= most
    assert certificate.gap is not None
    assert 0 < certificate.gap < 1


def test_a_plan_that_was_found_and_not_simulated_says_how_much_slower_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_several(of: Job, tables: list[CostTables], **asked: Any) -> choose.Acceptance:
        return replace(accept(of, tables, **(asked | {"num_exact": 3, "num_alternatives": 2})), num_simulated=1)

    monkeypatch.setattr(choose, "accept", of_several)
    found = plan_job(job(), Decisions(), top=1).plan
    assert found is not None
    assert found.prediction is not None
    reasons = [each.reason for each in found.prediction.alternatives if "not simulated" in each.reason]
    assert reasons
    assert all(re.match(r"\d+\.\d% slower in the search, not simulated: \S", reason) for reason in reasons)


def test_a_plan_says_where_its_costs_come_from_and_what_carries_its_collectives() -> None:
    of = job().on(time_factor=1.25)
    found = plan_job(of, Decisions()).plan
    assert found is not None
    assert found.prediction is not None
    assert found.prediction.profile == of.cost_source()
    assert found.prediction.profile.time_factor == 1.25
    assert found.prediction.backend is Backend.NCCL


def test_a_profile_of_another_device_type_is_refused() -> None:
    of = job()
    identity = of.profile.identity.model_copy(update={"method": "measured", "num_devices": 8, "device_kind": "cpu"})
    profile = of.profile.model_copy(update={"identity": identity})
    with pytest.raises(InvalidProfileError, match=r"identity\.device_kind: found cpu\n.*gpu, as in this job"):
        make_job(
            of.chain, of.cluster, global_batch=8, seq_len=of.seq_len, precision="bf16", memory=None, profile=profile
        )


@cache
def searched(devices: int) -> list[tuple[Job, PlanningResult]]:
    """Return the planning results within decreasing memory."""
    of = job(cluster(1, devices), global_batch=16)
    tables = make_tables(of, Decisions())
    return [(tight, plan_job(tight, tables=tables)) for tight in tightening(of, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_chosen_plan_fits_as_reported(devices: int) -> None:
    for tight, found in searched(devices):
        assert found.plan is None or fullest_bytes(found) <= tight.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_more_memory_never_costs_time(devices: int) -> None:
    times = [found.search.ranked[0].score_s for _, found in searched(devices) if found.plan is not None]
    assert len(times) > 3
    assert times == sorted(times)


@pytest.mark.slow
def test_a_plan_made_for_another_budget_is_not_faster_than_the_bound_where_it_fits() -> None:
    of = job(cluster(1, 8), global_batch=64, num_hidden_layers=8)
    tables = make_tables(of, Decisions())
    found = [(tight, accept(tight, tables)) for tight in tightening(of, 6)]
    for tight, here in found:
        for _, other in found:
            for each in other.ranked[:1]:
                if max(tensor_bytes(each.plan, tight)) <= here.search.budget_bytes:
                    assert each.outcome.score_s >= here.search.lower_bound_s * (1 - 1e-9)


def every_plan(of: Job, tables: CostTables) -> Iterator[tuple[float, int]]:
    """Seconds by the closed form and predicted bytes of every plan of a configuration."""
    num_layers = len(tables.layers)
    legal = [
        [index for index, allowed in enumerate(tables.legal[layer_type]) if allowed] for layer_type in tables.layers
    ]
    for inner in combinations(range(1, num_layers), tables.pipeline.num_stages - 1):
        boundaries = (0, *inner, num_layers)
        for chosen in product(*legal):
            plan = plan_of(of, tables, boundaries, chosen)
            yield evaluate(tables, boundaries, chosen).step_s, max(tensor_bytes(plan, of))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "max_cp"),
    [(1, 2, 1), (2, 2, 2), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((1, 1, 2), (2, 4, 2)))],
)
def test_the_fastest_plan_of_all_that_fit_is_found_and_proven(
    num_stages: int, num_microbatches: int, max_cp: int
) -> None:
    """Without cp one stage has an eighth of the plans: 8 strategies of each of three layers, not 16."""
    of = job(cluster(1, 2), global_batch=4, num_hidden_layers=1)
    options = Decisions(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedules=("1f1b",),
        remats=(Remat.NONE, Remat.FULL),
        modes={"zero": (3,)},
        max_degrees={"cp": max_cp},
    )
    (given,) = make_tables(of, options)
    tables = given.tables
    plans = sorted(every_plan(of, tables))
    sizes = sorted({num_bytes for _, num_bytes in plans})
    for room in sizes[:: max(1, len(sizes) // 12)]:
        tight = of.on(budget_bytes=-(-room * 108 // 100))
        found = accept(tight, [tables])
        fastest_s = min(seconds for seconds, num_bytes in plans if num_bytes <= found.search.budget_bytes)
        assert found.search.status == "optimal"
        assert found.ranked[0].outcome.score_s == pytest.approx(fastest_s, rel=1e-9)
        assert max(tensor_bytes(found.ranked[0].plan, of)) <= found.search.budget_bytes


def test_where_memory_does_not_bind_the_plan_is_proven() -> None:
    found = plan_job(job(), Decisions())
    assert found.search.status == "optimal"


@pytest.mark.slow
def test_what_is_called_the_nearest_miss_is_enough_and_no_more_than_needed() -> None:
    of = job().on(budget_bytes=1100 * MIB)
    missed = plan_job(of, Decisions())
    assert missed.plan is None
    assert missed.miss is not None
    assert missed.miss.miss_bytes > 0
    enough = of.on(budget_bytes=of.budget_bytes + -(-missed.miss.miss_bytes * 108 // 100) + 2)
    found = plan_job(enough, Decisions())
    assert found.plan is not None
    assert peak_bytes(found.plan) <= enough.budget_bytes
    assert predict(found.plan, enough).fits
    assert plan_job(enough.on(budget_bytes=enough.budget_bytes - 1024), Decisions()).plan is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "machines", "seq_len", "options"),
    [
        ("llama3-8b", "1x8xh100-80gb", 8192, Decisions()),
        ("llama3-8b", "2x8xh100-80gb", 32768, Decisions()),
        ("mixtral-8x7b", "2x8xa100-80gb", 4096, Decisions()),
        ("t5-large", "1x8xa100-40gb", 512, Decisions()),
        ("llama3-8b", "2x4xl4", 2048, Decisions(pins=("blocks: remat=full",))),
    ],
)
def test_no_table_promises_less_than_what_is_known_before_it_is_made(
    model: str, machines: str, seq_len: int, options: Decisions
) -> None:
    of = make_job(model, machines, global_batch=64, seq_len=seq_len, precision="bf16", memory=None, profile=None)
    for each in make_tables(of, options):
        assert each.pipeline == each.tables.pipeline
        assert each.least_s <= quick_bound_s(each.tables), each.pipeline


@pytest.mark.parametrize(
    ("cluster", "engine", "changes", "num_stages"),
    [
        # the closed form of interleaved passes is below their simulation and may hide a plan without a pipeline
        ("1x4xrtx-4090", "megatron-fsdp", {"global_batch": 8, "seq_len": 1024}, 1),
        # it counts the transfers of a slow network in every pass, which other passes hide
        ("2x2xa100-40gb", "megatron", {"global_batch": 16, "seq_len": 4096, "network": "ethernet-25"}, 2),
    ],
)
def test_configurations_are_searched_that_may_be_faster_than_the_simulated_best(
    cluster: str, engine: str, changes: dict[str, Any], num_stages: int
) -> None:
    asked = {"engine": engine, "num_next_best": 0, "num_fallbacks": 0, "simplify": 0.0, **changes}
    free, pinned = (
        complete(make_request("qwen3-1.7b", cluster, decisions=decisions, **asked)).plan
        for decisions in (Decisions(), Decisions(num_stages=num_stages))
    )
    assert free is not None
    assert pinned is not None
    assert free.step_s <= pinned.step_s
    assert free.prediction is not None
    assert free.prediction.certificate.status == "simulated"
