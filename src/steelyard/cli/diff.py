"""``steelyard diff``: what two plans do and cost differently."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from steelyard.cli.options import AsJson, check_page, print_json, tried
from steelyard.errors import InvalidPlanError
from steelyard.output import write_file
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.report.compare_view import changed_layers, compare_view, fullest_terms, step_terms
from steelyard.report.html import compare_page


def diff(
    first: Annotated[Path, typer.Argument(help="A plan file.", metavar="FIRST")],
    second: Annotated[Path, typer.Argument(help="Another plan of the same model.", metavar="SECOND")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=tried, help="Write the comparison as a page, a path that ends in .html."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two plans of a model: time by term, memory by term, layers that differ."""
    if output is not None:
        check_page(output)
    one, other = read_plan(first), read_plan(second)
    if one.chain().num_layers != other.chain().num_layers:
        raise InvalidPlanError(
            field=str(second),
            found=f"{other.model.name} with {other.chain().num_layers} layers",
            expected=f"{one.chain().num_layers} layers, as {one.model.name} in {first} has",
            hint="compare plans of the same model",
        )
    if output is not None:
        names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
        write_file(output, compare_page(one, other, names), "--output")
    if as_json:
        changes = [
            {"layers": [start, end], "first": before, "second": after}
            for start, end, before, after in changed_layers(one, other)
        ]
        print_json({"first": _terms(one), "second": _terms(other), "layers": changes})
    else:
        Console().print(compare_view(one, other))
        if output is not None:
            print(f"written to {output}")


def _terms(plan: Plan) -> dict[str, Any]:
    prediction = plan.prediction
    if prediction is None:
        return {}
    return {
        "step_time_s": prediction.step_time_s,
        "time_s": step_terms(plan, prediction),
        "memory_bytes": fullest_terms(prediction),
    }
