"""A plan as Megatron-LM's arguments: a script that starts its ``pretrain_gpt.py``.

Two targets: ``megatron`` replicates parameters over data ranks and shards the optimizer (the distributed optimizer,
ZeRO-1), as its users do; ``megatron-fsdp`` shards all states with Megatron-FSDP.

Names are those of megatron-core 0.19.2 (``megatron/training/arguments.py`` and the config classes that it uses, and
``core/transformer/pipeline_parallel_layer_layout.py`` for the layout: E the embedding, t a block, L the loss, | a cut).
Hybrid sharding is Megatron-FSDP's with several instances of the distributed optimizer, whose outer ranks do not shard;
it requires ZeRO-3 inside.
"""

import ast
import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from steelyard.engines.capabilities import Capabilities, block_layers, dimensions_of
from steelyard.engines.engine import Engine, Entries, FileSettings, Reader, Settings, options_in
from steelyard.engines.execution import FUSED, Execution, Module, StateBytes
from steelyard.engines.megatron_models import Flags, model_flags
from steelyard.engines.writing import Draft, PipelinePart, Request, Target, UniformPlan, refuse_untold
from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.plan.dimensions.ep import DEGREE
from steelyard.plan.strategy import Remat
from steelyard.precision import SCALES_LOSS, Precision
from steelyard.schedules import SCHEDULES

_COMMUNICATION = {"gather": "all_gather", "ulysses": "a2a"}
"""Values of ``--cp-comm-type`` by cp method, as in ``TransformerConfig`` and Transformer Engine. The option's own help
says ``allgather``, which nothing reads."""

_DISPATCHERS: Mapping[str, Sequence[str]] = {
    "alltoall": ("--moe-token-dispatcher-type alltoall",),
    "allgather": ("--moe-token-dispatcher-type allgather",),
    "deepep": ("--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend deepep"),
}
"""Flags of the token dispatcher by option; the first is the default."""
BALANCED = "balanced"
"""Option that makes routers distribute tokens evenly, for benchmarks."""


IN_BF16 = StateBytes(parameters=2, gradients=2, optimizer=12, zero=1)
"""States with gradients in 16 bits."""
OPTIONS: Mapping[str, Callable[[Engine], Engine]] = {
    "alltoall": lambda engine: engine.executing(dispatcher="all-to-all"),
    "allgather": lambda engine: engine.executing(dispatcher="all-gather"),
    "deepep": lambda engine: engine.executing(dispatcher="deep"),
    BALANCED: lambda engine: engine.executing(balances_experts=True),
}
"""Options of everything that has Megatron-Core's experts."""
_SWITCHES: Mapping[str, tuple[str, Callable[[Engine], Engine]]] = {
    "bf16-gradients": (
        "--grad-reduce-in-bf16",
        lambda engine: engine.executing(states=IN_BF16, reduce_bytes=2, accumulation_bytes=2),
    ),
    "fp8-parameters": ("--fp8-param-gather", lambda engine: engine.executing(low_copies=0)),
    "fused-loss": ("--cross-entropy-loss-fusion", lambda engine: engine.with_kernels(loss_bytes=(14, 4))),
}
"""Further options of Megatron-LM's script, with their flags: gradients kept and reduced in bf16, parameters kept and
gathered in 8 bits, and a loss that torch compiles (fusions/fused_cross_entropy.py; bytes seen in published runs)."""

CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of("dp", "tp", "dp+tp", "dp+ep", "dp+tp+ep", "cp", "dp+cp", "cp+tp", "dp+cp+tp"),
    modes={"sp": frozenset({False, True}), "cp_method": frozenset(_COMMUNICATION), "ep": frozenset(DEGREE.texts)},
    modes_with_experts={"sp": frozenset({True})},  # core/transformer/moe/moe_layer.py, MoELayer.forward
    why_not={"fsdp": "which needs Megatron-FSDP: export --to megatron-fsdp"},
    remats=frozenset(Remat),
    remats_first_blocks=True,
    schedules=frozenset(each.name for each in SCHEDULES.values() if each.megatron_name is not None),
)

