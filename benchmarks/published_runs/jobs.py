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
from typing import Any

from published_runs.frameworks import Framework, Reports, framework_of, levers_of, precision_of, workspace_bytes
from published_runs.rows import PublishedRun
from steelyard.cost.decoder import DecoderShape, decoder_layer
from steelyard.cost.efficiency import Efficiency
from steelyard.cost.job import ASSUMED_IMBALANCE, DeviceGroup, Job, tuned_over_experts
from steelyard.cost.kernels import kernels_of
from steelyard.engines.engine import Engine
from steelyard.engines.execution import Kernels
from steelyard.engines.native import NATIVE
from steelyard.errors import UserError
from steelyard.hardware import Cluster, Link, parse_cluster
from steelyard.hardware.files import default_links, find_link
from steelyard.levers import Effects
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.family import KV_HEADS, Task
from steelyard.model.read import chain_from_config
from steelyard.model.split import BlockCall, ModelSplit, SplitLayerType
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.planning.settings import Settings, plan_of_settings
from steelyard.profiles.profile import Profile, ProfileIdentity
from steelyard.schedules.gpipe import GPIPE
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
    further_bytes: int = 0
    """States of the copy of the embedding that a layer for further tokens reads on the last stage."""
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
    settings, cluster = _settings(run, framework), _cluster(run)
    model = _model(run, framework, settings)
    precision, levers = precision_of(run), levers_of(run)
    engine = _sharding(run, framework, settings)
    kernels, slowdown = kernels_of(engine, precision), tuned_over_experts(engine, cluster.device)
    assert kernels is not None, "of every framework here"
    imbalance = 1.0 if engine.execution.balances_experts else ASSUMED_IMBALANCE
    profile = _profile(model, kernels, settings.tp, settings.sp, imbalance, slowdown, levers.effects)
    job = Job(
        chain=levers.change(model.chain),
        groups=(DeviceGroup(profile=profile, cluster=cluster, budget_bytes=cluster.device.known_memory_bytes()),),
        seq_len=model.shape.seq_len,
        global_batch=_needed(run, "gbs"),
        precision=precision,
        engine=engine,
        imbalance=imbalance,
        levers=levers,
    )
    case = Case(
        run=run,
        job=job,
        plan=_plan(job, replace(settings, blocks=_blocks(model, framework, settings))),
        reports=framework.reports,
        workspace_bytes=workspace_bytes(run, framework),
        rates=framework.rates,
    )
    if (run.count("mtp_layers") or 0) and settings.pp > 1:
        case = replace(case, further_bytes=_further_bytes(case, settings.tp))
    return replace(case, job=case.timed_at(job.efficiency)) if case.rates else case


def _further_bytes(case: Case, tp: int) -> int:
    """Bytes of an embedding's states on the last stage (``mtp_process`` in Megatron-Core's gpt_model.py)."""
    execution, strategy = case.job.execution, case.plan.parts[-1].runs[-1].strategy
    assert execution.states is not None, "of Megatron-Core"
    num_params = case.job.chain.vocab_size * case.job.chain.hidden_size // tp
    return sum(execution.states.kept_bytes(num_params, strategy, execution.shard_degree).values())


def _plan(job: Job, settings: Settings) -> Plan:
    """The plan of a run, in the form of our own runtime where the product does not plan such runs for the engine."""
    try:
        return plan_of_settings(job, settings)
    except UserError as error:
        if error.field != "--engine":
            raise
        return plan_of_settings(replace(job, engine=replace(job.engine, capabilities=NATIVE.capabilities)), settings)


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


def _needed(run: PublishedRun, column: str) -> int:
    value = run.count(column)
    if value is None:
        raise _SkipError(f"{column} missing")
    return value


