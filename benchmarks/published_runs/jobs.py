"""Turns a published run into a job and a plan that the cost model can price, or into the reason why not.

Nothing is guessed: a row that lacks a size or a degree, or uses what is not modelled, is skipped with its reason. A
ring of context parallelism is priced as a gather of keys and values. What a row leaves open and hardly matters is taken
from the device's reference system: the number of devices in a node, the links, and the memory variant of a device that
comes in several (the larger).
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from published_runs.frameworks import Framework, Reports, framework_of, levers_of, precision_of, workspace_bytes
from published_runs.rows import PublishedRun
from steelyard.cost.decoder import DecoderShape, Latent, decoder_layer
from steelyard.cost.decoder_experts import Experts
from steelyard.cost.efficiency import Efficiency
from steelyard.cost.job import DeviceGroup, Job, tuned_over_experts
from steelyard.cost.kernels import kernels_of
from steelyard.engines.execution import Kernels
from steelyard.engines.native import NATIVE
from steelyard.errors import UserError
from steelyard.hardware import Cluster, Link
from steelyard.hardware.files import default_links, find_device, find_link
from steelyard.hardware.values import Device, NodeGroup
from steelyard.levers import Effects
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.family import KV_HEADS, Task
from steelyard.model.read import chain_from_config
from steelyard.model.split import BlockCall, ModelSplit, SplitLayerType
from steelyard.plan.dimensions import CP, DP, FSDP, TP
from steelyard.plan.dimensions.dimension import Level
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import Remat, Strategy
from steelyard.profiles.profile import Profile, ProfileIdentity
from steelyard.schedules import Schedule
from steelyard.schedules.gpipe import GPIPE
from steelyard.schedules.interleaved import INTERLEAVED_1F1B
from steelyard.schedules.one_f_one_b import ONE_F_ONE_B
from steelyard.units import GB

_GATED = {"swiglu": True, "geglu": True, "gelu": False, "squared_relu": False}
_DENSE, _SPARSE = "dense block", "sparse block"
"""The block types where some have experts and some do not."""
_ENDS = (LayerRole.EMBEDDING, LayerRole.HEAD)
_VOCAB_MULTIPLE = 128
"""Frameworks pad the vocabulary so that each tensor-parallel rank has a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Why a run is not predicted."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run as the cost model sees it."""

    run: PublishedRun
    job: Job
    plan: Plan
    reports: Reports
    """The rank that the row's memory is of."""
    workspace_bytes: int
    """What kernels keep in torch's memory beside tensors."""
    rates: tuple[tuple[str, float], ...] = ()
    """As `Framework.rates`."""

    def timed_at(self, rates: Efficiency) -> Job:
        """The job at these rates, as far as the row's time shows them."""
        shown: dict[str, Any] = {name: part * getattr(rates, name) for name, part in self.rates}
        return self.job.on(rates=replace(rates, **shown))


class _SkipError(Exception):
    """A reason to skip a row; never leaves this module."""


def case_of(run: PublishedRun) -> Case | Skipped:
    """The job and the plan of a run, or why it cannot be predicted."""
    try:
        return _case(run)
    except _SkipError as skip:
        return Skipped(reason=str(skip))
    except UserError as error:
        return Skipped(reason=f"not a legal plan: {error.field}: {error.expected}")


def _case(run: PublishedRun) -> Case:
    _refuse_what_is_not_modelled(run)
    framework = framework_of(run)
    if framework is None:
        raise _SkipError(f"framework not known: {run.text('framework') or 'none given'}")
    degrees = _degrees(run)
    shape = _shape(run, degrees, framework)
    cluster = _cluster(run)
    precision, levers = precision_of(run), levers_of(run)
    chain = levers.change(_chain(shape))
    strategy, framework = _strategy(run, framework, degrees, shape)
    engine = replace(NATIVE, name=run.text("framework"), execution=framework.execution, precisions=(precision,))
    imbalance = _imbalance(run, framework)
    kernels, slowdown = kernels_of(engine, precision), tuned_over_experts(engine, cluster.device)
    assert kernels is not None, "of every framework here"
    profile = _profile(shape, kernels, degrees.tp, bool(strategy.mode("sp")), imbalance, slowdown, levers.effects)
    job = Job(
        chain=chain,
        groups=(DeviceGroup(profile=profile, cluster=cluster, budget_bytes=cluster.device.known_memory_bytes()),),
        seq_len=shape.decoder.seq_len,
        global_batch=degrees.global_batch,
        precision=precision,
        engine=engine,
        imbalance=imbalance,
        levers=levers,
    )
    plan = _plan(job, degrees, strategy, shape, framework, run)
    case = Case(
        run=run,
        job=job,
        plan=plan,
        reports=framework.reports,
        workspace_bytes=workspace_bytes(run, framework),
        rates=framework.rates,
    )
    return replace(case, job=case.timed_at(job.efficiency)) if case.rates else case


