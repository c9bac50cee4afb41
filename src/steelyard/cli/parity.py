"""``steelyard parity``: compare losses and gradients of a plan with one process, at small width."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table
from typing_extensions import TypedDict

from steelyard.cli.options import AsJson, PlanFile, count, print_json, prints, progress
from steelyard.installed import require_training
from steelyard.limits import MOST_DEVICES, MOST_STEPS
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.plan.shrink import TOLERANCES, shrunk_plan
from steelyard.report.tables import console, number
from steelyard.units import format_plural


class Compared(TypedDict):
    """Losses and gradients of a plan and of one process: `steelyard.runtime.parity.Comparison`, and its verdict."""

    losses: list[float]
    expected_losses: list[float]
    router_losses: list[float]
    expected_router_losses: list[float]
    norms: list[float]
    expected_norms: list[float]
    gradient_error: float
    gradient_tensor: str
    weight_error: float | None
    same_loss_on_all_ranks: bool
    strategies: list[str]
    loss_error: float
    within_tolerance: bool
    loss_tolerance: float
    gradient_tolerance: float
    config: Mapping[str, Any]


@prints(Compared)
def parity(
    path: PlanFile,
    steps: Annotated[int, count("--steps", "Training steps to compare.", most=MOST_STEPS)] = 2,
    max_processes: Annotated[
        int, count("--max-processes", "Maximum number of processes on this host.", most=MOST_DEVICES)
    ] = 16,
    as_json: AsJson = False,
) -> None:
    """Train a narrow copy of the model under the plan and on one process: compare losses and gradients."""
    plan = read_plan(path)
    require_training("`steelyard parity` trains")
    from steelyard.runtime.checks import check_engine
    from steelyard.runtime.parity_run import launch_parity

    check_engine(plan)
    small = shrunk_plan(plan)

    with progress(f"training on {small.num_devices} processes, then on one", silent=as_json):
        found = launch_parity(small, num_steps=steps, max_processes=max_processes)
    of_levers = (lever.tolerances for lever in small.chosen_levers)
    loss_tolerance, gradient_tolerance = map(max, zip(TOLERANCES[small.precision], *of_levers, strict=True))
    within = found["loss_error"] <= loss_tolerance and found["gradient_error"] <= gradient_tolerance
    report = found | {
        "within_tolerance": within and found["same_loss_on_all_ranks"],
        "loss_tolerance": loss_tolerance,
        "gradient_tolerance": gradient_tolerance,
        "config": small.model.config,
    }
    if as_json:
        print_json(report)
    else:
        _show(small, report)
    if not report["within_tolerance"]:
        raise typer.Exit(1)


def _show(small: Plan, report: dict[str, Any]) -> None:
    chain = small.chain()
    columns = ("step", "loss, plan", "loss, one process", "gradient norm, plan", "gradient norm, one process")
    title = f"{chain.name} at width {chain.hidden_size}: plan and one process"
    table = Table(*(number(each, whole=False) for each in columns), title=title)
    rows = zip(report["losses"], report["expected_losses"], report["norms"], report["expected_norms"], strict=True)
    for step, values in enumerate(rows, start=1):
        table.add_row(str(step), *(f"{value:.7f}" for value in values))
    console().print(table)
    verdict = "equal" if report["within_tolerance"] else "DIFFERENT"
    print(
        f"{verdict}: losses differ by {report['loss_error']:.1e} (tolerance {report['loss_tolerance']:.0e}), gradients "
        f"by {report['gradient_error']:.1e} of the largest entry (tolerance {report['gradient_tolerance']:.0e}), in "
        f"{report['gradient_tensor'] or 'none'}"
    )
    print(
        f"compared: {format_plural(small.num_devices, 'process', 'processes')}, "
        f"{format_plural(chain.num_layers, 'layer')}, {small.schedule}, {small.precision}; "
        f"{format_plural(small.num_microbatches, 'microbatch', 'microbatches')} of {small.microbatch_samples}"
    )
