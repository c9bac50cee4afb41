"""A plan as Megatron-LM's arguments: a script that starts its ``pretrain_gpt.py``.

Two targets: ``megatron`` replicates parameters over data ranks and shards the optimizer (the distributed optimizer,
ZeRO-1), as its users do; ``megatron-fsdp`` shards all states with Megatron-FSDP.

Names are those of megatron-core 0.19.2 (``megatron/training/arguments.py`` and the config classes that it uses, and
``core/transformer/pipeline_parallel_layer_layout.py`` for the layout: E the embedding, t a block, L the loss, | a cut).
Hybrid sharding is Megatron-FSDP's with several instances of the distributed optimizer, whose outer ranks do not shard;
it requires ZeRO-3 inside.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from steelyard.engines.capabilities import Capabilities, dimensions_of
from steelyard.engines.engine import BALANCED, Engine, Reader, options_in
from steelyard.engines.execution import FUSED, Execution, StateBytes
from steelyard.engines.megatron_arguments import (
    FLAGS,
    OPTIONS,
    RECOMPUTED,
    SCRIPTS,
    SWITCHES,
    YAML,
    arguments,
    read_script,
)
from steelyard.engines.megatron_models import Flags, model_flags
from steelyard.engines.writing import Draft, PipelinePart, Request, Target, UniformPlan, refuse_untold
from steelyard.model.chain import ModelChain
from steelyard.plan.dimensions.ep import DEGREE
from steelyard.plan.strategy import Remat
from steelyard.precision import SCALES_LOSS
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
CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of(
        *("dp", "tp", "dp+tp", "dp+ep", "dp+tp+ep", "cp", "dp+cp", "cp+tp", "dp+cp+tp"),
        *("cp+ep", "dp+cp+ep", "cp+tp+ep", "dp+cp+tp+ep"),
    ),
    modes={"sp": frozenset({False, True}), "cp_method": frozenset(_COMMUNICATION), "ep": frozenset(DEGREE.texts)},
    modes_with_experts={"sp": frozenset({True})},  # core/transformer/moe/moe_layer.py, MoELayer.forward
    why_not={"fsdp": "which needs the engine megatron-fsdp"},
    remats=frozenset(Remat),
    remats_first_blocks=True,
    schedules=frozenset(each.name for each in SCHEDULES.values() if each.megatron_name is not None),
)

FSDP_CAPABILITIES = replace(
    CAPABILITIES,
    dimensions=dimensions_of(
        *("fsdp", "dp+fsdp", "fsdp+tp", "dp+fsdp+tp", "fsdp+ep", "fsdp+tp+ep", "fsdp+cp", "fsdp+cp+tp"),
        "tp",
    ),
    modes={**CAPABILITIES.modes, "zero": frozenset({2, 3})},
    modes_beside={"dp": {"zero": frozenset({3})}},
    why_not={},
)


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
            *switch_flags(view, options_in(request.plan.engine)),
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


def switch_flags(view: UniformPlan, options: Sequence[str]) -> Iterator[str]:
    """Yield the flags of options that the degrees and the precision of a plan leave an effect."""
    idle = {"tp-overlap": view.tp == 1, "ep-overlap": view.ep == 1, "fp8-parameters": "fp8" not in view.precision}
    for name in options:
        if name in SWITCHES and not idle.get(name):
            yield from (flag.partition("|")[0] for flag in SWITCHES[name].flags)


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
        modules = [each for each in RECOMPUTED if has.get(each, True)]
        return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]
    method, count = ("uniform", 1) if view.remat_blocks is None else ("block", view.remat_blocks)
    return ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {count}"]


KERNELS = replace(FUSED, loss_bytes=(6, 4), of_each_expert=2, selective=RECOMPUTED)
"""Megatron-Core's kernels. The loss makes one fp32 copy of the logits, works in place and keeps the softmax
(tensor_parallel/cross_entropy.py). Transformer Engine computes every expert with a separate matmul on one of four
streams (gemm.cpp, te_general_grouped_gemm)."""


def _shards(script: str) -> bool:
    """Return whether a script trains with Megatron-FSDP."""
    with suppress(ValueError):
        return "use_megatron_fsdp" in arguments(script)
    return False


_READER = Reader(suffixes=SCRIPTS, values=arguments, read=read_script)
YAML_READER = replace(_READER, suffixes=(".yaml", ".yml"), mark=re.compile(YAML).search)
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
    options={**OPTIONS, **SWITCHES},
    refuse=_refuse,
    reader=_READER,
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
    reader=replace(_READER, mark=_shards),
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
