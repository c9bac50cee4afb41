"""Engines for the frameworks that others published runs of: those of the product, and values of the same kind.

What runs beside what, which kernels are fused and how states are kept follows each framework's code, papers or
defaults, as far as known; versions may differ from those that ran. These numbers were chosen on open rows instead:
``loss_bytes``, ``norm_bytes``, ``copies``, ``kept_transfers``, ``bucket_bytes`` and nanotron's ``keeps_gathered`` and
``pipelined_collective_s``. Most frameworks come from one source, so they are known to fit that source only. What the
allocator holds in reserve depends on whether its segments expand. A framework that is not here is a reason to skip a
row.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from published_runs.rows import PublishedRun
from steelyard.cost.job import ASSUMED_IMBALANCE
from steelyard.engines.automodel import AUTOMODEL
from steelyard.engines.deepspeed import DEEPSPEED
from steelyard.engines.execution import EAGER, FUSED, Dispatcher, Execution, Kernels, Module, StateBytes
from steelyard.engines.megatron import KERNELS, MEGATRON
from steelyard.engines.megatron_bridge import MEGATRON_BRIDGE
from steelyard.engines.torchtitan import TORCHTITAN
from steelyard.levers import Effects, Levers
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

    execution: Execution
    """With kernels of its own: rows have sizes, and no modules that could be traced."""
    engine: str = ""
    """The engine of the product that it is, or became."""
    balances_by_flop: bool = False
    """Whether stages get equal FLOP, head included, instead of equal numbers of blocks."""
    default_remat: Remat | None = Remat.NONE
    """What it recomputes where nothing is said; None where its own configurations differ."""
    default_sp: bool = False
    """Whether tensor parallelism has sequence parallelism where nothing is said."""
    default_zero: int = 0
    """ZeRO stage where nothing is said."""
    pipes_whole: bool = False
    """Whether its stages are torch's, which keep sharded layers gathered, and their gradients whole, from microbatch to
    microbatch, whatever the ZeRO stage (torch/distributed/pipelining/stage.py, backward_maybe_with_nosync)."""
    imbalance: float = ASSUMED_IMBALANCE
    """How many times the mean of tokens the fullest rank of its experts computes, where a row does not say."""
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

_DEEPSPEED = Execution(
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
_AA_EXECUTION = replace(_DEEPSPEED, kernels=_AA_SCALING, reduce_bytes=4, bucket_bytes=0, step_shard_bytes=4)
"""Its ZeRO 1 steps on an fp32 copy of the gradients of its own part (core/optimizer/parameter_group.py)."""
_ONEFLOW = replace(_DEEPSPEED, kept_transfers=0, bucket_bytes=0, step_shard_bytes=0)
_MEGATRON_LM = Execution(
    kernels=_CLASSIC,
    accumulation_bytes=ADDED_APART,
    states=MIXED_18,
    overlaps_data=False,
    overlaps_transfers="never",
)
"""Until the version of sequence parallelism (3.0, 2022), whose products of gradients add them to those of a step
(mpu/layers.py, LinearWithGradAccumulationAndAsyncCommunication)."""
_CORE = Framework(execution=MEGATRON.execution, engine=MEGATRON.name, has_te=True)
_PRIMUS = replace(MEGATRON.execution, kernels=replace(KERNELS, expert_copies=0))
"""Tokens are put in order in one kernel (``moe_permute_fusion``) and dealt out evenly
(examples/megatron/configs/MI355X/deepseek_v2_lite-BF16-pretrain.yaml)."""
_NEMO = Framework(
    execution=MEGATRON_BRIDGE.execution, engine=MEGATRON_BRIDGE.name, default_sp=True, default_zero=1, imbalance=1.0
)
"""Its performance recipes force routing to be even, have sp on and a distributed optimizer
(distributed_fused_adam_with_cosine_annealing)."""
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

_BEFORE_HOPPER = ("A100", "A800", "V100")
_FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    ("aa-scaling", Framework(execution=_AA_EXECUTION)),
    ("megatron-deepspeed", Framework(execution=_DEEPSPEED)),
    ("deepspeed zero-3", Framework(execution=replace(DEEPSPEED.execution, kernels=_CLASSIC), engine=DEEPSPEED.name)),
    ("megatron-lm 23e00ed0", _CORE),
    ("megatron-lm (2022)", Framework(execution=replace(_MEGATRON_LM, accumulation_bytes=6))),
    ("megatron-lm", Framework(execution=_MEGATRON_LM)),
    ("megatron-core", _CORE),
    ("megatron-bridge", _NEMO),
    ("nemo automodel", Framework(execution=AUTOMODEL.execution, engine=AUTOMODEL.name, default_remat=None)),
    ("nemo", _NEMO),
    ("primus", Framework(execution=_PRIMUS, engine=MEGATRON.name, has_te=True, imbalance=1.0)),
    ("maxtext", Framework(execution=Execution(kernels=FUSED, eager_launch=False), default_remat=Remat.FULL)),
    ("llm-foundry", Framework(execution=Execution(kernels=_MPT))),
    (
        "torchtitan",
        Framework(
            execution=TORCHTITAN.execution,
            engine=TORCHTITAN.name,
            default_sp=True,
            expands_segments=True,  # run_train.sh
            pipes_whole=True,
        ),
    ),
    ("nanotron", Framework(execution=_NANOTRON, balances_by_flop=True, reports="first")),
    ("ibm fms-fsdp", Framework(execution=Execution(kernels=_FSDP_EAGER, reduce_bytes=2))),
    (
        "internevo",
        Framework(
            execution=replace(_DEEPSPEED, kernels=FUSED, overlaps_data=True),
            shard_broadcast_s=_INTERNEVO_BROADCAST_S,
        ),
    ),
    ("kempnerforge", Framework(execution=Execution(kernels=_FSDP_EAGER), default_sp=True)),
    ("pytorch fsdp", Framework(execution=Execution(kernels=EAGER, reduce_bytes=2))),
    (
        "colossal-ai",
        Framework(execution=replace(_DEEPSPEED, kernels=_FSDP_EAGER, overlaps_data=True, bucket_bytes=0)),
    ),
    ("oneflow", Framework(execution=_ONEFLOW)),
)
"""The beginning of a framework's name, the longer before the shorter one."""


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
    """The framework of a run with what the row itself says of kernels, precision and overlap; None if not known."""
    name = run.text("framework").lower()
    found = next((value for start, value in _FRAMEWORKS if name.startswith(start)), None)
    if found is None:
        return None
    if run.text("source_ref").startswith(_SUMS_OF_KERNELS):
        found = replace(found, pads_vocab=False, rates=_NOT_IN_SUMS)
    if "attentionv1" in run.text("attention") or "triton flash" in run.text("attention"):
        found = replace(found, rates=(*found.rates, ("attention", _FIRST_FLASH)))
    execution = _execution(run, found.execution, found.zero_stage(run))
    if not found.expands_segments:
        execution = replace(execution, reserve=FIXED_SEGMENTS_RESERVE)
    reports: Reports = "last" if "of the last rank" in run.text("mem_kind") else found.reports
    return replace(found, execution=execution, reports=reports, has_te=found.has_te and not _is_local(run))


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


