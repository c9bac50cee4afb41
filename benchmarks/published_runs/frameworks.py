"""Engines for the frameworks that others published runs of: those of the product, and values of the same kind.

A row names options of an engine (`_OPTIONS`): compiled blocks, overlaps, CUDA graphs, dispatchers. These are the
product's own, so that a row is priced as a user of the product prices it. What is here alone is what no option says:
frameworks and versions that the product does not write for.

What runs beside what, which kernels are fused and how states are kept follows each framework's code, papers or
defaults, as far as known; versions may differ from those that ran. These numbers were chosen on open rows instead:
``loss_bytes``, ``norm_bytes``, ``copies``, ``kept_transfers``, ``bucket_bytes`` and nanotron's ``keeps_gathered`` and
``pipelined_collective_s``. Most frameworks come from one source, so they are known to fit that source only. What the
allocator holds in reserve depends on whether its segments expand. A framework that is not here is a reason to skip a
row.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from published_runs.rows import PublishedRun
from steelyard.engines.automodel import AUTOMODEL
from steelyard.engines.deepspeed import DEEPSPEED
from steelyard.engines.engine import BALANCED, Engine, options_in
from steelyard.engines.execution import EAGER, FUSED, Execution, Kernels, Module, StateBytes
from steelyard.engines.megatron import MEGATRON, MEGATRON_FSDP
from steelyard.engines.megatron_arguments import OPTIONS
from steelyard.engines.megatron_bridge import MEGATRON_BRIDGE
from steelyard.engines.native import NATIVE
from steelyard.engines.torchtitan import ASYNC_TP, COMPILED, TORCHTITAN, WHOLE_LOSS
from steelyard.levers import NO_LEVERS, Levers
from steelyard.levers.float8 import Float8
from steelyard.levers.train import Train
from steelyard.plan.strategy import Remat
from steelyard.precision import Precision

MIXED_16 = StateBytes(parameters=2, gradients=2, optimizer=12, zero=0)
"""Half-precision parameters and gradients, fp32 master and moments (DeepSpeed, fp16)."""
MIXED_18 = StateBytes(parameters=2, gradients=4, optimizer=12, zero=0)
"""Gradients accumulated in fp32, those of a microbatch freed at once (Megatron-LM, nanotron)."""
ADDED_APART = 10
"""Bytes that moves where a kernel of its own adds 2-byte gradients to 4-byte ones."""
KEPT_18 = StateBytes(parameters=2, gradients=6, optimizer=12, zero=0)
"""Gradients accumulated in fp32, those of a microbatch kept in buffers of their own (DeepSpeed's BF16Optimizer)."""
MIB = 2**20
FIXED_SEGMENTS_RESERVE = 0.14
"""What an allocator short of memory holds in reserve where its segments do not expand, torch's default. Chosen on the
open rows, nearly all of one source: with jobs left out in turn it is the best value 26 of 29 times."""
Reports = Literal["first", "last", "fullest"]
SMALL_BYTES = 32 * MIB
"""Masks, labels, statistics and what rounding takes, which no term counts: the residual of Megatron-Core's runs of
dense models of 60 million parameters is 0 to 30 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework as it runs a plan, and its defaults where a row says nothing."""

    engine: Engine
    """The product's, or one of the same kind. It has kernels: rows have sizes, and no modules that could be traced."""
    balances_by_flop: bool = False
    """Whether stages get equal FLOP, head included, instead of equal numbers of blocks."""
    default_remat: Remat | None = Remat.NONE
    """What it recomputes where nothing is said; None where its own configurations differ."""
    default_sp: bool = False
    """Whether tensor parallelism has sequence parallelism where nothing is said."""
    default_zero: int = 0
    """ZeRO stage where nothing is said."""
    has_te: bool = False
    """Whether kernels of Transformer Engine run beside torch's, with a workspace of their own."""
    expands_segments: bool = False
    """Whether it sets torch's allocator so, as this project does."""
    reports: Reports = "fullest"
    """The rank that the memory which it reports is of (nanotron's benchmark file: helpers.py, log_throughput)."""
    pads_vocab: bool = True
    """Whether the vocabulary is made a multiple of 128 on each tensor-parallel rank, or what cannot be divided left."""
    rates: tuple[tuple[str, float], ...] = ()
    """Of rates of the cost model, the part that its times show: 0 of those that they hold nothing of."""
    shard_broadcast_s: float = 0.0
    """Of a step, for each rank that states are divided over, where each hands on its new parameters by itself."""

    def zero_stage(self, run: PublishedRun) -> int:
        """The ZeRO stage that a row states, or the framework's default."""
        stated = run.count("zero_stage")
        return self.default_zero if stated is None else stated


_CLASSIC = replace(FUSED, attention="fused softmax", dropout=True)
"""Megatron-LM's before flash attention."""
_FSDP_EAGER = replace(EAGER, full="until last needed")
_MPT = replace(EAGER, loss=True, loss_bytes=(4, 2))
"""flash-attn's cross entropy keeps the logits in half precision; FSDP1 with reentrant checkpoints."""
_AA_SCALING = replace(EAGER, norm_bytes=20, loss_bytes=(22, 4), gathers_logits=True, keeps_gathered=True)
"""The last stage gathers the logits and computes the loss in fp32; norms keep their input and result in fp32. With
sequence parallelism linear layers keep the gathered input (core/nn/linear/column_parallel_linear.py)."""
_NANOTRON_KERNELS = replace(EAGER, norm=True, rotary=True, loss=True, copies=12, keeps_gathered=True)
"""Of each block's launches 12 are copies of q, k and v and sums of the mask."""

DEEPSPEED_ZERO_1 = Execution(
    kernels=_CLASSIC,
    states=MIXED_16,
    reduce_bytes=2,
    overlaps_data=False,
    overlaps_transfers="never",
    transfer="whole",
    kept_transfers=2,
    bucket_bytes=2 * 2 * 500_000_000,
    step_shard_bytes=2 + 4,
)
"""As it steps, ZeRO 1 copies its gradients into one fp16 tensor and that into an fp32 one (zero/stage_1_and_2.py)."""
_INTERNEVO_BROADCAST_S = 0.0026
"""After a step each rank of a sharding group broadcasts its part, one after another (hybrid_zero_optim.py); seen in its
runs on 16 to 1,024 ranks, in proportion to them: 1.3 s of 5.5 at 512."""
_UNSHARDED_STEP = 4 + 4
"""DeepSpeed without ZeRO converts each fp16 gradient to fp32 and then copies all into one (fp16/fused_optimizer.py)."""
_AA_EXECUTION = replace(DEEPSPEED_ZERO_1, kernels=_AA_SCALING, reduce_bytes=4, bucket_bytes=0, step_shard_bytes=4)
"""Its ZeRO 1 steps on an fp32 copy of the gradients of its own part (core/optimizer/parameter_group.py)."""
_MEGATRON_LM = Execution(
    kernels=_CLASSIC,
    accumulation_bytes=ADDED_APART,
    states=MIXED_18,
    overlaps_data=False,
    overlaps_transfers="never",
)
"""Until the version of sequence parallelism (3.0, 2022), whose products of gradients add them to those of a step
(mpu/layers.py, LinearWithGradAccumulationAndAsyncCommunication)."""
_NANOTRON = Execution(
    kernels=_NANOTRON_KERNELS,
    accumulation_bytes=ADDED_APART,
    states=MIXED_18,
    accumulates_late=True,
    overlaps_data=False,
    overlaps_transfers="never",
    pipelined_collective_s=270e-6,
    shard_pieces=6,
    gathered_bytes=2,
)
"""ZeRO 1 gathers all new parameters in one tensor and copies them from there (distributed.py, all_gather_coalesced)."""


def _own(name: str, execution: Execution, **others: Any) -> tuple[str, Framework]:
    """A framework that the product does not have, whose engine has the options of Megatron-LM's script."""
    engine = replace(MEGATRON, name=name, capabilities=NATIVE.capabilities, execution=execution)
    return name, Framework(engine=engine, **others)


_CORE = Framework(engine=MEGATRON, has_te=True)
_NEMO = Framework(engine=MEGATRON_BRIDGE.with_options([BALANCED]), default_sp=True, default_zero=1)
"""Its performance recipes force routing to be even, have sp on and a distributed optimizer
(distributed_fused_adam_with_cosine_annealing)."""
_PRIMUS = replace(MEGATRON.with_kernels(expert_copies=0), options=OPTIONS).with_options([BALANCED])
"""Tokens are put in order in one kernel (``moe_permute_fusion``) and dealt out evenly
(examples/megatron/configs/MI355X/deepseek_v2_lite-BF16-pretrain.yaml). Its fused loss is Transformer Engine's
(``cross_entropy_fusion_impl``), which works in place as the usual one does."""
_BEFORE_HOPPER = ("A100", "A800", "V100")
_FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    _own("aa-scaling", _AA_EXECUTION),
    _own("megatron-deepspeed", DEEPSPEED_ZERO_1),
    ("deepspeed zero-3", Framework(engine=DEEPSPEED.executing(kernels=_CLASSIC))),
    ("megatron-lm 23e00ed0", _CORE),
    _own("megatron-lm (2022)", replace(_MEGATRON_LM, accumulation_bytes=6)),
    _own("megatron-lm", _MEGATRON_LM),
    ("megatron-core", _CORE),
    ("megatron-bridge", _NEMO),
    ("nemo automodel", Framework(engine=AUTOMODEL, default_remat=None)),
    ("nemo", _NEMO),
    ("primus", replace(_CORE, engine=_PRIMUS)),
    _own("maxtext", Execution(kernels=FUSED, eager_launch=False), default_remat=Remat.FULL),
    _own("llm-foundry", Execution(kernels=_MPT)),
    ("torchtitan", Framework(engine=TORCHTITAN, default_sp=True, expands_segments=True)),  # run_train.sh
    _own("nanotron", _NANOTRON, balances_by_flop=True, reports="first"),
    _own("ibm fms-fsdp", Execution(kernels=_FSDP_EAGER, reduce_bytes=2)),
    _own(
        "internevo",
        replace(DEEPSPEED_ZERO_1, kernels=FUSED, overlaps_data=True),
        shard_broadcast_s=_INTERNEVO_BROADCAST_S,
    ),
    _own("kempnerforge", Execution(kernels=_FSDP_EAGER), default_sp=True),
    _own("pytorch fsdp", Execution(kernels=EAGER, reduce_bytes=2)),
    _own("colossal-ai", replace(DEEPSPEED_ZERO_1, kernels=_FSDP_EAGER, overlaps_data=True, bucket_bytes=0)),
    _own("oneflow", replace(DEEPSPEED_ZERO_1, kept_transfers=0, bucket_bytes=0, step_shard_bytes=0)),
)
"""The beginning of a framework's name, the longer before the shorter one."""
_OPTIONS = (
    ("alltoall", "moe_dispatcher", "^(alltoall|local)"),
    ("allgather", "moe_dispatcher", "^allgather"),
    ("deepep", "moe_dispatcher", "deepep|hybridep"),
    (BALANCED, "moe_balance", "(?<!not )forced"),
    (BALANCED, "notes", "the example command forces it"),  # of a repository whose rows name no balance
    ("fused-loss", "options", "fused cross entropy"),
    ("tp-overlap", "overlap", "async tp|tp userbuffers|tp comm"),
    ("ep-overlap", "overlap", "ep all-to-all"),
    ("cuda-graphs", "cuda_graph", "."),
    ("fp8-parameters", "precision", "fp8 parameters"),
    (COMPILED, "compile", "true"),
    (ASYNC_TP, "overlap", "async tp"),
)
"""Options of the product's engines, each with the column of a row and the words in it that say that it is on."""


