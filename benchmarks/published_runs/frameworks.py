"""What each framework that others published runs of does otherwise than this project's runtime.

What runs beside what, which kernels are fused and how states are kept follows each framework's code, papers or
defaults, as far as known; versions may differ from those that ran. These numbers were chosen on open rows instead:
``loss_bytes``, ``norm_bytes``, ``copies``, ``kept_transfers``, ``bucket_bytes`` and nanotron's ``keeps_gathered`` and
``pipelined_collective_s``. Most frameworks come from one source, so they are known to fit that source only. What the
allocator holds in reserve depends on whether its segments expand. A framework that is not here is a reason to skip a
row.
"""

from dataclasses import dataclass, replace
from typing import Literal

from published_runs.experts import Dispatcher
from published_runs.rows import PublishedRun
from published_runs.shapes import Kernels
from steelyard.cost.job import ASSUMED_IMBALANCE, FP8_SPEEDUP
from steelyard.engines.execution import FSDP2_STATES, Execution, StateBytes
from steelyard.engines.megatron_bridge import TE_SPEEDUP
from steelyard.plan.strategy import Remat

MIXED_16 = StateBytes(parameters=2, gradients=2, optimizer=12, zero=0)
"""Half-precision parameters and gradients, fp32 master and moments (DeepSpeed, fp16)."""
MIXED_18 = StateBytes(parameters=2, gradients=4, optimizer=12, zero=0)
"""Gradients accumulated in fp32, those of a microbatch freed at once (Megatron-LM, nanotron)."""
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
    """How a framework computes, runs a plan, and cuts a model into stages."""

    kernels: Kernels
    execution: Execution
    balances_by_flop: bool = False
    """Whether stages get equal FLOP, head included, instead of equal numbers of blocks."""
    default_remat: Remat = Remat.NONE
    """What it recomputes where nothing is said."""
    default_sp: bool = False
    """Whether tensor parallelism has sequence parallelism where nothing is said."""
    default_zero: int = 0
    """ZeRO stage where nothing is said."""
    imbalance: float = ASSUMED_IMBALANCE
    """How many times the mean of tokens the fullest rank of its experts computes, where a row does not say."""
    has_te: bool = False
    """Whether kernels of Transformer Engine run beside torch's, with a workspace of their own."""
    expands_segments: bool = False
    """Whether it sets torch's allocator so, as this project does."""
    experts_by_te: bool = False
    """Whether Transformer Engine computes experts: a matmul of each on one of four streams, its input cast in a kernel
    of its own in fp8 (gemm.cpp, te_general_grouped_gemm; cast.cpp, split_quantize)."""
    dispatcher: Dispatcher = "all-to-all"
    """How tokens reach their experts where a row does not say."""
    reports: Reports = "fullest"
    """The rank that the memory which it reports is of (nanotron's benchmark file: helpers.py, log_throughput)."""
    pads_vocab: bool = True
    """Whether the vocabulary is made a multiple of 128 on each tensor-parallel rank, or what cannot be divided left."""
    not_in_time: tuple[str, ...] = ()
    """Rates of the cost model that its times hold nothing of."""
    shard_broadcast_s: float = 0.0
    """Of a step, for each rank that states are divided over, where each hands on its new parameters by itself."""

    def zero_stage(self, run: PublishedRun) -> int:
        """The ZeRO stage that a row states, or the framework's default."""
        stated = run.count("zero_stage")
        return self.default_zero if stated is None else stated


_FUSED = Kernels(norm=True, rotary=True, activation=True, loss=True, attention="flash")
_MEGATRON_CLASSIC = Kernels(norm=True, rotary=True, activation=True, loss=True, attention="fused softmax", dropout=True)
_FSDP_EAGER = Kernels(
    norm=True, rotary=False, activation=False, loss=False, attention="flash", full="until last needed"
)
_MPT = replace(_FSDP_EAGER, full="block", loss=True, loss_bytes=(4, 2))
"""flash-attn's cross entropy keeps the logits in half precision; FSDP1 with reentrant checkpoints."""
_AA_SCALING = replace(
    _FSDP_EAGER, full="block", norm_bytes=20, loss_bytes=(22, 4), gathers_logits=True, keeps_gathered=True
)
"""The last stage gathers the logits and computes the loss in fp32; norms keep their input and result in fp32. With
sequence parallelism linear layers keep the gathered input (core/nn/linear/column_parallel_linear.py)."""
_NANOTRON_KERNELS = Kernels(
    norm=True,
    rotary=True,
    activation=False,
    loss=True,
    attention="flash",
    copies=12,
    keeps_gathered=True,
    loss_outlives=True,
)
"""Of each block's launches 12 are copies of q, k and v and sums of the mask. The loss makes two fp32 copies of the
logits while those of the microbatch before are still alive (models/llama.py, tensor_parallel/functional.py, 2025)."""

