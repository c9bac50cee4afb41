"""A plan as ms-swift's arguments: for Megatron, in a script, and for transformers' trainer, in a YAML file.

Names are those of the package ms-swift 4.6.0. Those of ``megatron pt`` and ``megatron sft``
(``swift/megatron/arguments/megatron_args.py``) are Megatron-LM's with underscores; switches take true or false. It
starts the processes itself, from NNODES, NPROC_PER_NODE, NODE_RANK and MASTER_ADDR, and builds the model from its
Hugging Face config (modelscope/mcore-bridge, ``config/parser.py`` at 00e6df7), except the entries in `_LOST`. This is a
front end of `steelyard.engines.megatron`, which defines its plans and models and their execution.

Those of ``swift pt`` and ``swift sft`` (``swift/arguments/sft_args.py``, ``tuner_args.py``, ``base_args``) are those of
`transformers.TrainingArguments` if it has them; a file as the first argument is read as options
(``swift/cli/main.py``). Adapters are peft's. ``fsdp`` holds its own file of FSDP2 (``swift/config/fsdp2.json``), which
has no replicas. This is a front end of `steelyard.engines.transformers`, which defines the execution of plans.
"""

import shlex
from dataclasses import replace
from typing import Any

import yaml

from steelyard.engines import megatron, peft
from steelyard.engines.accelerate import kept_gathered
from steelyard.engines.capabilities import dimensions_of
from steelyard.engines.engine import options_in
from steelyard.engines.megatron_arguments import OPTIONS, SWITCHES
from steelyard.engines.megatron_models import model_flags
from steelyard.engines.transformers import TRANSFORMERS
from steelyard.engines.writing import ROUTERS_BY_RANK, Draft, Request, Target, UniformPlan
from steelyard.errors import UserError
from steelyard.levers import Levers
from steelyard.levers.quantized_base import QuantizedBase
from steelyard.levers.train import Train
from steelyard.plan.strategy import Remat
from steelyard.precision import DTYPES, Precision

SWIFT = replace(
    megatron.MEGATRON,
    precisions=("bf16", "fp32", "fp8"),
    options={
        **OPTIONS,
        **{name: SWITCHES[name] for name in ("bf16-moments", "fp8-parameters", "fused-loss", "tp-overlap")},
    },
)
"""Megatron-LM with the options for which ms-swift has arguments."""
_BALANCING = ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff")
"""Model flags that ms-swift does not read from the model's config."""
_LOST = {"--window-size": "sliding_window", "--moe-layer-freq": "blocks without experts"}
"""Model flags that ms-swift neither reads from the config nor has as arguments, with their names in messages."""


def _write_megatron(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    chain = request.plan.chain()
    flags = model_flags(chain, view.seq_len, target="ms-swift", lacking=("gpt2",))
    lost = next((_LOST[option] for option in (flag.partition(" ")[0] for flag in flags) if option in _LOST), None)
    if lost is not None:
        raise UserError(
            field="--to",
            found=f"ms-swift for {chain.name}, whose config sets {lost}",
            expected="a model with full attention, and with experts in every block or in none",
            hint="export --to megatron, which supports it",
        )
    balancing = [flag for flag in flags if flag.startswith(_BALANCING)]
    return Draft(
        files=(("swift.sh", _script(view, request, balancing)),),
        left_out=(
            f"the model: MODEL is an ID or folder with the config of {request.plan.model.name}",
            "data, learning rate and number of steps: pass them as arguments of the script",
        ),
        launch=f"{request.variables}MODEL=NAME bash swift.sh --dataset NAME --train_iters 1000 --lr 3e-4",
        usage=("for DeepSpeed instead: export --to deepspeed, and swift sft --deepspeed ds_config.json",),
    )


def _script(view: UniformPlan, request: Request, balancing: list[str]) -> str:
    options = options_in(request.plan.engine)
    arguments: dict[str, Any] = {
        "recompute_granularity": "none",
        **megatron.attributes(
            [
                *megatron.parallel_flags(view, options),
                *megatron.remat_flags(view, request.plan.chain()),
                *balancing,
                *megatron.switch_flags(view, options),
            ]
        ),
        "cross_entropy_loss_fusion": "fused-loss" in options,
        "micro_batch_size": view.microbatch_per_rank,
        "global_batch_size": view.global_batch,
        "max_length": view.seq_len,
        "packing": True,
        "bf16": view.precision != "fp32",
        "accumulate_allreduce_grads_in_fp32": True,
        **({"fp8_format": "hybrid", "fp8_recipe": "tensorwise"} if view.precision == "fp8" else {}),
    }
    cluster = request.cluster
    nodes, devices = (cluster.num_nodes, cluster.devices_per_node) if cluster else (1, "")
    needed = [
        ': "${MODEL:?set MODEL to the model, an id or a folder}"',
        f'export NNODES="${{NNODES:-{nodes}}}"',
        f'export NPROC_PER_NODE="${{NPROC_PER_NODE:-{devices}}}"'
        if devices
        else ': "${NPROC_PER_NODE:?set NPROC_PER_NODE to the devices of a host}"',
    ]
    if cluster and nodes > 1:
        needed += [
            ': "${NODE_RANK:?set NODE_RANK to the number of this host, from 0}"',
            ': "${MASTER_ADDR:?set MASTER_ADDR to the first host}"',
        ]
    lines = ["#!/bin/bash", "set -euo pipefail", *needed, "", 'megatron pt --model "$MODEL" \\']
    lines += [f"    --{key} {_word(value)} \\" for key, value in arguments.items()]
    return "\n".join([*lines, '    "$@"']) + "\n"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))


