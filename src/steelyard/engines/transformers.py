"""A plan for transformers' own trainer: its arguments, and a `DistributedConfig` if there is tp or ep.

Names are those of transformers 5.23.0 (``training_args.py``, ``distributed/configuration_utils.py``). It has no
pipelines for a trainer, no sequence parallelism with tp and no selective remat, and refuses plain replication with tp.
Hybrid sharding without tp or ep is accelerate's (its `ParallelismConfig`, which `TrainingArguments` takes).
"""

from typing import Any

from steelyard.engines import peft
from steelyard.engines.accelerate import GATHERED_TAIL, SHARDED_TASKS, kept_gathered
from steelyard.engines.capabilities import Capabilities, dimensions_of
from steelyard.engines.engine import Engine
from steelyard.engines.execution import Execution
from steelyard.engines.writing import ROUTERS_BY_RANK, Draft, Request, Target, UniformPlan, refuse_as_transformers
from steelyard.levers import Levers
from steelyard.plan.dimensions.ep import DEGREE
from steelyard.plan.strategy import Remat
from steelyard.precision import SCALES_LOSS

CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of(
        *("dp", "fsdp", "dp+fsdp", "tp", "fsdp+tp", "dp+fsdp+tp"),
        *("fsdp+ep", "fsdp+tp+ep", "dp+fsdp+ep", "dp+fsdp+tp+ep"),
    ),
    modes={"zero": frozenset({2, 3}), "sp": frozenset({False}), "ep": frozenset(DEGREE.texts)},
    modes_beside={"tp": {"zero": frozenset({3})}, "ep": {"zero": frozenset({3})}},
    shares_heads=False,  # reshaping a part of a head fails in their tp plans
    experts_within_shards=True,
    experts_of=frozenset(
        {
            *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe"),
            *("glm4_moe_lite", "minimax_m2", "nemotron_h"),
        }
    ),
    never_divided=frozenset(
        {
            *("bart", "bert", "bitnet", "bloom", "codegen", "dbrx", "diffllama", "electra", "falcon", "falcon_h1"),
            *(
                "gemma3",
                "gpt2",
                "gpt_bigcode",
                "gpt_neo",
                "gpt_oss",
                "gptj",
                "hunyuan_v1_dense",
                "jetmoe",
                "lfm2",
                "modernbert",
                "mpt",
                "opt",
            ),
            *("persimmon", "roberta", "stablelm", "t5", "vit", "whisper", "xglm", "xlm-roberta"),
        }
    ),
    sharded_tasks=SHARDED_TASKS,
    remats=frozenset({Remat.NONE, Remat.FULL}),
)
"""Plans of one strategy. A model with tp or ep shards itself (`DistributedConfig`), which frees the parameters of every
block after forward. Experts are divided in models whose config has a ``base_model_ep_plan``; a model without one would
train undivided. tp needs a ``base_model_tp_plan``, which the types that are never divided lack."""


def _write(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    levers = request.plan.chosen_levers
    left_out = [
        f"{('' if 'optimizer' in levers.texts else 'optimizer, ')}data and initial weights: set by the training script"
    ]
    if _shards_itself(view):
        left_out.append(GATHERED_TAIL)
    elif view.fsdp > 1:
        left_out += kept_gathered(request)
    left_out += peft.left_out(levers)
    model = "distributed_config=distributed_config" if _shards_itself(view) else "..."
    return Draft(
        files=(("steelyard_trainer.py", _trainer(view, levers, CAPABILITIES.divides_experts(request.plan.chain()))),),
        left_out=tuple(left_out),
        launch=f"{request.torchrun} train.py",
        usage=(
            f"in train.py: model = AutoModelForCausalLM.from_pretrained(NAME, {model}); "
            "Trainer(model=model, args=TrainingArguments(output_dir, **training_arguments), ...)",
            *peft.model_usage(levers, view.precision),
        ),
    )


def _shards_itself(view: UniformPlan) -> bool:
    return view.tp > 1 or view.ep > 1


def _trainer(view: UniformPlan, levers: Levers, divides_experts: bool) -> str:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": view.microbatch_per_rank,
        "gradient_accumulation_steps": view.pipeline.num_microbatches,
        "bf16": view.precision == "bf16",
        "fp16": view.precision == "fp16",
        "max_grad_norm": 1.0,
        **peft.training_arguments(levers),
    }
    is_accelerates = view.fsdp > 1 and not _shards_itself(view)
    if is_accelerates:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": view.zero == 3,
            "activation_checkpointing": view.remat is Remat.FULL,
            "state_dict_type": "SHARDED_STATE_DICT",
            **({"cpu_offload": True} if view.on_host else {}),
        }
    else:
        arguments["activation_checkpointing"] = view.remat is Remat.FULL
    lines = ["training_arguments = {", *(f"    {key!r}: {value!r}," for key, value in arguments.items()), "}"]
    if is_accelerates and view.dp > 1:
        hybrid = f"ParallelismConfig(dp_replicate_size={view.dp}, dp_shard_size={view.fsdp})"
        lines = [
            "from accelerate import ParallelismConfig",
            "",
            *lines[:-1],
            f"    'parallelism_config': {hybrid},",
            "}",
        ]
    if _shards_itself(view):
        sizes = {
            **({"tp_size": view.tp, "tp_plan": "auto"} if view.tp > 1 else {}),
            "fsdp_size": view.fsdp,
            **({"dp_replicate_size": view.dp} if view.dp > 1 else {}),
            **({"ep_size": view.ranks_of_experts} if view.ranks_of_experts > 1 and divides_experts else {}),
            "fsdp_mixed_precision": view.precision == "bf16" and view.fsdp > 1,
        }
        lines = [
            "from transformers.distributed import DistributedConfig",
            "",
            "distributed_config = DistributedConfig(",
            *(f"    {key}={value!r}," for key, value in sizes.items()),
            ")",
            *lines,
        ]
    imports, changes = peft.model_lines(levers, view.precision)
    if imports:
        lines = [*imports, *lines] if lines[0].startswith("from") else [*imports, "", *lines]
    return "\n".join([*lines, *changes]) + "\n"


TRANSFORMERS = Engine(
    name="transformers",
    capabilities=CAPABILITIES,
    execution=Execution(whole_gradients="without tp", shares_head=True),
    precisions=("bf16", "fp16", "fp32"),
    dimensions_in={SCALES_LOSS: dimensions_of("dp", "fsdp", "dp+fsdp", "tp")},  # its DistributedConfig computes in bf16
    refuse=lambda chain, seq_len: refuse_as_transformers("transformers", chain),
    levers={**peft.LEVERS, "offload": peft.OFFLOAD},
    targets=(
        Target(
            name="transformers",
            software="transformers 5.23.0",
            summary="TrainingArguments, and a DistributedConfig for tp or ep",
            write=_write,
            weights="from_pretrained reads and save_pretrained writes the Hugging Face format; accelerate "
            "merge-weights CHECKPOINT OUT converts a sharded checkpoint to it",
            routers=ROUTERS_BY_RANK,
        ),
    ),
)
"""Transformers trains through accelerate, except if its DistributedConfig shards the model; it then reduces in fp32
(distributed/fsdp.py) and in every backward pass."""