_SUMS_OF_KERNELS = ("VIA-Research/vTrain:data/ground_truth_single.csv",)
"""Tables whose times are sums over profiled layers and looked-up collectives: nothing in them waits for a late rank or
the launch of a collective, and a step is its layers alone. vTrain profiles modules of its own, which divide the
vocabulary as it is (src/model/gpt_modeling.py)."""
_NOT_IN_SUMS = tuple(
    (name, 0.0) for name in ("step_s", "step_per_node_s", "jitter_s", "straggling", "collective_launch_s")
)
_FIRST_FLASH = 0.7
"""Rate of the first flash attention (1.0, and Triton's of its time) in that of the second, on A100. Where the least of
`calibrate.py`'s loss is, to 0.05 and all else as it is: at 0.36 and 0.30 of the peak for the first (llm_foundry, 139
runs; aleph_alpha, 64), at 0.50 for the second (aleph_alpha, 159; torchtitan, 5). Dao 2023 states a half."""


def framework_of(run: PublishedRun) -> Framework | None:
    """The framework of a run, its engine with the options that the row names; None if it is not known."""
    name = run.text("framework").lower()
    found = next((value for start, value in _FRAMEWORKS if name.startswith(start)), None)
    if found is None:
        return None
    if run.text("source_ref").startswith(_SUMS_OF_KERNELS):
        found = replace(found, pads_vocab=False, rates=_NOT_IN_SUMS)
    if "attentionv1" in run.text("attention") or "triton flash" in run.text("attention"):
        found = replace(found, rates=(*found.rates, ("attention", _FIRST_FLASH)))
    if "Megatron-FSDP" in run.text("options"):
        found = replace(found, engine=MEGATRON_FSDP)
    engine = _special(run, _with_options(run, found.engine), found.zero_stage(run))
    if not found.expands_segments:
        engine = engine.executing(reserve=FIXED_SEGMENTS_RESERVE)
    reports: Reports = "last" if "of the last rank" in run.text("mem_kind") else found.reports
    return replace(found, engine=engine, reports=reports, has_te=found.has_te and not _is_local(run))