_DEEPSPEED = Execution(
    states=MIXED_16,
    reduce_bytes=2,
    overlaps_data=False,
    overlaps_transfers=False,
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
_AA_EXECUTION = replace(_DEEPSPEED, reduce_bytes=4, bucket_bytes=0, step_shard_bytes=4)
"""Its ZeRO 1 steps on an fp32 copy of the gradients of its own part (core/optimizer/parameter_group.py)."""
_ONEFLOW = replace(_DEEPSPEED, kept_transfers=0, bucket_bytes=0, step_shard_bytes=0)
_MEGATRON_LM = Execution(states=MIXED_18, accumulates_apart=True, overlaps_data=False, overlaps_transfers=False)
_MEGATRON_CORE = Execution(states=MIXED_18)
"""The matmul that makes a gradient adds it to the fp32 one."""
_CORE = Framework(kernels=replace(_FUSED, loss_bytes=(6, 4)), execution=_MEGATRON_CORE, has_te=True, experts_by_te=True)
"""Its loss makes one fp32 copy of the logits, works in place and keeps the softmax
(tensor_parallel/cross_entropy.py)."""
_NEMO = Framework(
    kernels=_FUSED,
    execution=replace(_MEGATRON_CORE, states=MIXED_16, reduce_bytes=2),
    default_sp=True,
    default_zero=1,
    dispatcher="deep",
    imbalance=1.0,
    experts_by_te=True,
)
"""Its performance recipes send tokens by DeepEP or HybridEP and force routing to be even. They keep and reduce
gradients in bf16 (grad_sync_dtype, grad_reduce_in_fp32), have sp on and a
distributed optimizer (distributed_fused_adam_with_cosine_annealing)."""
_NANOTRON = Execution(
    states=MIXED_18,
    accumulates_apart=True,
    accumulates_late=True,
    overlaps_data=False,
    overlaps_transfers=False,
    pipelined_collective_s=270e-6,
    shard_pieces=6,
    gathered_bytes=2,
)
"""ZeRO 1 gathers all new parameters in one tensor and copies them from there (distributed.py, all_gather_coalesced)."""

_FAST_LINEAR = ("NeMo", "Megatron-Bridge")
"""Frameworks whose linear layers are all Transformer Engine's, as tuned in NVIDIA's recipes."""
_BEFORE_HOPPER = ("A100", "A800", "V100")
_FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    ("aa-scaling", Framework(kernels=_AA_SCALING, execution=_AA_EXECUTION)),
    ("megatron-deepspeed", Framework(kernels=_MEGATRON_CLASSIC, execution=_DEEPSPEED)),
    ("deepspeed zero-3", Framework(kernels=_MEGATRON_CLASSIC, execution=Execution(reduce_bytes=2))),
    ("megatron-lm 23e00ed0", _CORE),
    ("megatron-lm", Framework(kernels=_MEGATRON_CLASSIC, execution=_MEGATRON_LM)),
    ("megatron-core", _CORE),
    ("megatron-bridge", _NEMO),
    ("nemo automodel", Framework(kernels=replace(_FUSED, full="until last needed"), execution=Execution())),
    ("nemo", _NEMO),
    (
        "maxtext",
        Framework(kernels=_FUSED, execution=Execution(eager_launch=False), default_remat=Remat.FULL),
    ),
    ("llm-foundry", Framework(kernels=_MPT, execution=Execution())),
    (
        "torchtitan",
        Framework(
            kernels=_FSDP_EAGER,
            execution=Execution(buffers_every_microbatch=True),
            default_sp=True,
            expands_segments=True,  # run_train.sh
        ),
    ),
    (
        "nanotron",
        Framework(kernels=_NANOTRON_KERNELS, execution=_NANOTRON, balances_by_flop=True, reports="first"),
    ),
    ("ibm fms-fsdp", Framework(kernels=_FSDP_EAGER, execution=Execution(reduce_bytes=2))),
    (
        "internevo",
        Framework(
            kernels=_FUSED, execution=replace(_DEEPSPEED, overlaps_data=True), shard_broadcast_s=_INTERNEVO_BROADCAST_S
        ),
    ),
    ("kempnerforge", Framework(kernels=_FSDP_EAGER, execution=Execution(), default_sp=True)),
    ("pytorch fsdp", Framework(kernels=replace(_FSDP_EAGER, full="block"), execution=Execution(reduce_bytes=2))),
    (
        "colossal-ai",
        Framework(kernels=_FSDP_EAGER, execution=replace(_DEEPSPEED, overlaps_data=True, bucket_bytes=0)),
    ),
    ("oneflow", Framework(kernels=_MEGATRON_CLASSIC, execution=_ONEFLOW)),
)
"""The beginning of a framework's name, the longer before the shorter one."""