def _refuse_what_is_not_modelled(run: PublishedRun) -> None:
    if run.text("decoder_layers"):
        raise _SkipError("encoder-decoder")
    if run.text("offload"):
        raise _SkipError("offload")
    if run.text("schedule").upper().startswith("ZB"):
        raise _SkipError("zero-bubble schedule")
    if not run.text("precision") and "MLPerf" in run.text("framework"):
        raise _SkipError("precision not stated, fp8 or fp4")
    if run.text("precision") == "fp32":
        raise _SkipError("fp32 or TF32, which of them is not stated")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Degrees:
    devices: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    chunks: int
    dp: int
    microbatches: int
    global_batch: int


def _needed(run: PublishedRun, column: str) -> int:
    value = run.count(column)
    if value is None:
        raise _SkipError(f"{column} missing")
    return value


def _degrees(run: PublishedRun) -> _Degrees:
    devices, tp, pp = (_needed(run, column) for column in ("gpus", "tp", "pp"))
    samples, batch, cp = _needed(run, "mbs"), _needed(run, "gbs"), run.count("cp") or 1
    if devices % (tp * pp * cp):
        raise _SkipError("tp × pp × cp does not divide the devices")
    dp = devices // (tp * pp * cp)
    if batch % (samples * dp):
        raise _SkipError("microbatch × dp does not divide the global batch")
    return _Degrees(
        devices=devices,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=run.count("ep") or 1,
        etp=run.count("etp") or (tp if (run.count("ep") or 1) == 1 else 1),
        chunks=(run.count("vpp") or 1) if pp > 1 else 1,
        dp=dp,
        microbatches=batch // (samples * dp),
        global_batch=batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A decoder with its number of blocks, and where some have experts, of those before them that have none."""

    decoder: DecoderShape
    num_layers: int
    dense_blocks: int
    tied: Literal["no", "on one rank", "across stages"]


def _shape(run: PublishedRun, degrees: _Degrees, framework: Framework) -> _Shape:
    if run.text("mlp_type") not in _GATED:
        raise _SkipError("mlp_type missing" if not run.text("mlp_type") else f"mlp_type {run.text('mlp_type')}")
    hidden, heads, vocab = (_needed(run, column) for column in ("hidden", "heads", "vocab"))
    padded = -(-vocab // (_VOCAB_MULTIPLE * degrees.tp)) * _VOCAB_MULTIPLE * degrees.tp
    experts = _experts(run, degrees) if run.text("moe_experts") else None
    dense_blocks = _needed(run, "moe_dense_layers") if experts else 0
    is_tied = run.text("tied_emb") == "True"
    decoder = DecoderShape(
        hidden=hidden,
        heads=heads,
        kv_heads=run.count("kv_heads") or heads,
        head_dim=run.count("head_dim") or hidden // heads,
        ffn=_needed(run, "ffn") if dense_blocks or not experts else 0,
        gated=_GATED[run.text("mlp_type")],
        vocab=run.count("vocab_padded") or (padded if framework.pads_vocab else vocab // degrees.tp * degrees.tp),
        seq_len=_needed(run, "seq_len"),
        rotary=run.text("pos_emb") in {"rope", ""} and _GATED[run.text("mlp_type")],
        own_head=not is_tied or degrees.pp > 1,
        latent=_latent(run),
        experts=experts,
        shared_ffn=(run.count("moe_shared_ffn") or _shared_ffn(run)) if experts else 0,
    )
    return _Shape(
        decoder=decoder,
        num_layers=_needed(run, "layers") + (run.count("mtp_layers") or 0),
        dense_blocks=dense_blocks,
        tied="no" if not is_tied else "on one rank" if degrees.pp == 1 else "across stages",
    )


def _experts(run: PublishedRun, degrees: _Degrees) -> Experts:
    if degrees.ep * degrees.etp < degrees.tp and degrees.ep > 1:
        raise _SkipError(f"experts over {degrees.ep * degrees.etp} ranks beside tp {degrees.tp}")
    return Experts(
        count=_needed(run, "moe_experts"),
        top_k=_needed(run, "moe_topk"),
        ffn=_needed(run, "moe_ffn"),
        etp=degrees.etp,
    )


def _shared_ffn(run: PublishedRun) -> int:
    """The width of all experts together that every token takes, where the row counts experts of one width."""
    return _needed(run, "moe_shared_experts") * _needed(run, "moe_ffn")


def _latent(run: PublishedRun) -> Latent | None:
    keys = run.count("mla_kv_lora")
    if not keys:
        if run.text("model").lower().startswith(("deepseek-v", "deepseek_v", "kimi")):
            raise _SkipError("widths of latent attention missing")
        return None
    return Latent(
        queries=run.count("mla_q_lora") or 0,
        keys=keys,
        plain=_needed(run, "mla_qk_nope"),
        rotary=_needed(run, "mla_qk_rope"),
        values=_needed(run, "mla_v_head"),
    )


_BY_EXAMPLE = "the example command forces it"
"""What the notes say of rows that name no balance, of a repository whose command does."""


def _imbalance(run: PublishedRun, framework: Framework) -> float:
    """How many times the mean of tokens the fullest rank computes: even where routing is forced or padded to be."""
    said = f"{run.text('moe_balance')} {run.text('overlap')} {run.text('notes').partition(_BY_EXAMPLE)[1]}"
    is_even = any(word in said for word in ("forced", "padded", _BY_EXAMPLE))
    return 1.0 if is_even and "not forced" not in run.text("moe_balance") else framework.imbalance


@cache
def _chain(shape: _Shape) -> ModelChain:
    """The model as a config that divides alike; a part of an expert's width counts as an expert of its own."""
    decoder = shape.decoder
    config: dict[str, object] = {
        "model_type": "llama" if decoder.gated else "gpt_neox",
        "hidden_size": decoder.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": decoder.heads,
        "head_dim": decoder.head_dim,
        "intermediate_size": decoder.ffn or decoder.hidden,
        "vocab_size": decoder.vocab,
        "max_position_embeddings": decoder.seq_len,
        "tie_word_embeddings": shape.tied == "across stages",
    }
    if decoder.experts is not None:
        config |= {
            "model_type": "qwen3_moe",
            "num_key_value_heads": decoder.heads,
            "num_experts": decoder.experts.count * decoder.experts.etp,
            "num_experts_per_tok": decoder.experts.top_k,
            "moe_intermediate_size": decoder.experts.ffn,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(shape.dense_blocks)),
        }
    return chain_from_config(config, name="published", split=_split(shape))


