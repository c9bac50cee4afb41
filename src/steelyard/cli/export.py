"""``steelyard export``: a plan as the configuration of another framework, or as launch files."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typing_extensions import TypedDict

from steelyard.cli import options
from steelyard.engines import ENGINE_OF_TARGET, TARGETS, check_levers, engine_of, target_of
from steelyard.engines.capabilities import Capabilities, unsupported
from steelyard.engines.engine import Engine, options_in
from steelyard.engines.native import NATIVE
from steelyard.engines.writing import Draft, Request, Target, describe_uniform, export_plan
from steelyard.errors import InvalidClusterError, UserError
from steelyard.hardware import Cluster, parse_cluster
from steelyard.levers import LEVERS
from steelyard.output import make_folder, write_files
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.planning.engine_fit import FittedPlan, fit_plan
from steelyard.planning.job import job_of
from steelyard.planning.request import Elsewhere, check_precision, request_of_plan
from steelyard.units import format_seconds

SAME = 5e-4
"""Step times that differ by less than this fraction count as equal."""


class Abilities(TypedDict):
    """Capabilities of an engine in words."""

    strategies: str
    remat: str
    pipeline: str


class Listed(TypedDict):
    """A target of ``--to``."""

    target: str
    software: str
    summary: str
    capabilities: Abilities
    precisions: tuple[str, ...]
    levers: tuple[str, ...]


class Exported(TypedDict):
    """Files for a target, by name, and the plan that they carry."""

    target: str
    software: str
    headline: str
    kept: tuple[str, ...]
    given_up: tuple[str, ...]
    carried: tuple[str, ...]
    left_out: tuple[str, ...]
    step_time_s: float | None
    slowdown: float | None
    plan: Plan
    written: list[str]
    files: dict[str, str]


_TO = "Framework or launcher; list shows all."
_OUTPUT = "File, or folder for all files. Default: print the first file."
To = Annotated[str, options.option("--to", "NAME", _TO, autocompletion=options.complete_one_of(("list", *TARGETS)))]


@options.prints(Exported | list[Listed])
def export(
    path: Annotated[Path | None, typer.Argument(help="Plan file.", metavar="PLAN", show_default=False)] = None,
    to: To = "list",
    output: Annotated[
        Path | None, options.option("--output -o", "PATH", _OUTPUT, callback=options.tried_file_or_folder)
    ] = None,
    cluster: options.OtherCluster = None,
    network: options.NetworkOption = None,
    memory: options.Memory = None,
    profile: options.ProfileOption = None,
    image: Annotated[str | None, options.option("--image", "NAME", "Container image, for kubeflow.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a plan for another framework: the best plan it can express, and a list of the differences."""
    if to == "list":
        _print_targets(as_json)
        return
    target = target_of(to)
    if path is None:
        raise UserError(
            field="PLAN",
            found="nothing",
            expected="a plan file",
            hint="make one: steelyard plan MODEL --cluster CLUSTER -o plan.json",
        )
    plan, engine, lacking = read_plan(path), ENGINE_OF_TARGET[target.name], list[str]()
    if engine.name == (plan.engine or NATIVE.name).partition("+")[0]:
        chosen = options_in(plan.engine)
        lacking = [f"+{name}: {target.name} has no such option" for name in chosen if name not in engine.options]
        engine = engine.with_options([name for name in chosen if name in engine.options])
    if plan.is_mixed and not target.starts_steelyard:
        plan.machines()  # raises: these frameworks have one device type and stages of one size
    if target.starts_steelyard and plan.engine is not None:
        raise UserError(
            field="--to",
            found=f"{target.name}, which starts steelyard, for a plan of the engine {plan.engine}",
            expected="a plan for steelyard's own runtime",
            hint=f"plan without --engine, or export --to {plan.engine.partition('+')[0]}",
        )
    _check_engine(plan, engine, target)
    engine.refuse(plan.chain(), plan.seq_len)
    with options.progress(f"fitting the plan into {target.name}", silent=as_json):
        given = Elsewhere(cluster=cluster, network=network, memory=memory, profile=profile)
        fitted = _fitted(plan, path.parent, engine, given)
    fitted = replace(fitted, reasons=(*fitted.reasons, *lacking))
    headline = _headline(fitted, engine, target, plan.engine)
    request = Request(
        plan=fitted.plan,
        headline=headline,
        unsupported=fitted.reasons,
        kept=fitted.kept,
        given_up=fitted.given_up,
        cluster=parse_cluster(cluster) if cluster else _own_cluster(plan),
        image=image,
    )
    exported = export_plan(target, request)
    written = _write(exported, output, plan=path) if output is not None else ()
    if as_json:
        options.print_json(_content(exported, fitted, target, headline, written))
        return
    if output is None:
        print(exported.files[0][1], end="")
    _print_statement(exported, fitted, headline, written, on_error=output is None)


