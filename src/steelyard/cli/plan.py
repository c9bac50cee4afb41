"""``steelyard plan``: the fastest plan for a model on a cluster within a memory budget."""

import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from steelyard.cli.options import (
    AsJson,
    ClusterOption,
    GlobalBatch,
    Memory,
    Model,
    PrecisionOption,
    ProfileOption,
    SeqLen,
    print_json,
)
from steelyard.errors import UserError, nearest
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Precision
from steelyard.planning import PlanningResult, PlanOptions, make_job, make_problem, plan_job
from steelyard.report.plan_table import plan_view
from steelyard.search import Partition, save_problem
from steelyard.units import format_bytes


def plan(
    model: Model,
    cluster: ClusterOption,
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan.")] = None,
    memory: Memory = None,
    precision: PrecisionOption = "bf16",
    profile: ProfileOption = None,
    max_tp: Annotated[int | None, typer.Option("--max-tp", help="Largest tensor-parallel degree.", min=1)] = None,
    stages: Annotated[int | None, typer.Option("--stages", help="Fix the number of pipeline stages.", min=1)] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", help="Fix the number of microbatches.", min=1)
    ] = None,
    partition: Annotated[
        str,
        typer.Option("--partition", help="How stages are cut: exact, or for comparison bmw, memory-balanced, even."),
    ] = "exact",
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Seconds after which the best so far is taken.", min=0)
    ] = None,
    problem: Annotated[
        Path | None, typer.Option("--save-problem", help="Write the cost tables for `steelyard solve`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan that fits. No GPU needed."""
    job = make_job(
        model,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=check_precision(precision),
        memory=memory,
        profile=profile,
    )
    options = PlanOptions(
        max_tp=max_tp,
        num_stages=stages,
        num_microbatches=microbatches,
        partition=check_choice("--partition", partition, Partition),
        time_limit_s=time_limit,
    )
    if problem is not None:
        save_problem(problem, make_problem(job, options))
    result = plan_job(job, options)
    if result.plan is None:
        _print_nothing_fits(result, as_json)
        raise typer.Exit(1)
    if output is not None:
        write_plan(result.plan, output)
    if as_json:
        print_json(result.plan.model_dump(mode="json", exclude_none=True))
        return
    console = Console()
    console.print(plan_view(result.plan))
    if output is not None:
        console.print(f"written to {output}; run it with: steelyard train {output} --data PATH")


def check_precision(text: str) -> Precision:
    """The precision that a user named; raises `UserError` for another one."""
    return check_choice("--precision", text, Precision)


def check_choice(option: str, text: str, choices: Any) -> Any:
    """``text`` if it is one of the literal ``choices``; raises `UserError` naming them for anything else."""
    known = get_args(choices)
    if text not in known:
        raise UserError(
            field=option, found=repr(text), expected="one of " + ", ".join(known), hint=nearest(text, known)
        )
    return text


def _print_nothing_fits(result: PlanningResult, as_json: bool) -> None:
    budget = result.job.budget_bytes
    reasons = [
        {
            "stages": each.tables.num_stages,
            "microbatches": each.tables.num_microbatches,
            "reason": each.reason,
        }
        for each in result.search.settings
    ]
    if as_json:
        miss = result.miss
        print_json(
            {
                "status": "infeasible",
                "budget_bytes": budget,
                "missing_bytes": None if miss is None else miss.miss_bytes,
                "nearest_miss": result.miss_text,
                "settings": reasons,
            }
        )
        return
    print(f"nothing fits in {format_bytes(budget)} per device", file=sys.stderr)
    print(f"  nearest miss: {result.miss_text}", file=sys.stderr)
    print("  to fix: more memory per device, more devices, or a shorter sequence", file=sys.stderr)
