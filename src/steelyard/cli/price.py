"""``steelyard price``: step time and memory of settings of your own."""

from dataclasses import replace
from typing import Annotated, Any

from steelyard.cli import options
from steelyard.cli.job_options import JobOptions
from steelyard.cost.job import ASSUMED_IMBALANCE, layer_precision
from steelyard.engines import check_model, engine_of, model_refusal
from steelyard.engines.native import NATIVE
from steelyard.errors import UserError
from steelyard.hardware import parse_cluster
from steelyard.limits import MOST_DEVICES, MOST_LAYERS, MOST_SAMPLES
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.planning.price import peak_bytes
from steelyard.planning.request import check_precision
from steelyard.planning.settings import Settings, price_settings, usual_zero
from steelyard.report.plan_table import warning_lines
from steelyard.report.tables import console
from steelyard.schedules import SCHEDULES
from steelyard.units import format_bytes, format_seconds, format_tera


def _setting(flag: str, text: str, most: int, least: int = 1) -> Any:
    return options.count(flag, text, options.PARALLELISM, most=most, least=least, example="1")


_ZERO = (
    "Sharded over data ranks: 0 nothing, 1 optimizer, 2 also gradients, 3 also parameters. "
    "Default: 1, or the highest that the engine has."
)
_SP = "Sequence parallelism with tp."
_REMAT = "Activation checkpointing of blocks: none, selective, full."
_SCHEDULE = f"Pipeline schedule: {', '.join(SCHEDULES)}."
_REMAT_BLOCKS = "Number of blocks per chunk with full remat."


@options.prints(Plan)
@options.with_levers
def price(
    job: JobOptions,
    tp: Annotated[int, _setting("--tp", "Tensor-parallel degree.", MOST_DEVICES)] = 1,
    cp: Annotated[int, _setting("--cp", "Context-parallel degree.", MOST_DEVICES)] = 1,
    pp: Annotated[int, _setting("--pp", "Pipeline stages.", MOST_LAYERS)] = 1,
    vpp: Annotated[int, _setting("--vpp", "Virtual stages: chunks of the model per stage.", MOST_LAYERS)] = 1,
    schedule: Annotated[str | None, options.option("--schedule", "NAME", _SCHEDULE, options.PARALLELISM)] = None,
    ep: Annotated[int, _setting("--ep", "Expert-parallel degree.", MOST_DEVICES)] = 1,
    micro_batch: Annotated[int, _setting("--micro-batch", "Samples of a microbatch per rank.", MOST_SAMPLES)] = 1,
    zero: Annotated[int | None, _setting("--zero", _ZERO, 3, 0)] = None,
    sp: Annotated[bool, options.option("--sp/--no-sp", None, _SP, options.PARALLELISM)] = True,
    remat: Annotated[str, options.option("--remat", "NAME", _REMAT, options.PARALLELISM)] = "none",
    remat_blocks: Annotated[int | None, _setting("--remat-blocks", _REMAT_BLOCKS, MOST_LAYERS, 0)] = None,
    imbalance: options.Imbalance = ASSUMED_IMBALANCE,
    output: options.Output = None,
    as_json: options.AsJson = False,
) -> None:
    """Predict step time and memory of settings of your own, as the engine runs them, and whether they fit.

    A model that the engine does not support is priced too, with a note; a plan file is not written for it.
    """
    chosen, runs_it = options.parse_precision(job.precision), engine_of(job.engine or NATIVE.name)
    check_precision(runs_it, chosen)
    with options.progress("counting the model's layers", silent=as_json):
        request = job.request(
            cluster=parse_cluster(job.cluster),
            memory_margin=0.0,
            precision=layer_precision(chosen),
            imbalance=imbalance,
            engine=replace(runs_it, refuse=NATIVE.refuse),
        )
        settings = Settings(
            tp=tp,
            cp=cp,
            pp=pp,
            vpp=vpp,
            schedule=schedule,
            ep=ep,
            micro_batch=micro_batch,
            zero=usual_zero(runs_it, is_piped=pp > 1) if zero is None else zero,
            sp=sp,
            remat=options.check_choices("--remat", remat, {each.value: each for each in Remat})[0],
            remat_blocks=remat_blocks,
        )
        plan, priced = price_settings(request, runs_it, chosen, settings)
    if output is not None and zero == 0 and runs_it.execution.keeps_own_buffers:
        raise UserError(
            field="--output",
            found=f"--zero 0 for {runs_it.name}",
            expected="sharded optimizer states, as in all plans for this engine",
            hint="leave out --output or --zero",
        )
    if output is not None:
        check_model(runs_it, plan.chain(), plan.seq_len)  # the commands that read plans refuse it
        write_plan(plan, output)
    if as_json:
        options.print_json(plan)
        return
    print(_line(plan, priced.engine.name, priced.budget_bytes))
    told = console(stderr=True)
    for line in warning_lines(plan.prediction):
        told.print(line)
    if (error := model_refusal(runs_it, plan.chain(), plan.seq_len)) is not None:
        told.print(f"Only priced: found {error.found}; a plan for {runs_it.name} expects {error.expected}", style="dim")


def _line(plan: Plan, engine: str, budget_bytes: int) -> str:
    prediction, taken = plan.prediction, peak_bytes(plan)
    assert prediction is not None, "just priced"
    fits = "fits" if taken <= budget_bytes else f"does not fit ({format_bytes(taken - budget_bytes)} too much)"
    host = f"; {prediction.host}" if prediction.host else ""
    return (
        f"{engine}: {format_seconds(prediction.step_time_s)} per step, "
        f"{format_tera(prediction.model_flop_per_s or 0)} TFLOP/s per device, "
        f"{format_bytes(taken)} of {format_bytes(budget_bytes)} per device: {fits}{host}"
    )