FSDP_CAPABILITIES = replace(
    CAPABILITIES,
    dimensions=dimensions_of(
        *("fsdp", "dp+fsdp", "fsdp+tp", "dp+fsdp+tp", "fsdp+ep", "fsdp+tp+ep", "fsdp+cp", "fsdp+cp+tp"),
        *("tp", "cp", "cp+tp"),
    ),
    modes={**CAPABILITIES.modes, "zero": frozenset({2, 3})},
    modes_beside={"dp": {"zero": frozenset({3})}},
    why_not={},
)

FLAGS: Mapping[Precision, Sequence[str]] = {
    "bf16": ("--bf16",),
    "fp16": ("--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale 65536"),
    "fp32": (),
    "fp8": ("--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"),
    "fp8-block": ("--bf16", "--fp8-format e4m3", "--fp8-recipe blockwise"),
    "mxfp8": ("--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"),
    "nvfp4": ("--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"),
}
"""Flags of each precision. By default Megatron keeps and reduces gradients in fp16 under fp16, and starts with a loss
scale of 2^32."""
_OF_RECIPE = {flags[-1].partition("-recipe ")[2]: precision for precision, flags in FLAGS.items() if flags}


def _refuse(chain: ModelChain, seq_len: int) -> None:
    refuse_untold("megatron", chain)
    model_flags(chain, seq_len)


