"""A plan as DeepSpeed's JSON: ZeRO stage, AutoTP, AutoEP, batch sizes, precision, activation checkpointing.

Names are those of DeepSpeed 0.19.8 (``runtime/config.py``, ``runtime/zero/config.py``,
``runtime/tensor_parallel/config.py``, ``runtime/activation_checkpointing/config.py``,
``module_inject/auto_ep_config.py``). AutoEP replaces the experts of models that it has a preset for
(``module_inject/auto_ep_presets``). AutoTP refuses GPT-2, fails in Falcon, and refuses types whose tp plan in
transformers has styles that ``module_inject/tp_plan_converter.py`` lacks, those of fused matrices and of experts.
DeepSpeed's pipelines require the model as a ``PipelineModule``, which a JSON file cannot make of a Hugging Face model.
Hybrid sharding no longer exists: MiCS is removed, and the groups of ZeRO++ hold a second copy of parameters that stay
sharded over all ranks.

Adapters are peft's, which the training script puts into the model. ZeRO flattens parameters; their number need not be a
multiple of the block size of torchao's moments. bitsandbytes' take any number (``zero_allow_untested_optimizer``).
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from steelyard.engines import peft
from steelyard.engines.capabilities import Capabilities, dimensions_of
from steelyard.engines.engine import Engine, Entries, FileSettings, Option, Reader, Settings, flattened, options_in
from steelyard.engines.execution import Execution
from steelyard.engines.writing import ROUTERS_BY_RANK, Draft, Request, Target, UniformPlan, refuse_as_transformers
from steelyard.errors import UserError
from steelyard.files import parse_json
from steelyard.levers.offload import Offload, stepping_on_host
from steelyard.levers.optimizer import Optimizer
from steelyard.levers.train import Train
from steelyard.model.chain import ModelChain
from steelyard.plan.dimensions.ep import DEGREE
from steelyard.plan.strategy import Remat
from steelyard.precision import SCALES_LOSS

PRESETS = {
    "mixtral": "mixtral",
    "qwen2_moe": "qwen3_moe",
    "qwen3_moe": "qwen3_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}
"""AutoEP's name for the layout of a model's experts, by model type."""
_OFFLOADED = {"parameters": ("param", "optimizer"), "optimizer": ("optimizer",)}
"""Parts in host memory, by text of the lever. With an optimizer alone there, DeepSpeed steps on the host too."""
_BUCKET_SIZE = 50_000_000
"""Gradients of a reduction: two such buffers, 0.2 GB, are within the allocator slack."""
_LARGE_BUCKET_SIZE = 500_000_000
"""DeepSpeed's default, for `LARGE_BUCKETS`."""
LARGE_BUCKETS = "large-buckets"
"""Option of DeepSpeed's default buckets: two in 16 bits, as for ZeRO-1 and 2; ZeRO-3 has one."""
_BUCKET_ENTRY = "zero_optimization.reduce_bucket_size"
_SCALED = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 2000,
    "hysteresis": 1,
    "min_loss_scale": 1,
}
"""fp16 with a dynamic loss scale (0), as in torch's `GradScaler`; the run ends below a scale of 1."""
_KEPT_ON_DEVICE = dict.fromkeys(("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"), False)
_OPTIMIZERS = {"adamw-8bit": "bitsandbytes.optim.AdamW8bit", "sgd": "torch.optim.SGD"}
_OLDER = (
    "with transformers 5.16: AutoEP fails with 5.23, whose registry of recorded outputs takes no default "
    "(transformers/utils/output_capturing.py)"
)
CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of("dp", "fsdp", "tp", "dp+tp", "fsdp+tp", "fsdp+ep"),
    modes={"zero": frozenset({1, 2, 3}), "sp": frozenset({False}), "ep": frozenset(DEGREE.texts)},
    experts_of=frozenset(PRESETS),
    never_divided=frozenset(
        {
            *PRESETS,
            *("ernie4_5_moe", "falcon", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "granitemoe"),
            *("hunyuan_v1_moe", "jamba", "minimax_m2", "nemotron_h", "olmo2", "olmo3", "olmoe", "phi3", "phimoe"),
            "qwen3_next",
        }
    ),
    remats=frozenset({Remat.NONE, Remat.FULL}),
)


