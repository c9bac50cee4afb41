"""Turns the outcome of a search into a plan, without its prediction, and says in words what it is."""

from steelyard.cost.fold import unfold_layers, unfold_parts
from steelyard.cost.setting import Job
from steelyard.plan.plan import Plan, PlanModel, Schedule, StagePlan, fold_runs
from steelyard.search import SettingOutcome
from steelyard.search.tidy import group_equal_strategies
from steelyard.units import format_plural


def bare_plan(job: Job, outcome: SettingOutcome, *, is_grouped: bool = True) -> Plan:
    """The plan of a search outcome, without its prediction; equal layers of equal strategies beside each other."""
    tables = outcome.tables
    solution = group_equal_strategies(tables, outcome.solution) if is_grouped else outcome.solution
    strategies = unfold_layers([tables.strategies[index] for index in solution.strategies], tables.num_chunks)
    size = job.cluster.num_devices // tables.num_stages
    stages = tuple(
        StagePlan(ranks=(stage * size, stage * size + size - 1), runs=fold_runs(first, strategies[first:end]))
        for stage, first, end in unfold_parts(solution.boundaries, tables.num_chunks)
    )
    return assemble_plan(job, tables.num_microbatches, tables.schedule, stages)


def assemble_plan(job: Job, num_microbatches: int, schedule: Schedule, stages: tuple[StagePlan, ...]) -> Plan:
    """The plan of a job with these stages, without its prediction."""
    chain = job.chain
    return Plan(
        model=PlanModel(name=chain.name, config=dict(chain.config), config_hash=chain.config_hash),
        cluster=job.cluster.name,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        num_microbatches=num_microbatches,
        precision=job.precision,
        schedule=schedule,
        stages=stages,
    )


def describe_setting(outcome: SettingOutcome) -> str:
    """The pipeline setting of an outcome in words, as in ``2 stages, 16 microbatches``."""
    tables = outcome.tables
    return describe(tables.num_stages, tables.num_microbatches, tables.schedule, tables.num_chunks)


def describe_plan(plan: Plan) -> str:
    """The pipeline setting of a plan in the same words."""
    return describe(plan.num_stages, plan.num_microbatches, plan.schedule, plan.num_chunks)


def describe(num_stages: int, num_microbatches: int, schedule: Schedule, num_chunks: int = 1) -> str:
    """A pipeline setting in words; the schedule only where it is not the usual one."""
    stages = format_plural(num_stages, "stage") + (f" of {num_chunks} chunks" if num_chunks > 1 else "")
    microbatches = format_plural(num_microbatches, "microbatch", "microbatches")
    return f"{stages}, {microbatches}" + (f", {schedule}" if schedule != "1f1b" and num_stages > 1 else "")


def summarise(plan: Plan) -> str:
    """The strategies of a plan, the most used first."""
    counts: dict[str, int] = {}
    for strategy in plan.strategies:
        counts[str(strategy)] = counts.get(str(strategy), 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{text} ×{count}" for text, count in most)