def has_loss_in_pieces(run: PublishedRun) -> bool:
    """Whether a version of torchtitan has its loss in pieces: as it says, or since May 2026 (pull request 2937), but
    for graph_trainer (3115)."""
    name = run.text("framework").lower()
    month = re.search(r"20\d\d-\d\d", name)
    return "chunked" in name or ("graph_trainer" not in name and month is not None and month[0] >= "2026-05")


_MODULES: Mapping[str, Module] = {
    **{"core_attn": "core_attn", "layernorm": "layernorm", "norm": "layernorm", "mla_up_proj": "mla_up_proj"},
    **{"mlp": "mlp", "moe_act": "moe_act", "act": "moe_act"},
}
"""What runs call the modules of a block that are computed again."""


def _kernels(run: PublishedRun, kernels: Kernels) -> Kernels:
    attention = run.text("attention").lower()
    if "rms kernel" in attention:
        kernels = replace(kernels, norm=True)
    elif run.text("framework").startswith("AA-"):
        kernels = replace(kernels, norm=False)
    if attention == "torch":
        kernels = replace(kernels, attention="eager")
    elif attention == "fused" or attention.startswith(("unfused", "local (mcore)")) or "backend unfused" in attention:
        kernels = replace(kernels, attention="fused softmax")
    if run.text("framework") == "nanotron" and run.count("grad_accum") != 1:
        # two fp32 copies of logits beside those of the microbatch before (tensor_parallel/functional.py, 2025)
        peak, kept = kernels.loss_bytes
        kernels = replace(kernels, loss_bytes=(peak + kept, kept))
    if run.text("framework").startswith("Megatron-Core"):
        kernels = _megatron_core_kernels(run, kernels)
    if "fp8 activation input store" in run.text("options") or _has_fp8_parameters(run):
        kernels = replace(kernels, activation_bytes=1)
    if run.text("compile") == "True":
        kernels = compiled(kernels)
    if run.text("act_ckpt") == "selective":
        named = tuple(
            module
            for word, module in _MODULES.items()
            if word in re.findall(r"\w+", run.text("act_ckpt_detail").lower())
        )
        kernels = replace(kernels, selective=named or ("core_attn",))
    if run.text("framework").startswith("torchtitan"):
        kernels = _torchtitan_kernels(run, kernels)
    if "sequential" in run.text("moe_dispatcher"):
        return replace(kernels, of_each_expert=4)  # two products, an activation, a slice
    return replace(kernels, of_each_expert=0) if _is_local(run) else kernels