def _write(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    chain = request.plan.chain()
    groups = {
        "MODEL": model_flags(chain, view.seq_len),
        "PARALLEL": parallel_flags(view, options_in(request.plan.engine)),
        "REMAT": remat_flags(view, chain),
        "BATCH": [
            f"--micro-batch-size {view.microbatch_per_rank}",
            f"--global-batch-size {view.global_batch}",
            f"--seq-length {view.seq_len}",
            *FLAGS[view.precision],
            *(_SWITCHES[each][0] for each in options_in(request.plan.engine) if each in _SWITCHES),
        ],
    }
    left_out = [
        "tokenizer, data, learning rate and initial weights: pass them as arguments of the script",
        "exact kernels: Megatron's fused kernels are priced by a closed form, not measured",
        f"the vocabulary of {chain.vocab_size} tokens: Megatron uses that of the tokenizer, padded by "
        "--make-vocab-size-divisible-by",
    ]
    if view.shards > 1:
        left_out.append("FSDP2 itself: Megatron-FSDP shards the same states with its own buckets and prefetching")
    return Draft(
        files=(("megatron.sh", _script(groups, view, request)),),
        left_out=tuple(left_out),
        launch=f"{request.variables}MEGATRON=/path/to/Megatron-LM bash megatron.sh --tokenizer-type "
        "HuggingFaceTokenizer --tokenizer-model NAME --data-path PREFIX --train-iters 1000 --lr 3e-4",
    )


def _script(groups: Mapping[str, Flags], view: UniformPlan, request: Request) -> str:
    connections = (
        "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP refuses 1"
        if view.shards > 1
        else "export CUDA_DEVICE_MAX_CONNECTIONS=1  # tensor parallelism asks for it before Blackwell"
    )
    wanted = ': "${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}"'
    lines = ["#!/bin/bash", "set -euo pipefail", wanted, connections, ""]
    for name, flags in groups.items():
        lines += [f"{name}=(", *(f"    {_quoted(flag)}" for flag in flags), ")"]
    arrays = " ".join(f'"${{{name}[@]}}"' for name in groups)
    # lines that start one process per device on each host
    cluster = request.cluster
    nodes, devices = (cluster.num_nodes, str(cluster.devices_per_node)) if cluster else (1, "gpu")
    rank = "${NODE_RANK:-0}" if nodes == 1 else "${NODE_RANK:?set NODE_RANK to the number of this host, from 0}"
    host = "${MASTER_ADDR:-127.0.0.1}" if nodes == 1 else "${MASTER_ADDR:?set MASTER_ADDR to the first host}"
    lines += [
        "",
        f'torchrun --nnodes "${{NNODES:-{nodes}}}" --nproc-per-node "${{NPROC_PER_NODE:-{devices}}}" \\',
        f'    --node-rank "{rank}" --master-addr "{host}" \\',
        '    --master-port "${MASTER_PORT:-29500}" \\',
        f'    "$MEGATRON/pretrain_gpt.py" {arrays} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _quoted(flag: str) -> str:
    """Return an option and its value as shell words, quoted so that a value of a config is never code."""
    option, space, value = flag.partition(" ")
    return option + (f" {shlex.quote(value)}" if space else "")


def refuse_cut_token(name: str, chain: ModelChain, tp: int) -> None:
    """Raise `UserError` if tp does not divide the vocabulary, for targets that do not pad it."""
    if chain.vocab_size % tp:
        raise UserError(
            field="--to",
            found=f"{name} for tp {tp} over {chain.vocab_size} tokens",
            expected="a tp degree that divides the vocabulary, because this target does not pad it",
            hint="plan with --max-tp, or export --to megatron, which pads it",
        )


def attributes(flags: Sequence[str]) -> dict[str, Any]:
    """Return flags as Python names and values: ``--micro-batch-size 2`` becomes ``micro_batch_size``, 2."""
    found: dict[str, Any] = {}
    for flag in flags:
        option, _, text = flag.partition(" ")
        value: Any = text or True
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
        found[option.removeprefix("--").replace("-", "_")] = value
    return found


def parallel_flags(view: UniformPlan, options: Sequence[str]) -> Flags:
    """Return the flags of degrees, stages, sharding and dispatch."""
    flags = [
        f"--tensor-model-parallel-size {view.tp}",
        f"--pipeline-model-parallel-size {view.pipeline.num_stages}",
        *(["--sequence-parallel"] if view.sp else []),
    ]
    if view.pipeline.num_stages > 1:
        flags.append(f"--pipeline-model-parallel-layout {layout(view.parts)}")
    if view.shards > 1:
        shards = "optim_grads_params" if view.zero == 3 else "optim_grads"
        flags += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {shards}",
            "--use-distributed-optimizer",
            "--ckpt-format fsdp_dtensor",
            "--no-gradient-accumulation-fusion",
            "--overlap-param-gather",
        ]
    if view.shards > 1 and view.dp > 1:
        flags += [f"--num-distributed-optimizer-instances {view.dp}", "--outer-dp-sharding-strategy no_shard"]
    if view.cp > 1:
        flags += [f"--context-parallel-size {view.cp}", f"--cp-comm-type {_COMMUNICATION[view.cp_method]}"]
    if view.has_experts:
        flags += [
            f"--expert-model-parallel-size {view.ranks_of_experts}",
            "--expert-tensor-parallel-size 1",
            *[_DISPATCHERS[each] for each in ("alltoall", *options) if each in _DISPATCHERS][-1],
            *(["--moe-router-force-load-balancing"] if BALANCED in options else []),
        ]
    if view.data_degree * view.cp > 1:
        sharded = ["--use-distributed-optimizer", "--overlap-param-gather"] if view.shards == 1 else []
        flags += [*sharded, "--overlap-grad-reduce"]
    return flags


def layout(parts: tuple[PipelinePart, ...]) -> str:
    """Return the stages, or their chunks, in the form of ``--pipeline-model-parallel-layout``: ``Ettt|tttt|tttL``."""
    return "|".join(
        "E" * part.has_embedding
        + (f"t*{len(part.blocks)}" if len(part.blocks) > 1 else "t" * len(part.blocks))
        + "L" * part.has_head
        for part in parts
    )


def remat_flags(view: UniformPlan, chain: ModelChain) -> Flags:
    """Return the flags of recomputation; empty without any."""
    if view.remat is Remat.NONE:
        return []
    if view.remat is Remat.SELECTIVE:
        has = {"moe_act": view.has_experts, "mla_up_proj": bool(chain.config.get("kv_lora_rank"))}
        modules = [each for each in _RECOMPUTED if has.get(each, True)]
        return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]
    method, count = ("uniform", 1) if view.remat_blocks is None else ("block", view.remat_blocks)
    return ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {count}"]