def _split(shape: _Shape) -> ModelSplit:
    """How such a model splits: embedding, blocks (dense ones first where others have experts), norm and projection."""
    decoder = shape.decoder
    heads, width = ((name, decoder.heads) for name in ("attention heads", KV_HEADS)), decoder.ffn or decoder.hidden
    divides = (*heads, ("feed-forward width", width))
    block = SplitLayerType(name="block", role=LayerRole.BLOCK, tp_divides=divides)
    ends = [SplitLayerType(name=each.value, role=each, tp_divides=(("vocabulary", decoder.vocab),)) for each in _ENDS]
    blocks, places = [block], [1] * shape.num_layers
    if decoder.experts is not None:
        experts = decoder.experts.count * decoder.experts.etp
        sparse = block.model_copy(update={"tp_divides": (*divides[:2], ("experts", experts)), "num_experts": experts})
        blocks = [sparse]
        if shape.dense_blocks:
            named = {_DENSE: block, _SPARSE: sparse}
            blocks = [layer_type.model_copy(update={"name": name}) for name, layer_type in named.items()]
            places = [1] * shape.dense_blocks + [2] * (shape.num_layers - shape.dense_blocks)
    last = len(blocks) + 1
    tied = ((0, "model.embed_tokens.weight"), (shape.num_layers + 1, "lm_head.weight"))
    return ModelSplit(
        model_type="llama",
        task=Task.CAUSAL_LM,
        embedding=("model.embed_tokens",),
        blocks="model.layers",
        head=("model.norm", "lm_head"),
        kinds=(ends[0], *blocks, ends[1]),
        layers=(0, *places, last),
        call=BlockCall(),
        hidden_size=decoder.hidden,
        vocab_size=decoder.vocab,
        max_seq_len=decoder.seq_len,
        learned_positions=False,
        rotary_size=decoder.head_dim,
        rotary_by_attention=False,
        fused_attention=True,
        shared=(tied,) if shape.tied == "across stages" else (),
    )


