"""A plan as axolotl's YAML, which drives accelerate: FSDP2 or DDP, degrees, activation checkpointing, batch.

Names are those of the package axolotl 0.19.0 (``utils/schemas/config.py``, ``utils/schemas/fsdp.py``). Its
``utils/distributed.py`` passes the degrees to accelerate's ParallelismConfig. It is a front end of
`steelyard.engines.accelerate`, which defines its plans and their execution.

Adapters are peft's (``utils/schemas/peft.py``, ``loaders/adapter.py``), with its own kernels for them turned off
(``lora_*_kernel``), because they keep other tensors. A 4-bit base is for one device or DDP: under FSDP2 axolotl shards
it (``loaders/model.py``: bnb_4bit_quant_storage), and our runtime does not.
"""

import re
from dataclasses import replace
from typing import Any

import yaml

from steelyard.engines import deepspeed, peft
from steelyard.engines.accelerate import ACCELERATE, kept_gathered, read_fsdp
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
            *([_LOADED] if view.fsdp == 1 and not {"train", "weights"} & levers.texts.keys() else ()),
            "datasets, learning rate and number of steps: add them to the file",
            *(kept_gathered(request) if view.fsdp > 1 else ()),
            *peft.left_out(levers),
        ),
        launch=f"{request.torchrun} -m axolotl.cli.train axolotl.yaml",
        usage=("for DeepSpeed instead: export --to deepspeed, and write deepspeed: ds_config.json into axolotl.yaml",),
    )


_LOADED = "fp32 weights: outside FSDP axolotl trains them in the type it loads, bf16 (priced with --weights bf16)"
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
    r"base_model.*|.*tokenizer.*|tokens.*|(special|eot)_tokens.*|chat_template.*|((test|pretraining)_)?datasets?|"
    r"dataset_.*|val_set_size|output_dir|loss_watchdog_.*|.*learning_rate.*|(lr|cosine)_.*|weight_decay|warmup_.*|"
    r"num_epochs|max_steps|max_grad_norm|adam_.*|seed|train_on_inputs|group_by_length|strict|debug|local_rank|tf32|"
    r"(evals?|evaluation|saves?|logging|wandb|hub|hf|mlflow|comet|swanlab|early|resume|auto_resume|dataloader|shuffle|"
    r"ddp|use_(wandb|tensorboard|mlflow))(_.*)?|pad_to_sequence_len|trust_remote_code|device_map|low_cpu_mem_usage|"
    r"model_type|is_.*_model|gradient_checkpointing_kwargs.*|(flash|sdp|xformers|flex)_attention|attn_implementation|"
    r"processor_type|cls_model_config|lora_model_dir|lora_fan_in_fan_out|plugins|accelerator_config.*|skip_prepare_dataset|"
    r"min_sample_len|revision_of_model|.*otel.*"
)
"""Entries about data, learning rates, evaluation, checkpoints and logs, and about attention in one kernel."""
_SUPERVISED = "next-token training of all parameters or adapters"
_NO_PRICE = "leave it out to price the run without it"
_REFUSED = {
    "rl": (f"{_SUPERVISED}: pairs, reference models and generated samples have no price", _NO_PRICE),
    **dict.fromkeys(("reward_model", "process_reward_model"), (f"{_SUPERVISED}: rewards have no price", _NO_PRICE)),
    **dict.fromkeys(("kd_trainer", "diffusion"), (f"{_SUPERVISED}, with its usual loss", _NO_PRICE)),
    "hatchery": ("training on this cluster: the file sends its steps to a service", _NO_PRICE),
    "load_in_8bit": (
        "load_in_4bit, or 16 bits: LLM.int8() has no price",
        "write load_in_4bit: true for a smaller base, or load_in_8bit: false for a larger one",
    ),
    **dict.fromkeys(("gptq", "quantize_moe_experts"), ("a base in 16 bits, or linear layers in nf4", _NO_PRICE)),
    **dict.fromkeys(("qat", "use_onebitllms"), ("weights that are not quantized in training", _NO_PRICE)),
    **dict.fromkeys(("unfrozen_parameters", "spectrum_top_fraction", "lisa_n_layers"), (_SUPERVISED, _NO_PRICE)),
}
_REFUSED_ADAPTERS = dict.fromkeys(
    ("lora_modules_to_save", "lora_target_parameters", "peft_layers_to_transform"),
    ("adapters alone, of linear layers in all blocks", _NO_PRICE),
)
_WHOLE_LOSS = ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "liger_cross_entropy", "chunked_cross_entropy")


