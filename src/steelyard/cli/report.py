"""``steelyard report``: a plan as one HTML page, next to measurements of a run."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typing_extensions import TypedDict

from steelyard.cli import options
from steelyard.cost.predict import predict
from steelyard.errors import UserError
from steelyard.output import command, write_file
from steelyard.plan.choices import Explanation, PlanStudy
from steelyard.plan.file import parse_file, read_plan
from steelyard.plan.plan import Plan
from steelyard.planning.explain import explain_pools, search_for_report
from steelyard.planning.explore import explore as solved_plans
from steelyard.planning.price import priced_or_reason, with_cost
from steelyard.planning.request import Elsewhere
from steelyard.planning.variants import Study
from steelyard.profiles.record import RunRecord
from steelyard.report.html import ReportContents, explore_page, report_page
from steelyard.units import format_bytes


class Reported(TypedDict):
    """The contents of a page; the share and the record are null where there is none."""

    plan: Plan
    study: PlanStudy
    bubble_share: float | None
    record: RunRecord | None
    notes: list[str]


_RUN = "Record of `steelyard train`: shows measured values, too."
_TIME_LIMIT = "CPU seconds for frontier and baselines. Default: no limit; 0: leave them out."
_EXPLORE = (
    "Seconds for a last part with sliders for memory, devices and sequence length (see steelyard explore). "
    "0: leave it out."
)
_CONFIGS = "Search all pipeline configurations, or only that of the plan."


@options.prints(Reported)
def report(
    path: options.PlanFile,
    output: Annotated[Path, options.written("Write the page (.html) to this file.")],
    run: Annotated[Path | None, options.option("--run", "FILE", _RUN)] = None,
    cluster: options.OtherCluster = None,
    network: options.NetworkOption = None,
    engine: options.EngineOption = None,
    memory: options.Memory = None,
    profile: options.ProfileOption = None,
    time_limit: Annotated[float | None, options.seconds("--time-limit", _TIME_LIMIT)] = None,
    explore: Annotated[float, options.seconds("--explore", _EXPLORE, "52")] = 0,
    all_configs: Annotated[bool, options.option("--all-settings/--own-setting", None, _CONFIGS, options.SEARCH)] = True,
    as_json: options.AsJson = False,
) -> None:
    """Write one offline page: the decision, time and memory by term, schedule, frontier, plans that lost."""
    options.check_page(output)
    plan, name = read_plan(path), shlex.quote(path.name)
    record = None if run is None else read_record(run, plan, path)
    with options.progress("counting the model's layers", silent=as_json) as show:
        given = Elsewhere(cluster=cluster, network=network, memory=memory, profile=profile, engine=engine)
        priced = priced_or_reason(plan, path, **given)
        if isinstance(priced, str):
            nothing = PlanStudy(scope="", explanation=Explanation(binds=""))
            note = f"Schedule, frontier and baselines are left out: {priced}."
            found = ReportContents(plan=plan, plan_file=name, study=nothing, record=record, notes=(note,))
        else:
            request, job = priced
            cost = predict(plan, job)
            if job.is_mixed:  # no frontier is searched over several pools
                show("searching each device group alone, and even stages")
                explanation = Explanation(binds="") if time_limit == 0 else explain_pools(plan, Study(request, job))
                scope = "plans of one device group, or of even stages over all groups"
                study = PlanStudy(scope=scope, explanation=explanation)
            else:
                study = search_for_report(
                    plan, request, job, cost, time_limit_s=time_limit, everywhere=all_configs, progress=show
                )
            explored = None
            if explore:
                asked = command("plan", plan.model.name, *_options(plan))
                explored = explore_page(solved_plans(request, asked, limit_s=explore, progress=show))
            show("writing the page")
            if plan.prediction is None or any(given.values()):
                plan = with_cost(plan, job, cost)
            found = ReportContents(
                plan=plan,
                plan_file=name,
                job=job,
                timeline=cost.timeline,
                study=study,
                explore_page=explored,
                record=record,
            )
        text = report_page(found)
    write_file(output, text, "--output")
    if as_json:
        share, notes = None if found.timeline is None else found.timeline.bubble_share(), list(found.notes)
        content = Reported(plan=found.plan, study=found.study, bubble_share=share, record=found.record, notes=notes)
        options.print_json(content)
    else:
        print(f"Written to {output} ({format_bytes(len(text.encode()))}).")


def _options(plan: Plan) -> Iterator[str]:
    """Yield the options of `steelyard plan` that all choices of the explorer share."""
    yield from ("--global-batch", str(plan.global_batch), "--precision", plan.precision)
    for name, text in plan.levers.items():
        yield from (f"--{name}", text)


def read_record(path: Path, plan: Plan, plan_path: Path) -> RunRecord:
    """Return the run record in a file; raises `UserError` if it is no record, or of another model or plan."""
    record = parse_file(path, RunRecord, UserError, what="record")
    chain = plan.chain()
    wanted: list[tuple[str, object, object]] = [
        ("config_hash", record.config_hash, chain.config_hash),
        ("num_devices", record.num_devices, plan.num_devices),
        ("strategies", record.strategies, tuple(str(strategy) for strategy in plan.strategies)),
    ]
    for field in ("predicted_busy_s", "predicted_peak_bytes"):
        if (predicted := getattr(record, field)) is not None:
            wanted.append((field, f"{len(predicted)} stages", f"{plan.num_stages} stages"))
    last = plan.num_stages - 1
    wanted.extend(("ranks", f"stage {rank.stage}", f"{last} at most") for rank in record.ranks if rank.stage > last)
    for field, found, expected in wanted:
        if found != expected:
            raise UserError(
                field=f"--run: {field}",
                found=_short(found),
                expected=f"{_short(expected)}, as in {plan_path}",
                hint=f"give the record of a run of {plan_path}: steelyard train {plan_path} --data PATH --record FILE",
            )
    return record


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(dict.fromkeys(map(str, value))) + f" ({len(value)} layers)"
    return str(value)
