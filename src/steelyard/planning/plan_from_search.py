"""Turns the outcome of a search into a plan, without its prediction, and says in words what it is.

The fastest plans of a job that fit, as plans: the search within the memory of a device, and what it says of all.

The search adds up memory as a plan is predicted (`steelyard.cost.memory`), so what it finds fits as reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from steelyard.cost.build import usable_bytes
from steelyard.cost.fold import unfold_layers, unfold_parts
from steelyard.cost.job import Job
from steelyard.cost.tables import CostTables
from steelyard.hardware import hardware_file
from steelyard.plan.decisions import Partition
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.schedules import PipelineConfig
from steelyard.search import ConfigOutcome, OnDemand, SearchResult, nearest_miss, search
from steelyard.search.evaluate import Solution, group_equal_strategies
from steelyard.units import format_plural


def grouped_plan(job: Job, outcome: ConfigOutcome) -> Plan:
    """The plan of a search outcome, without its prediction; equal layers of equal strategies beside each other."""
    return bare_plan(job, outcome.tables, group_equal_strategies(outcome.tables, outcome.solution))


def bare_plan(job: Job, tables: CostTables, solution: Solution) -> Plan:
    """The plan of a solution of these tables, without its prediction."""
    pipeline = tables.pipeline
    strategies = unfold_layers([tables.strategies[index] for index in solution.strategies], pipeline.num_chunks)
    cuts = list(unfold_parts(solution.boundaries, pipeline.num_chunks))
    ends = list(accumulate(strategies[first].num_devices for _, first, _ in cuts[: pipeline.num_stages]))
    parts = tuple(
        StagePart(
            ranks=(ends[stage - 1] if stage else 0, ends[stage] - 1), runs=fold_runs(first, strategies[first:end])
        )
        for stage, first, end in cuts
    )
    used = job if tables.pools is None else Job.over([job.by_group[place] for place in tables.pools.order])
    return assemble_plan(used, pipeline, parts)


def assemble_plan(job: Job, pipeline: PipelineConfig, parts: Sequence[StagePart]) -> Plan:
    """The plan of a job on all its devices, with these parts of the pipeline, without its prediction."""
    chain, cluster = job.chain, job.hardware
    return Plan(
        model=PlanModel(
            name=chain.name,
            config=dict(chain.config) or None,
            config_hash=chain.config_hash,
            split=chain.split,
            frozen=chain.freeze,
        ),
        cluster=cluster.name,
        hardware=hardware_file(cluster),
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        num_microbatches=pipeline.num_microbatches,
        precision=job.precision,
        schedule=pipeline.schedule.name,
        stages=stages_of(parts),
    )


def describe(pipeline: PipelineConfig, *, stages: str | None = None) -> str:
    """A pipeline configuration in words, as in ``2 stages, 16 microbatches``; the schedule only where it needs saying.

    ``stages`` says more of them than how many there are.
    """
    if stages is None:
        chunks = f" of {pipeline.num_chunks} chunks" if pipeline.num_chunks > 1 else ""
        stages = format_plural(pipeline.num_stages, "stage") + chunks
    microbatches = format_plural(pipeline.num_microbatches, "microbatch", "microbatches")
    words = pipeline.schedule.words if pipeline.num_stages > 1 else ""
    return f"{stages}, {microbatches}" + (f", {words}" if words else "")


def summarise(plan: Plan) -> str:
    """The two strategies that most layers of a plan have, and how many layers have another."""
    counts: dict[str, int] = {}
    for strategy in plan.strategies:
        counts[str(strategy)] = counts.get(str(strategy), 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])[:2]
    others = len(plan.strategies) - sum(count for _, count in most)
    named = [f"{text} ×{count}" for text, count in most]
    return ", ".join([*named, format_plural(others, "other")] if others else named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A plan that fits, and the outcome of the search that it comes from."""

    outcome: ConfigOutcome
    plan: Plan

    @property
    def is_settled(self) -> bool:
        """Whether no plan of its configuration is faster."""
        return self.outcome.result.status == "optimal"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """The best plans of the configurations, fastest first, and what the search says of all configurations.

    Where there is none no plan takes less than ``floor_bytes``.
    """

    ranked: tuple[Accepted, ...]
    search: SearchResult
    bounds_s: tuple[float, ...]
    """What no plan of each configuration that fits is faster than, in the order given."""
    floor_bytes: int = 0

    def bounded(self) -> tuple[OnDemand, ...]:
        """The tables that were searched with their bounds, for further searches within no more memory."""
        pairs = zip(self.search.configs, self.bounds_s, strict=True)
        return tuple(each.given.bounded(bound_s) for each, bound_s in pairs)


def accept(
    job: Job,
    tables: Sequence[CostTables | OnDemand],
    *,
    num_exact: int = 1,
    num_alternatives: int = 4,
    partition: Partition = "exact",
    time_limit_s: float | None = None,
) -> Acceptance:
    """The fastest plans of a job that fit, of all configurations whose cost tables are given; arguments as of
    `search`."""
    room_bytes = usable_bytes(job)
    found = search(
        tables,
        room_bytes,
        num_exact=num_exact,
        num_alternatives=num_alternatives,
        partition=partition,
        time_limit_s=time_limit_s,
    )
    bounds = (max(each.result.lower_bound_s, each.given.least_s) for each in found.configs)
    made = [] if found.ranked else [each.tables for each in found.configs if each.given.is_made]
    least = [nearest_miss(each, 0) for each in made]
    return Acceptance(
        ranked=tuple(Accepted(outcome=each, plan=_plan(job, each, room_bytes)) for each in found.ranked),
        search=found,
        bounds_s=tuple(bounds),
        floor_bytes=min((miss.needed_bytes for miss in least if miss is not None), default=0),
    )


def _plan(job: Job, outcome: ConfigOutcome, room_bytes: int) -> Plan:
    return bare_plan(job, outcome.tables, group_equal_strategies(outcome.tables, outcome.solution, room_bytes))