_RECOMPUTED: tuple[Module, ...] = ("layernorm", "moe_act", "mla_up_proj")
"""Modules of selective remat that take little time. Recomputing attention's core saves nothing with a flash kernel."""
KERNELS = replace(FUSED, loss_bytes=(6, 4), of_each_expert=2, selective=_RECOMPUTED)
"""Megatron-Core's kernels. The loss makes one fp32 copy of the logits, works in place and keeps the softmax
(tensor_parallel/cross_entropy.py). Transformer Engine computes every expert with a separate matmul on one of four
streams (gemm.cpp, te_general_grouped_gemm)."""
_ASSIGNED = re.compile(r"(?m)^\s*(?:export\s+)?([A-Za-z_]\w*)=([^\s(]\S*)")
_USED = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|([A-Za-z_]\w*))")
_CALCULATED = re.compile(r"\$\(\(((?:\s*\d{1,9}\s*[*/])*\s*\d{1,9}\s*)\)\)")
_OPTION = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?|([a-z][\w.]*)=(.*)")
_LAUNCH = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint")
_NOT_PRICED = (
    *("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "ckpt_format"),
    *("no_gradient_accumulation_fusion", "outer_dp_sharding_strategy", "bf16", "fp16"),
    *("accumulate_allreduce_grads_in_fp32", "loss_scale", "initial_loss_scale", "min_loss_scale"),
    *("loss_scale_window", "hysteresis", "lr", "seed", "split", "num_workers", "mock_data", "clip_grad"),
    *("init_method_std", "distributed_backend", "no_position_embedding", "use_rotary_position_embeddings"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "use_flash_attn", "no_masked_softmax_fusion", "dataloader_type"),
    *("no_create_attention_mask_in_dataloader", "no_mmap_bin_files", "empty_unused_memory_level", "use_mcore_models"),
)
_OF_TRAINING = (
    r"(min_lr|lr|decoupled|train|valid|test|eval|save|load|no_load|no_save|log|tensorboard|wandb|weight_decay|"
    r"(start|end)_weight_decay|adam|data|tokenizer|vocab|merge|tiktoken|exit|timing|profile|manual_gc|"
    r"distributed_timeout|override_opt|use_checkpoint)(_\w+)?"
)
"""Names of arguments of data, learning rates, evaluation, checkpoints and logs."""
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
)
"""Sizes of a model that tell it from another one."""
_NARROW = "gradients in fp16 (priced in fp32, as with --accumulate-allreduce-grads-in-fp32)"
_LOOPED = "experts one after another (priced with --moe-grouped-gemm)"


def _check_sizes(entries: Entries, own: Mapping[str, str], chain: ModelChain) -> None:
    for name in _SIZES:
        found = entries.get(name)
        told = own.get(name, "none" if name == "num_experts" else None)
        if found is not None and told is not None and str(found) != told:
            raise UserError(
                field="--from",
                found=f"{name} {found}",
                expected=f"{told}, the value of {chain.name}",
                hint="pass the model that the file trains",
            )


def _dispatch_options(entries: Entries) -> tuple[str, ...]:
    """Return the options of the engine for experts that the file sets."""
    backend = str(entries.get("moe_flex_dispatcher_backend", default="deepep"))
    deep = "deepep" if backend in ("deepep", "hybridep") or entries.get("moe_enable_deepep") else None
    dispatcher = str(entries.get("moe_token_dispatcher_type"))
    named = {"alltoall": "alltoall", "allgather": "allgather", "flex": deep}.get(dispatcher)
    if "moe_token_dispatcher_type" in entries.values and named is None:
        raise UserError(
            field="moe_token_dispatcher_type",
            found=f"{dispatcher} {backend}" if dispatcher == "flex" else dispatcher,
            expected="alltoall, allgather, or flex with deepep or hybridep",
            hint="change it in the file",
        )
    balanced = (BALANCED,) if entries.get("moe_router_force_load_balancing") else ()
    return (*([named] if named else ()), *balanced)


def _read_script(entries: Entries, chain: ModelChain, num_devices: int) -> FileSettings:
    """Return the settings of Megatron-LM's arguments with the defaults of its experts."""
    flags = {name: flag.removeprefix("--").replace("-", "_") for name, (flag, _) in _SWITCHES.items()}
    switches = tuple(name for name, flag in flags.items() if entries.get(flag))
    found = read(entries, chain, num_devices)
    options, looped = (*found.options, *switches), False
    if chain.has_experts:
        options = options if "moe_token_dispatcher_type" in entries.values else ("allgather", *options)
        looped = "moe_grouped_gemm" not in entries.values
    return replace(found, options=options, unread=(*found.unread, *[_LOOPED] * looped))