def _settings(run: PublishedRun, framework: Framework) -> Settings:
    """The settings of a run, with the framework's defaults where it says nothing."""
    tp, pp, cp = _needed(run, "tp"), _needed(run, "pp"), run.count("cp") or 1
    ep, micro_batch, zero = run.count("ep") or 1, _needed(run, "mbs"), framework.zero_stage(run)
    dp, shards = _needed(run, "gpus") // (tp * pp * cp), max(1, (run.count("dp_shard") or 1) // cp)
    experts = ep * _etp(run, tp)
    if ep > 1 and experts < tp:
        raise _SkipError(f"experts over {experts} ranks beside tp {tp}")
    vpp = (run.count("vpp") or 1) if pp > 1 else 1
    is_short = vpp == 1 < pp and _needed(run, "gbs") < micro_batch * dp * pp
    remat, first_blocks = _remat(run, framework)
    return Settings(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        ep=experts if experts > tp else 1,
        replicas=dp // shards if shards > 1 else 1,
        schedule=GPIPE.name if is_short else None,  # whose passes 1F1B does with fewer microbatches than stages
        micro_batch=micro_batch,
        zero=zero,
        sp=tp > 1 and (run.text("sp") == "True" if run.text("sp") else framework.default_sp),
        remat=remat,
        remat_blocks=first_blocks,
    )


def _etp(run: PublishedRun, tp: int) -> int:
    """Ranks that divide each expert's matrices."""
    return run.count("etp") or (tp if (run.count("ep") or 1) == 1 else 1)


def _sharding(run: PublishedRun, framework: Framework, settings: Settings) -> Engine:
    """The engine with the ranks of a run that share optimizer states."""
    engine, shards = framework.engine, run.count("dp_shard")
    if settings.zero != 1:
        return engine
    data = _needed(run, "gpus") // (settings.tp * settings.pp)
    if engine.execution.keeps_own_buffers and shards not in (None, data):
        engine = engine.executing(shard_degree=shards)
    return engine.executing(step_s=framework.shard_broadcast_s * (shards or data))


_FIRST_BLOCKS = re.compile(r"block (\d+) layers")
"""Megatron's block recomputation: so many blocks, the first ones of each stage."""


def _remat(run: PublishedRun, framework: Framework) -> tuple[Remat, int | None]:
    """Remat that the row names, or the framework's default, and the number of blocks where not all."""
    text, detail = run.text("act_ckpt") or str(framework.default_remat or ""), run.text("act_ckpt_detail")
    if not text:
        raise _SkipError("act_ckpt missing")
    if text == Remat.SELECTIVE and "ratio not stated" in detail:
        raise _SkipError("remat of some layers, how many is not stated")
    if text not in set(Remat):
        raise _SkipError(f"act_ckpt {text}")
    first = _FIRST_BLOCKS.fullmatch(detail)
    if detail.startswith("every k-th layer (repo default k=2"):
        return Remat.FULL, _needed(run, "layers") // (2 * _needed(run, "pp"))  # every second takes what the first do
    return Remat(text), int(first[1]) if first else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Model:
    """A model as its sizes say, and its layers; one for each config (`_made`)."""

    shape: DecoderShape
    chain: ModelChain


