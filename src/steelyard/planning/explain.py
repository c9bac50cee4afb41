"""Explanation of a plan: its bottleneck, the best baseline under every restriction, and the value of memory.

`explain_plan` is the result that `explain` shows. `search_for_report` adds the frontier of time against memory. If the
report has a time limit, every search gets a share of it (`SEARCH_SHARE`) and returns the best plan found by then, which
for most models is proven optimal. Searches for which there was no time are named.
"""

import math
import time
from dataclasses import replace

from steelyard.cost.build import build_tables
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer_load import refusal
from steelyard.cost.predict import PlanCost, predict
from steelyard.limits import MOST_BYTES
from steelyard.plan.choices import ANY_PLAN, ComparedBaseline, Explanation, PlanStudy, StrategyVerdict
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import shortfall
from steelyard.plan.strategy import Strategy
from steelyard.planning.frontier import falling, memory_points, priced_point
from steelyard.planning.price import describe, peak_bytes, with_cost, with_price
from steelyard.planning.problem import stage_strategies
from steelyard.planning.request import PlanRequest
from steelyard.planning.simple import SAME
from steelyard.planning.variants import (
    FREE_CHOICE,
    Answer,
    Progress,
    Study,
    Variant,
    baselines,
    counted,
    group_answers,
    other_pipelines,
    within,
    without_techniques,
)
from steelyard.planning.why_not import configs_not_searched, strategies_not_searched
from steelyard.search.reasons import strategy_verdicts
from steelyard.units import GIB, format_bytes, format_seconds

SMALL_BUDGET_BYTES = 16 * GIB
"""Budget below which a sixteenth of it replaces the change of one GiB."""
OWN_GAIN = 0.02
"""Fraction of a step by which the best plan is faster if the plan's own settings limit it; a plan that `plan` finds may
be up to 1 % slower, being simpler."""
BUDGETS = "more and less memory"
UNLIMITED = "unlimited memory"


def explain_plan(
    plan: Plan,
    study: Study,
    *,
    everything: bool = False,
    progress: Progress = lambda _: None,
) -> Explanation:
    """Return the bottleneck of a plan and the costs of its baselines, searched within a study's request.

    ``everything`` adds the configurations that were never searched and a verdict on every strategy of the plan's
    configuration.
    """
    priced = with_price(plan, study.job)
    explanation, _ = what_was_searched(study, priced, progress=progress)
    more: dict[str, object] = {"notes": pricing_notes(plan, priced) + supposed_notes(study.job)}
    if everything:
        decisions = study.request.decisions
        more |= {
            "not_searched": configs_not_searched(study.job, decisions),
            "verdicts": plan_verdicts(plan, study.job, decisions),
        }
    return explanation.model_copy(update=more)


def explain_pools(plan: Plan, study: Study) -> Explanation:
    """Return the gain of a plan over several pools, compared with each pool alone and with even cuts."""
    step_s = predict(plan, study.job).step_time_s
    return Explanation(binds="", rivals=tuple(each.beside(step_s) for each in group_answers(study)))


def what_was_searched(
    study: Study, priced: Plan, deadline: float = math.inf, *, progress: Progress = lambda _: None
) -> tuple[Explanation, tuple[str, ...]]:
    """Return the bottleneck of a priced plan with its baselines, and the names of those for which there was no time.

    ``deadline`` is a `time.process_time` value.
    """
    assert priced.prediction is not None, "baselines are compared with its prediction"
    step_s = priced.prediction.step_time_s
    free, budgets = (FREE_CHOICE, within(UNLIMITED, MOST_BYTES)), other_budgets(study.job)
    pipelines, restricted = other_pipelines(priced, study), (*baselines(), *without_techniques(priced))
    found, left_out = dict[Variant, Answer](), dict[str, None]()
    # pipelines first: a variant without a technique takes the plans of theirs that do without it
    for variant in counted((*free, *pipelines, *restricted, *budgets), progress):
        if time.process_time() <= deadline:
            found[variant] = study.answer(variant)
        elif variant not in free:
            left_out[BUDGETS if variant in budgets else variant.name] = None
    asked = [variant for variant in (*free, *restricted, *pipelines, *budgets) if variant in found]
    own = study.of(priced, step_s, peak_bytes(priced))
    _, *others = (each.beside(step_s) for each in study.reconciled([own, *map(found.__getitem__, asked)]))
    compared = [each for variant, each in zip(asked, others, strict=True) if variant not in budgets]
    binds = what_binds(step_s, *compared[:2]) if compared and compared[1:] else ""
    faster = (each for each in compared if each.name != ANY_PLAN or (each.slowdown or 0.0) < -SAME)
    shown = tuple(each for each in faster if each.name != UNLIMITED)
    with_more_or_less = tuple(each for variant, each in zip(asked, others, strict=True) if variant in budgets)
    return Explanation(binds=binds, rivals=shown, budgets=with_more_or_less), tuple(left_out)


def plan_verdicts(plan: Plan, job: Job, decisions: Decisions) -> tuple[StrategyVerdict, ...]:
    """Return the verdict on every strategy of the tree in the pipeline configuration of a plan."""
    config = JobConfig(job=job, pipeline=plan.pipeline)
    tables = build_tables(config, stage_strategies(job, config.devices_per_stage, decisions))

    def why_illegal(layer_type: int, strategy: Strategy) -> str | None:
        return refusal(job.chain.layer_types[layer_type], strategy, config)

    return strategy_verdicts(tables, why_illegal) + strategies_not_searched(job, config.devices_per_stage, decisions)


