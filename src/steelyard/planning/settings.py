"""A plan as engineers set it for a framework: a few degrees for the whole model, stages of as many blocks each."""

from dataclasses import dataclass, replace

from steelyard.cost.job import Job
from steelyard.engines.capabilities import block_layers, unsupported
from steelyard.engines.execution import StateBytes
from steelyard.errors import InvalidPlanError, UserError
from steelyard.plan.dimensions.fsdp import ZERO
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import Remat, Strategy, parse_strategy
from steelyard.planning.price import assemble_plan
from steelyard.schedules import SCHEDULES, USUAL, PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Degrees of parallelism and what goes with them; the data degree is what is left of the devices."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    """Chunks of the model on every stage."""
    ep: int = 1
    """Ranks that the experts are divided over, among all ranks of a stage but those of cp."""
    micro_batch: int = 1
    """Samples of a microbatch on a data rank."""
    zero: int = 1
    """0: all replicated; 1: optimizer states sharded; 2: gradients too; 3: parameters too (FSDP)."""
    sp: bool = True
    """Sequence parallelism beside tp."""
    remat: Remat = Remat.NONE
    remat_blocks: int | None = None
    """Of every stage, or of every chunk, only so many blocks at its start are recomputed."""


def plan_of_settings(job: Job, settings: Settings) -> Plan:
    """Return the plan that these settings are for the job's model, devices, batch and engine, without a prediction.

    Raises `UserError` where they divide devices, batch or experts unevenly, or the engine cannot run them.
    """
    chain, devices = job.chain, job.cluster.num_devices
    model_ranks = settings.tp * settings.cp * settings.pp
    data = _divided("--tp, --cp and --pp", devices, model_ranks, "devices")
    count = _divided("--micro-batch", job.global_batch, data * settings.micro_batch, "samples of the global batch")
    experts = _divided("--ep", settings.ep, settings.tp, "ranks of experts by tp") if settings.ep > 1 else 1
    strategy = _strategy(job, settings, data, experts)
    schedule = next(each for each in SCHEDULES.values() if each.takes_chunks) if settings.vpp > 1 else USUAL
    pipeline = PipelineConfig(
        num_stages=settings.pp, num_chunks=settings.vpp, num_microbatches=count, schedule=schedule
    )
    blocks, recomputed = set(block_layers(chain)), settings.remat_blocks
    parts, first, size = [], 0, devices // settings.pp
    counts = _even(len(blocks), settings.pp * settings.vpp)
    ends = [sum(counts[: index + 1]) + 1 for index in range(len(counts) - 1)] + [chain.num_layers]
    for index, end in enumerate(ends):
        strategies, seen = [], 0
        for layer in range(first, end):
            is_block, layer_type = layer in blocks, chain.type_of(layer)
            own = strategy if layer_type.num_experts else strategy.with_whole_experts()
            keeps = not is_block or (recomputed is not None and seen >= recomputed)
            own = own.without_remat() if keeps else own
            is_whole = not is_block and chain.vocab_size % settings.tp
            strategies.append(own.with_whole_tensors() if is_whole else own)
            seen += is_block
        stage = index % settings.pp
        ranks = (stage * size, stage * size + size - 1)
        parts.append(StagePart(ranks=ranks, runs=fold_runs(first, tuple(strategies))))
        first = end
    plan = assemble_plan(job, pipeline, tuple(parts))
    if reasons := unsupported(plan, job.engine.capabilities):
        raise UserError(
            field="--engine",
            found=f"{job.engine.name} for {'; '.join(reasons)}",
            expected="settings that it can run",
            hint="give another --engine, or other settings",
        )
    return plan


def _strategy(job: Job, settings: Settings, data: int, experts: int) -> Strategy:
    """The strategy of a block; an engine with buffers of its own shards optimizer states of replicated parameters."""
    shards_itself = job.execution.keeps_own_buffers
    if isinstance(states := job.execution.states, StateBytes) and settings.zero < states.zero:
        raise UserError(
            field="--zero",
            found=f"{settings.zero} for {job.engine.name}",
            expected=f"{states.zero}: it is priced as it always shards states",
            hint="leave --zero out",
        )
    is_sharded = settings.zero >= (2 if shards_itself else 1)
    is_sharded &= data * settings.cp > 1
    levels = [f"fsdp{data}"] if is_sharded else [f"dp{data}"] if data > 1 else []
    levels += [f"cp{settings.cp}"] if settings.cp > 1 else []
    levels += [f"tp{settings.tp}{'+sp' if settings.sp else ''}"] if settings.tp > 1 else []
    stages = job.engine.capabilities.allowed(ZERO, is_piped=settings.pp > 1)
    is_one = len(stages) == 1 and is_sharded and not job.engine.capabilities.mixes_layers
    zero = max(stages) if is_one else settings.zero  # all that FSDP does in this engine
    words = ["-".join(levels) or "single"]
    words += [f"zero{zero}"] if is_sharded and zero != 3 else []
    words += [f"ep{experts}"] if experts > 1 else []
    try:
        found = parse_strategy(" ".join(words))
    except InvalidPlanError as error:
        raise UserError(**error.parts() | {"field": "settings"}) from None
    return replace(found, remat=Remat.FULL if settings.remat_blocks is not None else settings.remat)


def _divided(option: str, whole: int, parts: int, words: str) -> int:
    if whole % parts:
        raise UserError(
            field=option,
            found=f"{parts} for {whole} {words}",
            expected=f"a divisor of {whole}",
            hint="change the settings, the devices or the batch",
        )
    return whole // parts


def _even(blocks: int, parts: int) -> list[int]:
    """Numbers of blocks as even as can be, more in the middle of the pipeline than beside its ends."""
    if parts > blocks:
        raise UserError(
            field="--pp, --vpp",
            found=f"{parts} parts of the pipeline for {blocks} blocks",
            expected="a block or more for each",
            hint="lower --pp or --vpp",
        )
    least, more = divmod(blocks, parts)
    inner = sorted(range(parts), key=lambda part: abs(part - (parts - 1) / 2))[:more]
    return [least + (part in inner) for part in range(parts)]
