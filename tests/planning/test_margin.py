"""Tests that a plan keeps the reserved fraction of a GPU's memory free if one fits, and reports it."""

from dataclasses import replace

import pytest

from steelyard.cost.job import Job
from steelyard.errors import UserError
from steelyard.plan.decisions import Decisions
from steelyard.plan.prediction import shortfall
from steelyard.planning.choose import PlanningResult, plan_job, without_margin
from steelyard.planning.explain import other_budgets, pricing_notes
from steelyard.planning.price import peak_bytes, warnings_of, with_price
from steelyard.planning.request import MARGIN
from steelyard.planning.why_not import why_not_plan
from steelyard.units import GIB, format_bytes
from tests.jobs import job_of, make_job

CONFIG = "llama3.2-1b"


def of(*, memory: str | None = None, margin: float | None = None) -> Job:
    return make_job(
        CONFIG,
        "1x2xa100-80gb",
        global_batch=64,
        seq_len=4096,
        precision="bf16",
        memory=memory,
        memory_margin=margin,
        profile=None,
    )


@pytest.fixture(scope="module")
def comfortable() -> PlanningResult:
    return plan_job(of(), Decisions())


def test_by_default_a_part_of_a_gpu_is_left_free(comfortable: PlanningResult) -> None:
    job, has = comfortable.job, of().cluster.device.memory_bytes
    assert has is not None
    assert job.budget_bytes + job.margin_bytes == has
    assert job.margin_bytes == int(has * MARGIN)
    assert comfortable.plan is not None
    assert peak_bytes(comfortable.plan) <= job.budget_bytes


def test_a_budget_that_was_asked_for_is_used_whole_unless_a_margin_is_asked_for_too() -> None:
    assert (of(memory="40GiB").budget_bytes, of(memory="40GiB").margin_bytes) == (40 * GIB, 0)
    both = of(memory="40GiB", margin=0.1)
    assert (both.budget_bytes, both.margin_bytes) == (36 * GIB, 4 * GIB)


@pytest.mark.slow
def test_the_allocator_of_a_cpu_needs_no_margin() -> None:
    profiled = make_job(CONFIG, "1x2xcpu", global_batch=4, seq_len=64, precision="fp32", memory="40GiB", profile=None)
    assert profiled.margin_bytes == 0


@pytest.mark.parametrize("share", [-0.1, 0.95, float("nan")])
def test_a_share_that_is_none_is_an_error(share: float) -> None:
    with pytest.raises(UserError, match=r"--memory-margin: found .*\n.*from 0 to 0.9"):
        of(margin=share)


def test_no_margin_is_never_slower(comfortable: PlanningResult) -> None:
    full = plan_job(of(margin=0), Decisions())
    assert full.cost is not None
    assert comfortable.cost is not None
    assert full.cost.step_time_s <= comfortable.cost.step_time_s * (1 + 1e-9)


def test_the_first_lines_say_what_is_left_free(comfortable: PlanningResult) -> None:
    assert comfortable.plan is not None
    assert "; 5% of 79.1 GiB left free" in str(comfortable.plan)
    assert "left free" not in str(with_price(comfortable.plan, of(memory="60GiB")))


def test_what_fits_without_the_margin_alone_is_taken_with_a_warning(comfortable: PlanningResult) -> None:
    """A device with a little more than what the plan of least memory takes, less than the margin on top of it."""
    job = of()
    missed = plan_job(job.on(budget_bytes=GIB, margin_bytes=0), Decisions())
    assert missed.miss is not None
    least = int(missed.miss.needed_bytes * 1.09)
    device = replace(job.cluster.device, memory_bytes=int(least * 1.01))
    tight = job.on(
        cluster=job.cluster.on(device=device),
        budget_bytes=int(least * 1.01 * (1 - MARGIN)),
        margin_bytes=int(least * 1.01) - int(least * 1.01 * (1 - MARGIN)),
    )
    found = plan_job(tight, Decisions())
    assert found.plan is not None
    assert found.plan.prediction is not None
    assert found.job.group == without_margin(tight).group
    assert found.plan.prediction.margin_bytes == 0
    assert peak_bytes(found.plan) > tight.budget_bytes
    (warning,) = found.plan.prediction.warnings
    assert not found.has_margin
    assert warning.startswith(f"no plan was found that leaves {format_bytes(tight.margin_bytes)} per device free; ")
    assert "--memory-margin" not in warning
    assert f"{peak_bytes(found.plan) / device.memory_bytes:.1%} of what it has" in warning
    assert comfortable.plan is not None
    assert comfortable.plan.prediction is not None
    assert comfortable.plan.prediction.warnings == ()