def _read(entries: Entries, chain: ModelChain, num_devices: int) -> FileSettings:
    entries.refuse(_REFUSED)
    entries.skip_like(_OF_TRAINING)
    entries.skip(*(name for name, value in entries.values.items() if value is False or value == []))
    is_recomputed, unlike = _recomputation(entries)
    zero, is_offloaded = read_fsdp(entries)
    with_deepspeed = deepspeed.is_named(entries)
    is_half = bool(entries.get("fp16", "float16"))
    precision = "bf16" if entries.get("bf16", "bfloat16", default=not is_half) else "fp16" if is_half else "fp32"
    levers = {"offload": "parameters"} if is_offloaded else {}
    levers |= _adapters(entries, unlike)
    optimizer, remarks = peft.optimizer_of_file(entries, "optimizer")
    levers |= optimizer
    unlike += remarks
    if precision == "bf16" and not (zero or with_deepspeed or "train" in levers or "adafactor" in optimizer.values()):
        levers["weights"] = "bf16"
    unlike += [*_of_kernels(entries), *peft.remarks_on_base(entries, "base_model", levers)]
    zero = zero if num_devices > 1 else 0
    peft.refuse_sharded_base("fsdp_config", levers, zero=zero)
    unlike += [] if entries.get("sample_packing") else ["sample_packing, which is off (priced with full sequences)"]
    tp = entries.number("tensor_parallel_size")
    cp = entries.number("context_parallel_size", "sequence_parallel_degree")
    if num_devices % (tp * cp):
        raise UserError(
            field="context_parallel_size",
            found=f"{cp} with tensor_parallel_size {tp} for {num_devices} devices",
            expected="sizes whose product divides the number of devices",
            hint="correct the file, or --cluster",
        )
    micro_batch = entries.number("micro_batch_size")
    steps = max(entries.number("batch_size", default=micro_batch) // micro_batch, 1)
    steps = entries.number("gradient_accumulation_steps", default=steps)
    found = FileSettings(
        settings=Settings(
            cp=cp,
            tp=tp,
            ep=entries.number("expert_parallel_size"),
            zero=zero,
            replicas=_replicas(entries, num_devices // (tp * cp)),
            sp=False,
            remat=Remat.FULL if is_recomputed else Remat.NONE,
        ),
        micro_batch=micro_batch,
        global_batch=micro_batch * steps * num_devices // (tp * cp),
        seq_len=entries.number("sequence_len", default=512),
        precision=precision,
        levers=levers,
        unread=(*entries.unread, *unlike),
    )
    return deepspeed.read_beside(entries, chain, num_devices, found) if with_deepspeed else found


def _recomputation(entries: Entries) -> tuple[bool, list[str]]:
    """Return whether blocks are recomputed, and remarks on activations that the trainer keeps elsewhere."""
    names = [f"fsdp_config.{prefix}activation_checkpointing" for prefix in ("", "fsdp_")]
    word, sharded = entries.get("gradient_checkpointing"), entries.get(*names)
    offloads = entries.get("activation_offloading") or (word if isinstance(word, str) else None)
    remarks = [f"activation offloading {offloads} (priced with inputs of blocks on the device)"] if offloads else []
    return bool(word) or bool(sharded), remarks


def _replicas(entries: Entries, ranks: int) -> int:
    """Return the number of groups that shard states. Raises `UserError` if their sizes do not fill the ranks."""
    shards, replicas = entries.number_or_none("dp_shard_size"), entries.number_or_none("dp_replicate_size")
    if shards is not None and shards * (replicas or max(ranks // shards, 1)) != ranks:
        raise UserError(
            field="dp_shard_size",
            found=f"{shards}{f' with dp_replicate_size {replicas}' if replicas else ''} for {ranks} data ranks",
            expected="sizes whose product is the number of data ranks",
            hint="correct the file, or --cluster",
        )
    return replicas or (ranks // shards if shards else 1)


def _of_kernels(entries: Entries) -> list[str]:
    """Return remarks on plugins and kernels that have no price."""
    given = entries.get("plugins", default=[])
    plugins = [str(each).rpartition(".")[2] for each in (given if isinstance(given, list) else [given])]
    known = ("LigerPlugin", "CutCrossEntropyPlugin", "SwanLabPlugin", "LMEvalPlugin")
    found = [f"plugin {each}" for each in plugins if each not in known]
    cuts = "CutCrossEntropyPlugin" in plugins and entries.get("cut_cross_entropy", default=True)
    entries.skip(*_WHOLE_LOSS)
    if cuts or any(entries.values.get(name) for name in _WHOLE_LOSS):
        found.append("a loss without whole logits (priced with them, which take more memory)")
    return found


def _adapters(entries: Entries, unlike: list[str]) -> dict[str, str]:
    """Return adapters and their base as texts of levers; add to ``unlike`` how a pattern of targets was read."""
    adapter = entries.get("adapter")
    if adapter is None:
        entries.skip_like(r"(lora|peft)_.*")
        return {}
    entries.refuse(_REFUSED_ADAPTERS)
    if adapter not in ("lora", "qlora"):
        raise UserError(field="adapter", found=str(adapter), expected="lora or qlora", hint=_NO_PRICE)
    targets = entries.get("lora_target_modules", default=ALL_LINEAR)
    if entries.get("lora_target_linear") or targets == ALL_LINEAR:
        named = ALL_LINEAR
    elif isinstance(targets, list):
        named = "+".join(map(str, targets))
    else:
        named = peft.names_in_pattern("lora_target_modules", str(targets))
        unlike.append(f"lora_target_modules, a pattern (priced as {named} in the whole model)")
    return peft.words_of_file(
        rank=entries.get("lora_r", default=8),
        alpha=entries.get("lora_alpha", default=16),
        targets=named,
        dropout=entries.get("lora_dropout", default=0),
        rslora=entries.get("peft_use_rslora"),
        dora=entries.get("peft_use_dora"),
        quantized=entries.get("load_in_4bit") or adapter == "qlora",
    )


ENGINE = replace(
    ACCELERATE,
    reader=Reader(
        suffixes=(".yaml", ".yml"), values=yaml_values("axolotl"), read=_read, mark=re.compile("sequence_len").search
    ),
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
