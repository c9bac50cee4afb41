"""Variants: named functions from a request to a request, and `Study`, which solves them.

| variant              | changes       | result                                                         |
|----------------------|---------------|----------------------------------------------------------------|
| `baselines`          | decisions     | DDP, FSDP and one strategy everywhere                          |
| `without_techniques` | decisions     | gain of each technique that the plan uses                      |
| `other_pipelines`    | decisions     | other stages, microbatches and schedules                       |
| `insisting`          | decisions     | cost of a pin                                                  |
| `within`             | budget        | value of more or less memory: frontiers, fallbacks             |
| `on_cluster`         | cluster       | fewer or more devices, or parts of a cluster                   |
| `alone`              | cluster       | one device group by itself                                     |
| `run_by`             | engine        | another engine                                                 |

Other batches and lengths are variants too, which `steelyard.planning.sizes` tries one after another.

`Study.plan` searches a variant as thoroughly as the request itself, `Study.answer` for a comparison. Both share the
trace, the prices and the cost tables of the request if the variant does not change them.

In the search's model, a variant that only restricts is never faster than the free plan: it is searched in a part of the
tables of the free request, whose proven bounds hold for it. The simulator, time limits and gaps may reverse the order
of two plans. So if several answers are compared, each gets the fastest plan of all that it allows (`Study.reconciled`,
and `steelyard.planning.complete` over several device groups). A variant that widens the request says so by its name
(more memory, another size, other devices, any number of stages). If a pin requires strategies that the free search
leaves out because they are not worth it (`Dimension.not_worth`), `steelyard.planning.why_not.widened` says so.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, pairwise

import numpy as np

from steelyard.cost.job import Job
from steelyard.cost.kernels import job_under
from steelyard.cost.predict import predict
from steelyard.cost.tables import CostTables
from steelyard.engines.capabilities import block_layers
from steelyard.engines.engine import Engine
from steelyard.engines.native import NATIVE
from steelyard.errors import InvalidClusterError, UserError
from steelyard.hardware import FULL_NODE, Cluster, is_as_named, parse_cluster
from steelyard.plan.choices import ANY_PLAN, ComparedBaseline
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions import DIMENSIONS, Dimension, modes
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import ONE_STRATEGY
from steelyard.plan.strategy import Remat, Strategy, divisors
from steelyard.planning.choose import (
    NUM_RESCORED,
    Accepted,
    NoUniformPlanError,
    PlanningResult,
    accept,
    device_bytes,
    plan_job,
    ranks_all,
)
from steelyard.planning.job import job_of
from steelyard.planning.price import describe, summarise, with_cost
from steelyard.planning.problem import (
    GroupSpace,
    is_beaten,
    is_uniform,
    make_tables,
    pipeline_configs,
    space_options,
    with_remats,
)
from steelyard.planning.request import Budget, PlanRequest
from steelyard.planning.simple import DEPTH_GAIN, has_one_strategy, usual_stages
from steelyard.schedules import SCHEDULES
from steelyard.search import OnDemand, refusal
from steelyard.search.balance import even_boundaries
from steelyard.search.layers import ROUNDING
from steelyard.units import format_plural, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A named function from a request to a request."""

    name: str
    change: Callable[[PlanRequest], PlanRequest]


def deciding(name: str, decisions: Decisions) -> Variant:
    """Return the variant with these additional decisions. If they contradict the request, it has no plan."""
    return Variant(name=name, change=lambda request: replace(request, decisions=request.decisions.with_also(decisions)))


FREE_CHOICE = Variant(name=ANY_PLAN, change=lambda request: request)


def baselines() -> tuple[Variant, ...]:
    """Return the ways to train that need no planner, by their usual names."""
    alone, found = Decisions(uniform=True, num_stages=1), []
    for dimension in DIMENSIONS.values():
        if dimension.plain_name:
            others = (_without(each) for each in DIMENSIONS.values() if each is not dimension)
            found.append(deciding(dimension.plain_name, alone.with_also(*others)))
    return (*found, deciding(ONE_STRATEGY, Decisions(uniform=True)))