def _write(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    levers = request.plan.chosen_levers
    left_out = {
        "optimizer, data and initial weights: set by the training script": True,
        "which matrices are divided: DeepSpeed's AutoTP decides": view.tp > 1,
        f"which rank reads which samples: give the {view.tp} ranks of a tp group the same samples": view.tp > 1,
    }
    usage = [
        "in train.py: deepspeed.initialize(model=model, config='ds_config.json'), or TrainingArguments(deepspeed=...)"
    ]
    if view.remat is Remat.FULL:
        usage.append("in train.py: model.gradient_checkpointing_enable() (the JSON alone recomputes nothing)")
    offloaded = _OFFLOADED.get(str(levers.value(Offload)), ())
    is_large = LARGE_BUCKETS in options_in(request.plan.engine)
    content = _content(view, PRESETS.get(request.plan.chain().family.model_type), offloaded, is_large=is_large)
    if (word := str(levers.value(Optimizer))) in _OPTIMIZERS:
        content["zero_allow_untested_optimizer"] = True
        usage.append(f"in train.py: deepspeed.initialize(..., optimizer=...), which is {_OPTIMIZERS[word]}")
    if "expert_parallel" in content:
        usage.append(_OLDER)
    if offloaded:
        usage.append(
            "in train.py: the optimizer is deepspeed.ops.adam.DeepSpeedCPUAdam (with offload others are refused)"
        )
    usage += peft.model_usage(levers, view.precision)
    return Draft(
        files=(("ds_config.json", json.dumps(content)), *peft.model_files(levers, view.precision)),
        left_out=tuple(line for line, holds in left_out.items() if holds),
        launch=f"{request.torchrun} train.py",
        usage=tuple(usage),
    )


def _content(view: UniformPlan, preset: str | None, offloaded: Collection[str], *, is_large: bool) -> dict[str, Any]:
    alone = 3 if "param" in offloaded else 2 if offloaded else 0
    zero: dict[str, Any] = {"stage": view.zero if view.fsdp > 1 else alone}
    if zero["stage"]:
        zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
        zero["reduce_bucket_size"] = _LARGE_BUCKET_SIZE if is_large else _BUCKET_SIZE
        zero |= {f"offload_{name}": {"device": "cpu", "pin_memory": True} for name in offloaded}
        zero |= {"stage3_gather_16bit_weights_on_model_save": True} if zero["stage"] == 3 else {}
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": view.microbatch_per_rank,
        "gradient_accumulation_steps": view.pipeline.num_microbatches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": view.precision == "bf16"},
        **({"fp16": _SCALED} if view.precision == SCALES_LOSS else {}),
        "zero_optimization": zero,
    }
    if view.tp > 1:
        content["tensor_parallel"] = {"autotp_size": view.tp}
    else:  # DeepSpeed compares it with the product of all ranks, those of tp among them
        content = {"train_batch_size": view.global_batch, **content}
    if view.ranks_of_experts > 1 and preset is not None:
        content["expert_parallel"] = {"enabled": True, "autoep_size": view.ranks_of_experts, "preset_model": preset}
    if view.remat is Remat.FULL:
        content["activation_checkpointing"] = _KEPT_ON_DEVICE
    return content


def _plain(text: str) -> str:
    """Return JSON without the comments and last commas that DeepSpeed's parser (hjson) takes."""
    kept = re.sub(
        r'("(?:\\.|[^"\\\n])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', lambda part: part[1] or "", text, flags=re.DOTALL
    )
    return re.sub(r'("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])', lambda part: part[1] or "", kept)


def _values(text: str) -> Mapping[str, Any]:
    content = parse_json(_plain(text))
    if not isinstance(content, dict):
        raise ValueError("not an object with DeepSpeed's keys")
    return flattened(flattened(content))