_SUMS_OF_KERNELS = ("VIA-Research/vTrain:data/ground_truth_single.csv",)
"""Tables whose times are sums over profiled layers and looked-up collectives: nothing in them waits for a late rank or
the launch of a collective, and a step is its layers alone. vTrain profiles modules of its own, which divide the
vocabulary as it is (src/model/gpt_modeling.py)."""
_NOT_IN_SUMS = ("step_s", "step_per_node_s", "jitter_s", "straggling", "collective_launch_s")


def framework_of(run: PublishedRun) -> Framework | None:
    """The framework of a run with what the row itself says of kernels, precision and overlap; None if not known."""
    name = run.text("framework").lower()
    found = next((value for start, value in _FRAMEWORKS if name.startswith(start)), None)
    if found is None:
        return None
    if run.text("source_ref").startswith(_SUMS_OF_KERNELS):
        found = replace(found, pads_vocab=False, not_in_time=_NOT_IN_SUMS)
    execution = _execution(run, found.execution, found.zero_stage(run))
    if not found.expands_segments:
        execution = replace(execution, reserve=FIXED_SEGMENTS_RESERVE)
    reports: Reports = "last" if "of the last rank" in run.text("mem_kind") else found.reports
    has_te = found.has_te and "local (mcore)" not in name
    return replace(
        found,
        kernels=_kernels(run, found.kernels),
        execution=execution,
        reports=reports,
        has_te=has_te,
        experts_by_te=found.experts_by_te and "local (mcore)" not in name,
    )


def workspace_bytes(run: PublishedRun, framework: Framework) -> int:
    """What matmul kernels keep in torch's memory beside tensors, where the framework's code says how much.

    cuBLAS has a workspace for each thread that calls it, the one that goes forward and autograd's: 32 MiB since Hopper
    and under deterministic algorithms (``:4096:8``), 8 MiB before. Transformer Engine adds 32 MiB since Hopper, 4 MiB
    before.
    """
    if not framework.has_te and not framework.kernels.mask_bytes > 1:
        return 0
    is_old = run.text("gpu") in _BEFORE_HOPPER
    of_torch = 8 * MIB if is_old and "deterministic" not in run.text("attention") else 32 * MIB
    return SMALL_BYTES + 2 * of_torch + (0 if not framework.has_te else 4 * MIB if is_old else 32 * MIB)


