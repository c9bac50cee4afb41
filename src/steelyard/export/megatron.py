"""A plan as Megatron-LM's arguments: a script that starts its ``pretrain_gpt.py``.

Two targets: ``megatron`` replicates parameters over data ranks and shards the optimizer (the distributed optimizer,
ZeRO-1), as its users do; ``megatron-fsdp`` shards all states with Megatron-FSDP.

Names are those of megatron-core 0.19.2 (``megatron/training/arguments.py`` and the config classes it is made from, and
``core/transformer/pipeline_parallel_layer_layout.py`` for the layout: E the embedding, t a block, L the loss, | a cut).
Hybrid sharding is Megatron-FSDP's with several instances of the distributed optimizer, whose outer ranks do not shard:
it takes ZeRO-3 inside.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from steelyard.cost.execution import MEGATRON_CORE, MEGATRON_FSDP
from steelyard.errors import UserError
from steelyard.export.target import Draft, PipelinePart, Request, Target, UniformPlan
from steelyard.model.chain import ModelChain
from steelyard.model.config_values import ROUTER_LOSS
from steelyard.plan.capabilities import Capabilities, dimensions_of
from steelyard.plan.dimensions.ep import DEGREE
from steelyard.plan.strategy import Remat
from steelyard.schedules import SCHEDULES

_COMMUNICATION = {"gather": "allgather", "ulysses": "a2a"}
"""What ``--cp-comm-type`` calls the ways in which attention sees the whole sequence."""

CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of("dp", "tp", "dp+tp", "dp+ep", "dp+tp+ep", "cp", "dp+cp", "cp+tp", "dp+cp+tp"),
    variants={
        "sp": frozenset({False, True}),
        "cp_method": frozenset(_COMMUNICATION),
        "ep": frozenset(DEGREE.texts),
    },
    why_not={"fsdp": "which is Megatron-FSDP's: export --to megatron-fsdp"},
    remats=frozenset({Remat.NONE, Remat.FULL}),
    remats_first_blocks=True,
    pipeline="any cuts",
    schedules=frozenset(each.name for each in SCHEDULES.values() if each.megatron_name is not None),
)

FSDP_CAPABILITIES = replace(
    CAPABILITIES,
    dimensions=dimensions_of(
        *("fsdp", "dp+fsdp", "fsdp+tp", "dp+fsdp+tp", "fsdp+ep", "fsdp+tp+ep", "fsdp+cp", "fsdp+cp+tp"),
        *("tp", "cp", "cp+tp"),
    ),
    variants={**CAPABILITIES.variants, "zero": frozenset({2, 3})},
    variants_beside={"dp": {"zero": frozenset({3})}},
    why_not={},
)

Flags = list[str]
"""Each an option, and behind a space its value, which the script quotes."""


def _write(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    chain = request.plan.chain()
    groups = {
        "MODEL": _model_flags(chain, view),
        "PARALLEL": _parallel_flags(view),
        "REMAT": _remat_flags(view),
        "BATCH": [
            f"--micro-batch-size {view.microbatch_per_rank}",
            f"--global-batch-size {view.global_batch}",
            f"--seq-length {view.seq_len}",
            *(["--bf16"] if view.precision == "bf16" else []),
        ],
    }
    left_out = [
        "tokenizer, data, learning rate and first weights: give them as arguments of the script",
        "kernels to the letter: the price counts Megatron's fused ones in closed form, not as measured",
    ]
    if view.fsdp > 1:
        left_out.append("FSDP2 itself: Megatron-FSDP shards the same states, with buckets and prefetching of its own")
    return Draft(
        files=(("megatron.sh", _script(groups, view, request)),),
        carried=view.carried,
        left_out=tuple(left_out),
        usage=(
            "MEGATRON=/path/to/Megatron-LM bash megatron.sh --tokenizer-type HuggingFaceTokenizer "
            "--tokenizer-model NAME --data-path PREFIX --train-iters 1000 --lr 3e-4",
            *_where(request),
        ),
    )


def _where(request: Request) -> tuple[str, ...]:
    cluster = request.cluster
    if cluster is None:
        return ("set NPROC_PER_NODE, NNODES, NODE_RANK and MASTER_ADDR: the cluster of the plan is not known here",)
    if cluster.num_nodes == 1:
        return ()
    last = cluster.num_nodes - 1
    return (f"on every host, with NODE_RANK from 0 to {last} and MASTER_ADDR the first host, which all of them reach",)


def _script(groups: Mapping[str, Flags], view: UniformPlan, request: Request) -> str:
    connections = (
        "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP refuses 1"
        if view.fsdp > 1
        else "export CUDA_DEVICE_MAX_CONNECTIONS=1  # tensor parallelism asks for it before Blackwell"
    )
    wanted = ': "${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}"'
    lines = ["#!/bin/bash", "set -euo pipefail", wanted, connections, ""]
    for name, flags in groups.items():
        lines += [f"{name}=(", *(f"    {_quoted(flag)}" for flag in flags), ")"]
    arrays = " ".join(f'"${{{name}[@]}}"' for name in groups)
    # the lines that start as many processes on each host as it has devices
    cluster = request.cluster
    nodes, devices = (cluster.num_nodes, str(cluster.devices_per_node)) if cluster else (1, "gpu")
    rank = "${NODE_RANK:-0}" if nodes == 1 else "${NODE_RANK:?set NODE_RANK to the number of this host, from 0}"
    host = "${MASTER_ADDR:-127.0.0.1}" if nodes == 1 else "${MASTER_ADDR:?set MASTER_ADDR to the first host}"
    lines += [
        "",
        *[
            f'torchrun --nnodes "${{NNODES:-{nodes}}}" --nproc-per-node "${{NPROC_PER_NODE:-{devices}}}" \\',
            f'    --node-rank "{rank}" --master-addr "{host}" \\',
            '    --master-port "${MASTER_PORT:-29500}" \\',
        ],
        f'    "$MEGATRON/pretrain_gpt.py" {arrays} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _quoted(flag: str) -> str:
    """An option and its value as words of a shell: no value of a config is ever more than a value."""
    option, space, value = flag.partition(" ")
    return option + (f" {shlex.quote(value)}" if space else "")


def _parallel_flags(view: UniformPlan) -> Flags:
    flags = [
        f"--tensor-model-parallel-size {view.tp}",
        f"--pipeline-model-parallel-size {view.pipeline.num_stages}",
        *(["--sequence-parallel"] if view.sp else []),
    ]
    if view.pipeline.num_stages > 1:
        flags.append(f"--pipeline-model-parallel-layout {layout(view.parts)}")
    if view.fsdp > 1:
        shards = "optim_grads_params" if view.zero == 3 else "optim_grads"
        flags += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {shards}",
            "--use-distributed-optimizer",
            "--ckpt-format fsdp_dtensor",
            "--no-gradient-accumulation-fusion",
            "--overlap-param-gather",
        ]
    if view.fsdp > 1 and view.dp > 1:
        flags += [f"--num-distributed-optimizer-instances {view.dp}", "--outer-dp-sharding-strategy no_shard"]
    if view.cp > 1:
        flags += [f"--context-parallel-size {view.cp}", f"--cp-comm-type {_COMMUNICATION[view.cp_method]}"]
    if view.has_experts:
        flags += [
            f"--expert-model-parallel-size {view.ranks_of_experts}",
            "--expert-tensor-parallel-size 1",
            "--moe-token-dispatcher-type alltoall",
        ]
    if view.data_degree * view.cp > 1:
        sharded = ["--use-distributed-optimizer", "--overlap-param-gather"] if view.fsdp == 1 else []
        flags += [*sharded, "--overlap-grad-reduce"]
    return flags


def layout(parts: tuple[PipelinePart, ...]) -> str:
    """The stages, or their chunks, as ``--pipeline-model-parallel-layout`` writes them: ``Ettt|tttt|tttL``."""
    return "|".join(
        "E" * part.has_embedding
        + (f"t*{len(part.blocks)}" if len(part.blocks) > 1 else "t" * len(part.blocks))
        + "L" * part.has_head
        for part in parts
    )


def _remat_flags(view: UniformPlan) -> Flags:
    if view.remat is Remat.NONE:
        return []
    method, count = ("uniform", 1) if view.remat_blocks is None else ("block", view.remat_blocks)
    return ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {count}"]


def _model_flags(chain: ModelChain, view: UniformPlan) -> Flags:
    config = chain.config
    special = _FAMILIES.get(chain.family.model_type)
    if special is None:
        raise UserError(
            field="--to",
            found=f"megatron for {chain.name} ({chain.family.model_type})",
            expected="a model of " + ", ".join(sorted(_FAMILIES)),
            hint="export --to pytorch, which builds any of our models with transformers",
        )
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    flags = [
        "--use-mcore-models",
        f"--num-layers {chain.num_layers - 2}",
        f"--hidden-size {chain.hidden_size}",
        f"--num-attention-heads {heads}",
        f"--ffn-hidden-size {config['intermediate_size']}",
        f"--max-position-embeddings {max(chain.max_seq_len, view.seq_len)}",
        "--position-embedding-type rope",
        f"--rotary-base {_rotary(config, 'rope_theta', 10000):.0f}",
        *(
            f"--{name.replace('_', '-')} {float(config.get(name) or 0):g}"
            for name in ("attention_dropout", "hidden_dropout")
        ),
    ]
    if kv_heads != heads:
        flags += ["--group-query-attention", f"--num-query-groups {kv_heads}"]
    if config.get("head_dim"):
        flags.append(f"--kv-channels {config['head_dim']}")
    if not chain.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    return flags + special(config)


def _rotary(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number of the rotary embedding: under ``rope_parameters`` or, in older configs, at the top."""
    nested = config.get("rope_parameters") or {}
    return float(nested.get(key) or config.get(key) or default)


