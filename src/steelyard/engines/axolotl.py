"""A plan as axolotl's YAML, which drives accelerate: FSDP2 or DDP, degrees, activation checkpointing, batch.

Names are those of the package axolotl 0.19.0 (``utils/schemas/config.py``, ``utils/schemas/fsdp.py``). Its
``utils/distributed.py`` passes the degrees to accelerate's ParallelismConfig. It is a front end of
`steelyard.engines.accelerate`, which defines its plans and their execution.

Adapters are peft's (``utils/schemas/peft.py``, ``loaders/adapter.py``), with its own kernels for them turned off
(``lora_*_kernel``), because they keep other tensors. A 4-bit base is for one device or DDP: under FSDP2 axolotl shards
it (``loaders/model.py``: bnb_4bit_quant_storage), and our runtime does not.
"""

from dataclasses import replace
from typing import Any

import yaml

from steelyard.engines import peft
from steelyard.engines.accelerate import ACCELERATE, kept_gathered
from steelyard.engines.capabilities import dimensions_of
from steelyard.engines.writing import ROUTERS_BY_RANK, Draft, Request, Target, UniformPlan
from steelyard.levers import Levers
from steelyard.levers.quantized_base import QuantizedBase
from steelyard.levers.train import ALL_LINEAR, Train
from steelyard.plan.strategy import Remat


def _write(request: Request) -> Draft:
    view, levers = UniformPlan.of(request.plan), request.plan.chosen_levers
    return Draft(
        files=(("axolotl.yaml", yaml.safe_dump(_content(view) | _levers(levers), sort_keys=False)),),
        left_out=(
            f"the model: add base_model, a Hugging Face ID or folder with the config of {request.plan.model.name}",
            "datasets, learning rate and number of steps: add them to the file",
            *(kept_gathered(request) if view.fsdp > 1 else ()),
            *peft.left_out(levers),
        ),
        launch=f"{request.torchrun} -m axolotl.cli.train axolotl.yaml",
        usage=("for DeepSpeed instead: export --to deepspeed, and write deepspeed: ds_config.json into axolotl.yaml",),
    )


_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def _levers(levers: Levers) -> dict[str, Any]:
    train, base = levers.value(Train), levers.value(QuantizedBase)
    found = peft.training_arguments(levers)
    content: dict[str, Any] = {"optimizer": found["optim"]} if found else {}
    if train.is_default:
        return content
    is_all = train.targets == (ALL_LINEAR,)
    return content | {
        "adapter": "lora" if base.is_default else "qlora",
        "load_in_4bit": not base.is_default,
        "lora_r": train.r,
        "lora_alpha": int(train.alpha),
        "lora_dropout": train.dropout,
        **({"lora_target_linear": True} if is_all else {"lora_target_modules": list(train.targets)}),
        "peft_use_rslora": train.rslora,
        **dict.fromkeys(_KERNELS, False),
    }


def _refuse_part(train: Train) -> str | None:
    fraction = None if train.alpha == int(train.alpha) else "which needs a whole number for lora_alpha"
    return peft.refuse_kind(train) or fraction


def _content(view: UniformPlan) -> dict[str, Any]:
    content: dict[str, Any] = {
        "sequence_len": view.seq_len,
        "sample_packing": True,
        "micro_batch_size": view.microbatch_per_rank,
        "gradient_accumulation_steps": view.pipeline.num_microbatches,
        "bf16": view.precision == "bf16",
        "fp16": view.precision == "fp16",
        "max_grad_norm": 1.0,
    }
    if view.fsdp == 1:
        return content | {"gradient_checkpointing": view.remat is Remat.FULL}
    return content | {
        "dp_shard_size": view.fsdp,
        "dp_replicate_size": view.dp,
        "fsdp_version": 2,
        "fsdp_config": {
            "reshard_after_forward": view.zero == 3,
            "activation_checkpointing": view.remat is Remat.FULL,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "offload_params": view.on_host,
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": True,
        },
    }


ENGINE = replace(
    ACCELERATE,
    levers={
        **peft.LEVERS,
        "offload": peft.OFFLOAD,
        "train": replace(peft.LEVERS["train"], refuse=_refuse_part),
        "base": replace(peft.LEVERS["base"], dimensions=dimensions_of("dp")),
    },
)
"""accelerate with the levers that the YAML file supports."""
TARGET = Target(
    name="axolotl",
    software="axolotl 0.19.0",
    summary="axolotl.yaml: FSDP2 or DDP, degrees, activation checkpointing, batch",
    write=_write,
    weights="base_model has the Hugging Face format; axolotl merge-sharded-fsdp-weights axolotl.yaml converts a "
    "checkpoint to it",
    routers=ROUTERS_BY_RANK,
)