def _kernels(run: PublishedRun, kernels: Kernels) -> Kernels:
    attention, detail = run.text("attention").lower(), run.text("act_ckpt_detail").lower()
    if "rms kernel" in attention:
        kernels = replace(kernels, norm=True)
    elif run.text("framework").startswith("AA-"):
        kernels = replace(kernels, norm=False)
    if attention == "torch":
        kernels = replace(kernels, attention="eager")
    elif attention == "fused" or attention.startswith(("unfused", "local (mcore)")) or "backend unfused" in attention:
        kernels = replace(kernels, attention="fused softmax")
    if kernels.loss_outlives and run.count("grad_accum") != 1:
        peak, kept = kernels.loss_bytes
        kernels = replace(kernels, loss_bytes=(peak + kept, kept))
    if run.text("framework").startswith("Megatron-Core"):
        kernels = _megatron_core_kernels(run, kernels)
    if run.text("compile") == "True":
        kernels = replace(kernels, norm=True, rotary=True, activation=True)
    if run.text("act_ckpt") == "selective":
        by_op = "op" in detail and "torchtitan" in run.text("framework")
        kernels = replace(kernels, selective="half of the matmuls" if by_op else "attention core")
    return kernels


def kernels_of_each_expert(run: PublishedRun, framework: Framework) -> int:
    """Kernels of the forward pass that each local expert has of its own: none where one grouped matmul does all."""
    if "sequential" in run.text("moe_dispatcher"):
        return 4  # Two products, an activation, a slice.
    return (2 if _peak_ratio(run) == 1.0 else 4) if framework.experts_by_te else 0


def te_speedup(run: PublishedRun) -> float:
    """How much faster dense linear layers run than torch's in the same precision."""
    is_tuned = run.text("gpu") not in _BEFORE_HOPPER and run.text("framework").startswith(_FAST_LINEAR)
    return TE_SPEEDUP if is_tuned else 1.0


def _peak_ratio(run: PublishedRun) -> float:
    """Peak of the type that linear layers compute in over that of 16 bits."""
    precision = run.text("precision").lower()
    return 4.0 if "fp4" in precision else 2.0 if "fp8" in precision else 1.0


def _linear_speedup(run: PublishedRun) -> float:
    """How much faster linear layers run than torch's at the reached rate of 16 bits; of fp4 as of fp8, with twice that
    ratio."""
    ratio = _peak_ratio(run)
    return (ratio * FP8_SPEEDUP if ratio > 1 else 1.0) * te_speedup(run)


def _megatron_core_kernels(run: PublishedRun, kernels: Kernels) -> Kernels:
    """What a run's switches make of Megatron-Core's kernels; models of GPT-3's form have its dropout."""
    peak, kept = (14, 4) if "fused cross entropy" in run.text("options") else kernels.loss_bytes
    more = kept * (run.count("mtp_layers") or 0) + (4 if "deferred embedding wgrad" in run.text("overlap") else 0)
    return replace(
        kernels,
        norm="no persistent layer norm" not in run.text("options"),
        loss_bytes=(peak + more, kept + more),
        dropout=run.text("mlp_type") == "gelu",
        mask_bytes=2,
    )


def _execution(run: PublishedRun, execution: Execution, zero: int) -> Execution:
    precision, overlap = run.text("precision").lower(), run.text("overlap").lower()
    if (
        execution.keeps_own_buffers
        and "interleaved" not in run.text("schedule").lower()
        and run.count("vpp") in (None, 1)
    ):
        execution = replace(execution, overlaps_transfers=False)
    if isinstance(execution.states, StateBytes) and zero < 3:
        execution = replace(execution, states=replace(execution.states, zero=zero))
    else:
        execution = replace(execution, states=FSDP2_STATES)
    execution = replace(execution, linear_speedup=_linear_speedup(run))
    if precision.startswith("fp16") or "v100" in run.text("gpu").lower():
        execution = replace(execution, matmul_dtype="fp16")
    if "pure" in precision:
        execution = replace(execution, reduce_bytes=2)
    if "bf16optimizer" in precision:
        execution = replace(
            execution,
            states=replace(KEPT_18, zero=zero),
            reduce_bytes=4,
            accumulates_apart=True,
            step_shard_bytes=0,
        )
    elif run.text("framework").lower().startswith("megatron-deepspeed") and zero == 0:
        execution = replace(execution, step_shard_bytes=_UNSHARDED_STEP)
    if "async tp" in overlap or "tp userbuffers" in overlap or "tp comm" in overlap:
        execution = replace(execution, hidden_collectives=0.5)
    if run.text("framework") == "nanotron" and zero == 0:
        execution = replace(execution, overlaps_data=True)
    if "grad" in overlap:
        execution = replace(execution, overlaps_data=True)
    return execution