def _llama(config: Mapping[str, Any]) -> Flags:
    epsilon = f"--norm-epsilon {config.get('rms_norm_eps', 1e-6):g}"
    return ["--normalization RMSNorm", epsilon, "--swiglu", "--disable-bias-linear"]


def _qwen3(config: Mapping[str, Any]) -> Flags:
    return [*_llama(config), "--qk-layernorm"]


def _mixtral(config: Mapping[str, Any]) -> Flags:
    count, width, layers = config.get("num_local_experts", 8), config["intermediate_size"], config["num_hidden_layers"]
    return [*_llama(config), *_experts(count, width, layers, config, top_k=2)]


def _qwen3_moe(config: Mapping[str, Any]) -> Flags:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    sparse = [int(block not in dense and (block + 1) % step == 0) for block in range(config["num_hidden_layers"])]
    where = [] if all(sparse) else [f"--moe-layer-freq {sparse}"]
    experts = _experts(config["num_experts"], config["moe_intermediate_size"], sum(sparse), config, top_k=8)
    return [*_qwen3(config), *experts, *where]


def _experts(count: int, width: int, layers: int, config: Mapping[str, Any], *, top_k: int) -> Flags:
    """Routed experts, none dropped, of so many layers; the loss that balances them only where the config asks for it.

    A token takes ``top_k`` of them where the config does not say. Megatron's loss is the sum over the layers, each
    divided by the experts of a token; that of transformers is of all.
    """
    top_k, balancing = config.get("num_experts_per_tok", top_k), ["--moe-router-load-balancing-type none"]
    if config.get(ROUTER_LOSS):
        coefficient = config.get("router_aux_loss_coef", 0.001) * top_k / layers
        balancing = ["--moe-router-load-balancing-type aux_loss", f"--moe-aux-loss-coeff {coefficient:g}"]
    return [
        f"--num-experts {count}",
        f"--moe-router-topk {top_k}",
        f"--moe-ffn-hidden-size {width}",
        *balancing,
        "--moe-grouped-gemm",
    ]


def _gpt_neox(config: Mapping[str, Any]) -> Flags:
    share = _rotary(config, "partial_rotary_factor", float(config.get("rotary_pct", 0.25)))
    epsilon = f"--norm-epsilon {config.get('layer_norm_eps', 1e-5):g}"
    return ["--normalization LayerNorm", epsilon, f"--rotary-percent {share:g}"]


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Flags]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda config: [*_llama(config), "--add-qkv-bias"],
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_neox": _gpt_neox,
}

TARGET = Target(
    name="megatron",
    software="Megatron-LM (megatron-core 0.19.2)",
    summary="a script with the arguments of pretrain_gpt.py: sizes, layout of uneven stages, recompute, batch",
    capabilities=CAPABILITIES,
    write=_write,
    execution=MEGATRON_CORE,
    routers="the auxiliary loss of routers over all layers and data ranks: Megatron takes each layer and each data "
    "rank's samples by themselves (the coefficient is the model's times the experts of a token over the layers)",
)
SHARDED_TARGET = replace(
    TARGET,
    name="megatron-fsdp",
    summary="the same on Megatron-FSDP: parameters, gradients and optimizer sharded",
    capabilities=FSDP_CAPABILITIES,
    execution=MEGATRON_FSDP,
)