def options_of(run: PublishedRun, engine: Engine) -> list[str]:
    """Options of an engine that a row names, besides those that it has."""
    known = engine.options.keys() - {*options_in(engine.name)}
    return [name for name, column, words in _OPTIONS if name in known and re.search(words, run.text(column).lower())]


def _with_options(run: PublishedRun, engine: Engine) -> Engine:
    said = options_of(run, engine)
    if engine is TORCHTITAN:
        return torchtitan_of(run.text("framework"), said, levers_of(run))
    return engine.running(levers_of(run), precision_of(run)).with_options(tuple(said))


def _is_local(run: PublishedRun) -> bool:
    """Whether Megatron-Core computes by torch's kernels alone, without Transformer Engine's."""
    return "local (mcore)" in run.text("framework").lower()


def workspace_bytes(run: PublishedRun, framework: Framework) -> int:
    """What matmul kernels keep in torch's memory beside tensors, where the framework's code says how much.

    cuBLAS has a workspace for each thread that calls it, the one that goes forward and autograd's: 32 MiB since Hopper
    and under deterministic algorithms (``:4096:8``), 8 MiB before. Transformer Engine adds 32 MiB since Hopper, 4 MiB
    before.
    """
    if not framework.has_te and not run.text("framework").startswith("Megatron-Core"):
        return 0
    is_old = run.text("gpu") in _BEFORE_HOPPER
    of_torch = 8 * MIB if is_old and "deterministic" not in run.text("attention") else 32 * MIB
    return SMALL_BYTES + 2 * of_torch + (0 if not framework.has_te else 4 * MIB if is_old else 32 * MIB)


