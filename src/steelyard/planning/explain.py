"""Why a plan and not another: what binds, the best rival under every restriction, and what memory is worth."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from steelyard.cost.build import build_tables
from steelyard.cost.layer_load import refusal
from steelyard.cost.setting import Job, Setting
from steelyard.limits import MOST_BYTES
from steelyard.plan.choices import Explanation, Rival, StrategyVerdict
from steelyard.plan.margin import shortfall
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy
from steelyard.planning.margin import without_margin
from steelyard.planning.not_searched import settings_not_searched, strategies_not_searched
from steelyard.planning.price import peak_bytes, with_price
from steelyard.planning.problem import PlanOptions, stage_strategies
from steelyard.planning.rivals import ANY_PLAN, Contest, restrictions
from steelyard.search.reasons import strategy_verdicts
from steelyard.units import GIB, format_bytes, format_seconds

SMALL_BUDGET_BYTES = 16 * GIB
"""Below this a sixteenth of the budget takes the place of one GiB."""
BUDGETS = "more and less memory"
SAME = 5e-4
"""Step times that differ by less than this fraction are called the same."""


def explain_plan(
    plan: Plan,
    job: Job,
    options: PlanOptions,
    *,
    everything: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Explanation:
    """What binds a plan and what its rivals cost, searched among all that ``options`` allow.

    ``everything`` adds the settings that were never searched and a verdict on every strategy of the plan's setting.
    """
    priced = with_price(plan, job)
    assert priced.prediction is not None, "just priced"
    contest = Contest.of(job, options, priced.prediction.step_time_s, time_limit_s=options.time_limit_s)
    progress("searching the rivals of the plan")
    explanation, _ = what_was_searched(contest, plan, options)
    more: dict[str, object] = {"notes": pricing_notes(plan, priced) + supposed_notes(job)}
    if everything:
        more |= {"not_searched": settings_not_searched(job, options), "verdicts": plan_verdicts(plan, job, options)}
    return explanation.model_copy(update=more)


def what_was_searched(
    contest: Contest, plan: Plan, options: PlanOptions, deadline: float = math.inf
) -> tuple[Explanation, tuple[str, ...]]:
    """What binds and the rivals, and the names of those that were left out since computing took until ``deadline``, a
    `time.process_time` value."""
    binds = ""
    budgets: tuple[Rival, ...] = ()
    rivals: list[Rival] = []
    left_out: list[str] = []
    known = contest
    if time.process_time() <= deadline:
        best, known = contest.any_plan()
        rivals.append(best)
        binds = what_binds(contest, best)
    for each in restrictions(known, plan, options):
        if time.process_time() > deadline:
            left_out.append(each.name)
        else:
            rivals.append(each.rival())
    if time.process_time() > deadline:
        left_out.append(BUDGETS)
    else:
        budgets = other_budgets(contest)
    shown = tuple(rival for rival in rivals if is_worth_showing(rival))
    return Explanation(binds=binds, rivals=shown, budgets=budgets), tuple(left_out)


def plan_verdicts(plan: Plan, job: Job, options: PlanOptions) -> tuple[StrategyVerdict, ...]:
    """What became of every strategy of the tree in the pipeline setting of a plan."""
    setting = Setting(job=job, pipeline=plan.pipeline)
    tables = build_tables(setting, stage_strategies(job, setting.devices_per_stage, options))

    def why_illegal(kind: int, strategy: Strategy) -> str | None:
        return refusal(job.chain.kinds[kind], strategy, setting)

    return strategy_verdicts(tables, why_illegal) + strategies_not_searched(job, setting.devices_per_stage, options)


def is_worth_showing(rival: Rival) -> bool:
    """Whether a rival says something: the best of all only where it is faster than the plan."""
    return rival.name != ANY_PLAN or (rival.slowdown or 0.0) < -SAME


def other_budgets(contest: Contest) -> tuple[Rival, ...]:
    """The best plans with a GiB per device more and less, or a sixteenth of a small budget, and without the margin."""
    budget = contest.job.budget_bytes
    change = GIB if budget >= SMALL_BUDGET_BYTES else budget // 16
    jobs = {
        f"{format_bytes(change)} more": contest.job.within(budget + change),
        f"{format_bytes(change)} less": contest.job.within(budget - change),
    }
    if contest.job.margin_bytes:
        jobs[f"no margin ({format_bytes(contest.job.margin_bytes)} more)"] = without_margin(contest.job)
    return tuple(replace(contest, job=job).rival(name, contest.tables) for name, job in jobs.items())


def what_binds(contest: Contest, best: Rival) -> str:
    """What a plan faster than ``best`` would need, in a sentence."""
    roomy = contest.job.within(MOST_BYTES)
    free = replace(contest, job=roomy).rival("unlimited memory", contest.tables)
    if best.step_time_s is None or free.step_time_s is None:
        return "Memory binds: the search finds no plan that fits."
    gain = 1 - free.step_time_s / contest.step_s
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
    """The kinds of layers whose tp follows from their structure, and why not from their model's own plan."""
    return tuple(
        f"How tp divides the {kind.name} follows from its structure: {kind.unread_plan}."
        for kind in job.chain.split.kinds
        if kind.unread_plan
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
            "which the rivals are compared."
        )
    if missed := shortfall(peak_bytes(priced), priced.prediction.budget_bytes, priced.prediction.margin_bytes):
        notes.append(f"The plan itself {missed}.")
    return tuple(notes)
