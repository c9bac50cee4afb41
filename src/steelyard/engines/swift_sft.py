"""A plan as ms-swift's arguments for transformers' trainer (``swift pt`` and ``swift sft``), in a YAML file.

Names are those of the package ms-swift 4.6.0 (``swift/arguments/sft_args.py``, ``tuner_args.py``, ``base_args``), which
are those of `transformers.TrainingArguments` if it has them; a file as the first argument is read as options
(``swift/cli/main.py``). Adapters are peft's. ``fsdp`` holds its own file of FSDP2 (``swift/config/fsdp2.json``), which
has no replicas. It is a front end of `steelyard.engines.transformers`, which defines the execution of plans.
"""

from dataclasses import replace
from typing import Any

import yaml

from steelyard.engines import peft
from steelyard.engines.accelerate import kept_gathered
from steelyard.engines.capabilities import dimensions_of
from steelyard.engines.transformers import TRANSFORMERS
from steelyard.engines.writing import ROUTERS_BY_RANK, Draft, Request, Target, UniformPlan
from steelyard.levers import Levers
from steelyard.levers.quantized_base import QuantizedBase
from steelyard.levers.train import Train
from steelyard.plan.strategy import Remat
from steelyard.precision import Precision

_FILE = "swift_sft.yaml"


def _write(request: Request) -> Draft:
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
        "torch_dtype": "float32" if is_full else peft.DTYPES[view.precision],
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


ENGINE = replace(
    TRANSFORMERS,
    capabilities=replace(TRANSFORMERS.capabilities, dimensions=dimensions_of("dp", "fsdp")),
    levers={**peft.LEVERS, "base": replace(peft.LEVERS["base"], dimensions=dimensions_of("dp"))},
)
"""transformers with the plans and the levers that the file supports."""
TARGET = Target(
    name="swift-sft",
    software="ms-swift 4.6.0",
    summary="swift_sft.yaml: arguments of swift sft, which drives transformers' trainer",
    write=_write,
    weights="--model reads the Hugging Face format, and checkpoints have it",
    routers=ROUTERS_BY_RANK,
)