def torchtitan_of(version: str, said: Sequence[str], levers: Levers = NO_LEVERS) -> Engine:
    """torchtitan with options that a run names, as a version of it has them.

    The loss is in pieces where the version says so, or since May 2026 (pull request 2937), but for graph_trainer
    (3115). What is compiled has an eager loss until April 2025, where compiling it stands in comments as it "causes
    CUDA errors", and eager routing until May 2026 (distributed/compile.py). Backends that run the captured graph as it
    is, without inductor, fuse neither. What is not compiled has norms of several kernels until June 2025
    (pytorch/pytorch pull request 153666).
    """
    version, plain = version.lower(), TORCHTITAN.execution.kernels
    assert plain is not None, "of torchtitan"
    month = (_MONTH.search(version) or [""])[0]
    captures = any(name in version for name in ("graph_trainer", "aot_eager", "compiler toolkit"))
    has_pieces = "chunked" in version or (month >= "2026-05" and "graph_trainer" not in version)
    has_eager_loss = _LOSS_NOT_COMPILED.search(version) is not None
    found = TORCHTITAN.running(levers, "bf16").with_options((*([] if has_pieces else [WHOLE_LOSS]), *said))
    is_compiled = COMPILED in said
    fuses_routing = is_compiled and not captures and month >= "2026-06"
    changes: dict[str, Any] = {"eager_routing": not fuses_routing and found.execution.dispatcher != "deep"}
    if is_compiled and (captures or has_eager_loss):
        changes |= {"loss": not has_eager_loss, "loss_bytes": plain.loss_bytes}
    if not is_compiled and "" < month < "2025-07":
        changes |= {"norm": False}
    return found.with_kernels(**changes)


