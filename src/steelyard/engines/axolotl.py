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
from steelyard.engines.engine import Entries, FileSettings, Reader, Settings, yaml_values
from steelyard.engines.writing import ROUTERS_BY_RANK, Draft, Request, Target, UniformPlan
from steelyard.errors import UserError
from steelyard.levers import Levers
from steelyard.levers.quantized_base import QuantizedBase
from steelyard.levers.train import ALL_LINEAR, Train
from steelyard.model.chain import ModelChain
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


_OF_TRAINING = (
    r"base_model.*|.*tokenizer.*|tokens|special_tokens.*|chat_template.*|(test_)?datasets|dataset_.*|val_set_size|"
    r"output_dir|loss_watchdog_.*|.*learning_rate.*|lr_.*|weight_decay|warmup_.*|num_epochs|max_steps|max_grad_norm|"
    r"(evals?|saves?|logging|wandb|hub|mlflow|comet|swanlab|early|resume|auto_resume|dataloader|shuffle|ddp)_.*|"
    r"adam_.*|seed|train_on_inputs|group_by_length|strict|debug|local_rank|tf32|pad_to_sequence_len|trust_remote_code|"
    r"model_type|is_.*_model|gradient_checkpointing_kwargs.*|(flash|sdp|xformers)_attention|attn_implementation|"
    r"lora_model_dir|"
    r"fsdp_version|fsdp_config\.(fsdp_)?(version|auto_wrap_policy|state_dict_type|final_state_dict_type|"
    r"cpu_ram_efficient_loading|transformer_layer_cls_to_wrap|sync_module_states|use_orig_params|limit_all_gathers)"
)
"""Entries about data, learning rates, evaluation, checkpoints and logs, and about attention in one kernel."""
_NEAR = {"adamw_bnb_8bit": "adamw-8bit", "adamw_8bit": "adamw-8bit", "paged_adamw_8bit": "adamw-8bit"}
"""Optimizers of bitsandbytes that are priced as torchao's."""
_OFFLOADED = ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params")
_REFUSED = {
    "deepspeed": ("FSDP or DDP, because ZeRO stands in a file of its own", "read that file: --from ds_config.json"),
    "load_in_8bit": ("load_in_4bit, or 16 bits: LLM.int8() has no price", "change it in the file"),
}


def _read(entries: Entries, _chain: ModelChain, num_devices: int) -> FileSettings:
    for name, (expected, hint) in _REFUSED.items():
        if found := entries.get(name):
            raise UserError(field=name, found=str(found), expected=expected, hint=hint)
    entries.skip_like(_OF_TRAINING)
    entries.skip(*(name for name, value in entries.values.items() if value is False))
    sharding = entries.get("fsdp", "dp_shard_size")
    is_sharded = sharding or any(name.startswith("fsdp_config.") for name in entries.values)
    keeps = entries.get("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward") is False
    recomputing = "fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"
    is_recomputed = bool(entries.get("gradient_checkpointing")) or bool(entries.get(*recomputing))
    levers = _levers_of(entries)
    optimizer = str(entries.get("optimizer", default="adamw_torch_fused"))
    word = {**peft.OPTIMIZERS, **_NEAR}.get(optimizer, "adamw")
    levers |= {"optimizer": word} if word != "adamw" else {}
    unlike = [] if optimizer in peft.OPTIMIZERS else [f"optimizer {optimizer} (priced as {word})"]
    unlike += [] if entries.get("sample_packing") else ["sample_packing, which is off (priced with full sequences)"]
    micro_batch, steps = entries.number("micro_batch_size"), entries.number("gradient_accumulation_steps")
    kinds = [entries.get(*names) for names in (("bf16", "bfloat16"), ("fp16", "float16"))]
    return FileSettings(
        settings=Settings(
            cp=entries.number("context_parallel_size", "sequence_parallel_degree"),
            tp=entries.number("tensor_parallel_size"),
            micro_batch=micro_batch,
            zero=(2 if keeps else 3) if is_sharded and num_devices > 1 else 0,
            replicas=entries.number("dp_replicate_size"),
            sp=False,
            remat=Remat.FULL if is_recomputed else Remat.NONE,
        ),
        global_batch=micro_batch * steps * num_devices,
        seq_len=entries.number_or_none("sequence_len"),
        precision="bf16" if kinds[0] else "fp16" if kinds[1] else "fp32",
        levers=levers,
        unread=(*entries.unread, *unlike),
    )


def _levers_of(entries: Entries) -> dict[str, str]:
    """Return adapters, their base and offload as texts of levers."""
    found = {"offload": "parameters"} if entries.get(*_OFFLOADED) else {}
    adapter = entries.get("adapter")
    if adapter is None:
        return found
    targets = entries.get("lora_target_modules", default=ALL_LINEAR)
    named = "+".join(map(str, targets)) if isinstance(targets, list) else str(targets)
    return found | peft.words_of_file(
        rank=entries.get("lora_r", default=8),
        alpha=entries.get("lora_alpha", default=16),
        targets=ALL_LINEAR if entries.get("lora_target_linear") else named,
        dropout=entries.get("lora_dropout", default=0),
        rslora=entries.get("peft_use_rslora"),
        dora=entries.get("peft_use_dora"),
        quantized=entries.get("load_in_4bit") or adapter == "qlora",
    )


ENGINE = replace(
    ACCELERATE,
    reader=Reader(suffixes=(".yaml", ".yml"), values=yaml_values("axolotl"), read=_read, mark="sequence_len"),
    levers=peft.FILE_LEVERS,
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