@cache
def _profile(
    shape: _Shape, kernels: Kernels, tp: int, sp: bool, imbalance: float, slowdown: float, effects: Effects
) -> Profile:
    chain, low, adapters = _chain(shape), effects.low_precision, effects.adapters
    identity = ProfileIdentity(
        method="traced",
        model_name="published",
        config_hash=chain.config_hash,
        seq_len=shape.decoder.seq_len,
        precision="bf16",
        device="any",
        num_devices=1,
        torch="none: closed form",
        transformers="none: closed form",
        created="",
    )
    layers = (
        decoder_layer(
            shape.decoder,
            kernels,
            each,
            tp=tp,
            sp=sp,
            imbalance=imbalance,
            slowdown=slowdown,
            low=low,
            adapters=adapters,
        )
        for each in chain.layer_types
    )
    return Profile(identity=identity, layers=tuple(layers))


def _strategy(run: PublishedRun, framework: Framework, degrees: _Degrees, shape: _Shape) -> tuple[Strategy, Framework]:
    zero = framework.zero_stage(run)
    shards = run.count("dp_shard")
    execution = framework.execution
    levels = []
    if degrees.dp > 1:
        sharded = not execution.keeps_own_buffers and zero >= 2
        stated = None if shards is None else max(1, shards // degrees.cp)
        group = stated if sharded and stated is not None and stated > 1 else degrees.dp
        if degrees.dp % group:
            raise _SkipError(f"shard groups of {group} of {degrees.dp} data ranks")
        if group < degrees.dp:
            levels.append(Level(dimension=DP, degree=degrees.dp // group))
        levels.append(Level(dimension=FSDP if sharded else DP, degree=group))
    if degrees.cp > 1:
        levels.append(Level(dimension=CP, degree=degrees.cp))
    if degrees.tp > 1:
        levels.append(Level(dimension=TP, degree=degrees.tp))
    if execution.keeps_own_buffers and shards not in (None, degrees.dp * degrees.cp) and zero == 1:
        execution = replace(execution, shard_degree=shards)
    if zero == 1:
        num_shards = shards or degrees.dp * degrees.cp
        execution = replace(execution, step_s=framework.shard_broadcast_s * num_shards)
    fsdp = any(level.dimension is FSDP for level in levels)
    has_sp = run.text("sp") == "True" if run.text("sp") else framework.default_sp
    strategy = Strategy.of(
        levels=tuple(levels),
        remat=_remat(run, framework),
        sp=degrees.tp > 1 and has_sp,
        zero=1 if fsdp and framework.pipes_whole and degrees.pp > 1 else 2 if zero == 2 and fsdp else 3,
        cp_method="ulysses" if run.text("cp_method") == "a2a" else "gather",
        ep=_outside_tp(degrees) if shape.decoder.experts else 1,
    )
    return strategy, replace(framework, execution=execution)


def _outside_tp(degrees: _Degrees) -> int:
    """Data ranks that divide the experts, beside the tensor-parallel ranks that do."""
    group = degrees.ep * degrees.etp
    inside = min(degrees.tp, group)
    if group % inside:
        raise _SkipError(f"experts over {group} ranks beside tp {degrees.tp}")
    return group // inside


def _remat(run: PublishedRun, framework: Framework) -> Remat:
    """What the row says of recomputation, or the framework's default."""
    text = run.text("act_ckpt") or str(framework.default_remat or "")
    if not text:
        raise _SkipError("act_ckpt missing")
    if _is_alternating(run):
        return Remat.FULL
    if text == Remat.SELECTIVE and "ratio not stated" in run.text("act_ckpt_detail"):
        raise _SkipError("remat of some layers, how many is not stated")
    if text not in set(Remat):
        raise _SkipError(f"act_ckpt {text}")
    return Remat(text)


_FIRST_BLOCKS = re.compile(r"block (\d+) layers")
"""Megatron's block recomputation: so many blocks, the first ones of each stage."""


def _is_alternating(run: PublishedRun) -> bool:
    """Whether every second block is recomputed in full, torchtitan's default where it goes by layers."""
    return run.text("act_ckpt_detail").startswith("every k-th layer (repo default k=2")


def _plan(
    job: Job,
    degrees: _Degrees,
    strategy: Strategy,
    shape: _Shape,
    framework: Framework,
    run: PublishedRun,
) -> Plan:
    chain, size = job.chain, degrees.devices // degrees.pp
    bounds = _stage_bounds(shape, degrees.pp * degrees.chunks, by_flop=framework.balances_by_flop)
    edge = replace(strategy, remat=Remat.NONE)
    stages = []
    for index, (first, end) in enumerate(pairwise(bounds)):
        strategies = tuple(
            each if chain.type_of(layer).num_experts else each.with_whole_experts()
            for layer in range(first, end)
            for each in (edge if _keeps_all(run, chain, layer, layer - max(first, 1)) else strategy,)
        )
        start = index % degrees.pp * size
        stages.append(StagePart(ranks=(start, start + size - 1), runs=fold_runs(first, strategies)))
    return Plan(
        model=PlanModel(name=chain.name, config=dict(chain.config), config_hash=chain.config_hash, split=chain.split),
        cluster=job.cluster.name,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        num_microbatches=degrees.microbatches,
        precision=job.precision,
        engine=job.engine.name,
        schedule=_schedule(degrees).name,
        stages=stages_of(stages),
    )


def _keeps_all(run: PublishedRun, chain: ModelChain, layer: int, place: int) -> bool:
    """Whether a layer, the block of a part of the pipeline in this place, is not computed again."""
    if chain.type_of(layer).role is not LayerRole.BLOCK:
        return True
    first = _FIRST_BLOCKS.fullmatch(run.text("act_ckpt_detail"))
    return place >= int(first[1]) if first else _is_alternating(run) and layer % 2 == 0


def _schedule(degrees: _Degrees) -> Schedule:
    """Interleaved where there are chunks; with fewer microbatches than stages 1F1B does the passes of GPipe."""
    if degrees.chunks > 1:
        return INTERLEAVED_1F1B
    return ONE_F_ONE_B if degrees.microbatches >= degrees.pp else GPIPE


def _stage_bounds(shape: _Shape, num_stages: int, *, by_flop: bool) -> tuple[int, ...]:
    """First layer of each stage and the end: blocks divided evenly, or layers by their FLOP."""
    num_layers = shape.num_layers + 2
    if num_stages > num_layers:
        raise _SkipError("more stages than layers")
    if by_flop or shape.num_layers < num_stages:
        return _bounds_by_flop(shape, num_stages)
    low, extra = divmod(shape.num_layers, num_stages)
    bounds = [0]
    for stage in range(num_stages - 1):
        bounds.append(max(bounds[-1], 1) + low + (1 if stage < extra else 0))
    return (*bounds, num_layers)


def _bounds_by_flop(shape: _Shape, num_stages: int) -> tuple[int, ...]:
    """Cuts after the layer at which the FLOP so far reach the stage's equal share; every stage has a layer."""
    decoder = shape.decoder
    block = decoder.hidden * (decoder.hidden * 4 + decoder.ffn * (3 if decoder.gated else 2))
    costs = [0.0, *([float(block)] * shape.num_layers), float(decoder.hidden * decoder.vocab)]
    share, bounds, spent = sum(costs) / num_stages, [0], 0.0
    for layer, cost in enumerate(costs):
        spent += cost
        stages_left = num_stages - len(bounds)
        layers_left = len(costs) - layer - 1
        if stages_left and (spent >= share * len(bounds) or layers_left == stages_left):
            bounds.append(layer + 1)
    return (*bounds, len(costs))


# hardware

_VARIANTS = {
    "A100": {"80": "a100-80gb", "40": "a100-40gb", "": "a100-80gb"},
    "A800": {"80": "a800-80gb", "": "a800-80gb"},
    "H100": {"80": "h100-80gb", "": "h100-80gb", "96": "h100-96gb-hbm2e", "95": "h100-96gb-hbm2e"},
    "H200": {"141": "h200-141gb", "": "h200-141gb"},
    "H200-NVL": {"141": "h200-nvl-141gb"},
    "L40S": {"48": "l40s"},
    "B200": {"180": "b200-180gb", "": "b200-180gb"},
    "B300": {"270": "b300-270gb", "": "b300-270gb"},
    "GH200": {"96": "gh200-96gb"},
    "MI300X": {"192": "mi300x", "": "mi300x"},
    "MI325X": {"256": "mi325x"},
    "MI350X": {"288": "mi350x"},
    "MI355X": {"288": "mi355x"},
    "GB200": {"186": "gb200-186gb", "": "gb200-186gb"},
    "GB300": {"279": "gb300-279gb", "": "gb300-279gb"},
    "V100": {"16": "v100-16gb", "32": "v100-32gb", "": "v100-32gb"},
}
_RATE = re.compile(r"(?:(?P<ports>[0-9]+)x)?[^0-9]*?\s*(?P<rate>[0-9.]+)\s*(?P<unit>[GT][Bb])(?!E)")
_ADAPTER = re.compile(r"ConnectX-[0-9]+|BlueField-[0-9]+|BF[0-9]|MT[0-9]+")
"""Names of network adapters that have digits."""
_OTHER_PATH, _TO_STORAGE = "PCIe-NIC", " for NS and "
"""What says a rate of the host's bus, and what stands between the network of storage and that of compute."""
_BITS = {"Gb": 1.0, "Tb": 1000.0, "GB": 8.0, "TB": 8000.0}
"""Gigabits in a unit."""


def _cluster(run: PublishedRun) -> Cluster:
    device = _device(run)
    devices = _needed(run, "gpus")
    per_node = min(run.count("gpus_per_node") or 8, devices)
    if devices % per_node:
        raise _SkipError("devices are not whole nodes")
    per_node = _on_one_switch(device.name, devices, per_node)
    intra, inter = default_links(device.name, num_devices=devices)
    if intra is not inter:
        inter = _inter_link(run.text("inter_link"), inter, min(run.count("gpus_per_node") or 8, devices))
    num_nodes = devices // per_node
    return Cluster(
        groups=(
            NodeGroup(
                name=f"{num_nodes}x{per_node}x{device.name}",
                num_nodes=num_nodes,
                devices_per_node=per_node,
                device=device,
                intra_link=intra,
                inter_link=inter if num_nodes > 1 else None,
            ),
        )
    )


def _on_one_switch(device: str, devices: int, per_node: int) -> int:
    """Devices that a switch inside a rack joins, several nodes' where it does: whole nodes and whole racks."""
    whole = [count for count in range(per_node, devices + 1, per_node) if devices % count == 0]

    def is_joined(count: int) -> bool:
        intra, inter = default_links(device, num_devices=count)
        return count == per_node or intra is inter

    return max(count for count in whole if is_joined(count))


def _device(run: PublishedRun) -> Device:
    memory = run.number("gpu_mem_gb")
    variants = _VARIANTS.get(run.text("gpu"), {})
    name = variants.get("" if memory is None else f"{memory:g}")
    if name is None:
        raise _SkipError(f"device not known: {run.text('gpu')} {run.text('gpu_mem_gb')}".strip())
    return find_device(name)


def _inter_link(text: str, default: Link, per_node: int) -> Link:
    """The link between nodes as one device sees it: the rate that the row states, per device or per node."""
    if "OmniPath" in text:
        return find_link("omnipath-100").shared(num_ports=4, num_devices=per_node)
    if text == "AWS EFA":
        return find_link("efa-100").shared(num_ports=32, num_devices=per_node)
    if _OTHER_PATH in text:
        return default
    of_compute = text.partition("Compute:")[2] or text.partition(_TO_STORAGE)[2] or text
    match = _RATE.search(_ADAPTER.sub("", of_compute))
    if match is None:
        return default
    ports, rate = match["ports"], float(match["rate"]) * _BITS[match["unit"]] / 8 * GB
    is_per_device = "per GPU" in text or "per HCA" in text
    per_device = rate if is_per_device or ports == str(per_node) else rate * int(ports or 1) / per_node
    return replace(default, name=text, bytes_per_s=per_device)