def _check_engine(plan: Plan, engine: Engine, target: Target) -> None:
    """Raise `UserError` for a precision or a lever that the engine of a target does not support."""
    try:
        check_precision(engine, plan.precision)
        check_levers(plan.chosen_levers, plan.chain(), engine)
    except UserError as error:
        raise UserError(
            field="--to",
            found=f"{target.name}: {error.found}",
            expected=error.expected,
            hint=f"export --to {(plan.engine or 'torchrun').partition('+')[0]}, or plan without this option",
        ) from None


def _fitted(plan: Plan, folder: Path, engine: Engine, given: Elsewhere) -> FittedPlan:
    """Return the best plan that the engine can run; the plan itself, unpriced, if nothing needs a search.

    No search is needed if the engine can run the plan and it was written by hand or found for an engine that executes
    alike, on the same cluster and within the same memory. Our own runtime runs the plan unchanged.
    """
    own, theirs = (
        each.running(plan.chosen_levers, plan.precision) for each in (engine_of(plan.engine or NATIVE.name), engine)
    )
    is_elsewhere = any(given.values()) and not theirs.capabilities.mixes_layers
    is_for_it = not is_elsewhere and (plan.prediction is None or own.execution == theirs.execution)
    if is_for_it and not unsupported(plan, theirs.capabilities):
        kept = tuple(plan.asked.one_by_one()) if plan.asked else ()
        return FittedPlan(plan=plan, reasons=(), wanted_step_s=None, kept=kept, is_wanted=True)
    given["engine"] = NATIVE.name
    return fit_plan(plan, job_of(request_of_plan(plan, folder=folder, **given)), engine)


def _headline(fitted: FittedPlan, engine: Engine, target: Target, own: str | None) -> str:
    """Return the export in a line: ``uniform fsdp8 in torchtitan: 1.43 s per step, 6.0% slower than the plan``.

    ``own`` is the engine that the plan was found for; None for our own runtime.
    """
    if engine.capabilities.mixes_layers:
        where = f" on {fitted.plan.cluster}" if fitted.plan.prediction else ""  # also if it is launched elsewhere
        return f"the plan itself in {target.name}{_predicted(fitted.plan)}{where}"
    what = f"{describe_uniform(fitted.plan)} in {target.name}{_predicted(fitted.plan)}"
    slowdown = fitted.slowdown
    if fitted.is_wanted:
        return f"{what}, the plan itself"
    theirs = "the plan"
    if engine.execution != engine_of(own or NATIVE.name).execution:
        theirs += f" in {own}" if own else " in steelyard's runtime"
    if slowdown is None or abs(slowdown) < SAME:
        return f"{what}, as fast as {theirs}"
    return f"{what}, {abs(slowdown):.1%} {'slower' if slowdown > 0 else 'faster'} than {theirs}"


def _predicted(plan: Plan) -> str:
    return f": {format_seconds(plan.prediction.step_time_s)} per step" if plan.prediction else ""


def _own_cluster(plan: Plan) -> Cluster | None:
    """Return the cluster of a plan; None if its name is unknown or it has several device groups."""
    try:
        return None if plan.is_mixed else plan.machines()
    except InvalidClusterError:
        return None


