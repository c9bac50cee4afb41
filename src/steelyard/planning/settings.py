"""Plans as engineers configure them for a framework: a few degrees for the whole model, equally many blocks a stage."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from steelyard.cost.job import Job, layer_precision
from steelyard.cost.kernels import job_under
from steelyard.engines import READERS, check_levers, engine_of, model_refusal
from steelyard.engines.capabilities import block_layers, unsupported
from steelyard.engines.engine import Engine, Entries, Settings, python_function
from steelyard.errors import AbsentTargetsError, InvalidPlanError, UserError
from steelyard.files import read_text
from steelyard.hardware import parse_cluster
from steelyard.levers import LEVERS
from steelyard.levers.train import Train
from steelyard.model.chain import ModelChain
from steelyard.model.read import load_model
from steelyard.plan.dimensions import DIMENSIONS
from steelyard.plan.dimensions.cp import METHOD
from steelyard.plan.dimensions.fsdp import ZERO
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import Remat, Strategy, parse_strategy
from steelyard.planning.job import job_of
from steelyard.planning.price import assemble_plan, peak_bytes, with_price
from steelyard.planning.request import PlanRequest, check_precision, make_request
from steelyard.precision import Precision
from steelyard.schedules import SCHEDULES, USUAL, PipelineConfig, Schedule, find_schedule
from steelyard.units import format_bytes, format_seconds

__all__ = ["Settings", "plan_of_file", "plan_of_settings", "price_settings", "usual_zero"]


def usual_zero(engine: Engine, *, is_piped: bool) -> int:
    """Return the ZeRO stage of settings that do not give one: 1, or else the highest that the engine has."""
    allowed = engine.capabilities.allowed(ZERO, is_piped=is_piped)
    has_1 = engine.capabilities.mixes_layers or engine.execution.keeps_own_buffers or 1 in allowed
    return 1 if has_1 else max(int(value) for value in allowed)


def price_settings(request: PlanRequest, engine: Engine, precision: Precision, settings: Settings) -> tuple[Plan, Job]:
    """Return the plan of settings with its price under an engine, and its job.

    ``request`` is for this engine or for our own runtime. Optimizer states are replicated for ``zero`` 0, even if the
    engine shards them by itself. Raises `UserError` as `plan_of_settings`.
    """
    check_levers(request.levers, request.chain, engine)
    if request.global_batch is not None:
        _divisions(request.chain, request.cluster.num_devices, request.global_batch, settings)  # before the trace
    states = engine.execution.states
    if settings.zero == 0 and states is not None:
        engine = replace(engine, execution=replace(engine.execution, states=replace(states, zero=0)))
    job = job_under(replace(job_of(request, (settings.tp, settings.cp)), precision=precision), engine)
    return with_price(plan_of_settings(job, settings), job), job


def plan_of_file(
    path: Path,
    model: str,
    cluster: str,
    *,
    engine: str | None = None,
    network: str | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    micro_batch: int | None = None,
    levers: Mapping[str, str | None] | None = None,
) -> tuple[Plan, tuple[str, ...]]:
    """Return the priced plan that a file of an engine describes, and notes on how it was read.

    A path may name a function of a Python file, as ``recipes.py:mine``.

    ``engine`` defaults to one that reads files with that ending. ``global_batch``, ``seq_len``, ``micro_batch`` and
    ``levers`` override the file. Raises `UserError` if the file cannot be read or is incomplete.
    """
    path, function = _parted(path)
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, "a file with settings") from None
    runs_it = engine_of(engine) if engine else _reader_of(path, text)
    if runs_it is None or (reader := runs_it.reader) is None:
        known = {name: each.reader.suffixes for name, each in READERS.items() if each.reader is not None}
        raise UserError(
            field="--from",
            found=f"{path}: no file of these, by its ending and content"
            if runs_it is None
            else f"a file of {runs_it.name}",
            expected="; ".join(f"{name}: {' or '.join(suffixes)}" for name, suffixes in known.items()),
            hint="give the settings to steelyard price by its options",
        )
    chain, machines = load_model(model), parse_cluster(cluster)
    _check_reader(runs_it, chain)
    try:
        entries = Entries(reader.values(python_function(text, function) if path.suffix == ".py" else text), path)
        found = reader.read(entries, chain, machines.num_devices)
        if entries.are_unknown:
            raise UserError(
                field="--from",
                found=f"{path}: no setting of parallelism or batch",
                expected=f"a file that {runs_it.name} reads, with the settings in itself",
                hint="pass the file that it starts or includes, or give the settings to steelyard price by its options",
            )
    except UserError:
        raise
    except (ValueError, SyntaxError) as error:
        raise _unreadable(path, error, f"a file that {runs_it.name} reads") from None
    if found.engine is not None:
        runs_it = found.engine
        _check_reader(runs_it, chain)
    plain, offered = runs_it, [each for each in found.options if each in runs_it.options]
    runs_it = plain.with_options([each for each in offered if plain.options[each].change(plain) != plain])
    check_precision(runs_it, found.precision)
    precision = next(each for each in runs_it.precisions if each == found.precision)
    given = {name: text for name, text in (levers or {}).items() if text is not None}
    chosen = {**found.levers, **given}
    global_batch, seq_len, micro_batch = _needed(
        path,
        {
            "--global-batch": global_batch or found.global_batch,
            "--seq-len": seq_len or found.seq_len,
            "--micro-batch": micro_batch or found.micro_batch,
        },
    )
    requested = partial(
        make_request,
        chain,
        machines,
        network=network,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=layer_precision(precision),
        engine=runs_it.name if chosen else None,
    )
    request, remarks = _with_targets(requested, chosen, are_given="train" in given)
    unread = (*found.unread, *(each for each in found.options if each not in offered), *remarks)
    notes = [f"Not read of {path.name}: {', '.join(unread)}."] if unread else []
    if assumed := [name for name in reader.untold if name not in given]:
        named = ", ".join(f"--{name} {LEVERS[name]()}" for name in assumed)
        notes.append(f"Assumed, because {path.name} cannot say it: {named}.")
    settings = replace(found.settings, micro_batch=micro_batch)
    if settings.zero == 0 and runs_it.execution.keeps_own_buffers:
        whole, _ = price_settings(request, runs_it, precision, settings)
        assert whole.prediction is not None, "just priced"
        notes.append(
            f"{path.name} replicates the optimizer: {format_seconds(whole.prediction.step_time_s)} a step and "
            f"{format_bytes(peak_bytes(whole))} per device. The plan has it sharded, as all plans for {runs_it.name}."
        )
        settings = replace(settings, zero=1)
    plan, _ = price_settings(request, runs_it, precision, settings)
    return plan, tuple(notes)


def _parted(path: Path) -> tuple[Path, str | None]:
    name, is_named, function = path.name.partition(".py:")
    return (path.with_name(f"{name}.py"), function) if is_named else (path, None)


def _with_targets(
    requested: Callable[..., PlanRequest], levers: Mapping[str, str], *, are_given: bool
) -> tuple[PlanRequest, list[str]]:
    """Return the request with these levers, and a remark on targets of a file that are left out, as by peft: names of
    no layer of the model, beside others."""
    try:
        return requested(levers=levers), []
    except AbsentTargetsError as error:
        if are_given or not error.present:
            raise
        train = replace(Train.parse(levers["train"]), targets=error.present)
        remark = f"the targets {', '.join(error.absent)} of adapters (no such layers)"
        return requested(levers={**levers, "train": str(train)}), [remark]


def _unreadable(path: Path, error: Exception, expected: str) -> UserError:
    hint = "correct the path or the file, or give the settings to steelyard price by its options"
    reason = getattr(error, "strerror", None) or error  # of an OSError, without the path again
    return UserError(field="--from", found=f"{path}: {reason}", expected=expected, hint=hint)


def _check_reader(engine: Engine, chain: ModelChain) -> None:
    """Raise `UserError` if an engine cannot train the model; its hint is another engine that reads the same files."""
    if (reason := model_refusal(engine, chain, 1)) is None:
        return
    mine = {*engine.reader.suffixes} if engine.reader else set()
    others = (name for name, each in READERS.items() if each.reader and mine < {*each.reader.suffixes})
    other = next((name for name in others if model_refusal(READERS[name], chain, 1) is None), None)
    hint = (
        f"add --engine {other}, which reads the same file and takes its own defaults"
        if other
        else "price its settings by steelyard price"
    )
    raise UserError(field="--from", found=reason.found, expected=reason.expected, hint=hint)


def _reader_of(path: Path, text: str) -> Engine | None:
    """Return the engine whose files have this ending and contain its mark; engines without a mark come last."""
    found = [each for each in READERS.values() if each.reader and path.suffix in each.reader.suffixes]
    found = [each for each in found if each.reader and (each.reader.mark is None or each.reader.mark(text))]
    return max(found, key=lambda each: bool(each.reader and each.reader.mark), default=None)


def _needed(path: Path, values: Mapping[str, int | None]) -> list[int]:
    """Return these numbers by the names of their options. Raises `UserError` if the file and the command lack one."""
    if missing := [option for option, value in values.items() if value is None]:
        raise UserError(
            field=missing[0],
            found=f"none in {path.name}",
            expected="a number",
            hint=f"add {' and '.join(missing)} to the command",
        )
    return [value for value in values.values() if value is not None]


def plan_of_settings(job: Job, settings: Settings) -> Plan:
    """Return the plan of these settings for the job's model, devices, batch and engine, without a prediction.

    Raises `UserError` if they divide devices, batch or experts unevenly, or if the engine cannot run them.
    """
    chain, devices = job.chain, job.cluster.num_devices
    data, count, experts = _divisions(chain, devices, job.global_batch, settings)
    strategy = _strategy(job, settings, data, experts)
    pipeline = PipelineConfig(
        num_stages=settings.pp, num_chunks=settings.vpp, num_microbatches=count, schedule=_schedule(settings)
    )
    pipeline.check()
    if chain.vocab_size % settings.tp and settings.micro_batch % settings.tp:
        raise UserError(
            field="--micro-batch",
            found=f"{settings.micro_batch} with tp {settings.tp}, which does not divide {chain.vocab_size} tokens",
            expected="a multiple of tp, because embedding and head divide samples instead of the vocabulary",
            hint=f"give --micro-batch {settings.tp}, or a config whose vocab_size is padded",
        )
    blocks, recomputed = set(block_layers(chain)), settings.remat_blocks
    parts, first, size = [], 0, devices // settings.pp
    num_parts = settings.pp * settings.vpp
    counts = _even(len(blocks), num_parts) if settings.blocks is None else list(settings.blocks)
    if len(counts) != num_parts or sum(counts) != len(blocks):
        raise UserError(
            field="blocks of each stage",
            found=f"{', '.join(map(str, counts))}",
            expected=f"{len(blocks)} blocks in {num_parts} parts",
            hint="correct the layout, or leave it out",
        )
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
        stage = pipeline.stage_of(index)
        ranks = (stage * size, stage * size + size - 1)
        parts.append(StagePart(ranks=ranks, runs=fold_runs(first, tuple(strategies))))
        first = end
    plan = assemble_plan(job, pipeline, tuple(parts))
    if reasons := unsupported(plan, job.engine.capabilities):
        chosen = [f"--{each.name} {each}" for each in job.levers]
        raise UserError(
            field="--engine",
            found=" and ".join((f"{job.engine.name} with {'; '.join(reasons)}", *chosen)),
            expected="settings that this engine can run",
            hint="change these settings, or give another --engine",
        )
    return plan


def _divisions(chain: ModelChain, devices: int, global_batch: int, settings: Settings) -> tuple[int, int, int]:
    """Return the numbers of data ranks, of microbatches, and of ranks that divide experts within tp's.

    Raises `UserError` if settings divide devices, batch or experts unevenly, or a dimension does not serve the model.
    """
    for dimension in DIMENSIONS.values():
        degree = getattr(settings, dimension.name, 1)
        if degree > 1 and (reason := dimension.serves(chain)):
            raise UserError(
                field=f"--{dimension.name}",
                found=f"{degree} for {chain.name}",
                expected=f"1, because {reason}",
                hint="leave it out",
            )
    model_ranks = settings.tp * settings.cp * settings.pp
    data = _divided("--tp, --cp and --pp", devices, model_ranks, "devices")
    count = _divided(
        "--micro-batch",
        global_batch,
        data * settings.micro_batch,
        f"samples of the global batch, {settings.micro_batch} on each of {data} data ranks",
    )
    experts = _divided("--ep", settings.ep, settings.tp, "ranks of experts by tp") if settings.ep > 1 else 1
    return data, count, experts


def _strategy(job: Job, settings: Settings, data: int, experts: int) -> Strategy:
    """Return the strategy of a block. An engine with its own buffers shards optimizer states of replicated
    parameters."""
    if (states := job.execution.states) is not None and settings.zero < states.zero:
        raise UserError(
            field="--zero",
            found=f"{settings.zero} for {job.engine.name}",
            expected=f"{states.zero}: a plan for it has these states sharded",
            hint="leave --zero out, or price the settings without a plan (steelyard price)",
        )
    is_sharded = settings.zero >= (2 if job.execution.keeps_own_buffers else 1)
    replicas = settings.replicas if is_sharded else data
    shards = _divided("data ranks that shard states", data, replicas, "data ranks")
    is_sharded &= shards * settings.cp > 1
    levels = [f"dp{replicas}"] if replicas > 1 else []
    levels += [f"fsdp{shards}"] if is_sharded else []
    levels += [f"cp{settings.cp}"] if settings.cp > 1 else []
    levels += [f"tp{settings.tp}{'+sp' if settings.sp else ''}"] if settings.tp > 1 else []
    stages = job.engine.capabilities.allowed(ZERO, is_piped=settings.pp > 1)
    is_one = len(stages) == 1 and is_sharded and not job.engine.capabilities.mixes_layers
    zero = max(stages) if is_one else settings.zero  # the only ZeRO stage of this engine's FSDP
    method = METHOD.texts[settings.cp_method] if settings.cp > 1 else ""
    words = [("-".join(levels) or "single") + method]
    words += [f"zero{zero}"] if is_sharded and zero != 3 else []
    words += [f"ep{experts}"] if experts > 1 else []
    try:
        found = parse_strategy(" ".join(words))
    except InvalidPlanError as error:
        raise UserError(**error.parts() | {"field": "settings"}) from None
    return found.with_remat(Remat.FULL if settings.remat_blocks is not None else settings.remat)


def _schedule(settings: Settings) -> Schedule:
    if settings.schedule is None:
        return next(each for each in SCHEDULES.values() if each.takes_chunks) if settings.vpp > 1 else USUAL
    found = find_schedule(settings.schedule)
    if settings.pp == 1 or found.takes_chunks != (settings.vpp > 1):
        raise UserError(
            field="--schedule",
            found=f"{found.name} with --pp {settings.pp} --vpp {settings.vpp}",
            expected=f"two or more stages with {'two or more chunks' if found.takes_chunks else 'one chunk'} each",
            hint="change --pp or --vpp, or leave --schedule out",
        )
    return found


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
    """Return numbers of blocks that are as even as possible, larger in the middle of the pipeline than at its ends."""
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