def read(entries: Entries, chain: ModelChain, num_devices: int) -> FileSettings:
    """Return the settings that Megatron-LM's arguments or the settings of a Megatron-Bridge recipe are."""
    values = entries.values
    entries.skip(*_LAUNCH, *_NOT_PRICED, *(["cp_comm_type"] if values.get("cp_comm_type") != "a2a" else []))
    entries.skip(*(["recompute_modules"] if values.get("recompute_modules") in _RECOMPUTED else []))
    usual = {"attention_backend": ("auto", "flash", "fused"), "transformer_impl": ("transformer_engine",)}
    entries.skip(*(name for name, known in usual.items() if values.get(name) in known))
    entries.skip_like(_OF_TRAINING)
    seq_len = entries.number_or_none("seq_length", "sequence_length", "seq_len")
    own = {
        flag.partition(" ")[0].removeprefix("--").replace("-", "_"): flag.partition(" ")[2]
        for flag in model_flags(chain, seq_len or 1)
    }
    _check_sizes(entries, own, chain)
    tp, pp, cp, ep = (
        entries.number(f"{word}_model_parallel_size", f"{word}_parallel_size", short)
        for word, short in (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp"), ("expert", "ep"))
    )
    parts = _parts_of_layout(str(entries.get("pipeline_model_parallel_layout", default="")))
    chunks = entries.number("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "vp")
    if (layers := entries.number_or_none("num_layers_per_virtual_pipeline_stage")) is not None:
        chunks = len(block_layers(chain)) // (pp * layers)
    shards = str(entries.get("data_parallel_sharding_strategy", default="optim_grads_params"))
    zero = int("use_distributed_optimizer" in values)
    if entries.get("use_megatron_fsdp"):
        zero = {"optim_grads_params": 3, "optim_grads": 2}.get(shards, 1)
    data = num_devices // (tp * pp * cp)
    instances = entries.number("num_distributed_optimizer_instances")
    remat, blocks = _read_remat(entries)
    narrow = "fp16" in values and "accumulate_allreduce_grads_in_fp32" not in values
    return FileSettings(
        settings=Settings(
            tp=tp,
            cp=cp,
            pp=pp,
            vpp=len(parts) // pp if parts else chunks,
            ep=ep,
            replicas=instances if zero > 1 else 1,
            micro_batch=entries.number("micro_batch_size", "mbs"),
            zero=zero if data > 1 else 1,
            sp=bool(entries.get("sequence_parallel", default=False)),
            remat=remat,
            remat_blocks=blocks,
            blocks=parts or None,
        ),
        global_batch=entries.number_or_none("global_batch_size", "gbs"),
        seq_len=seq_len,
        precision=_read_precision(entries) or next((each for each in ("bf16", "fp16") if each in values), "fp32"),
        options=_dispatch_options(entries),
        unread=(*(name for name in entries.unread if name not in own), *[_NARROW] * narrow),
    )


def arguments(text: str) -> Mapping[str, Any]:
    """Return the values of options in a shell script by name with underscores; True for an option without a value.

    Options have the form ``--tensor-model-parallel-size 4`` or, for a Megatron-Bridge recipe,
    ``model.tensor_model_parallel_size=4``, anywhere in the script, also in quotes or arrays. Variables that the text
    sets to one value are substituted, and products of numbers are computed.
    """
    spelt = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    set_to: dict[str, str | None] = {}

    def filled(part: str) -> str:
        known = _USED.sub(lambda use: str(set_to.get(use[1] or use[3]) or use[2] or use[0]), part)
        return _CALCULATED.sub(_calculated, known)

    for variable, assigned in _ASSIGNED.findall(spelt):
        text_of = filled(assigned.strip("\"'"))
        text_of = "" if text_of.startswith("-") else text_of  # options, which are read where they stand
        is_alone = set_to.get(variable, text_of) == text_of  # what depends on a condition stays open
        set_to[variable] = text_of if is_alone else None
    words = re.sub(r"\\\n|[\"'()]", " ", filled(spelt)).split()
    found: dict[str, Any] = {}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue="--"):
        option = _OPTION.fullmatch(word)
        if option is None or (option[3] and option[3] in set_to):
            continue
        given = option[2] if option[1] else option[4]
        name = (option[1] or option[3]).rpartition(".")[2].replace("-", "_")
        is_alone = given is None and re.match(r"-|\w+\+?=", after) is not None
        value = given if given is not None else True if is_alone else after
        found[name] = {"true": True, "false": False, "null": None, "none": None}.get(str(value).lower(), value)
    return {name: value for name, value in found.items() if value is not None and value is not False}


def _calculated(match: re.Match[str]) -> str:
    """Return the value of a shell's product or quotient of numbers, ``$((8*16/2))``, or its text if it is another."""
    numbers, operators = re.findall(r"\d+", match[1]), re.findall(r"[*/]", match[1])
    found = int(numbers[0])
    for operator, number in zip(operators, map(int, numbers[1:]), strict=True):
        if operator == "/" and number == 0:
            return match[0]
        found = found * number if operator == "*" else found // number
    return str(found)


def _parts_of_layout(layout_text: str) -> tuple[int, ...]:
    """Return the number of blocks of each part in ``--pipeline-model-parallel-layout``; empty if it is not given."""
    spelt = re.sub(r"\(([^)]*)\)\*(\d{1,3})", lambda part: part[1] * int(part[2]), layout_text)
    spelt = re.sub(r"([Etm|L])\*(\d{1,3})", lambda part: part[1] * int(part[2]), spelt)
    return tuple(part.count("t") for part in spelt.split("|")) if spelt else ()


def _read_precision(entries: Entries) -> str:
    """Return the precision of products in 8 or 4 bits by its recipe, any other 8-bit recipe as fp8; empty if none."""
    for bits, usual in (("fp4", "nvfp4"), ("fp8", "fp8")):
        if entries.get(f"{bits}_format", bits):
            return _OF_RECIPE.get(str(entries.get(f"{bits}_recipe")), usual)
    return ""


def _read_remat(entries: Entries) -> tuple[Remat, int | None]:
    """Return the remat of blocks, and the number of recomputed blocks of each part; None for all."""
    usual = "selective" if entries.get("recompute_activations") else None
    granularity = entries.get("recompute_granularity", default=usual)
    method = entries.get("recompute_method", default="uniform")
    count = entries.number_or_none("recompute_num_layers")
    if granularity != "full":
        return Remat.SELECTIVE if granularity == "selective" else Remat.NONE, None
    return Remat.FULL, count if method == "block" else None


MEGATRON = Engine(
    name="megatron",
    capabilities=CAPABILITIES,
    execution=Execution(
        states=StateBytes(parameters=2, gradients=4, optimizer=12, zero=1),
        overlaps_transfers="with chunks",
        kernels=KERNELS,
        accumulation_bytes=6,  # in the product that computes a gradient
        low_copies=2,  # Transformer Engine, module/base.py, get_weight_workspace
    ),
    precisions=tuple(FLAGS),
    options={**OPTIONS, **{name: change for name, (_, change) in _SWITCHES.items()}},
    refuse=_refuse,
    reader=Reader(suffixes=(".sh", ".txt", ".args"), values=arguments, read=_read_script),
    targets=(
        Target(
            name="megatron",
            software="Megatron-LM (megatron-core 0.19.2)",
            summary="a script with the arguments of pretrain_gpt.py: sizes, layout of uneven stages, recompute, batch",
            write=_write,
            weights="Megatron-Bridge's examples/conversion/convert_checkpoints.py import and export",
            vocabulary_unit=128,
            routers="the auxiliary loss of routers over all layers and data ranks: Megatron computes it per layer "
            "and per data rank (coefficient: the model's, times experts per token, over the number of layers)",
        ),
    ),
)
"""Megatron-LM, whose distributed optimizer overlaps the reduction of gradients and the gathering of parameters with
compute (--use-distributed-optimizer, --overlap-grad-reduce, --overlap-param-gather)."""
MEGATRON_FSDP = replace(
    MEGATRON,
    name="megatron-fsdp",
    capabilities=FSDP_CAPABILITIES,
    execution=Execution(kernels=KERNELS),
    options=OPTIONS,
    precisions=tuple(each for each in FLAGS if each != SCALES_LOSS),
    targets=tuple(
        replace(
            target,
            name="megatron-fsdp",
            summary="the same script for Megatron-FSDP: parameters, gradients and optimizer states sharded",
        )
        for target in MEGATRON.targets
    ),
)
"""Megatron-FSDP, which shards as FSDP2 does. Its loss scaling was not read."""
