"""A plan as LLaMA-Factory's YAML, which drives transformers' trainer: DDP, or FSDP2 with accelerate's file beside it.

Names are those of the package llamafactory 0.9.5 (``hparams/model_args.py``, ``data_args.py``, ``finetuning_args.py``)
and of `transformers.TrainingArguments`. It trains parameters in fp32 under autocast (``model/adapter.py``), adapters
too, and recomputes blocks unless told not to (``model/model_utils/checkpointing.py``), so that accelerate's own
recomputation stays off. FSDP2 comes from a file of ``accelerate launch`` alone; it has no replicas in the versions of
accelerate that LLaMA-Factory allows. This is a front end of `steelyard.engines.accelerate`, which defines the execution
of plans.

Adapters are peft's. A base in nf4 is bitsandbytes' (``model/model_utils/quantization.py``); under FSDP its storage is
sharded, and that of our runtime is not.
"""

import re
from dataclasses import replace
from typing import Any

import yaml

from steelyard.engines import deepspeed, peft
from steelyard.engines.accelerate import ACCELERATE, kept_gathered, launch_config, read_fsdp
from steelyard.engines.capabilities import dimensions_of
from steelyard.engines.engine import Entries, FileSettings, Reader, Settings, yaml_values
from steelyard.engines.writing import ROUTERS_BY_RANK, Draft, Request, Target, UniformPlan
from steelyard.errors import UserError
from steelyard.levers import Levers
from steelyard.levers.quantized_base import QuantizedBase
from steelyard.levers.train import ALL_LINEAR, Train
from steelyard.levers.weights import Weights
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.plan.strategy import Remat

_FILE, _LAUNCH_FILE = "llama_factory.yaml", "accelerate.yaml"
_BASE = {
    "quantization_bit": 4,
    "quantization_method": "bnb",
    "quantization_type": "nf4",
    "double_quantization": True,
}


def _write(request: Request) -> Draft:
    view, levers = UniformPlan.of(request.plan), request.plan.chosen_levers
    images = dict.fromkeys(_FROZEN, False) if _reads_images(request.plan.chain()) else {}
    content = _content(view, is_pure=not levers.value(Weights).is_default) | images | _levers(levers)
    files = [(_FILE, yaml.safe_dump(content, sort_keys=False))]
    left_out = [
        f"the model: add model_name_or_path, an ID or folder with the config of {request.plan.model.name}",
        "dataset, template, output_dir, learning rate and number of steps: add them to the file",
        *peft.left_out(levers),
    ]
    cluster = request.cluster
    devices = f" NPROC_PER_NODE={cluster.devices_per_node}" if cluster else ""
    nodes = f" NNODES={cluster.num_nodes}" if cluster and cluster.num_nodes > 1 else ""
    launch = f"{request.variables}FORCE_TORCHRUN=1{nodes}{devices} llamafactory-cli train {_FILE}"
    if view.fsdp > 1:
        config = launch_config(request, view)
        del config["parallelism_config"]
        config["fsdp_config"]["fsdp_activation_checkpointing"] = False
        files.append((_LAUNCH_FILE, yaml.safe_dump(config, sort_keys=False)))
        left_out += kept_gathered(request)
        several = " --machine_rank RANK --main_process_ip FIRST_HOST" if nodes else ""
        launch = f"accelerate launch --config_file {_LAUNCH_FILE}{several} -m llamafactory.launcher {_FILE}"
    return Draft(
        files=tuple(files),
        left_out=tuple(left_out),
        launch=launch,
        usage=("for DeepSpeed instead: export --to deepspeed, and write deepspeed: ds_config.json into the file",),
    )


_FROZEN = ("freeze_vision_tower", "freeze_multi_modal_projector")
"""Entries that are true by default: such parts are not trained, and get no adapters."""


def _reads_images(chain: ModelChain) -> bool:
    return chain.family.task is Task.IMAGE_TEXT