@dataclass(frozen=True, slots=True)
class GatheredFloat8(Float8):
    """Float8 whose weights FSDP gathers in 8 bits (``enable_fsdp_float8_all_gather``): each rank casts its own part."""

    def effects(self, effects: Effects) -> Effects:
        """Effects of the lever without casts of whole weights."""
        low = Float8.effects(self, effects).low_precision
        assert low is not None, "of float8"
        (inputs, _), (inputs_again, _, outputs) = low.forward, low.backward
        low = replace(low, forward=(inputs, (0, 0)), backward=(inputs_again, (0, 0), outputs))
        return replace(effects, low_precision=low)


_GRAPHS = ("full", "full iteration", "per layer")
"""CUDA graphs of all that a step launches, or of every layer."""
_LORA_DROPOUT = 0.1
"""Of MLPerf's runs, as ``target_modules: ['attention']`` and ``fp8_params`` beside fp8
(megatron_gpt_peft_tuning_config.yaml of mlcommons/training_results_v5.1, AMD, 4da2d1c)."""


def _has_fp8_parameters(run: PublishedRun) -> bool:
    """Whether what adapters stand beside is kept in 8 bits, and what an activation reads likewise (``FP8_ACTIVATION``
    of all scripts that were found)."""
    is_mlperf = "MLPerf" in run.text("framework")
    return bool(run.count("lora")) and is_mlperf and any(each in run.text("precision") for each in ("fp8", "fp4"))


def _lora_of(run: PublishedRun) -> Train:
    """Adapters of a run: MLPerf's beside attention, one of queries, keys and values together, which is priced as that
    of queries; of others beside all linear layers."""
    if "MLPerf" in run.text("framework"):
        return Train.parse(f"lora:r={run.count('lora')},targets=q_proj+o_proj,dropout={_LORA_DROPOUT}")
    return Train.parse(f"lora:r={run.count('lora')}")


def levers_of(run: PublishedRun) -> Levers:
    """Adapters, or float8 of torchtitan, whose weights FSDP gathers in 8 bits where scales are of whole tensors."""
    text = run.text("precision").lower()
    if run.count("lora"):
        return Levers((_lora_of(run),))
    if "torchtitan" not in run.text("framework").lower() or not any(each in text for each in ("float8", "mxfp8")):
        return Levers()
    word = next((each for each in ("mxfp8", "rowwise") if each in text), "tensorwise")
    gathers = word == "tensorwise" and run.count("tp") == 1
    return Levers((GatheredFloat8(word) if gathers else Float8(word),))


def precision_of(run: PublishedRun) -> Precision:
    """The precision of linear layers; V100s have no bf16."""
    precision = run.text("precision").lower()
    if levers_of(run).effects.low_precision:
        return "bf16"
    if precision.startswith("fp16") or "v100" in run.text("gpu").lower():
        return "fp16"
    return "nvfp4" if "fp4" in precision else "fp8" if "fp8" in precision else "bf16"


def _megatron_core_kernels(run: PublishedRun, kernels: Kernels) -> Kernels:
    """What a run's switches make of Megatron-Core's kernels; models of GPT-3's form have its dropout."""
    peak, kept = (14, 4) if "fused cross entropy" in run.text("options") else kernels.loss_bytes
    more = kept * (run.count("mtp_layers") or 0) + (4 if "deferred embedding wgrad" in run.text("overlap") else 0)
    return replace(
        kernels,
        norm="no persistent layer norm" not in run.text("options"),
        loss_bytes=(peak + more, kept + more),
        dropout=run.text("mlp_type") == "gelu",
    )


def compiled(kernels: Kernels) -> Kernels:
    """Kernels as ``torch.compile`` fuses them."""
    return replace(kernels, norm=True, rotary=True, activation=True, loss=True)


_UNFUSED = ("graph_trainer", "aot_eager", "compiler toolkit")
"""Backends of torch.compile in torchtitan that run the captured graph as it is, without inductor."""
_COMPILED_LOSS_BYTES = (4, 2)
"""Bytes of a logit at most, and kept, of a loss that inductor makes one kernel of."""
_LOSS_NOT_COMPILED = re.compile(r"2024-|2025-0[1-4]|torch 2\.7")
"""Versions in which compiling the loss stands in comments, as it "causes CUDA errors"."""


def with_compiled_loss(kernels: Kernels, version: str) -> Kernels:
    """Return the kernels of torchtitan, compiled, with the loss as a version has it: eager until April 2025, and then
    in one kernel, but for those that capture a graph, which keep logits and gradients in 32 bits."""
    if _LOSS_NOT_COMPILED.search(version):
        return replace(kernels, loss=False)
    return kernels if "graph" in version else replace(kernels, loss_bytes=_COMPILED_LOSS_BYTES)