def other_budgets(job: Job) -> tuple[Variant, ...]:
    """Return the variants with one GiB per device more and less (a sixteenth of a small budget), and with the reserved
    memory added."""
    budget = job.budget_bytes
    change = GIB if budget >= SMALL_BUDGET_BYTES else budget // 16
    found = {f"{format_bytes(change)} more": budget + change, f"{format_bytes(change)} less": budget - change}
    if job.margin_bytes:
        found[f"no margin ({format_bytes(job.margin_bytes)} more)"] = budget + job.margin_bytes
    return tuple(within(name, found[name]) for name in sorted(found, key=lambda name: -found[name]))


def what_binds(step_s: float, best: ComparedBaseline, free: ComparedBaseline) -> str:
    """Return one sentence that says whether the plan's own settings, memory or the hardware limit it.

    ``step_s`` is the step time of the plan, ``free`` the best plan with unlimited memory.
    """
    if best.step_time_s is None or free.step_time_s is None:
        return "Memory limits it: the search finds no plan that fits."
    gain = 1 - free.step_time_s / step_s
    if (own := 1 - best.step_time_s / step_s) > OWN_GAIN:
        return (
            f"Its settings limit it: in the same memory a step can take {format_seconds(best.step_time_s)}, {own:.1%} "
            f"less ({best.setting}: {best.strategies})."
        )
    if free.step_time_s >= best.step_time_s * (1 - SAME):
        return "Computation and communication limit it: with unlimited memory no plan is faster."
    return (
        f"Memory limits it: with unlimited memory a step would take {format_seconds(free.step_time_s)}, "
        + (f"{gain:.1%} less " if gain > SAME else "not less than this plan, but less than the best plan that fits ")
        + f"({free.setting}: {free.strategies})."
    )


def supposed_notes(job: Job) -> tuple[str, ...]:
    """Return notes on the layer types whose tp follows from their structure, and why their model's own plan is not
    used."""
    return tuple(
        f"How tp divides the {layer_type.name} follows from its structure: {layer_type.unread_plan}."
        for layer_type in job.chain.split.kinds
        if layer_type.unread_plan
    )


def pricing_notes(plan: Plan, priced: Plan) -> tuple[str, ...]:
    """Return notes on where the plan's own prediction differs from the current one."""
    if plan.prediction is None or priced.prediction is None:
        return ()
    before, now = plan.prediction.step_time_s, priced.prediction.step_time_s
    notes = []
    if abs(now / before - 1) > SAME:
        notes.append(
            f"The file says {format_seconds(before)} a step; with the costs of now it is {format_seconds(now)}, with "
            "which the baselines are compared."
        )
    if missed := shortfall(peak_bytes(priced), priced.prediction.budget_bytes, priced.prediction.margin_bytes):
        notes.append(f"The plan itself {missed}.")
    return tuple(notes)


SEARCH_SHARE = 0.04
"""Fraction of the time limit for one search."""
FRONTIER_SHARE = 0.5
"""Fraction of the time limit for the frontier, which most readers look at first."""
MAX_POINTS = 10


def search_for_report(
    plan: Plan,
    request: PlanRequest,
    job: Job,
    cost: PlanCost,
    *,
    time_limit_s: float | None = None,
    everywhere: bool = True,
    progress: Progress = lambda _: None,
) -> PlanStudy:
    """Return the frontier and the baselines of a plan of this cost.

    They are searched in all pipeline configurations, or only in the plan's own if ``everywhere`` is false. Without a
    time limit, every machine finds the same. The limit counts the computing time of this process, so a busy machine
    shows no less. A search that has started is finished, so the limit can be exceeded by up to one search. Searches
    that were not started are left out and named. A limit of 0 searches nothing.
    """
    priced = with_cost(plan, job, cost)
    changed = pricing_notes(plan, priced)
    notes = (*changed, *supposed_notes(job))
    if time_limit_s is not None and time_limit_s <= 0:
        return PlanStudy(scope="", explanation=Explanation(binds="", notes=notes))
    deadline = math.inf if time_limit_s is None else time.process_time() + time_limit_s
    progress("building cost tables")
    if not everywhere:
        own = Decisions(num_stages=plan.num_stages, num_microbatches=plan.num_microbatches)
        request = replace(request, decisions=request.decisions.with_also(own))
    share_s = None if time_limit_s is None else SEARCH_SHARE * time_limit_s
    study = Study(replace(request, time_limit_s=share_s), job)
    proven = plan.prediction is not None and plan.prediction.certificate.is_optimal and not changed
    point = priced_point(priced, is_chosen=True) if proven and peak_bytes(priced) <= job.budget_bytes else None
    until = time.process_time() + FRONTIER_SHARE * (deadline - time.process_time())
    points, _ = memory_points(study, point, max_searches=MAX_POINTS, deadline=until, progress=progress)
    known = (each for each in plan.contenders()[1:] if everywhere or describe(each.pipeline) == describe(plan.pipeline))
    points = falling([*points, *(priced_point(with_price(each, job)) for each in known)])
    explanation, left_out = what_was_searched(study, priced, deadline, progress=progress)
    return PlanStudy(
        scope="all pipeline configurations" if everywhere else f"plans of {describe(plan.pipeline)}",
        explanation=explanation.model_copy(update={"notes": notes}),
        points=points,
        left_out=left_out,
    )