def _content(view: UniformPlan, *, is_pure: bool) -> dict[str, Any]:
    return {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "cutoff_len": view.seq_len,
        "packing": True,
        "flash_attn": "fa2",
        "per_device_train_batch_size": view.microbatch_per_rank,
        "gradient_accumulation_steps": view.pipeline.num_microbatches,
        "bf16": view.precision == "bf16" and not is_pure,
        **({"pure_bf16": True} if is_pure else {}),
        "fp16": view.precision == "fp16",
        "disable_gradient_checkpointing": view.remat is not Remat.FULL,
        "use_reentrant_gc": False,
        "max_grad_norm": 1.0,
    }


def _levers(levers: Levers) -> dict[str, Any]:
    train, found = levers.value(Train), peft.training_arguments(levers)
    if train.is_default:
        return found
    return {
        "finetuning_type": "lora",
        "lora_rank": train.r,
        "lora_alpha": int(train.alpha),
        "lora_dropout": train.dropout,
        "lora_target": "all" if train.targets == (ALL_LINEAR,) else ",".join(train.targets),
        "use_rslora": train.rslora,
        **({} if levers.value(QuantizedBase).is_default else _BASE),
        **found,
    }


_OF_TRAINING = (
    r"model_name_or_path|trust_remote_code|do_.*|.*dataset.*|template|max_samples|output_dir|overwrite_.*|"
    r"preprocessing_.*|dataloader_.*|tokenized_path|(logging|save|eval)_.*|plot_loss|report_to|run_name|"
    r"per_device_eval_batch_size|val_size|learning_rate|num_train_epochs|max_steps|lr_.*|warmup_.*|weight_decay|adam_.*|"
    r"max_grad_norm|ddp_.*|resume_.*|seed|tf32|flash_attn|use_reentrant_gc|train_on_prompt|mask_history|(loraplus|pissa)_.*|"
    r"enable_thinking|swanlab_.*|use_swanlab|predict_with_generate|quantization_type|double_quantization|ray_.*|"
    r"include_.*|remove_unused_columns|(image|video)_.*|cache_dir|use_fast_tokenizer|adapter_name_or_path"
)
"""Entries about data, learning rates, evaluation, checkpoints and logs, and about attention in one kernel."""
_NO_PRICE = "leave it out to price the run without it"
_REFUSED = {
    **dict.fromkeys(("use_unsloth", "use_unsloth_gc"), ("peft's own adapters: unsloth has no price", _NO_PRICE)),
    **dict.fromkeys(
        ("use_badam", "use_galore", "use_apollo", "use_adam_mini", "use_muon"),
        ("an optimizer of transformers that has a price (optim)", "leave it out to price optim"),
    ),
    **dict.fromkeys(
        ("use_llama_pro", "mixture_of_depths", "additional_target"),
        ("training of all parameters, or adapters of linear layers alone", _NO_PRICE),
    ),
    **dict.fromkeys(
        ("use_mca", "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
        ("transformers' trainer: the file starts Megatron", "price it: steelyard price --engine megatron"),
    ),
    "use_kt": ("transformers' own modules: experts on the host have no price", _NO_PRICE),
    "use_asft_loss": ("a loss without a reference model", _NO_PRICE),
}
_STAGES = ("sft", "pt")


def _read(entries: Entries, chain: ModelChain, num_devices: int) -> FileSettings:
    stage = entries.get("stage", default="sft")
    if stage not in _STAGES or not entries.get("do_train", default=not entries.values.get("do_predict")):
        raise UserError(
            field="stage",
            found=f"{stage}{' without do_train' if stage in _STAGES else ''}",
            expected="training of the next token (sft or pt, with do_train: true): pairs, rewards, references and "
            "generated samples have no price",
            hint="write stage: sft and do_train: true to price supervised training",
        )
    entries.refuse(_REFUSED)
    entries.skip_like(_OF_TRAINING)
    frozen = [name for name in _FROZEN if entries.get(name, default=True)] if _reads_images(chain) else []
    entries.skip(*(name for name, value in entries.values.items() if value is False))
    with_deepspeed = deepspeed.is_named(entries)
    is_kept = entries.get("disable_gradient_checkpointing") is True
    zero, is_offloaded = read_fsdp(entries)
    levers, unlike = peft.optimizer_of_file(entries, "optim")
    levers = {**_levers_of(entries), **levers, **({"offload": "parameters"} if is_offloaded else {})}
    if is_pure := bool(entries.get("pure_bf16")):
        levers |= {} if "train" in levers else {"weights": "bf16"}
        unlike += ["pure_bf16 of adapters (priced in fp32)"] if "train" in levers else []
    unlike += peft.remarks_on_base(entries, "model_name_or_path", levers)
    zero = zero if num_devices > 1 else 0
    peft.refuse_sharded_base("fsdp", levers, zero=zero)
    if entries.get("enable_liger_kernel"):
        unlike.append("enable_liger_kernel (priced with transformers' kernels and whole logits: more memory)")
    unlike += [] if entries.get("neat_packing", "packing") else ["packing, which is off (priced with full sequences)"]
    is_half = is_pure or entries.get("bf16") or "train" in levers  # a frozen base computes in the type of its file
    micro_batch = entries.number("per_device_train_batch_size", default=8)
    unlike += [f"{name}, which is on (priced as trained)" for name in frozen]
    steps = entries.number("gradient_accumulation_steps")
    found = FileSettings(
        settings=Settings(zero=zero, remat=Remat.NONE if is_kept else Remat.FULL),
        micro_batch=micro_batch,
        global_batch=micro_batch * steps * num_devices,
        seq_len=entries.number("cutoff_len", default=2048),
        precision="fp16" if entries.get("fp16") else "bf16" if is_half else "fp32",
        levers=levers,
        unread=(*entries.unread, *unlike),
    )
    return deepspeed.read_beside(entries, chain, num_devices, found) if with_deepspeed else found


def _levers_of(entries: Entries) -> dict[str, str]:
    """Return adapters and their base as texts of levers."""
    kind, bits = entries.get("finetuning_type", default="lora"), entries.get("quantization_bit")
    method = entries.get("quantization_method", default="bnb") if bits else "bnb"
    if kind not in ("full", "lora") or bits not in (None, 4) or method not in ("bnb", "bitsandbytes"):
        name, found = ("quantization_bit", f"{bits} ({method})") if kind == "lora" else ("finetuning_type", kind)
        expected = "full or lora, with a base in 16 bits or in 4 (quantization_bit: 4)"
        raise UserError(field=name, found=str(found), expected=expected, hint="change it in the file")
    if kind == "full":
        return {}
    rank, targets = entries.number("lora_rank", default=8), entries.get("lora_target", default="all")
    return peft.words_of_file(
        rank=rank,
        alpha=entries.get("lora_alpha", default=2 * rank),
        targets=ALL_LINEAR if targets == "all" else str(targets).replace(" ", "").replace(",", "+"),
        dropout=entries.get("lora_dropout", default=0),
        rslora=entries.get("use_rslora"),
        dora=entries.get("use_dora"),
        quantized=bits,
    )


ENGINE = replace(
    ACCELERATE,
    capabilities=replace(ACCELERATE.capabilities, dimensions=dimensions_of("dp", "fsdp")),
    reader=Reader(
        suffixes=(".yaml", ".yml"),
        values=yaml_values("LLaMA-Factory"),
        read=_read,
        mark=re.compile("finetuning_type").search,
    ),
    levers=peft.FILE_LEVERS,
)
"""accelerate with the plans and levers that the file supports."""
TARGET = Target(
    name="llama-factory",
    software="LLaMA-Factory 0.9.5",
    summary="llama_factory.yaml: adapters, batch, recomputation; accelerate.yaml for FSDP2",
    write=_write,
    weights="model_name_or_path reads the Hugging Face format; llamafactory-cli export merges adapters",
    routers=ROUTERS_BY_RANK,
)
