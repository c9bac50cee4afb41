"""A plan for accelerate: its launch configuration, with FSDP2 or DDP.

Names are those of accelerate 1.15.0 (``commands/config/config_args.py``, ``parallelism_config.py``). It has no
pipelines for a trainer and no selective remat. Its tp fails with transformers 5.16.1 and 5.23.0, which no longer have
the `ReplicateParallel` that its `Accelerator._prepare_tp` imports. Its FSDP2 (``utils/fsdp_utils.py``) groups the
embedding, the final norm and the head of decoders. In most other models it shards a parameter twice, which torch
refuses: embeddings in one module with positions (BERT, ViT) or shared by encoder and decoder (T5).
"""

from typing import Any

import yaml

from steelyard.engines import peft
from steelyard.engines.capabilities import Capabilities, dimensions_of
from steelyard.engines.engine import Engine, Entries
from steelyard.engines.execution import Execution
from steelyard.engines.writing import (
    RENDEZVOUS_PORT,
    ROUTERS_BY_RANK,
    Draft,
    Request,
    Target,
    UniformPlan,
    refuse_as_transformers,
)
from steelyard.errors import UserError
from steelyard.levers.optimizer import Optimizer
from steelyard.levers.weights import Weights
from steelyard.model.family import Task
from steelyard.plan.strategy import Remat
from steelyard.units import format_plural

SHARDED_TASKS = frozenset({Task.CAUSAL_LM, Task.IMAGE_TEXT})
CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of("dp", "fsdp", "dp+fsdp"),
    sharded_tasks=SHARDED_TASKS,
    modes={"zero": frozenset({2, 3})},
    why_not={"tp": "which fails in accelerate with transformers 5, but not in the engine transformers"},
    remats=frozenset({Remat.NONE, Remat.FULL}),
)

OPTIMIZERS = {
    "adamw-8bit": "torchao.optim.AdamW8bit",
    "adamw-4bit": "torchao.optim.AdamW4bit",
    "adafactor": "torch.optim.Adafactor",
    "sgd": "torch.optim.SGD",
}
"""Optimizer classes that our runtime supports too."""
_TIED = (
    "freeing the tied matrix: embedding, final norm and head are one FSDP unit, gathered from the first use "
    "in the forward pass to the last use in the backward pass"
)
_BUFFERS = (
    "for routers with buffers, as in DeepSeek-V3: fsdp_cpu_ram_efficient_loading: false (it reads parameters alone)"
)
GATHERED_TAIL = "freeing the head after the forward pass: head and final norm stay gathered until the backward pass"


def _write(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    levers = request.plan.chosen_levers
    left_out = ["optimizer, data and initial weights: set by the training script"]
    several = request.cluster is not None and request.cluster.num_nodes > 1
    meeting = " --machine_rank RANK --main_process_ip FIRST_HOST" if several else ""
    usage = [
        f"in train.py: Accelerator(gradient_accumulation_steps={view.pipeline.num_microbatches}), a DataLoader of "
        f"{format_plural(view.microbatch_per_rank, 'sample')} of {view.seq_len} tokens"
    ]
    if view.fsdp > 1:
        left_out += kept_gathered(request)
        if view.has_experts:
            usage.append(_BUFFERS)
    if view.remat is Remat.FULL:
        recomputed = "model.config.use_cache = False (recomputed blocks would add to the cache again)"
        usage.append(f"in train.py: {recomputed if view.fsdp > 1 else 'model.gradient_checkpointing_enable()'}")
    usage += peft.model_usage(levers, view.precision)
    if not levers.value(Weights).is_default:
        usage.append("in train.py: from_pretrained(..., dtype='bfloat16') (mixed precision would keep fp32 weights)")
    if (word := str(levers.value(Optimizer))) in OPTIMIZERS:
        usage.append(f"in train.py: the optimizer is {OPTIMIZERS[word]}")
    if request.cluster is None:
        left_out.append("hosts: the cluster is unknown here, so all processes are assumed to run on one host")
    return Draft(
        files=(
            ("accelerate.yaml", yaml.safe_dump(launch_config(request, view), sort_keys=False)),
            *peft.model_files(levers, view.precision),
        ),
        left_out=tuple(left_out),
        launch=f"accelerate launch --config_file accelerate.yaml{meeting} train.py",
        usage=tuple(usage),
    )


def kept_gathered(request: Request) -> list[str]:
    """Return lines on parameters gathered once per microbatch at any ZeRO stage (``utils/fsdp_utils.py``)."""
    if request.plan.chain().tied_embeddings:
        return [_TIED]
    return [GATHERED_TAIL] if UniformPlan.of(request.plan).zero == 3 else []


def launch_config(request: Request, view: UniformPlan) -> dict[str, Any]:
    """Return the file of ``accelerate launch``."""
    weights = request.plan.chosen_levers.value(Weights)
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if view.fsdp > 1 else "MULTI_GPU" if view.dp > 1 else "NO",
        "mixed_precision": view.precision if view.precision != "fp32" and weights.is_default else "no",
        "num_machines": request.cluster.num_nodes if request.cluster else 1,
        "num_processes": request.plan.num_devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "main_process_port": RENDEZVOUS_PORT,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if view.fsdp > 1:
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": view.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": view.remat is Remat.FULL,
            "fsdp_offload_params": view.on_host,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        }
        content["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": view.dp,
            "parallelism_config_dp_shard_size": view.fsdp,
        }
    return content


