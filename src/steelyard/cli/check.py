"""``steelyard check``: run a plan's ranks on fake tensors and compare their memory with budget and prediction."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer
from typing_extensions import TypedDict

from steelyard.cli import options
from steelyard.cost.job import stage_configs
from steelyard.cost.predict import predict_host, predict_memory
from steelyard.hardware import Backend
from steelyard.installed import require_training
from steelyard.limits import MOST_DEVICES
from steelyard.model.own import Split
from steelyard.modules.any_model import changed_split_refused, split_of
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.planning.job import job_of
from steelyard.planning.request import Elsewhere, request_of_plan
from steelyard.report.run_table import CheckedRank, StageBudget, check_view, misfit_lines
from steelyard.report.tables import console


class RankMemory(TypedDict):
    """Memory of a rank, and of those that it stands for, as run and as predicted."""

    rank: int
    stage: int
    stands_for: list[int]
    fits: bool
    over_bytes: int
    peak_bytes: int
    peak_terms: Mapping[str, int]
    peak_where: str
    first_step_peak_bytes: int
    allowance_bytes: int
    budget_bytes: int
    margin_bytes: int
    under_pressure: bool
    host_bytes: int
    predicted_bytes: int
    predicted_terms: Mapping[str, int]
    wall_s: float


class Checked(TypedDict):
    """Every distinct rank of a plan."""

    fits: bool
    ranks: list[RankMemory]


_PROCESSES = "Ranks to run at once. Default: one per core."
_EVERY = "Run all microbatches, not only distinct ones."


@options.prints(Checked)
def check(
    path: options.PlanFile,
    cluster: options.OtherCluster = None,
    network: options.NetworkOption = None,
    memory: options.Memory = None,
    profile: options.ProfileOption = None,
    processes: Annotated[int | None, options.count("--processes", _PROCESSES, most=MOST_DEVICES)] = None,
    every_microbatch: Annotated[bool, options.option("--every-microbatch", None, _EVERY)] = False,
    builder: options.Builder = None,
    as_json: options.AsJson = False,
) -> None:
    """Check that a plan fits: run every distinct rank on fake tensors. No GPU needed."""
    plan = read_plan(path)
    require_training("`steelyard check` runs the training code on fake tensors")
    from steelyard.runtime.checks import check_builder

    check_builder(plan, builder)
    given = Elsewhere(cluster=cluster, network=network, memory=memory, profile=profile)
    budgets, backend = _expected(plan, given)
    from steelyard.runtime.dry_run import distinct_ranks, dry_run_all

    with (
        options.progress("building the model", silent=as_json) as show,
        changed_split_refused(plan.chain().split, partial(_own_split, plan, builder)),
    ):
        groups = distinct_ranks(plan, builder)
        show(f"1 of {len(groups)} ranks on fake tensors")
        found = []
        for each in dry_run_all(
            plan,
            [group.rank for group in groups],
            backend=backend,
            num_processes=processes or os.cpu_count() or 1,
            every_microbatch=every_microbatch,
            builder=builder,
        ):
            found.append(each)
            show(f"{min(len(found) + 1, len(groups))} of {len(groups)} ranks on fake tensors")
    checked = [
        CheckedRank(
            rank=group.rank,
            stage=group.stage,
            ranks=group.ranks,
            terms=rank.later_steps.terms,
            where=rank.later_steps.where,
            first_step_bytes=rank.first_step.total_bytes,
            wall_s=rank.wall_s,
            budget=budgets[group.stage],
            host_bytes=rank.host_bytes,
        )
        for group, rank in zip(groups, found, strict=True)
    ]
    if as_json:
        options.print_json(_as_json(checked))
    else:
        console().print(check_view(plan, checked))
        for line in misfit_lines(checked):
            console().print(line)
    if not all(rank.fits for rank in checked):
        raise typer.Exit(1)


def _own_split(plan: Plan, builder: str | None) -> Split | None:
    """Return the split of a plan's model as found now, not as kept in the plan."""
    if builder is None:
        return split_of(plan.chain().config)
    from steelyard.modules.own_proof import build, own_model

    return own_model(build(builder)).split


def _expected(plan: Plan, given: Elsewhere) -> tuple[list[StageBudget], Backend]:
    """Return prediction and budget of each stage, and the backend: from the plan, or computed if it has none.

    The default backend is that of the plan's cluster. Raises `InvalidClusterError` for an unknown cluster.
    """
    prediction = plan.prediction
    if prediction is not None and not any(given.values()):
        backend = prediction.backend or plan.pools()[0].device.backend
        stages = [(stage.memory_bytes, stage.host_bytes) for stage in prediction.stages]
        limits = list(zip(prediction.stage_budgets(), prediction.stage_margins(), strict=True))
    else:
        job = job_of(request_of_plan(plan, **given))
        stage_jobs = [config.job for config in stage_configs(plan, job)]
        backend = stage_jobs[0].cluster.device.backend
        stages = list(zip(predict_memory(plan, job), predict_host(plan, job), strict=True))
        limits = [(each.budget_bytes, each.margin_bytes) for each in stage_jobs]
    budgets = [
        StageBudget(predicted=terms, budget_bytes=budget + margin, margin_bytes=margin, host_bytes=on_host)
        for (terms, on_host), (budget, margin) in zip(stages, limits, strict=True)
    ]
    return budgets, backend


def _as_json(checked: list[CheckedRank]) -> Checked:
    return {
        "fits": all(rank.fits for rank in checked),
        "ranks": [
            {
                "rank": rank.rank,
                "stage": rank.stage,
                "stands_for": list(rank.ranks),
                "fits": rank.fits,
                "over_bytes": max(0, rank.over_bytes),
                "peak_bytes": rank.peak_bytes,
                "peak_terms": rank.terms,
                "peak_where": rank.where,
                "first_step_peak_bytes": rank.first_step_bytes,
                "allowance_bytes": rank.allowance_bytes,
                "budget_bytes": rank.budget.budget_bytes,
                "margin_bytes": rank.budget.margin_bytes,
                "under_pressure": rank.fits and rank.is_pressed,
                "host_bytes": rank.host_bytes,
                "predicted_bytes": rank.budget.tensor_bytes,
                "predicted_terms": rank.budget.predicted,
                "wall_s": rank.wall_s,
            }
            for rank in checked
        ],
    }