def compiles_all(run: PublishedRun) -> bool:
    """Whether inductor compiles blocks and loss of a run of torchtitan."""
    return _has_inductor(run) and not _LOSS_NOT_COMPILED.search(run.text("framework").lower())


def _has_inductor(run: PublishedRun) -> bool:
    name = run.text("framework").lower()
    return run.text("compile") == "True" and ("inductor" in name or not any(each in name for each in _UNFUSED))


def _torchtitan_kernels(run: PublishedRun, kernels: Kernels) -> Kernels:
    """Torchtitan's kernels under a run's version and switches.

    Inductor makes one kernel of the loss, with logits and their gradients in 16 bits, and of routing where it compiles
    blocks with experts in one piece (distributed/compile.py; of 2025 it did not). Selective remat repeats every second
    matmul by operation; the pass over graphs did so at first, and now keeps all (graph_trainer/passes.py).
    """
    name, detail = run.text("framework").lower(), run.text("act_ckpt_detail").lower()
    month = re.search(r"20\d\d-\d\d", name)
    is_fused = _has_inductor(run)
    if not has_loss_in_pieces(run):
        kernels = replace(kernels, loss_pieces=1)
    if is_fused:
        kernels = with_compiled_loss(kernels, name)
    if _dispatcher(run, Execution()) == "deep" or (is_fused and month is not None and month[0] >= "2026-06"):
        kernels = replace(kernels, eager_routing=False)
    if run.text("act_ckpt") == "selective" and (detail == "graph pass" or "op" in detail):
        keeps_all = detail == "graph pass" and month is not None and month[0] > "2026-03"
        kernels = replace(kernels, selective="no matmul" if keeps_all else "half of the matmuls")
    return kernels


def _execution(run: PublishedRun, execution: Execution, zero: int) -> Execution:
    precision, execution = run.text("precision").lower(), _overlapped(run, execution, zero)
    if execution.states is not None and zero < 3:
        execution = replace(execution, states=replace(execution.states, zero=zero))
    else:
        execution = replace(execution, states=None)
    assert execution.kernels is not None, "rows have no modules that could be traced"
    kernels = _kernels(run, execution.kernels)
    if execution.states is not None and _has_fp8_parameters(run):
        execution = replace(execution, states=replace(execution.states, frozen=1))
    if run.text("cuda_graph") in _GRAPHS:
        execution = replace(execution, eager_launch=False)
    execution = replace(execution, kernels=kernels, dispatcher=_dispatcher(run, execution))
    if "fp8 parameters" in precision:
        execution = replace(execution, low_copies=0)  # the parameters are those copies
    if "pure" in precision:
        execution = replace(execution, reduce_bytes=2)
    if "bf16optimizer" in precision:
        execution = replace(
            execution,
            accumulation_bytes=ADDED_APART,
            states=replace(KEPT_18, zero=zero),
            reduce_bytes=4,
            step_shard_bytes=0,
        )
    elif run.text("framework").lower().startswith("megatron-deepspeed") and zero == 0:
        execution = replace(execution, step_shard_bytes=_UNSHARDED_STEP)
    return execution


_HIDDEN = 0.5
"""Part of the communication of tensor or expert parallelism that runs beside compute where a row says so."""
_HIDDEN_IN_2022 = {True: 1 / 4, False: 1 / 3}
"""The same of Megatron-LM 3.0, with sequence parallelism and without: behind gradients of weights it reduces those of
inputs (LinearWithGradAccumulationAndAsyncCommunication), two of eight collectives of a block, or two of six all-reduces
of one that is computed again."""


def _overlapped(run: PublishedRun, execution: Execution, zero: int) -> Execution:
    """The execution with what the row says runs beside what."""
    overlap = run.text("overlap").lower()
    if run.text("framework") == "Megatron-LM (2022)":
        execution = replace(execution, hidden_collectives=_HIDDEN_IN_2022[run.text("sp") == "True"])
    if any(words in overlap for words in ("async tp", "tp userbuffers", "tp comm")):
        execution = replace(execution, hidden_collectives=_HIDDEN)
    if "ep all-to-all" in overlap:
        execution = replace(execution, hidden_exchanges=_HIDDEN)
    if "grad" in overlap or (run.text("framework") == "nanotron" and zero == 0):
        execution = replace(execution, overlaps_data=True)
    return execution


def _dispatcher(run: PublishedRun, execution: Execution) -> Dispatcher:
    text = run.text("moe_dispatcher").lower()
    if not text:
        return execution.dispatcher
    deep = any(word in text for word in ("deepep", "hybridep"))
    return "deep" if deep else "all-gather" if text.startswith("allgather") else "all-to-all"