_SHARDS = {"shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0}
"""ZeRO stages of strategies of FSDP1 other than full_shard, by name and by accelerate's number."""
FSDP_DETAILS = (
    r"fsdp_version|fsdp_config\.(fsdp_)?(version|.*wrap.*|.*state_dict_type|cpu_ram_efficient_loading|min_num_params|"
    r"sync_module_states|use_orig_params|limit_all_gathers|(backward|forward)_prefetch.*|cpu_offload_pin_memory)"
)
"""Entries of FSDP that change neither shards nor memory by much."""


def read_fsdp(entries: Entries) -> tuple[int, bool]:
    """Return the ZeRO stage of ``fsdp`` and ``fsdp_config`` in a file, and whether they offload parameters.

    Raises `UserError` for hybrid sharding of FSDP1, which does not state the number of replicas.
    """
    given, parts = entries.get("fsdp", default=()), ("fsdp_config.", "fsdp_config.fsdp_")
    entries.skip_like(FSDP_DETAILS)
    is_sharded = bool(given) or any(name.startswith(parts) for name in entries.values)
    strategies = [
        entries.get(*(f"{part}{name}" for part in parts)) for name in ("sharding_strategy", "reshard_after_forward")
    ]
    words = given if isinstance(given, list | tuple) else str(given).split()
    words = [str(word).lower() for word in (*words, *strategies)]
    if hybrid := next((word for word in words if word.startswith("hybrid")), None):
        raise UserError(
            field="fsdp",
            found=hybrid,
            expected="full_shard, shard_grad_op or no_shard: FSDP1's file does not state the replicas of hybrid shards",
            hint="write full_shard, or FSDP2's dp_replicate_size if the trainer reads it",
        )
    stage = 2 if strategies[-1] is False else next((_SHARDS[word] for word in words if word in _SHARDS), 3)
    offloads = bool(entries.get(*(f"{part}offload_params" for part in parts))) or "offload" in words
    return stage if is_sharded else 0, offloads and is_sharded


ACCELERATE = Engine(
    name="accelerate",
    capabilities=CAPABILITIES,
    execution=Execution(whole_gradients="always", shares_head=True),
    precisions=("bf16", "fp16", "fp32"),
    refuse=lambda chain, seq_len: refuse_as_transformers("accelerate", chain),
    levers={**peft.LEVERS, "offload": peft.OFFLOAD, "weights": peft.WEIGHTS},
    targets=(
        Target(
            name="accelerate",
            software="accelerate 1.15.0",
            summary="accelerate.yaml: FSDP2 or DDP, ParallelismConfig, activation checkpointing",
            write=_write,
            weights="from_pretrained reads the Hugging Face format; accelerate merge-weights CHECKPOINT OUT converts "
            "a sharded checkpoint to it",
            routers=ROUTERS_BY_RANK,
        ),
    ),
)
"""FSDP2 with one policy for parameters, gradients and outputs (utils/dataclasses.py, set_mixed_precision), and
`set_requires_gradient_sync(False)` while gradients accumulate (accelerator.py, no_sync)."""
