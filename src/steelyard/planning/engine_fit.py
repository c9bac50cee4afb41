"""The best plan for another engine that cannot run the wanted plan, or runs it in its own way.

It is searched like any plan for that engine. The user's decisions are given up last, only one of them if that is
enough. Each is named with the reason: the engine does not support it, or nothing fits with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from steelyard.cost.job import Job
from steelyard.cost.kernels import job_under
from steelyard.engines import engine_of
from steelyard.engines.capabilities import unsupported
from steelyard.engines.engine import Engine
from steelyard.engines.native import NATIVE
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.plan import Plan
from steelyard.planning.choose import NothingFitsError, NoUniformPlanError, PlanningResult, device_bytes, plan_job
from steelyard.planning.price import peak_bytes, with_price
from steelyard.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPlan:
    """A plan that an engine can run, compared with the wanted plan."""

    plan: Plan
    """Plan that the engine can run, priced for this engine."""
    reasons: tuple[str, ...]
    """Features of the wanted plan that the engine cannot express; empty if it can express all."""
    wanted_step_s: float | None
    """Predicted step time of the wanted plan in the engine that it was found for; None if nothing was priced."""
    kept: tuple[str, ...] = ()
    """Decisions of the user that are kept."""
    given_up: tuple[str, ...] = ()
    """Decisions of the user that are given up, each with the reason."""
    is_wanted: bool = False
    """Whether ``plan`` is the wanted plan."""

    @property
    def slowdown(self) -> float | None:
        """Slowdown relative to the wanted plan (0.1 is 10 % slower); None if nothing was priced."""
        if self.wanted_step_s is None or self.plan.prediction is None:
            return None
        return self.plan.prediction.step_time_s / self.wanted_step_s - 1


def fit_plan(plan: Plan, job: Job, engine: Engine) -> FittedPlan:
    """Return the fastest plan that fits and that an engine can run, priced for this engine.

    ``job`` is the job for our own runtime. The plan itself is returned if none is faster, and always if it was written
    by hand. Raises `NothingFitsError` with the nearest miss if nothing fits, and `NoUniformPlanError` if no plan is
    legal at all.
    """
    theirs = job_under(job, engine)
    own = job_under(job, engine_of(plan.engine)) if plan.engine else job
    wanted, reasons = with_price(plan, own), unsupported(plan, theirs.engine.capabilities)
    demands = plan.asked.one_by_one() if plan.asked else {}
    itself = None if reasons else with_price(plan, theirs)
    kept, given_up, best = tuple(demands), tuple[str, ...](), itself
    if itself is None or (plan.prediction is not None and engine.execution != NATIVE.execution):
        kept, given_up, best = _best_under(theirs, demands)
        if itself is not None and peak_bytes(itself) <= job.budget_bytes and itself.step_s <= best.step_s:
            best = itself
    assert best is not None, "either it is the plan itself or it was searched"
    return FittedPlan(
        plan=best.model_copy(update={"asked": plan.asked}),
        reasons=reasons,
        wanted_step_s=wanted.step_s,
        kept=kept,
        given_up=given_up,
        is_wanted=best is itself,
    )


Kept = tuple[tuple[str, ...], tuple[str, ...], Plan]
"""Decisions that are kept, decisions that were given up with the reasons, and the best plan."""


def _best_under(job: Job, demands: Mapping[str, Decisions]) -> Kept:
    """Return the best plan under as many decisions as can be kept. Raises as `fit_plan`."""
    try:
        return tuple(demands), (), _best(job, demands)
    except (NothingFitsError, NoUniformPlanError) as error:
        if not demands:
            raise
        miss = error.expected
    possible = {text: each for text, each in demands.items() if _is_possible(job, each)}
    if len(possible) < len(demands):
        why = f"nothing that {job.engine.name} can run of this model, batch and number of devices has it"
        refused = tuple(f"{text}: {why}" for text in demands if text not in possible)
        kept, given_up, plan = _best_under(job, possible)
        return kept, refused + given_up, plan
    found: list[Kept] = []
    for text in demands:
        rest = {other: each for other, each in demands.items() if other != text}
        try:
            found.append((tuple(rest), (f"{text}: with all that was asked there is not {miss}",), _best(job, rest)))
        except (NothingFitsError, NoUniformPlanError):
            continue
    if found:
        return min(found, key=lambda each: each[2].step_s)
    given_up = tuple(f"{text}: with what was asked there is not {miss}" for text in demands)
    return (), given_up, _best(job, {})


def _is_possible(job: Job, demand: Decisions) -> bool:
    try:
        plan_job(job, demand)
    except NoUniformPlanError:
        return False
    return True


def _best(job: Job, demands: Mapping[str, Decisions]) -> Plan:
    """Return the best plan under all these decisions. Raises as `fit_plan`."""
    result = plan_job(job, FREE.with_also(*demands.values()))
    if result.plan is None:
        raise _nothing_fits(result)
    return result.plan


def _nothing_fits(result: PlanningResult) -> NothingFitsError:
    """Build the error that says by how many bytes the nearest plan of one strategy misses."""
    job, miss = result.job, result.miss
    missing = device_bytes(job, miss.needed_bytes) - job.budget_bytes if miss else 0
    nearest = f": the nearest one misses {format_bytes(missing)} ({missing} bytes)" if miss else ""
    return NothingFitsError(
        field="--to",
        found=f"{job.engine.name}, which runs one strategy for all layers",
        expected=f"a plan of one strategy that fits into {format_bytes(job.budget_bytes)} per device{nearest}",
        hint="export for a target that mixes strategies (pytorch, torchrun), or plan with less memory per device",
    )
