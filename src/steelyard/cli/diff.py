"""``steelyard diff``: differences of two plans in strategies, time and memory."""

from pathlib import Path
from typing import Annotated

import typer
from typing_extensions import TypedDict

from steelyard.cli import options
from steelyard.engines import ENGINES, engine_of
from steelyard.engines.native import NATIVE
from steelyard.errors import InvalidPlanError, UserError
from steelyard.output import command, write_file
from steelyard.plan.decisions import FREE
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.planning.request import request_of_plan
from steelyard.planning.simple import with_usual_stages
from steelyard.planning.variants import Progress, Study, run_by
from steelyard.report.explain_view import changed_layers, compare_view, fullest_terms, step_terms
from steelyard.report.html import compare_page
from steelyard.report.tables import console


class PlanTerms(TypedDict, total=False):
    """Step time, its terms on the slowest stage, and memory of the fullest; empty for a plan without predictions."""

    step_time_s: float
    time_s: dict[str, float]
    memory_bytes: dict[str, float]


class ChangedLayers(TypedDict):
    """First and last layer of a run, and its strategies in both plans."""

    layers: tuple[int, int]
    first: str
    second: str


class Difference(TypedDict):
    """Two plans."""

    first: PlanTerms
    second: PlanTerms
    layers: list[ChangedLayers]


_SECOND = "Another plan file of the same model; leave it out with --engine."
_ENGINE = "Compare with the best plan of this engine for the same request."
Against = Annotated[
    str | None, options.option("--engine", "NAME", _ENGINE, autocompletion=options.complete_one_of(ENGINES))
]


@options.prints(Difference)
def diff(
    first: Annotated[Path, typer.Argument(help="Plan file.", metavar="FIRST")],
    second: Annotated[Path | None, typer.Argument(help=_SECOND, metavar="[SECOND]")] = None,
    engine: Against = None,
    output: Annotated[Path | None, options.written("Write the comparison as an HTML page.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare two plans of a model: time and memory by term, and the layers that differ."""
    if output is not None:
        options.check_page(output)
    one = read_plan(first)
    if (second is None) == (engine is None):
        raise UserError(
            field="SECOND",
            found="neither a second plan nor --engine" if second is None else "a second plan and --engine",
            expected="one of the two",
            hint=f"name a second plan file, or run {command('diff', first, '--engine', 'megatron')}",
        )
    with options.progress("counting the model's layers", silent=as_json) as show:
        other = read_plan(second) if second is not None else _by_engine(one, first, str(engine), show)
    if second is None:
        names = one.engine or NATIVE.name, other.engine or NATIVE.name
    else:
        names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    if one.chain().num_layers != other.chain().num_layers:
        raise InvalidPlanError(
            field=str(second),
            found=f"{other.model.name} with {other.chain().num_layers} layers",
            expected=f"{one.chain().num_layers} layers, as in {first} ({one.model.name})",
            hint="compare plans of the same model",
        )
    if output is not None:
        write_file(output, compare_page(one, other, names), "--output")
    if as_json:
        changes = [
            ChangedLayers(layers=(start, end), first=before, second=after)
            for start, end, before, after in changed_layers(one, other)
        ]
        options.print_json(Difference(first=_terms(one), second=_terms(other), layers=changes))
    else:
        console().print(compare_view(one, other, names if engine is not None else ("first", "second")))
        if output is not None:
            print(f"Written to {output}.")


def _by_engine(plan: Plan, path: Path, engine: str, show: Progress) -> Plan:
    """Return the plan of another engine for the request of a plan."""
    request = request_of_plan(plan, folder=path.parent, decisions=plan.asked or FREE)
    runs_it = engine_of(engine)
    show(f"searching plans for {runs_it.name}")
    result = Study(request).plan(run_by(runs_it))
    found = None if isinstance(result, str) else with_usual_stages(result, request)[0].plan
    if found is None:
        raise UserError(
            field="--engine",
            found=f"{engine}, which has no plan for it: {result if isinstance(result, str) else result.miss_text}",
            expected="an engine that can run this request",
            hint=f"run steelyard plan --engine {engine} with another memory, cluster or batch",
        )
    return found


def _terms(plan: Plan) -> PlanTerms:
    prediction = plan.prediction
    if prediction is None:
        return {}
    times, sizes = step_terms(plan, prediction), fullest_terms(prediction)
    return {"step_time_s": prediction.step_time_s, "time_s": times, "memory_bytes": sizes}