def test_a_margin_that_no_plan_leaves_is_told_on_any_device(comfortable: PlanningResult) -> None:
    assert comfortable.plan is not None
    assert comfortable.cost is not None
    missed = of().on(margin_bytes=30 * GIB)
    roomy = warnings_of(of(), comfortable.plan, comfortable.cost.stages, missed=missed)
    assert roomy == ("no plan was found that leaves 30.0 GiB per device free",)


def test_a_full_device_is_told_what_leaves_more_free(comfortable: PlanningResult) -> None:
    assert comfortable.plan is not None
    assert comfortable.cost is not None
    job = of()
    full = replace(job.cluster.device, memory_bytes=peak_bytes(comfortable.plan))
    pressed = job.on(cluster=job.cluster.on(device=full))
    (warning,) = warnings_of(pressed, comfortable.plan, comfortable.cost.stages)
    assert warning.endswith("--memory-margin 0.05 leaves more free, where one fits")


@pytest.mark.parametrize(
    ("peak", "text"),
    [
        (100, ""),
        (101, "fits under pressure: uses 1 B of the reserved 20 B"),
        (120, "fits under pressure: uses 20 B of the reserved 20 B"),
        (121, "does not fit: exceeds the memory by 1 B per device"),
    ],
)
def test_a_plan_fits_or_takes_of_the_margin_or_misses(peak: int, text: str) -> None:
    assert shortfall(peak, 100, 20) == text


def test_a_plan_of_ones_own_that_takes_of_the_margin_is_no_misfit(comfortable: PlanningResult) -> None:
    plan = comfortable.plan
    assert plan is not None
    peak = peak_bytes(plan)
    pressed = of().on(budget_bytes=peak - GIB, margin_bytes=2 * GIB)
    assert why_not_plan(pressed, plan, asked="plan.json").reasons == (
        "fits under pressure: uses 1.00 GiB of the reserved 2.00 GiB",
    )
    assert pricing_notes(plan, with_price(plan, pressed)) == (
        "The plan itself fits under pressure: uses 1.00 GiB of the reserved 2.00 GiB.",
    )
    short = pressed.on(margin_bytes=0)
    assert why_not_plan(short, plan, asked="plan.json").reasons == (
        "does not fit: exceeds the memory by 1.00 GiB per device",
    )


@pytest.mark.slow
def test_a_cpu_is_under_no_pressure(comfortable: PlanningResult) -> None:
    assert comfortable.plan is not None
    assert comfortable.cost is not None
    job = of()
    full = replace(job.cluster.device, memory_bytes=peak_bytes(comfortable.plan))
    cpu = make_job(CONFIG, "1x2xcpu", global_batch=4, seq_len=64, precision="fp32", memory="40GiB", profile=None)
    pressed = job.on(cluster=job.cluster.on(device=full))
    assert warnings_of(pressed, comfortable.plan, comfortable.cost.stages)
    assert warnings_of(cpu, comfortable.plan, comfortable.cost.stages) == ()


def test_a_plan_keeps_its_margin_and_explain_says_what_it_costs(comfortable: PlanningResult) -> None:
    assert comfortable.plan is not None
    again = job_of(comfortable.plan)
    assert (again.budget_bytes, again.margin_bytes) == (comfortable.job.budget_bytes, comfortable.job.margin_bytes)
    names = [variant.name for variant in other_budgets(again)]
    assert names == ["no margin (3.96 GiB more)", "1.00 GiB more", "1.00 GiB less"]


def test_a_plan_for_more_memory_than_a_device_has_is_told_that_it_runs_out(comfortable: PlanningResult) -> None:
    assert comfortable.plan is not None
    assert comfortable.cost is not None
    job = of()
    small = replace(job.cluster.device, memory_bytes=peak_bytes(comfortable.plan) - GIB)
    (warning,) = warnings_of(job.on(cluster=job.cluster.on(device=small)), comfortable.plan, comfortable.cost.stages)
    assert "it runs out of memory unless the device has more" in warning
    assert "allocator" not in warning
