"""``steelyard price``: what a plan takes that an engineer set, in the words of the framework that runs it."""

from collections.abc import Mapping
from typing import Annotated

import typer

from steelyard.cli import options
from steelyard.cli.levers import with_levers
from steelyard.cost.job import ASSUMED_IMBALANCE, layer_precision
from steelyard.engines import engine_of
from steelyard.engines.native import NATIVE
from steelyard.errors import UserError
from steelyard.limits import MOST_DEVICES, MOST_LAYERS, MOST_SAMPLES
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.planning.price import peak_bytes
from steelyard.planning.request import check_precision, make_request
from steelyard.planning.settings import Settings, price_settings
from steelyard.units import format_bytes, format_seconds, format_tera


@options.prints(Plan)
@with_levers
def price(
    model: options.Model,
    cluster: options.ClusterOption,
    global_batch: options.GlobalBatch,
    seq_len: options.SeqLen = None,
    engine: options.EngineOption = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree.", min=1, max=MOST_DEVICES)] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel degree.", min=1, max=MOST_DEVICES)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", min=1, max=MOST_LAYERS)] = 1,
    vpp: Annotated[int, typer.Option(help="Chunks of the model on a stage.", min=1, max=MOST_LAYERS)] = 1,
    ep: Annotated[int, typer.Option(help="Ranks that experts are divided over.", min=1, max=MOST_DEVICES)] = 1,
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", help="Samples of a microbatch on a data rank.", min=1, max=MOST_SAMPLES)
    ] = 1,
    zero: Annotated[
        int,
        typer.Option(help="Data ranks shard: 0 nothing, 1 the optimizer, 2 gradients, 3 parameters.", min=0, max=3),
    ] = 1,
    sp: Annotated[bool, typer.Option("--sp/--no-sp", help="Sequence parallelism beside tp.")] = True,
    remat: Annotated[str, typer.Option(help="Activation checkpointing of blocks: none, selective or full.")] = "none",
    remat_blocks: Annotated[
        int | None,
        typer.Option("--remat-blocks", help="Full remat of so many blocks of every chunk.", min=0, max=MOST_LAYERS),
    ] = None,
    precision: options.PrecisionOption = "bf16",
    network: options.NetworkOption = None,
    memory: options.Memory = None,
    imbalance: options.Imbalance = ASSUMED_IMBALANCE,
    output: options.Output = None,
    as_json: options.AsJson = False,
    *,
    levers: Mapping[str, str | None],
) -> None:
    """Price settings of your own: step time, memory and whether they fit, as the engine runs them.

    Whether the engine can train the model is not asked.
    """
    chosen, runs_it = options.parse_precision(precision), engine_of(engine or NATIVE.name)
    check_precision(runs_it, chosen)
    with options.progress("counting the model's layers", silent=as_json):
        request = make_request(
            model,
            cluster,
            global_batch=global_batch,
            seq_len=seq_len,
            network=network,
            memory=memory,
            memory_margin=0.0,
            precision=layer_precision(chosen),
            imbalance=imbalance,
            levers=levers,
        )
        settings = Settings(
            tp=tp,
            cp=cp,
            pp=pp,
            vpp=vpp,
            ep=ep,
            micro_batch=micro_batch,
            zero=zero,
            sp=sp,
            remat=options.check_choices("--remat", remat, {each.value: each for each in Remat})[0],
            remat_blocks=remat_blocks,
        )
        plan, job = price_settings(request, runs_it, chosen, settings)
    if output is not None and job.engine != runs_it:
        raise UserError(
            field="--output",
            found=f"--zero {zero} for {runs_it.name}",
            expected="optimizer states sharded, as all plans for it have them",
            hint="leave --output or --zero out",
        )
    if output is not None:
        write_plan(plan, output)
    if as_json:
        options.print_json(plan)
    else:
        print(_line(plan, job.engine.name, job.budget_bytes))


def _line(plan: Plan, engine: str, budget_bytes: int) -> str:
    prediction, taken = plan.prediction, peak_bytes(plan)
    assert prediction is not None, "just priced"
    fits = "fits" if taken <= budget_bytes else f"does not fit, {format_bytes(taken - budget_bytes)} too much"
    host = f"; {prediction.host}" if prediction.host else ""
    return (
        f"{engine}: {format_seconds(prediction.step_time_s)} a step, "
        f"{format_tera(prediction.model_flop_per_s or 0)} TFLOP/s per device, "
        f"{format_bytes(taken)} of {format_bytes(budget_bytes)} per device: {fits}{host}"
    )