def _read(entries: Entries, _chain: ModelChain, num_devices: int) -> FileSettings:
    entries.skip("_comment", "activation_checkpointing.partition_activations", *(f"fp16.{key}" for key in _SCALED))
    kept = {f"activation_checkpointing.{name}": value for name, value in _KEPT_ON_DEVICE.items()}
    entries.skip(*(name for name, value in kept.items() if entries.values.get(name) == value))
    entries.skip_like(_OF_TRAINING)
    is_recomputed = any(name.startswith("activation_checkpointing") for name in entries.values)
    entries.skip("expert_parallel.preset_model")
    entries.skip(*(name for name, usual in _USUAL.items() if entries.values.get(name) in usual))
    tp = entries.number("tensor_parallel.autotp_size")
    zero = entries.number("zero_optimization.stage", default=0, least=0)
    micro_batch, batch = _batches(entries, num_devices // tp)
    told = {name: entries.get(f"{name}.enabled") for name in ("fp16", "bf16")}
    on = [name for name, value in told.items() if value is True]
    is_open = next((name for name in ("bf16", "fp16") if not on and told[name] == "auto"), None)
    return FileSettings(
        settings=Settings(
            tp=tp,
            ep=entries.number("expert_parallel.autoep_size") if entries.get("expert_parallel.enabled") else 1,
            zero=zero,
            sp=False,
            remat=Remat.FULL if is_recomputed else Remat.NONE,
        ),
        micro_batch=micro_batch,
        global_batch=batch,
        seq_len=None,
        precision=on[0] if on else is_open or "fp32",
        levers=_offload(entries, zero),
        options=_buckets(entries) if zero else (),
        unread=(*entries.unread, *([f"the precision, which is auto (priced in {is_open})"] if is_open else [])),
    )


def _buckets(entries: Entries) -> tuple[str, ...]:
    """Return the option of large buckets of gradients, unless the file or its trainer makes them small."""
    size = entries.get(_BUCKET_ENTRY, default=_LARGE_BUCKET_SIZE)
    try:
        return (LARGE_BUCKETS,) if size != "auto" and float(size) > _BUCKET_SIZE else ()
    except (TypeError, ValueError):
        raise UserError(
            field=_BUCKET_ENTRY, found=repr(size), expected="a number of gradients, or auto", hint="write 5e8"
        ) from None


def _batches(entries: Entries, ranks: int) -> tuple[int | None, int | None]:
    """Return the samples of a rank and of a step, each from the others as in ``_set_batch_related_parameters``
    (runtime/config.py); None for what the trainer fills in. Raises `UserError` if they do not divide each other."""
    names = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    micro_batch, batch, steps = (entries.number_or_none(name) for name in names)
    steps = 1 if names[2] not in entries.values else steps
    if entries.number("sequence_parallel_size") > 1:
        raise UserError(
            field="sequence_parallel_size",
            found=str(entries.values["sequence_parallel_size"]),
            expected="1: sequences that DeepSpeed divides over ranks have no price",
            hint="price them for another engine, as with steelyard price --cp 2",
        )
    if batch is None and steps is not None and micro_batch is not None:
        batch = micro_batch * steps * ranks
    if names[0] not in entries.values and batch is not None and steps is not None:
        if batch % (steps * ranks):
            raise UserError(
                field=names[1],
                found=f"{batch} for {ranks} data ranks with {steps} microbatches",
                expected=f"a multiple of {steps * ranks}",
                hint="pass the cluster that runs the file",
            )
        micro_batch = batch // (steps * ranks)
    return micro_batch, batch


def is_named(entries: Entries) -> bool:
    """Return whether a trainer's file names a file of DeepSpeed, or contains its settings."""
    entries.skip_like(r"deepspeed(\..*)?")
    return any(name.partition(".")[0] == "deepspeed" and value for name, value in entries.values.items())


def read_beside(entries: Entries, chain: ModelChain, num_devices: int, told: FileSettings) -> FileSettings:
    """Return the settings of a trainer's file whose entry ``deepspeed`` names DeepSpeed's JSON file, or contains it.

    ``told`` holds the rest of the trainer's file; the trainer fills in its values for those that are "auto". Raises
    `UserError` if there is no such file, or if it cannot be priced.
    """
    micro_batch, ranks = told.micro_batch, num_devices // (told.settings.tp * told.settings.cp)
    assert told.global_batch is not None, "a trainer's file has a batch"
    assert micro_batch is not None, "likewise"
    parts = {name.partition(".")[2]: value for name, value in entries.values.items() if name.startswith("deepspeed.")}
    values = flattened(flattened(parts)) if parts else _values(entries.text_of("deepspeed"))
    filled = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": told.global_batch // (micro_batch * ranks),
        **{f"{name}.enabled": told.precision == name for name in ("bf16", "fp16")},
    }
    filled = {name: value for name, value in filled.items() if values.get(name, "auto") == "auto"}
    found = _read(Entries({**values, **filled}), chain, num_devices)
    zero, remarks = found.settings.zero, []
    if "base" in told.levers and zero in (1, 2):  # which leave parameters whole
        zero, remarks = 0, [f"ZeRO {zero} of adapters (priced with their small states replicated)"]
    peft.refuse_sharded_base("deepspeed", told.levers, zero=zero if num_devices > 1 else 0)
    return replace(
        told,
        settings=replace(found.settings, cp=told.settings.cp, remat=told.settings.remat, zero=zero),
        micro_batch=found.micro_batch,
        global_batch=found.global_batch,
        precision=found.precision,
        levers={**told.levers, **found.levers},
        options=found.options,
        unread=(*told.unread, *found.unread, *remarks),
        engine=DEEPSPEED,
    )


