"""A plan for Hugging Face's trainers: accelerate's launch configuration, or transformers' own classes.

Names are those of accelerate 1.15.0 (``commands/config/config_args.py``, ``parallelism_config.py``) and of transformers
5.23.0 (``training_args.py``, ``distributed/configuration_utils.py``). Neither has training pipelines for a trainer,
sequence parallelism beside tp, or selective remat; both refuse plain replication beside tp.
"""

from typing import Any

import yaml

from steelyard.cost.execution import ACCELERATE as RUN_BY_ACCELERATE
from steelyard.cost.execution import TRANSFORMERS as RUN_BY_TRANSFORMERS
from steelyard.export.target import RENDEZVOUS_PORT, Draft, Request, Target, UniformPlan
from steelyard.plan.capabilities import Capabilities, dimensions_of
from steelyard.plan.strategy import Remat
from steelyard.units import format_plural

_REMATS = frozenset({Remat.NONE, Remat.FULL})
ACCELERATE_CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of("dp", "fsdp", "dp+fsdp", "fsdp+tp", "dp+fsdp+tp"),
    modes={"zero": frozenset({2, 3}), "sp": frozenset({False})},
    remats=_REMATS,
)
TRANSFORMERS_CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of("dp", "fsdp", "tp", "fsdp+tp"),
    modes={"zero": frozenset({2, 3}), "sp": frozenset({False})},
    modes_beside={"tp": {"zero": frozenset({3})}},
    remats=_REMATS,
)
"""With tp the model shards itself (`DistributedConfig`), which frees the parameters of every block after forward."""

_TIED = (
    "freeing the tied matrix: embedding, final norm and head are one unit, gathered from its first use in forward to "
    "its last in backward"
)
_TAIL = "freeing the head after forward: it and the final norm stay gathered for the backward pass"


def _write_accelerate(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    left_out = ["optimizer, data and first weights: those of the training script"]
    several = request.cluster is not None and request.cluster.num_nodes > 1
    start = "accelerate launch --config_file accelerate.yaml"
    usage = [
        f"on every host: {start} --machine_rank RANK --main_process_ip FIRST_HOST train.py, RANK from 0 on the first"
        if several
        else f"{start} train.py",
        f"in train.py: Accelerator(gradient_accumulation_steps={view.pipeline.num_microbatches}), a DataLoader of "
        f"{format_plural(view.microbatch_per_rank, 'sample')} of {view.seq_len} tokens",
    ]
    if view.tp > 1:
        usage.append(
            "in train.py: from_pretrained(..., tp_plan='auto', device_mesh=...) on the mesh of the Accelerator"
        )
    if view.fsdp > 1:
        left_out += _kept_gathered(request)
    elif view.remat is Remat.FULL:
        usage.append("in train.py: model.gradient_checkpointing_enable()")
    if request.cluster is None:
        left_out.append("hosts: the cluster is not known here, so all processes are taken to be on one")
    return Draft(
        files=(("accelerate.yaml", yaml.safe_dump(_accelerate(request, view), sort_keys=False)),),
        carried=view.carried,
        left_out=tuple(left_out),
        usage=tuple(usage),
    )


def _kept_gathered(request: Request) -> list[str]:
    """What accelerate gathers once a microbatch whatever the ZeRO stage (``utils/fsdp_utils.py``)."""
    if request.plan.chain().tied_embeddings:
        return [_TIED]
    return [_TAIL] if UniformPlan.of(request.plan).zero == 3 else []


def _accelerate(request: Request, view: UniformPlan) -> dict[str, Any]:
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if view.fsdp > 1 else "MULTI_GPU" if view.dp > 1 else "NO",
        "mixed_precision": "bf16" if view.precision == "bf16" else "no",
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
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        }
        content["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": view.dp,
            "parallelism_config_dp_shard_size": view.fsdp,
            "parallelism_config_tp_size": view.tp,
            "parallelism_config_cp_size": 1,
        }
    return content


def _write_transformers(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    left_out = ["optimizer, data and first weights: those of the training script"]
    if view.fsdp > 1 and view.tp == 1:
        left_out += _kept_gathered(request)
    if view.tp > 1:
        left_out.append(_TAIL)
    model = "distributed_config=distributed_config" if view.tp > 1 else "..."
    return Draft(
        files=(("steelyard_trainer.py", _trainer(view)),),
        carried=view.carried,
        left_out=tuple(left_out),
        usage=(
            f"model = AutoModelForCausalLM.from_pretrained(NAME, {model}); "
            "Trainer(model=model, args=TrainingArguments(output_dir, **training_arguments), ...)",
            f"on every host: {request.torchrun} train.py, {request.plan.num_devices} processes in all",
        ),
    )


def _trainer(view: UniformPlan) -> str:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": view.microbatch_per_rank,
        "gradient_accumulation_steps": view.pipeline.num_microbatches,
        "bf16": view.precision == "bf16",
        "max_grad_norm": 1.0,
    }
    if view.fsdp > 1 and view.tp == 1:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": view.zero == 3,
            "activation_checkpointing": view.remat is Remat.FULL,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
    else:
        arguments["activation_checkpointing"] = view.remat is Remat.FULL
    lines = [
        "training_arguments = {",
        *(f"    {key!r}: {value!r}," for key, value in arguments.items()),
        "}",
    ]
    if view.tp > 1:
        mixed = view.precision == "bf16" and view.fsdp > 1
        lines = [
            "from transformers.distributed import DistributedConfig",
            "",
            "distributed_config = DistributedConfig(",
            f'    tp_size={view.tp}, tp_plan="auto", fsdp_size={view.fsdp}, fsdp_mixed_precision={mixed}',
            ")",
            *lines,
        ]
    return "\n".join(lines) + "\n"


ACCELERATE = Target(
    name="accelerate",
    software="accelerate 1.15.0",
    summary="accelerate.yaml: FSDP2 or DDP, ParallelismConfig, activation checkpointing",
    capabilities=ACCELERATE_CAPABILITIES,
    write=_write_accelerate,
    execution=RUN_BY_ACCELERATE,
    routers="the auxiliary loss of routers over all data ranks: the model takes the samples of each by themselves",
)
TRANSFORMERS = Target(
    name="transformers",
    software="transformers 5.23.0",
    summary="arguments of TrainingArguments, and a DistributedConfig where there is tp",
    capabilities=TRANSFORMERS_CAPABILITIES,
    write=_write_transformers,
    execution=RUN_BY_TRANSFORMERS,
    routers="the auxiliary loss of routers over all data ranks: the model takes the samples of each by themselves",
)