_MONTH = re.compile(r"20\d\d-\d\d")
_LOSS_NOT_COMPILED = re.compile(r"2024-|2025-0[1-4]|torch 2\.7")
_MODULES: Mapping[str, Module] = {
    **{"core_attn": "core_attn", "layernorm": "layernorm", "norm": "layernorm", "mla_up_proj": "mla_up_proj"},
    **{"mlp": "mlp", "moe_act": "moe_act", "act": "moe_act"},
}
"""What runs call the modules of a block that are computed again."""


def _special(run: PublishedRun, engine: Engine, zero: int) -> Engine:
    """The engine with what a row says of kernels, states and overlap that is no option of the product."""
    name, precision = run.text("framework"), run.text("precision").lower()
    changes: dict[str, Any] = {}
    if (states := engine.execution.states) is not None:
        frozen = 1 if _has_fp8_parameters(run) else states.frozen
        changes |= {"states": replace(states, zero=zero, frozen=frozen) if zero < 3 else None}
    if "pure" in precision:
        changes |= {"reduce_bytes": 2}
    if "bf16optimizer" in precision:
        changes |= {"accumulation_bytes": ADDED_APART, "states": replace(KEPT_18, zero=zero), "reduce_bytes": 4}
        changes |= {"step_shard_bytes": 0}
    elif name.startswith("Megatron-DeepSpeed") and zero == 0:
        changes |= {"step_shard_bytes": _UNSHARDED_STEP}
    if name == "Megatron-LM (2022)":
        changes |= {"hidden_collectives": _HIDDEN_IN_2022[run.text("sp") == "True"]}
    if name == "nanotron" and zero == 0:
        changes |= {"overlaps_data": True}
    return engine.executing(**changes).with_kernels(**_kernels(run, engine.execution.kernels))