def _offload(entries: Entries, zero: int) -> dict[str, str]:
    """Return the lever of the parts in host memory. Raises `UserError` for combinations that have no price."""
    names = {part: f"zero_optimization.offload_{part}.device" for part in _OFFLOADED["parameters"]}
    older = {"param": "zero_optimization.cpu_offload_params", "optimizer": "zero_optimization.cpu_offload"}
    devices = {
        part: "cpu" if entries.get(older[part]) else entries.get(name, default="none") for part, name in names.items()
    }
    if zero in (1, 2):
        devices["param"] = "none"  # which stage 3 alone reads (runtime/zero/config.py)
    there = {part: device for part, device in devices.items() if device != "none"}
    word = next((word for word, parts in _OFFLOADED.items() if zero and there == dict.fromkeys(parts, "cpu")), None)
    if there and word is None:
        raise UserError(
            field=names[next(iter(there))],
            found=", ".join(f"{part} on {device}" for part, device in devices.items()) + f" with ZeRO {zero}",
            expected="optimizer on cpu, alone or with param, and ZeRO 1 to 3: param alone, and NVMe, have no price",
            hint="give the settings without offload to steelyard price, or plan with --offload",
        )
    return {} if word is None else {"offload": word}


_USUAL: Mapping[str, tuple[object, ...]] = {
    "optimizer.type": ("Adam", "AdamW", "adam", "adamw"),
    "prescale_gradients": (False,),
    "zero_optimization.allgather_partitions": (True,),
    "zero_optimization.stage3_max_live_parameters": (1e9, "auto"),
    "zero_optimization.stage3_max_reuse_distance": (1e9, "auto"),
    "zero_optimization.stage3_prefetch_bucket_size": (5e7, "auto"),
    "zero_optimization.stage3_param_persistence_threshold": (1e5, "auto"),
}
"""Values of entries that are DeepSpeed's own defaults (runtime/zero/config.py), or what a trainer fills in."""
_OF_TRAINING = (
    r"gradient_clipping|zero_allow_untested_optimizer|steps_per_print|wall_clock_breakdown|optimizer\.params\..*|"
    r"(scheduler|tensorboard|wandb|csv_monitor|flops_profiler|aio)\..*|zero_optimization\."
    r"(overlap_comm|contiguous_gradients|reduce_scatter|sub_group_size|round_robin_gradients|"
    r"stage3_gather_16bit_weights_on_model_save|gather_16bit_weights_on_model_save|"
    r"offload_(param|optimizer)(\.(pin_memory|buffer_count|buffer_size|pipeline_read|pipeline_write|fast_init))?)|"
    r"(comms_config|monitor_config)\..*"
)
"""Entries about learning rates and logs, and those of ZeRO that every priced run has or that change little."""


DEEPSPEED = Engine(
    name="deepspeed",
    capabilities=CAPABILITIES,
    execution=Execution(reduce_bytes=2, keeps_parameters=True, shares_head=True),
    precisions=("bf16", "fp16", "fp32"),
    refuse=lambda chain, seq_len: refuse_as_transformers("deepspeed", chain),
    options={LARGE_BUCKETS: Option(change=lambda engine: engine.executing(bucket_bytes=2 * 2 * _LARGE_BUCKET_SIZE))},
    levers={
        "train": peft.LEVERS["train"],
        "offload": replace(
            peft.one_of(_OFFLOADED, "which cannot offload activations as planned"),
            dimensions=dimensions_of("fsdp"),
            effects=stepping_on_host,
        ),
        "base": replace(peft.LEVERS["base"], dimensions=dimensions_of("dp")),
        "optimizer": peft.one_of(_OPTIMIZERS, "which flattens parameters under ZeRO and has no such states"),
    },
    reader=Reader(suffixes=(".json",), values=_values, read=_read, untold=(Train.name, Optimizer.name)),
    targets=(
        Target(
            name="deepspeed",
            software="DeepSpeed 0.19.8",
            summary="ds_config.json: ZeRO stage, AutoTP, AutoEP, batch sizes, activation checkpointing",
            write=_write,
            weights="from_pretrained reads the Hugging Face format; zero_to_fp32.py in a checkpoint's folder writes "
            "fp32 weights; with sharded experts, deepspeed/checkpoint/ds_to_universal.py writes a universal checkpoint",
            routers=ROUTERS_BY_RANK,
        ),
    ),
)
"""ZeRO with 16-bit gradients, as in its published runs of ZeRO-3. ZeRO-1 keeps them whole, in the dtype of the model,
and reduces them once per step (stage_1_and_2.py, ``reduce_ready_partitions_and_remove_grads``)."""