def without_techniques(plan: Plan) -> tuple[Variant, ...]:
    """Return, for each technique that a plan uses, the variant without it: a dimension, a mode of one, or remat."""
    found = {
        f"without {dimension}": _without(dimension)
        for dimension in reversed(DIMENSIONS.values())
        if any(dimension in strategy.dimensions for strategy in plan.strategies)
    }
    for key, (dimension, mode) in modes().items():
        if dimension.is_level and any(each.mode(key) != mode.default for each in plan.strategies):
            texts = [text.lstrip("+") for text in mode.texts.values() if text]
            found[f"without {' or '.join(texts)}"] = Decisions(modes={key: (mode.default,)})
    if any(each.remat is not Remat.NONE for each in plan.strategies):
        found["without remat"] = Decisions(remats=(Remat.NONE,))
    return tuple(deciding(name, decisions) for name, decisions in found.items())


def _without(dimension: Dimension) -> Decisions:
    if dimension.is_level:
        return Decisions(max_degrees={dimension.name: 0})
    return Decisions(modes={mode.key: (mode.default,) for mode in dimension.modes})


def other_pipelines(plan: Plan, study: "Study") -> tuple[Variant, ...]:
    """Return the variants with every other searched number of stages, with half and twice the microbatches, and with
    every other schedule of the engine at the plan's own number of stages."""
    pipelines, runs = [each.pipeline for each in study.tables], study.job.engine.capabilities.runs
    stages = sorted({each.num_stages for each in pipelines} - {plan.num_stages})
    found = [deciding(format_plural(count, "stage"), Decisions(num_stages=count)) for count in stages]
    counts = {each.num_microbatches for each in pipelines}
    for count in (plan.num_microbatches // 2, plan.num_microbatches * 2):
        if count in counts:
            name = format_plural(count, "microbatch", "microbatches")
            found.append(deciding(name, Decisions(num_microbatches=count)))
    if plan.num_stages > 1:
        here = {each.schedule for each in pipelines if each.num_stages == plan.num_stages}
        others = [each for each in SCHEDULES.values() if each in here or (each.why_not_everywhere and runs(each.name))]
        found += [
            deciding(each.name, Decisions(schedules=(each.name,), num_stages=plan.num_stages))
            for each in others
            if each != plan.pipeline.schedule
        ]
    return tuple(found)


def insisting(pin: str) -> Variant:
    """Return the variant in which layers, or the pipeline, must meet a pin."""
    return deciding(pin, Decisions(pins=(pin,)))


def within(name: str, num_bytes: int, *, margin_bytes: int = 0) -> Variant:
    """Return the variant with another budget per device."""

    def change(request: PlanRequest) -> PlanRequest:
        return replace(request, budgets={request.cluster.name: Budget(num_bytes, margin_bytes)})

    return Variant(name=name, change=change)


def on_cluster(cluster: Cluster) -> Variant:
    """Return the variant on other devices."""
    return Variant(name=cluster.name, change=lambda request: replace(request, cluster=cluster))


def on_devices(job: Job, count: int) -> Variant:
    """Return the variant on ``count`` devices of the job's type.

    Raises `UserError` if its profile was measured on a number of devices that ``count`` does not divide, and as
    `with_devices`.
    """
    if job.has_measured_links and (count < 1 or job.cluster.num_devices % count):
        raise UserError(
            field="--devices",
            found=str(count),
            expected=f"{job.cluster.num_devices}, on which the profile was measured, or a divisor of it",
            hint="leave --profile out to have other device counts priced by the catalogue",
        )
    return on_cluster(with_devices(job.cluster, count))


def alone(group: Cluster, decisions: Decisions) -> Variant:
    """Return the variant on one device group, with any number of stages, of a request with these decisions.

    Its name says so if the decisions fix the number of stages.
    """
    free = decisions.model_copy(update={"num_stages": None})
    name = f"{group.name} alone" + ("" if decisions == free else ", any number of stages")
    changed = partial(replace, cluster=group, decisions=free, num_alternatives=NUM_RESCORED)
    return Variant(name=name, change=changed)


def run_by(engine: Engine) -> Variant:
    """Return the variant with another engine."""
    return Variant(name=engine.name, change=lambda request: replace(request, engine=engine))


def device_counts(cluster: Cluster) -> tuple[int, ...]:
    """Possible device counts of a part of this cluster, ascending: divisors of a node, then whole nodes."""
    size = cluster.devices_per_node
    return (*divisors(size)[:-1], *(nodes * size for nodes in range(1, cluster.num_nodes + 1)))


def with_devices(cluster: Cluster, count: int) -> Cluster:
    """Return a cluster of the same type with ``count`` devices: a divisor of a node on one node, or whole nodes.

    Raises `InvalidClusterError` if ``count`` is neither.
    """
    size = cluster.devices_per_node
    if count == cluster.num_devices:
        return cluster
    if count < 1 or (size % count if count < size else count % size):
        parts = ", ".join(map(str, divisors(size)[:-1]))
        raise InvalidClusterError(
            field="devices",
            found=str(count),
            expected=f"a multiple of the {size} devices of a node" + (f", or {parts}" if parts else ""),
            hint="name counts such as --devices " + ",".join(str(nodes * size) for nodes in (1, 2, 4)),
        )
    return with_shape(cluster, *((1, count) if count < size else (count // size, size)))


def with_shape(cluster: Cluster, nodes: int, per_node: int) -> Cluster:
    """Return a cluster of the same type with this number of nodes and of devices per node."""
    size = cluster.devices_per_node
    if is_as_named(cluster):
        return parse_cluster(f"{nodes}x{per_node}x{cluster.device.name}").on(device=cluster.device)
    is_short = cluster.name == f"{cluster.num_nodes}x{size}x{cluster.device.name}"
    name = f"{nodes}x{per_node}x{cluster.device.name}" if is_short else f"{cluster.name} ({nodes}x{per_node})"
    return cluster.on(name=name, num_nodes=nodes, devices_per_node=per_node)


def next_larger(cluster: Cluster) -> Cluster:
    """Return a cluster of the same type with one more node, or one node with twice the devices.

    The latter if it is one node with fewer than eight devices or without a network.
    """
    nodes, size = cluster.num_nodes, cluster.devices_per_node
    if nodes == 1 and (size < FULL_NODE or cluster.inter_link is None):
        return with_shape(cluster, 1, 2 * size)
    return with_shape(cluster, nodes + 1, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The fastest plan of a variant that fits, or the bytes that the nearest one misses."""

    name: str
    request: PlanRequest | None = None
    """Request of the variant; None if it contradicts itself or no pipeline meets it."""
    budget_bytes: int = 0
    """Requested budget per device in bytes."""
    held_bytes: int = 0
    """Peak memory of the plan's fullest device in bytes."""
    plan: Plan | None = None
    """Plan without its prediction."""
    step_s: float = math.inf
    missing_bytes: int | None = None
    """Bytes per device that the nearest plan misses; None if a plan fits or more memory would not help."""
    reason: str = ""
    """Reason why nothing was searched."""
    was_cut: bool = False
    """Whether the search ended before it had found a plan and proven it optimal."""

    def beside(self, step_s: float) -> ComparedBaseline:
        """Return the answer compared with a plan whose step time is ``step_s``."""
        if self.plan is None:
            return ComparedBaseline(
                name=self.name, missing_bytes=self.missing_bytes, reason=self.reason, is_bound=self.was_cut
            )
        return ComparedBaseline(
            name=self.name,
            step_time_s=self.step_s,
            slowdown=self.step_s / step_s - 1,
            is_bound=self.was_cut,
            setting=describe(self.plan.pipeline),
            strategies=summarise(self.plan),
        )


class Study:
    """Solver for variants of one request that share its trace, prices and cost tables.

    ``job`` and ``tables`` are the priced request and its cost tables, bounded or not, if they are already known. The
    time limit of the request applies to each search.
    """

    def __init__(
        self, request: PlanRequest, job: Job | None = None, *, tables: tuple[OnDemand, ...] | None = None
    ) -> None:
        self.request = request
        self._job, self._tables = job, tables
        self._bounded: dict[int, tuple[OnDemand, ...]] = {}
        """Tables by budget with the bounds proven within it, which also hold within less."""

    @property
    def job(self) -> Job:
        """Job of the request itself."""
        if self._job is None:
            self._job = job_of(self.request)
        return self._job

    @property
    def tables(self) -> tuple[OnDemand, ...]:
        """Cost tables of every pipeline configuration that the request allows."""
        if self._tables is None:
            self._tables = make_tables(self.job, self.request.decisions)
        return self._tables

    def at(self, variant: Variant) -> "Study":
        """Return the study of a variant, which shares the unchanged parts of the job.

        Raises `UserError` if the variant contradicts the request.
        """
        request = variant.change(self.request)
        return Study(request, self._job_of(request))

    def plan(
        self,
        variant: Variant = FREE_CHOICE,
        *,
        top: int | None = None,
        known_s: float = math.inf,
        to_the_end: bool = True,
    ) -> PlanningResult | str:
        """Return the plan of a variant, searched as thoroughly as the request itself, or the reason why there is none.

        The reason is that its decisions allow no plan, or that every plan is provably slower than ``known_s`` seconds
        without a search. ``top`` (default: the request's own) and ``to_the_end`` are as in `plan_job`.
        """
        request = variant.change(self.request)
        job, decisions = self._job_of(request), request.decisions
        try:
            tables = self.tables if request == self.request else self._tables_of(request, job)
            if known_s < math.inf and is_beaten(job, tables, known_s):
                return f"no plan takes less than {format_seconds(known_s)} a step"
            result = plan_job(
                job,
                decisions,
                top=request.num_alternatives if top is None else top,
                time_limit_s=request.time_limit_s,
                tables=tables,
                to_the_end=to_the_end,
            )
        except UserError as error:
            if isinstance(error, NoUniformPlanError) or error.field == "pipeline":
                return error.found
            if error.field not in ("--stages", "--microbatches"):
                raise
            return f"{error.field} is fixed at {error.found}, which is not {error.expected}"
        self._keep(request, result.job, result.bounded_tables)
        return result

    def simple_plan(self, variant: Variant) -> Plan | None:
        """Return the fastest plan of a variant of the budget among those of one strategy, each with any number of
        leading recomputed blocks; None if none fits."""
        request = variant.change(self.request)
        job = self._job_of(request)
        tables = self._tables_of(request, job)
        if not tables:
            return None
        found = accept(
            job,
            tables,
            num_exact=len(tables) if ranks_all(job) else 1,
            num_alternatives=0,
            time_limit_s=request.time_limit_s,
            uniform=True,
            remat_runs=True,
        )
        best = next((each for each in found.ranked if each.cost.fits), None)
        return None if best is None else with_cost(best.plan, job, best.cost)

    def of(self, plan: Plan, step_s: float, peak_bytes: int) -> Answer:
        """Return a known plan as an answer to the request itself."""
        return Answer(
            name=ANY_PLAN,
            request=self.request,
            budget_bytes=self.job.budget_bytes,
            held_bytes=peak_bytes,
            plan=plan,
            step_s=step_s,
        )

    def answer(self, variant: Variant, *, of_usual_depth: bool = False) -> Answer:
        """Return the best plan of a variant that is found within the time limit.

        ``of_usual_depth`` limits plans to the usual number of stages, unless more stages gain `DEPTH_GAIN` or the
        request allows no slowdown for simpler plans.
        """
        try:
            request = variant.change(self.request)
            job = self._job_of(request)
            tables = self._tables_of(request, job)
        except UserError as error:  # contradicts the decisions, or no pipeline meets it
            return Answer(name=variant.name, reason=error.found)
        answer = Answer(name=variant.name, request=request, budget_bytes=job.budget_bytes)
        if not tables:
            return replace(answer, reason="no numbers of stages and microbatches allow it")
        accepted = partial(
            accept,
            job,
            num_alternatives=0,
            time_limit_s=request.time_limit_s,
            uniform=is_uniform(job, request.decisions),
        )
        found = accepted(tables, num_exact=len(tables) if ranks_all(job) else 1)
        self._keep(request, job, found.bounded)
        if of_usual_depth and found.ranked and request.simplify_share:
            limit, most_s = usual_stages(self.job), (1 + DEPTH_GAIN) * found.ranked[0].step_s
            fewer = [each for each in found.bounded if limit.allows_stages(each.pipeline.num_stages)]
            if fewer and not limit.allows_stages(found.ranked[0].plan.num_stages):
                usual = accepted(fewer, cutoff_s=max(most_s, (1 + DEPTH_GAIN) * found.ranked[0].outcome.score_s))
                found = usual if usual.ranked and usual.ranked[0].step_s <= most_s else found
        configs, status = found.search.configs, found.search.status
        was_cut = status != "optimal" and any(each.result.status in ("feasible", "beaten") for each in configs)
        answer = replace(answer, was_cut=was_cut)
        if not found.ranked:
            miss = found.search.nearest_miss
            missing = device_bytes(job, miss.needed_bytes) - job.budget_bytes if miss else None
            return replace(answer, missing_bytes=missing)
        best = found.ranked[0]
        return replace(answer, plan=best.plan, step_s=best.step_s, held_bytes=job.budget_bytes)

    def reconciled(self, answers: Sequence[Answer]) -> tuple[Answer, ...]:
        """Return the answers, each with the fastest plan of all of them that it allows.

        Without this, a plan could be slower than another one that meets its restriction too, because searches end with
        gaps and time limits and the simulator may rank their plans differently.
        """
        found = []
        for answer in answers:
            allowed = (each for each in answers if each.step_s < answer.step_s and self._allows(answer, each))
            best = min(allowed, key=lambda each: each.step_s, default=answer)
            taken = {name: getattr(best, name) for name in ("plan", "step_s", "held_bytes", "missing_bytes")}
            found.append(replace(answer, **taken))
        return tuple(found)

    def _allows(self, answer: Answer, other: Answer) -> bool:
        """Return whether a variant allows the plan that was found for another one."""
        mine, theirs, plan = answer.request, other.request, other.plan
        if mine is None or theirs is None or plan is None or other.held_bytes > answer.budget_bytes:
            return False
        decisions = mine.decisions
        has_other_pins = not {*decisions.pins} <= {*theirs.decisions.pins}
        if has_other_pins or (decisions.uniform and not (theirs.decisions.uniform or has_one_strategy(plan))):
            return False
        is_scheduled = plan.num_stages == 1 or plan.schedule in decisions.allowed_schedules
        options, remats = space_options(self.job, decisions), Remat if decisions.remats is None else decisions.remats
        return (
            is_scheduled
            and decisions.allows_stages(plan.num_stages)
            and decisions.num_microbatches in (None, plan.num_microbatches)
            and all(refusal(strategy, options) is None for strategy in set(plan.strategies))
            and {plan.strategies[layer].remat for layer in block_layers(self.job.chain)} <= {*remats}
        )

    def _job_of(self, request: PlanRequest) -> Job:
        """Return the job of a variant, which is that of the request if nothing else must be priced."""
        own = self.request
        if request.seq_len != self.request.seq_len or own.engine not in (request.engine, NATIVE):
            return job_of(request)
        job, cluster = self.job, request.cluster
        if request.engine != own.engine:
            job = job_under(job, request.engine)
        if cluster != self.request.cluster:
            groups = [each.cluster for each in job.by_group]
            if all(pool in groups for pool in cluster.pools):
                job = job.only([pool.name for pool in cluster.pools])
            elif job.is_mixed or len(cluster.pools) > 1:
                return job_of(request)
            else:
                job = job.on(cluster=cluster, profile=job.profile.for_devices(cluster.num_devices))
        if request.global_batch is not None and request.global_batch != job.global_batch:
            job = replace(job, global_batch=request.global_batch)
        budget = request.budgets.get(cluster.name)
        return job if budget is None else job.within(budget.num_bytes, margin_bytes=budget.margin_bytes)

    def _tables_of(self, request: PlanRequest, job: Job) -> tuple[OnDemand, ...]:
        """Return the cost tables of a variant: those of the request that it allows, and the ones that it adds."""
        decisions, own = request.decisions, self.request
        if not self._shares_tables(request) or decisions.pins != own.decisions.pins:
            return make_tables(job, decisions)
        roomier = [budget for budget in self._bounded if budget >= job.budget_bytes]
        base = self._bounded[min(roomier)] if roomier else self.tables
        if decisions == own.decisions:
            return base
        wanted = {each.pipeline for each in pipeline_configs(job, decisions)}
        known = [each for each in base if each.pipeline in wanted]
        options = space_options(job, decisions)
        offered = cache(lambda strategy: refusal(strategy, options) is None)
        tables = [each.narrowed(partial(_allowed, offered=offered)) for each in known]
        tables = [each.narrowed(partial(with_remats, job=job, decisions=decisions)) for each in tables]
        if missing := wanted - {each.pipeline for each in known}:
            tables += [each for each in make_tables(job, decisions) if each.pipeline in missing]
        return tuple(tables)

    def _shares_tables(self, request: PlanRequest) -> bool:
        """Return whether a variant has the cluster, sequence length, batch and engine of the request itself."""
        own = self.request
        mine, theirs = ((each.cluster, each.seq_len, each.global_batch, each.engine) for each in (own, request))
        return mine == theirs

    def _keep(self, request: PlanRequest, job: Job, bounded: tuple[OnDemand, ...]) -> None:
        """Keep the bounds that a search within a job's budget has proven for the tables of the request itself."""
        if request.decisions == self.request.decisions and self._shares_tables(request) and not job.is_mixed:
            self._bounded[job.budget_bytes] = bounded


Progress = Callable[[str], None]
"""Function that shows the current step of the work."""


def counted(variants: Sequence[Variant], progress: Progress) -> Iterator[Variant]:
    """Yield these variants one after another, and report the number of each to ``progress``."""
    for number, variant in enumerate(variants, start=1):
        progress(f"{number} of {len(variants)}, {variant.name}")
        yield variant


def group_answers(study: Study) -> tuple[Answer, ...]:
    """Return the best plan on each device group alone, not searched to the end, and the best one of even cuts.

    Even cuts divide all devices into equal stages of equally many layers.
    """
    answers, request = [], study.request
    for each in study.job.by_group:
        variant = alone(each.cluster, request.decisions)
        found = study.plan(variant, to_the_end=False)
        if isinstance(found, str):
            answers.append(Answer(name=variant.name))
        else:
            missing = found.miss.miss_bytes if found.miss else None
            answers.append(_answer(variant.name, found.plan, found.job, missing))
    return (*answers, _answer("even cuts over all pools", even_plan(study.job, request.decisions), study.job))


def _answer(name: str, plan: Plan | None, job: Job, missing_bytes: int | None = None) -> Answer:
    if plan is None:
        return Answer(name=name, missing_bytes=missing_bytes)
    return Answer(name=name, plan=plan, step_s=predict(plan, job).step_time_s)


MOST_ORDERS = 6
"""Number of orders of the device groups that even cuts are tried in: all orders of three groups."""


def even_plan(job: Job, decisions: Decisions) -> Plan | None:
    """Return the best plan of stages with equal numbers of devices and layers, over all pools in `MOST_ORDERS` orders.

    None if no such plan fits. Its strategies are the best ones for these cuts.
    """
    space, counts = GroupSpace(job, decisions), [each.cluster.num_devices for each in job.groups]
    even = {tuple(count // size for count in counts) for size in divisors(math.gcd(*counts))}
    best: Accepted | None = None
    over_all = [each for each in space.configs() if each.placement.pools == tuple(range(len(counts)))]
    configs = sorted((each for each in over_all if each.placement.stages in even), key=lambda each: each.bound_s)
    for config in (each for unordered in configs for each in islice(space.orders(unordered), MOST_ORDERS)):
        if best is not None and config.bound_s * (1 - ROUNDING) >= best.outcome.score_s:
            break
        tables = space.tables(config)
        if best is None or _even_bound_s(tables) < best.outcome.score_s:
            found = accept(job, [tables], partition="even").ranked
            best = min((*found, *([best] if best else [])), key=lambda each: each.outcome.score_s, default=None)
    return None if best is None else best.plan


def _even_bound_s(tables: CostTables) -> float:
    """Lower bound of the step time of plans with even cuts in seconds, by the times of the layers."""
    times = [
        np.where(tables.legal_on(stage), tables.time_s, np.inf).min(axis=1)[list(tables.layers[first:end])].sum()
        for stage, (first, end) in enumerate(pairwise(even_boundaries(tables)))
    ]
    more_s = (tables.num_passes - 1) * max(times) if tables.num_passes > 1 else 0.0
    return float(sum(times) + more_s) * (1 - ROUNDING)


def _allowed(tables: CostTables, offered: Callable[[Strategy], bool]) -> CostTables:
    """Return the tables in which only the ``offered`` strategies are legal."""
    kept = np.array([offered(strategy) for strategy in tables.strategies], dtype=bool)
    return replace(tables, legal=tables.legal & kept)
