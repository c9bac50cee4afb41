"""Why a plan and not another: what binds, the best baseline under every restriction, and what memory is worth."""

import math
import time
from collections.abc import Callable

from steelyard.cost.build import build_tables
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer_load import refusal
from steelyard.cost.predict import predict
from steelyard.limits import MOST_BYTES
from steelyard.plan.choices import ComparedBaseline, Explanation, StrategyVerdict
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import shortfall
from steelyard.plan.strategy import Strategy
from steelyard.planning.not_searched import configs_not_searched, strategies_not_searched
from steelyard.planning.price import peak_bytes, with_price
from steelyard.planning.problem import stage_strategies
from steelyard.planning.variants import (
    ANY_PLAN,
    FREE_CHOICE,
    Study,
    Variant,
    baselines,
    group_answers,
    other_pipelines,
    within,
    without_techniques,
)
from steelyard.search.reasons import strategy_verdicts
from steelyard.units import GIB, format_bytes, format_seconds

SMALL_BUDGET_BYTES = 16 * GIB
"""Below this a sixteenth of the budget takes the place of one GiB."""
BUDGETS = "more and less memory"
UNLIMITED = "unlimited memory"
SAME = 5e-4
"""Step times that differ by less than this fraction are called the same."""


def explain_plan(
    plan: Plan,
    study: Study,
    *,
    everything: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Explanation:
    """Return what binds a plan and what its baselines cost, searched among all that a study's request allows.

    ``everything`` adds the configurations that were never searched and a verdict on every strategy of the plan's
    configuration.
    """
    priced = with_price(plan, study.job)
    progress("searching the baselines of the plan")
    explanation, _ = what_was_searched(study, priced)
    more: dict[str, object] = {"notes": pricing_notes(plan, priced) + supposed_notes(study.job)}
    if everything:
        decisions = study.request.decisions
        more |= {
            "not_searched": configs_not_searched(study.job, decisions),
            "verdicts": plan_verdicts(plan, study.job, decisions),
        }
    return explanation.model_copy(update=more)


def explain_pools(plan: Plan, study: Study) -> Explanation:
    """Return what a plan over several pools gains over each of them alone, and over even cuts."""
    step_s = predict(plan, study.job).step_time_s
    return Explanation(binds="", rivals=tuple(each.beside(step_s) for each in group_answers(study)))


def what_was_searched(study: Study, priced: Plan, deadline: float = math.inf) -> tuple[Explanation, tuple[str, ...]]:
    """Return what binds a priced plan and its baselines, and the names of those for which there was no time.

    ``deadline`` is a `time.process_time` value.
    """
    assert priced.prediction is not None, "baselines are compared with its prediction"
    step_s, left_out = priced.prediction.step_time_s, []
    answers = [study.of(priced, step_s, peak_bytes(priced))]
    if time.process_time() <= deadline:
        answers += [study.answer(FREE_CHOICE), study.answer(within(UNLIMITED, MOST_BYTES))]
    for variant in (*baselines(), *without_techniques(priced), *other_pipelines(priced, study.tables)):
        if time.process_time() > deadline:
            left_out.append(variant.name)
        else:
            answers.append(study.answer(variant))
    num_baselines = len(answers)
    if time.process_time() > deadline:
        left_out.append(BUDGETS)
    else:
        answers += [study.answer(each) for each in other_budgets(study.job)]
    _, *others = (each.beside(step_s) for each in study.reconciled(answers))
    compared, budgets = others[: num_baselines - 1], tuple(others[num_baselines - 1 :])
    binds = what_binds(step_s, *compared[:2]) if compared and compared[1:] else ""
    shown = tuple(each for each in compared if each.name != UNLIMITED and is_worth_showing(each))
    return Explanation(binds=binds, rivals=shown, budgets=budgets), tuple(left_out)


def plan_verdicts(plan: Plan, job: Job, decisions: Decisions) -> tuple[StrategyVerdict, ...]:
    """What became of every strategy of the tree in the pipeline configuration of a plan."""
    config = JobConfig(job=job, pipeline=plan.pipeline)
    tables = build_tables(config, stage_strategies(job, config.devices_per_stage, decisions))

    def why_illegal(layer_type: int, strategy: Strategy) -> str | None:
        return refusal(job.chain.layer_types[layer_type], strategy, config)

    return strategy_verdicts(tables, why_illegal) + strategies_not_searched(job, config.devices_per_stage, decisions)


def is_worth_showing(baseline: ComparedBaseline) -> bool:
    """Whether a baseline says something: the best of all only where it is faster than the plan."""
    return baseline.name != ANY_PLAN or (baseline.slowdown or 0.0) < -SAME


def other_budgets(job: Job) -> tuple[Variant, ...]:
    """Return the variants of a GiB per device more and less, or a sixteenth of a small budget, and without margin."""
    budget = job.budget_bytes
    change = GIB if budget >= SMALL_BUDGET_BYTES else budget // 16
    found = [within(f"{format_bytes(change)} more", budget + change)]
    found.append(within(f"{format_bytes(change)} less", budget - change))
    if job.margin_bytes:
        name = f"no margin ({format_bytes(job.margin_bytes)} more)"
        found.append(within(name, budget + job.margin_bytes))
    return tuple(found)


def what_binds(step_s: float, best: ComparedBaseline, free: ComparedBaseline) -> str:
    """Return what a plan faster than ``best`` would need, in a sentence.

    ``step_s`` is what the plan takes, ``free`` the best plan with unlimited memory.
    """
    if best.step_time_s is None or free.step_time_s is None:
        return "Memory binds: the search finds no plan that fits."
    gain = 1 - free.step_time_s / step_s
    if free.step_time_s >= best.step_time_s * (1 - SAME):
        return (
            "Memory does not bind: with any amount of it the best plan takes as long. Computation and communication do."
        )
    return (
        f"Memory binds: with any amount of it a step would take {format_seconds(free.step_time_s)}, "
        + (f"{gain:.1%} less " if gain > SAME else "no less than this plan's, but less than the best that fits ")
        + f"({free.setting}: {free.strategies})."
    )


def supposed_notes(job: Job) -> tuple[str, ...]:
    """The layer types whose tp follows from their structure, and why not from their model's own plan."""
    return tuple(
        f"How tp divides the {layer_type.name} follows from its structure: {layer_type.unread_plan}."
        for layer_type in job.chain.split.kinds
        if layer_type.unread_plan
    )


def pricing_notes(plan: Plan, priced: Plan) -> tuple[str, ...]:
    """Where the plan's own prediction is not what is computed now."""
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