def _kernels(run: PublishedRun, kernels: Kernels | None) -> dict[str, Any]:
    assert kernels is not None, "rows have no modules that could be traced"
    name, attention, options = run.text("framework"), run.text("attention").lower(), run.text("options")
    found: dict[str, Any] = {}
    if name.startswith("AA-"):
        found |= {"norm": "rms kernel" in attention}
    if attention == "torch":
        found |= {"attention": "eager"}
    elif attention == "fused" or attention.startswith(("unfused", "local (mcore)")) or "backend unfused" in attention:
        found |= {"attention": "fused softmax"}
    peak, kept = kernels.loss_bytes
    if name == "nanotron" and run.count("grad_accum") != 1:
        # two fp32 copies of logits beside those of the microbatch before (tensor_parallel/functional.py, 2025)
        found |= {"loss_bytes": (peak + kept, kept)}
    if name.startswith("Megatron-Core"):  # whose models of GPT-3's form have its dropout
        more = kept * (run.count("mtp_layers") or 0) + (4 if "deferred embedding wgrad" in run.text("overlap") else 0)
        found |= {"loss_bytes": (peak + more, kept + more), "dropout": run.text("mlp_type") == "gelu"}
        found |= {"norm": "no persistent layer norm" not in options}
    if "fp8 activation input store" in options or _has_fp8_parameters(run):
        found |= {"activation_bytes": 1}
    if run.text("act_ckpt") == "selective":
        found |= _selective(run)
    if _is_local(run):
        found |= {"of_each_expert": 0}
    if "sequential" in run.text("moe_dispatcher"):
        found |= {"of_each_expert": 4}  # two products, an activation, a slice
    return found


def _selective(run: PublishedRun) -> dict[str, Any]:
    """Scope of selective remat: modules by name, or torchtitan's by operation, of which its pass over graphs
    keeps all since April 2026 (graph_trainer/passes.py)."""
    name, detail = run.text("framework"), run.text("act_ckpt_detail").lower()
    if name.startswith("torchtitan"):
        month = _MONTH.search(name)
        keeps_all = detail == "graph pass" and month is not None and month[0] > "2026-03"
        return {"selective": "no matmul"} if keeps_all else {}
    words = re.findall(r"\w+", detail)
    return {"selective": tuple(module for word, module in _MODULES.items() if word in words) or ("core_attn",)}


_HIDDEN_IN_2022 = {True: 1 / 4, False: 1 / 3}
"""Part of the communication of tensor parallelism that Megatron-LM 3.0 hides, with sequence parallelism and without:
behind gradients of weights it reduces those of inputs (LinearWithGradAccumulationAndAsyncCommunication), two of eight
collectives of a block, or two of six all-reduces of one that is computed again."""


def _has_fp8_parameters(run: PublishedRun) -> bool:
    """Whether what adapters stand beside is kept in 8 bits, and what an activation reads likewise (``FP8_ACTIVATION``
    of all scripts that were found)."""
    is_mlperf = "MLPerf" in run.text("framework")
    return bool(run.count("lora")) and is_mlperf and any(each in run.text("precision") for each in ("fp8", "fp4"))


_LORA_DROPOUT = 0.1
"""Of MLPerf's runs, as ``target_modules: ['attention']`` and ``fp8_params`` beside fp8
(megatron_gpt_peft_tuning_config.yaml of mlcommons/training_results_v5.1, AMD, 4da2d1c)."""


def _lora_of(run: PublishedRun) -> Train:
    """Adapters of a run: MLPerf's beside attention, one of queries, keys and values together, which is priced as that
    of queries; of others beside all linear layers."""
    if "MLPerf" in run.text("framework"):
        return Train.parse(f"lora:r={run.count('lora')},targets=q_proj+o_proj,dropout={_LORA_DROPOUT}")
    return Train.parse(f"lora:r={run.count('lora')}")


def levers_of(run: PublishedRun) -> Levers:
    """Adapters, or float8 of torchtitan."""
    text = run.text("precision").lower()
    if run.count("lora"):
        return Levers((_lora_of(run),))
    if "torchtitan" not in run.text("framework").lower() or not any(each in text for each in ("float8", "mxfp8")):
        return Levers()
    return Levers((Float8(next((each for each in ("mxfp8", "rowwise") if each in text), "tensorwise")),))


def precision_of(run: PublishedRun) -> Precision:
    """The precision of linear layers; V100s have no bf16."""
    precision = run.text("precision").lower()
    if levers_of(run).effects.low_precision:
        return "bf16"
    if precision.startswith("fp16") or "v100" in run.text("gpu").lower():
        return "fp16"
    return "nvfp4" if "fp4" in precision else "fp8" if "fp8" in precision else "bf16"