def _write(exported: Draft, output: Path, *, plan: Path) -> tuple[Path, ...]:
    """Write all files into a folder, or those that a file name asks for, and return the paths.

    A file name asks for the file of its suffix, or for all under this name if they read each other. Raises `UserError`
    if nothing can be written, or the plan file would be overwritten.
    """
    if not options.is_file_name(output):
        make_folder(output, "--output")
        chosen = {output / name: content for name, content in exported.files}
    else:
        alike = [content for name, content in exported.files if Path(name).suffix == output.suffix]
        if not alike:
            raise UserError(
                field="--output",
                found=str(output),
                expected="a folder, or a file name that ends in "
                + " or ".join(Path(name).suffix for name, _ in exported.files),
                hint=f"write for example -o {exported.files[0][0]}, or make the folder first: mkdir {output}",
            )
        chosen = (
            {output.with_suffix(Path(name).suffix): content for name, content in exported.files}
            if exported.script
            else {output: alike[0]}
        )
    for file in chosen:
        if file.exists() and file.samefile(plan):
            raise UserError(
                field="--output",
                found=f"{output}, which would overwrite the plan in {plan}",
                expected="another name",
                hint=f"write for example -o {exported.files[0][0]}",
            )
    write_files(chosen, "--output")
    return tuple(chosen)


def _print_statement(
    exported: Draft, fitted: FittedPlan, headline: str, written: tuple[Path, ...], *, on_error: bool
) -> None:
    shown = Console(stderr=on_error, highlight=False, soft_wrap=True)
    for line in fitted.given_up:
        shown.print(f"given up: {line}", style="bold", markup=False)
    shown.print(headline, markup=False)
    if fitted.kept:
        shown.print(f"  kept as asked: {', '.join(fitted.kept)}", style="dim", markup=False)
    for line in exported.left_out:
        shown.print(f"  not exported: {line}", style="dim", markup=False)
    for file in written:
        shown.print(f"Written to {file}.", markup=False)
    if exported.script and on_error:
        needed = ", ".join(name for name, _ in exported.files[1:])
        shown.print(f"Only this file is printed; it reads {needed}. Write both: -o {exported.files[0][0]}")
    elif exported.script:
        shown.print("The first reads the other: keep them in one folder.")


def _content(exported: Draft, fitted: FittedPlan, target: Target, headline: str, written: tuple[Path, ...]) -> Exported:
    prediction = fitted.plan.prediction
    return {
        "target": target.name,
        "software": target.software,
        "headline": headline,
        "kept": fitted.kept,
        "given_up": fitted.given_up,
        "carried": exported.carried,
        "left_out": exported.left_out,
        "step_time_s": prediction.step_time_s if prediction else None,
        "slowdown": fitted.slowdown,
        "plan": fitted.plan,
        "written": [str(file) for file in written],
        "files": dict(exported.files),
    }


def _print_targets(as_json: bool) -> None:
    listed: list[Listed] = []
    for target in TARGETS.values():
        engine = ENGINE_OF_TARGET[target.name]
        written = () if engine.capabilities.mixes_layers else engine.levers  # a script of stock calls has none
        listed.append(
            {
                "target": target.name,
                "software": target.software,
                "summary": target.summary,
                "capabilities": _capabilities_content(engine.capabilities),
                "precisions": target.precisions or engine.precisions,
                "levers": tuple(LEVERS if target.starts_steelyard else written),
            }
        )
    if as_json:
        options.print_json(listed)
        return
    console = Console(highlight=False, soft_wrap=True)
    for each in listed:
        console.print(f"[bold]{each['target']}[/bold]  {each['software']}")
        words = [f"{name}: {text}" for name, text in each["capabilities"].items()]
        lists = {"precisions": each["precisions"], "levers": each["levers"]}
        console.print("  " + "; ".join([*words, *(f"{name}: {', '.join(of)}" for name, of in lists.items() if of)]))
        console.print(f"  writes {each['summary']}", style="dim")


def _capabilities_content(capabilities: Capabilities) -> Abilities:
    if capabilities.mixes_layers:
        return {"strategies": "one per layer", "remat": "one per layer", "pipeline": "any"}
    dimensions = sorted(
        "+".join(sorted(dimension.name for dimension in each)) for each in capabilities.dimensions if each
    )
    remats = [str(remat) for remat in sorted(capabilities.remats)] + [
        "first n blocks"
    ] * capabilities.remats_first_blocks
    pipeline = f"any cuts; {', '.join(sorted(capabilities.schedules))}" if capabilities.schedules else "none"
    return {"strategies": "one of " + ", ".join(dimensions), "remat": ", ".join(remats), "pipeline": pipeline}
