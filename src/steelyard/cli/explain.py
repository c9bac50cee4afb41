"""``steelyard explain``: why a plan wins and what limits it; also prices a plan written by hand."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from typing_extensions import TypedDict

from steelyard.cli import options
from steelyard.cost.job import Job
from steelyard.errors import UserError
from steelyard.plan.choices import Explanation
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.planning.elastic import slow_nodes
from steelyard.planning.explain import explain_plan, explain_pools
from steelyard.planning.pins import parse_pin
from steelyard.planning.price import priced_or_reason, with_price
from steelyard.planning.request import Elsewhere, PlanRequest, not_with_pools
from steelyard.planning.settings import plan_of_file
from steelyard.planning.simple import with_reasons
from steelyard.planning.variants import Study
from steelyard.planning.why_not import why_not, why_not_plan
from steelyard.profiles.record import SLOW_SHARE
from steelyard.report.explain_view import explain_view, why_not_view
from steelyard.report.tables import console


class Explained(TypedDict):
    """A plan, and why it and not another."""

    plan: Plan
    explanation: Explanation


_FROM = (
    "Explain the settings in a file of an engine: arguments of Megatron, a recipe of Megatron-Bridge, a TOML or "
    "configuration function of torchtitan, JSON of DeepSpeed, YAML of axolotl or LLaMA-Factory (with the JSON of "
    "DeepSpeed that it names); FILE.py:NAME for one of several functions. Needs --cluster."
)
_WHY = "Cost of another choice: fsdp, fsdp8, tp=8, stages=4, 'blocks 0-3: remat=full', or a plan file."
_RECORD = "Record of `train`: name slow ranks and the gain of planning around them."
_ALL = "Also list all that lost, was dominated or was not searched, with reasons."


@options.prints(Explained)
@options.with_levers
def explain(
    path: Annotated[Path, typer.Argument(help="Plan file; with --from the model.", metavar="PLAN|MODEL")],
    cluster: options.OtherCluster = None,
    network: options.NetworkOption = None,
    engine: options.EngineOption = None,
    memory: options.Memory = None,
    profile: options.ProfileOption = None,
    source: Annotated[Path | None, options.option("--from", "FILE", _FROM)] = None,
    global_batch: options.FileBatch = None,
    seq_len: options.FileSeqLen = None,
    micro_batch: options.FileMicroBatch = None,
    why: Annotated[str | None, options.option("--why-not", "TEXT", _WHY)] = None,
    record: Annotated[Path | None, options.option("--record", "FILE", _RECORD)] = None,
    everything: Annotated[bool, options.option("--all", None, _ALL)] = False,
    output: Annotated[Path | None, options.written("Write the plan with predictions to this file.")] = None,
    as_json: options.AsJson = False,
    *,
    levers: Mapping[str, str | None],
) -> None:
    """Explain a plan: why it wins, what limits it, the cost of other choices, and the value of more memory."""
    plan, notes = _read(path, source, cluster, engine, network, global_batch, seq_len, micro_batch, levers)
    with options.progress("counting the model's layers", silent=as_json) as show:
        if plan.is_mixed:
            not_with_pools({"--why-not": why, "--all": everything})
        given = Elsewhere(memory=memory, profile=profile)
        if source is None:  # the settings of a file are a plan for these already
            given = Elsewhere(cluster=cluster, network=network, engine=engine, **given)
        found = priced_or_reason(plan, path, **given)
        if isinstance(found, str):
            explanation = Explanation(binds="", notes=(f"baselines and other memory budgets are left out: {found}",))
        else:
            request, job = found
            explanation = _explained(plan, request, job, why, everything=everything, show=show)
            if plan.prediction is None or why or any(given.values()):
                plan = with_price(plan, job)
            plan = with_reasons(plan, job)
            if record is not None:
                show("planning without slow nodes")
                slow = slow_nodes(plan, request, job, record)
                longer = f"{SLOW_SHARE:.0%} longer than predicted, relative to the others"
                even = () if slow else (f"no rank of {record} computed more than {longer}",)
                explanation = explanation.model_copy(update={"slow_nodes": slow, "notes": (*explanation.notes, *even)})
    explanation = explanation.model_copy(update={"notes": (*notes, *explanation.notes)})
    if output is not None:
        write_plan(plan, output)
    if as_json:
        options.print_json(Explained(plan=plan, explanation=explanation))
    else:
        asked = explanation.why_not
        view = why_not_view(plan, asked) if asked else explain_view(plan, explanation, everything=everything)
        console().print(view)


def _read(
    path: Path,
    source: Path | None,
    cluster: str | None,
    engine: str | None,
    network: str | None,
    global_batch: int | None,
    seq_len: int | None,
    micro_batch: int | None,
    levers: Mapping[str, str | None],
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of a plan file, or of an engine's file ``source`` for the model ``path``, and notes on it."""
    if source is None:
        plan = read_plan(path)
        given = {"global-batch": global_batch, "seq-len": seq_len, "micro-batch": micro_batch, **levers}
        if option := next((name for name, value in given.items() if value is not None), None):
            raise UserError(
                field=f"--{option}",
                found="set for a plan file, which has its own",
                expected="--from with it",
                hint="leave it out, or plan again with another value",
            )
        return plan, ()
    if cluster is None:
        raise UserError(
            field="--cluster",
            found="nothing",
            expected="the cluster on which the file runs",
            hint="add --cluster 1x8xh100-80gb",
        )
    return plan_of_file(
        source,
        str(path),
        cluster,
        engine=engine,
        network=network,
        global_batch=global_batch,
        seq_len=seq_len,
        micro_batch=micro_batch,
        levers=levers,
    )


def _explained(
    plan: Plan, request: PlanRequest, job: Job, why: str | None, *, everything: bool, show: Callable[[str], None]
) -> Explanation:
    """Return the explanation of a plan; ``why`` is a pin or the name of another plan file."""
    study = Study(request, job)
    if job.is_mixed:
        return explain_pools(plan, study)
    if why is not None and why.endswith(".json"):
        return Explanation(binds="", why_not=why_not_plan(job, read_plan(why), asked=Path(why).name))
    if why is not None:
        pin = parse_pin(why, option="--why-not", num_layers=job.chain.num_layers)
        return Explanation(binds="", why_not=why_not(request, job, pin))
    return explain_plan(plan, study, everything=everything, progress=show)