MEGATRON_TARGET = Target(
    name="ms-swift",
    software="ms-swift 4.6.0",
    summary="swift.sh: arguments of megatron pt, which drives Megatron-Core",
    write=_write_megatron,
    weights="--model reads the Hugging Face format and --save_safetensors true writes it; megatron export converts",
    routers=megatron.MEGATRON.targets[0].routers,
)

_FILE = "swift_sft.yaml"


def _write_trainer(request: Request) -> Draft:
    view, levers = UniformPlan.of(request.plan), request.plan.chosen_levers
    content, cluster = _content(view, levers) | _levers(levers, view.precision), request.cluster
    nodes = f"NNODES={cluster.num_nodes} " if cluster and cluster.num_nodes > 1 else ""
    devices = f"NPROC_PER_NODE={cluster.devices_per_node} " if cluster else ""
    return Draft(
        files=((_FILE, yaml.safe_dump(content, sort_keys=False)),),
        left_out=(
            f"the model: MODEL is an ID or folder with the config of {request.plan.model.name}",
            "data, learning rate and number of steps: pass them as arguments",
            *(kept_gathered(request) if view.fsdp > 1 else ()),
            *peft.left_out(levers),
        ),
        launch=f"{nodes}{request.variables}{devices}swift sft {_FILE} --model MODEL --dataset NAME",
    )


def _content(view: UniformPlan, levers: Levers) -> dict[str, Any]:
    is_full, recomputes = levers.value(Train).is_default, view.remat is Remat.FULL
    sharding = "full_shard" if view.zero == 3 else "shard_grad_op"
    config = {
        "fsdp_version": 2,
        "reshard_after_forward": view.zero == 3,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": recomputes,
    }
    return {
        "tuner_type": "full" if is_full else "lora",
        "torch_dtype": "float32" if is_full else DTYPES[view.precision],
        "bf16": view.precision == "bf16",
        "fp16": view.precision == "fp16",
        "per_device_train_batch_size": view.microbatch_per_rank,
        "gradient_accumulation_steps": view.pipeline.num_microbatches,
        "max_length": view.seq_len,
        "packing": True,
        "attn_impl": "flash_attn",
        "max_grad_norm": 1.0,
        "gradient_checkpointing": recomputes and view.fsdp == 1,
        **({} if view.fsdp == 1 else {"fsdp": {"fsdp": f"{sharding} auto_wrap", "fsdp_config": config}}),
        **peft.training_arguments(levers),
    }


def _levers(levers: Levers, precision: Precision) -> dict[str, Any]:
    """Return the entries of the file on adapters and their base."""
    train = levers.value(Train)
    if train.is_default:
        return {}
    quantized = {} if levers.value(QuantizedBase).is_default else peft.quantization_config(precision)
    bits = {"quant_method": "bnb", "quant_bits": 4} if quantized.pop("load_in_4bit", False) else {}
    return {
        "lora_rank": train.r,
        "lora_alpha": peft.whole_if_so(train.alpha),
        "lora_dropout": train.dropout,
        "target_modules": list(train.targets),
        "use_rslora": train.rslora,
        **bits,
        **quantized,
    }


TRAINER = replace(
    TRANSFORMERS,
    capabilities=replace(TRANSFORMERS.capabilities, dimensions=dimensions_of("dp", "fsdp")),
    levers={**peft.LEVERS, "base": replace(peft.LEVERS["base"], dimensions=dimensions_of("dp"))},
)
"""transformers with the plans and the levers that the file supports."""
TRAINER_TARGET = Target(
    name="swift-sft",
    software="ms-swift 4.6.0",
    summary="swift_sft.yaml: arguments of swift sft, which drives transformers' trainer",
    write=_write_trainer,
    weights="--model reads the Hugging Face format, and checkpoints have it",
    routers=ROUTERS_BY_RANK,
)
