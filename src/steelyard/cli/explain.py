"""``steelyard explain``: what a plan does and costs; fills in the predictions of a plan written by hand."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from steelyard.cli.options import AsJson, Memory, ProfileOption, print_json
from steelyard.plan.file import read_plan, write_plan
from steelyard.planning import price_plan
from steelyard.report.plan_table import plan_view


def explain(
    path: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Price it for another cluster than the plan names.")
    ] = None,
    memory: Memory = None,
    profile: ProfileOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan with predictions.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan and what it costs; a plan written by hand is priced first."""
    plan = read_plan(path)
    if plan.prediction is None or cluster or memory or profile:
        plan = price_plan(plan, cluster=cluster, memory=memory, profile=profile)
    if output is not None:
        write_plan(plan, output)
    if as_json:
        print_json(plan.model_dump(mode="json", exclude_none=True))
    else:
        Console().print(plan_view(plan))
