"""What if: named functions from a request to a request, and the one place that solves them.

| variant              | changes               | asks                                                        |
|----------------------|-----------------------|-------------------------------------------------------------|
| `baselines`          | decisions             | what DDP, FSDP and one strategy everywhere take             |
| `without_techniques` | decisions             | what each technique that the plan uses is worth             |
| `other_pipelines`    | decisions             | what other stages, microbatches and schedules take          |
| `insisting`          | decisions             | what it costs to insist on a pin                            |
| `within`             | budget                | what more or less memory is worth                           |

A variant that only restricts is never faster than the free plan by the sums of the search: it is searched in what is
left of the tables of the free request, and what the search proves of those bounds it. The simulator, time limits and
gaps may turn two plans round; so where several answers stand beside each other each gets the fastest plan of all that
it allows (`Study.reconciled`). Pins may ask for strategies that the free search leaves out since they are not worth it
(`Dimension.not_worth`): such a variant widens, and `steelyard.planning.not_searched.widened` names them.

A `Study` answers variants of decisions and budget. Other sizes and devices have tables of their own: see
`steelyard.planning.sizes` and `steelyard.planning.devices`. A plan over several device groups is compared with the best
on each of them alone, and with even cuts (`pool_baselines`).
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.cost.tables import CostTables
from steelyard.errors import UserError
from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions import DIMENSIONS, Dimension, variants
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat, divisors
from steelyard.planning.choose import device_bytes, plan_job, ranks_all
from steelyard.planning.plan_from_search import Acceptance, Accepted, accept, describe, summarise
from steelyard.planning.problem import GroupSpace, make_tables, pipeline_configs, space_options
from steelyard.planning.request import Budget, PlanRequest
from steelyard.planning.uniform import uniform_tables
from steelyard.schedules import SCHEDULES, PipelineConfig
from steelyard.search import OnDemand, SpaceOptions, refusal
from steelyard.search.balance import even_boundaries
from steelyard.search.layers import ROUNDING
from steelyard.search.partition import least_plan
from steelyard.units import format_plural

ANY_PLAN = "any plan"
"""The name of the variant that changes nothing."""
UNIFORM = "plain n-D"
"""The name of the baseline that has all others in it: one strategy everywhere, cuts free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A named function from a request to a request."""

    name: str
    change: Callable[[PlanRequest], PlanRequest]


def deciding(name: str, decisions: Decisions) -> Variant:
    """Return the variant in which the user decides this as well; none that contradicts the request has a plan."""
    return Variant(name=name, change=lambda request: replace(request, decisions=request.decisions.with_also(decisions)))


FREE_CHOICE = Variant(name=ANY_PLAN, change=lambda request: request)


def baselines() -> tuple[Variant, ...]:
    """Return the ways to train that need no planner, by the names that their users give them."""
    alone, found = Decisions(uniform=True, num_stages=1), []
    for dimension in DIMENSIONS.values():
        if dimension.plain_name:
            others = (_without(each) for each in DIMENSIONS.values() if each is not dimension)
            found.append(deciding(dimension.plain_name, alone.with_also(*others)))
    return (*found, deciding(UNIFORM, Decisions(uniform=True)))


def without_techniques(plan: Plan) -> tuple[Variant, ...]:
    """Return, for each technique that a plan uses, the variant without it: a dimension, a variant of one, or remat."""
    found = {
        f"without {dimension}": _without(dimension)
        for dimension in reversed(DIMENSIONS.values())
        if _uses(plan, dimension)
    }
    for key, (dimension, variant) in variants().items():
        if dimension.is_level and any(each.variant(key) != variant.default for each in plan.strategies):
            texts = [text.lstrip("+") for text in variant.texts.values() if text]
            found[f"without {' or '.join(texts)}"] = Decisions(variants={key: (variant.default,)})
    if any(each.remat is not Remat.NONE for each in plan.strategies):
        found["without remat"] = Decisions(remats=(Remat.NONE,))
    return tuple(deciding(name, decisions) for name, decisions in found.items())


def _uses(plan: Plan, dimension: Dimension) -> bool:
    return any(dimension in strategy.dimensions for strategy in plan.strategies)


def _without(dimension: Dimension) -> Decisions:
    if dimension.is_level:
        return Decisions(max_degrees={dimension.name: 1})
    return Decisions(variants={variant.key: (variant.default,) for variant in dimension.variants})


def other_pipelines(plan: Plan, searched: Iterable[PipelineConfig]) -> tuple[Variant, ...]:
    """Return the variants of every other number of stages that is searched, of half and twice the microbatches, and of
    every other schedule for the plan's own number of stages."""
    pipelines = list(searched)
    stages = sorted({each.num_stages for each in pipelines} - {plan.num_stages})
    found = [deciding(format_plural(count, "stage"), Decisions(num_stages=count)) for count in stages]
    counts = {each.num_microbatches for each in pipelines}
    for count in (plan.num_microbatches // 2, plan.num_microbatches * 2):
        if count in counts:
            name = format_plural(count, "microbatch", "microbatches")
            found.append(deciding(name, Decisions(num_microbatches=count)))
    if plan.num_stages > 1:
        here = {each.schedule for each in pipelines if each.num_stages == plan.num_stages}
        others = [each for each in SCHEDULES.values() if each in here or each.why_not_everywhere]
        found += [
            deciding(each.name, Decisions(schedules=(each.name,), num_stages=plan.num_stages))
            for each in others
            if each != plan.pipeline.schedule
        ]
    return tuple(found)


def insisting(pin: str) -> Variant:
    """Return the variant in which layers, or the pipeline, must have what a pin asks for."""
    return deciding(pin, Decisions(pins=(pin,)))


def within(name: str, num_bytes: int, *, margin_bytes: int = 0) -> Variant:
    """Return the variant with another budget per device."""

    def change(request: PlanRequest) -> PlanRequest:
        return replace(request, budgets={request.cluster.name: Budget(num_bytes, margin_bytes)})

    return Variant(name=name, change=change)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The fastest plan of a variant that fits, or how far the nearest one is from fitting."""

    name: str
    request: PlanRequest | None = None
    """What was asked; None where it contradicts itself or no pipeline is so."""
    budget_bytes: int = 0
    """Of a device, as asked."""
    held_bytes: int = 0
    """What a device of the plan holds at most."""
    plan: Plan | None = None
    """Without its prediction."""
    step_s: float = math.inf
    missing_bytes: int | None = None
    """Of a device, None where a plan fits, or no memory would help."""

    def beside(self, step_s: float) -> ComparedBaseline:
        """Return the answer next to a plan whose step takes ``step_s``."""
        if self.plan is None:
            return ComparedBaseline(name=self.name, missing_bytes=self.missing_bytes)
        return ComparedBaseline(
            name=self.name,
            step_time_s=self.step_s,
            slowdown=self.step_s / step_s - 1,
            setting=describe(self.plan.pipeline),
            strategies=summarise(self.plan),
        )


class Study:
    """Solves variants of one request on one pool that change its decisions or its budget, and shares its trace, prices
    and cost tables between them.

    ``job`` is that of the request, ``time_limit_s`` is of each search. ``tables`` saves making those of the request,
    bounded or not.
    """

    def __init__(
        self,
        request: PlanRequest,
        job: Job,
        *,
        tables: Sequence[OnDemand] | None = None,
        time_limit_s: float | None,
    ) -> None:
        self.request, self.job, self.time_limit_s = request, job, time_limit_s
        self._tables = tuple(make_tables(job, request.decisions) if tables is None else tables)
        self._bounded = {job.budget_bytes: self._tables}
        """The tables with what is proven of them within budgets: it holds within less."""

    @property
    def pipelines(self) -> tuple[PipelineConfig, ...]:
        """The pipeline configurations that the request lets the search choose from."""
        return tuple(each.pipeline for each in self._tables)

    def least_bytes(self) -> int | None:
        """Return what a plan of little memory takes by the cost tables; None where none is legal."""
        smallest = (least_plan(each.tables) for each in self._tables)
        return min((plan.peak_bytes for plan in smallest if plan is not None), default=None)

    def of(self, plan: Plan, step_s: float, peak_bytes: int) -> Answer:
        """Return a plan that is known as an answer to the request itself."""
        return Answer(
            name=ANY_PLAN,
            request=self.request,
            budget_bytes=self.job.budget_bytes,
            held_bytes=peak_bytes,
            plan=plan,
            step_s=step_s,
        )

    def answer(self, variant: Variant) -> Answer:
        """Return the best plan of a variant, as far as the time limit reaches."""
        try:
            request = variant.change(self.request)
            job = self._job(request)
            tables = self._tables_of(request, job)
        except UserError:  # it contradicts what was decided, or no pipeline is so
            return Answer(name=variant.name)
        answer = Answer(name=variant.name, request=request, budget_bytes=job.budget_bytes)
        if not tables:
            return answer
        are_own = request.decisions == self.request.decisions and not request.decisions.uniform
        found = self._accepted(job, tables)
        bounded = found.bounded()
        if are_own:
            self._bounded[job.budget_bytes] = bounded
        if not found.ranked:
            miss = found.search.nearest_miss
            missing = device_bytes(job, miss.needed_bytes) - job.budget_bytes if miss else None
            return replace(answer, missing_bytes=missing)
        plans = [each.plan for each in (found.ranked if ranks_all(job) else found.ranked[:1])]
        step_s, plan = min(((predict(each, job).step_time_s, each) for each in plans), key=lambda pair: pair[0])
        return replace(answer, plan=plan, step_s=step_s, held_bytes=job.budget_bytes)

    def reconciled(self, answers: Sequence[Answer]) -> tuple[Answer, ...]:
        """Return the answers, each with the fastest plan of all of them that it allows.

        Searches end with gaps and time limits, and the simulator ranks what their sums found: without this a plan
        could be slower than another that meets its restriction as well.
        """
        return tuple(self._best_of(each, answers) for each in answers)

    def _best_of(self, answer: Answer, answers: Sequence[Answer]) -> Answer:
        allowed = (each for each in answers if each.step_s < answer.step_s and self._allows(answer, each))
        best = min(allowed, key=lambda each: each.step_s, default=answer)
        return replace(
            answer,
            plan=best.plan,
            step_s=best.step_s,
            held_bytes=best.held_bytes,
            missing_bytes=best.missing_bytes,
        )

    def _allows(self, answer: Answer, other: Answer) -> bool:
        """Whether a variant allows the plan that was found for another one."""
        mine, theirs, plan = answer.request, other.request, other.plan
        if mine is None or theirs is None or plan is None or other.held_bytes > answer.budget_bytes:
            return False
        decisions = mine.decisions
        has_other_pins = not {*decisions.pins} <= {*theirs.decisions.pins}
        if has_other_pins or (decisions.uniform and not theirs.decisions.uniform):
            return False
        is_scheduled = plan.num_stages == 1 or plan.schedule in decisions.allowed_schedules
        options = space_options(self.job, decisions)
        return (
            is_scheduled
            and decisions.num_stages in (None, plan.num_stages)
            and decisions.num_microbatches in (None, plan.num_microbatches)
            and all(refusal(strategy, options) is None for strategy in set(plan.strategies))
        )

    def _accepted(self, job: Job, tables: Sequence[OnDemand]) -> Acceptance:
        """What of these tables fits within the budget of a job."""
        count = len(tables) if ranks_all(job) else 1
        return accept(
            job,
            tables,
            num_exact=count,
            num_alternatives=count - 1,
            time_limit_s=self.time_limit_s,
        )

    def _job(self, request: PlanRequest) -> Job:
        """The job of a variant: the request's own within another budget."""
        budget = request.budgets.get(request.cluster.name)
        return self.job if budget is None else self.job.within(budget.num_bytes, margin_bytes=budget.margin_bytes)

    def _tables_of(self, request: PlanRequest, job: Job) -> list[OnDemand]:
        """The cost tables of a variant: what it leaves of those of the request, and what it adds to them."""
        decisions = request.decisions
        roomier = [budget for budget in self._bounded if budget >= job.budget_bytes]
        base = self._bounded[min(roomier)] if roomier else self._tables
        if decisions == self.request.decisions:
            tables = list(base)
        elif decisions.pins != self.request.decisions.pins:
            tables = list(make_tables(job, decisions))
        else:
            wanted = {each.pipeline for each in pipeline_configs(job, decisions)}
            known = [each for each in base if each.pipeline in wanted]
            options = space_options(job, decisions)
            tables = [each.narrowed(partial(_allowed, options=options)) for each in known]
            if missing := wanted - {each.pipeline for each in known}:
                tables += [each for each in make_tables(job, decisions) if each.pipeline in missing]
        if not decisions.uniform:
            return tables
        limit_s = math.inf if self.time_limit_s is None else self.time_limit_s
        found = uniform_tables(job, tables, deadline=time.monotonic() + limit_s)
        return [OnDemand.of(each) for each in found]


def group_answers(job: Job, decisions: Decisions) -> tuple[Answer, ...]:
    """Return the best plan on each device group of a job alone, not searched to the end, and the best that cuts all
    devices into equal stages of equal layers.

    A group alone may have any number of stages: where that was decided its name says so.
    """
    answers, free = [], decisions.model_copy(update={"num_stages": None})
    stages = "" if decisions.num_stages is None else ", any number of stages"
    for each in job.by_group:
        result = plan_job(each, free, to_the_end=False)
        missing = result.miss.miss_bytes if result.miss else None
        answers.append(_answer(f"{each.cluster.name} alone{stages}", result.plan, result.job, missing))
    return (*answers, _answer("even cuts over all pools", even_plan(job, decisions), job))


def _answer(name: str, plan: Plan | None, job: Job, missing_bytes: int | None = None) -> Answer:
    if plan is None:
        return Answer(name=name, missing_bytes=missing_bytes)
    return Answer(name=name, plan=plan, step_s=predict(plan, job).step_time_s)


def even_plan(job: Job, decisions: Decisions) -> Plan | None:
    """Return the best plan of stages that all have as many devices and as many layers, in the order of the pools.

    None where no such plan fits. Its strategies are the best ones for these cuts.
    """
    space, counts = GroupSpace(job, decisions), [each.cluster.num_devices for each in job.groups]
    even = {tuple(count // size for count in counts) for size in divisors(math.gcd(*counts))}
    best: Accepted | None = None
    for config in sorted(space.configs(), key=lambda each: each.bound_s):
        if config.placement.pools != tuple(range(len(counts))) or config.placement.stages not in even:
            continue
        tables = space.tables(config)
        if best is None or _even_bound_s(tables) < best.outcome.score_s:
            found = accept(job, [tables], partition="even").ranked
            best = min((*found, *([best] if best else [])), key=lambda each: each.outcome.score_s, default=None)
    return None if best is None else best.plan


def _even_bound_s(tables: CostTables) -> float:
    """What no plan of even cuts is faster than, by the times of its layers."""
    times = [
        np.where(tables.legal_on(stage), tables.time_s, np.inf).min(axis=1)[list(tables.layers[first:end])].sum()
        for stage, (first, end) in enumerate(pairwise(even_boundaries(tables)))
    ]
    more_s = (tables.pipeline.num_passes - 1) * max(times) if tables.pipeline.num_passes > 1 else 0.0
    return float(sum(times) + more_s) * (1 - ROUNDING)


def _allowed(tables: CostTables, options: SpaceOptions) -> CostTables:
    """The tables with only those strategies legal that these options offer."""
    kept = np.array([refusal(strategy, options) is None for strategy in tables.strategies], dtype=bool)
    return replace(tables, legal=tables.legal & kept)