def _model(run: PublishedRun, framework: Framework, settings: Settings) -> _Model:
    if run.text("mlp_type") not in _GATED:
        raise _SkipError("mlp_type missing" if not run.text("mlp_type") else f"mlp_type {run.text('mlp_type')}")
    tp, vocab, heads = settings.tp, _needed(run, "vocab"), _needed(run, "heads")
    padded = -(-vocab // (_VOCAB_MULTIPLE * tp)) * _VOCAB_MULTIPLE * tp
    has_experts, is_tied = bool(run.text("moe_experts")), run.text("tied_emb") == "True"
    dense_blocks = _needed(run, "moe_dense_layers") if has_experts else 0
    config = {
        "model_type": "llama",
        "hidden_size": _needed(run, "hidden"),
        "num_hidden_layers": _needed(run, "layers") + (run.count("mtp_layers") or 0),
        "num_attention_heads": heads,
        "num_key_value_heads": run.count("kv_heads") or heads,
        "head_dim": run.count("head_dim") or _needed(run, "hidden") // heads,
        "intermediate_size": _needed(run, "ffn") if dense_blocks or not has_experts else _needed(run, "hidden"),
        "vocab_size": run.count("vocab_padded") or (padded if framework.pads_vocab else vocab // tp * tp),
        "max_position_embeddings": _needed(run, "seq_len"),
        "tie_word_embeddings": is_tied and settings.pp > 1,
        **_latent(run),
        **(_experts(run) if has_experts else {}),
    }
    etp = _etp(run, tp) if has_experts else 1
    is_gated = _GATED[run.text("mlp_type")]
    return _made(
        tuple(config.items()),
        dense_blocks=dense_blocks,
        etp=etp,
        is_gated=is_gated,
        is_rotary=is_gated and run.text("pos_emb") in {"rope", ""},
        own_head=not is_tied or settings.pp > 1,
    )


def _experts(run: PublishedRun) -> dict[str, int]:
    width = _needed(run, "moe_ffn")
    return {
        "num_experts": _needed(run, "moe_experts"),
        "num_experts_per_tok": _needed(run, "moe_topk"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": run.count("moe_shared_ffn") or _needed(run, "moe_shared_experts") * width,
    }


def _latent(run: PublishedRun) -> dict[str, int]:
    keys = run.count("mla_kv_lora")
    if not keys:
        if run.text("model").lower().startswith(("deepseek-v", "deepseek_v", "kimi")):
            raise _SkipError("widths of latent attention missing")
        return {}
    return {
        "q_lora_rank": run.count("mla_q_lora") or 0,
        "kv_lora_rank": keys,
        "qk_nope_head_dim": _needed(run, "mla_qk_nope"),
        "qk_rope_head_dim": _needed(run, "mla_qk_rope"),
        "v_head_dim": _needed(run, "mla_v_head"),
    }


@cache
def _made(
    entries: tuple[tuple[str, Any], ...],
    *,
    dense_blocks: int,
    etp: int,
    is_gated: bool,
    is_rotary: bool,
    own_head: bool,
) -> _Model:
    """The model of a config; a part of an expert's width counts as an expert of its own."""
    config = dict(entries)
    split = _split(config, dense_blocks, etp, is_gated=is_gated, is_rotary=is_rotary)
    chain = chain_from_config(config, name="published", split=split)
    shape = DecoderShape.of(chain, config["max_position_embeddings"])
    assert shape is not None, "of heads"
    experts = shape.experts and replace(shape.experts, etp=etp)
    return _Model(shape=replace(shape, own_head=own_head, experts=experts), chain=chain)


def _split(config: dict[str, Any], dense_blocks: int, etp: int, *, is_gated: bool, is_rotary: bool) -> ModelSplit:
    """How such a model splits: embedding, blocks (dense ones first where others have experts), norm and projection."""
    num_layers, num_heads, vocab = (config[name] for name in ("num_hidden_layers", "num_attention_heads", "vocab_size"))
    heads = tuple((name, num_heads) for name in ("attention heads", KV_HEADS))
    divides = (*heads, ("feed-forward width", config["intermediate_size"]))
    block = SplitLayerType(name="block", role=LayerRole.BLOCK, tp_divides=divides)
    ends = [SplitLayerType(name=each.value, role=each, tp_divides=(("vocabulary", vocab),)) for each in _ENDS]
    blocks, places = [block], [1] * num_layers
    if "num_experts" in config:
        experts = config["num_experts"] * etp
        sparse = block.model_copy(update={"tp_divides": (*heads, ("experts", experts)), "num_experts": experts})
        blocks = [sparse]
        if dense_blocks:
            named = {_DENSE: block, _SPARSE: sparse}
            blocks = [layer_type.model_copy(update={"name": name}) for name, layer_type in named.items()]
            places = [1] * dense_blocks + [2] * (num_layers - dense_blocks)
    last = len(blocks) + 1
    tied = ((0, "model.embed_tokens.weight"), (num_layers + 1, "lm_head.weight"))
    return ModelSplit(
        model_type="llama" if is_gated else "gpt_neox",
        task=Task.CAUSAL_LM,
        embedding=("model.embed_tokens",),
        blocks="model.layers",
        head=("model.norm", "lm_head"),
        kinds=(ends[0], *blocks, ends[1]),
        layers=(0, *places, last),
        call=BlockCall(),
        hidden_size=config["hidden_size"],
        vocab_size=vocab,
        max_seq_len=config["max_position_embeddings"],
        learned_positions=False,
        rotary_size=config["head_dim"] if is_rotary else 0,
        rotary_by_attention=False,
        fused_attention=True,
        shared=(tied,) if config["tie_word_embeddings"] else (),
    )


@cache
def _profile(
    model: _Model, kernels: Kernels, tp: int, sp: bool, imbalance: float, slowdown: float, effects: Effects
) -> Profile:
    identity = ProfileIdentity(
        method="traced",
        model_name="published",
        config_hash=model.chain.config_hash,
        seq_len=model.shape.seq_len,
        precision="bf16",
        device="any",
        num_devices=1,
        torch="none: closed form",
        transformers="none: closed form",
        created="",
    )
    layers = (
        decoder_layer(
            model.shape,
            kernels,
            each,
            tp=tp,
            sp=sp,
            imbalance=imbalance,
            slowdown=slowdown,
            low=effects.low_precision,
            adapters=effects.adapters,
        )
        for each in model.chain.layer_types
    )
    return Profile(identity=identity, layers=tuple(layers))


def _blocks(model: _Model, framework: Framework, settings: Settings) -> tuple[int, ...] | None:
    """Blocks of each part of the pipeline where layers are cut by their FLOP, head included; every part has a layer."""
    shape, num_parts, num_layers = model.shape, settings.pp * settings.vpp, model.chain.num_layers
    if num_parts > num_layers:
        raise _SkipError("more stages than layers")
    if not framework.balances_by_flop and num_parts <= num_layers - 2:
        return None
    block = shape.hidden * (shape.hidden * 4 + shape.ffn * (3 if shape.gated else 2))
    costs = [0, *[block] * (num_layers - 2), shape.hidden * shape.vocab]
    share, cuts, spent = sum(costs) / num_parts, [0], 0
    for layer, cost in enumerate(costs):
        spent += cost
        left = num_parts - len(cuts)
        if left and (spent >= share * len(cuts) or num_layers - layer - 1 == left):
            cuts.append(layer + 1)
    ends = [max(cut - 1, 0) for cut in cuts] + [num_layers - 2]
    return tuple(end - start for start, end in pairwise(ends))


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
    name, devices = _device(run), _needed(run, "gpus")
    per_node = min(run.count("gpus_per_node") or 8, devices)
    if devices % per_node:
        raise _SkipError("devices are not whole nodes")
    switched = _on_one_switch(name, devices, per_node)
    cluster = parse_cluster(f"{devices // switched}x{switched}x{name}")
    if cluster.inter_link in (None, cluster.intra_link):
        return cluster
    return cluster.on(inter_link=_inter_link(run.text("inter_link"), cluster.inter_link, per_node))


def _on_one_switch(device: str, devices: int, per_node: int) -> int:
    """Devices that a switch inside a rack joins, several nodes' where it does: whole nodes and whole racks."""
    whole = [count for count in range(per_node, devices + 1, per_node) if devices % count == 0]

    def is_joined(count: int) -> bool:
        intra, inter = default_links(device, num_devices=count)
        return count == per_node or intra is inter

    return max(count for count in whole if is_joined(count))


def _device(run: PublishedRun) -> str:
    memory = run.number("gpu_mem_gb")
    variants = _VARIANTS.get(run.text("gpu"), {})
    name = variants.get("" if memory is None else f"{memory:g}")
    if name is None:
        raise _SkipError(f"device not known: {run.text('gpu')} {run.text('gpu_mem_gb')}".strip())
    return name


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
