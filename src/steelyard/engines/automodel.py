"""A plan as NeMo Automodel's YAML: FSDP2 with tp, cp, ep and torch's pipeline stages, on the model of a config.

Names are those of NVIDIA-NeMo/Automodel on GitHub (``components/distributed/config.py`` at 013d113,
``components/distributed/pipelining/config.py`` at 1265a65, ``recipes/_dist_utils.py`` at 0251250,
``components/distributed/mesh_utils.py`` at 210f58f, ``components/moe/parallelizer.py`` at 005f663) and of its
documentation of 0.7.0. States are sharded over the ranks of fsdp and cp together. Experts are divided in models that
Automodel has its own code for (``_transformers/registry.py`` at 003a961), which do not support tp.

Adapters are its own (``components/_peft/lora.py`` of 0.7.0) in the form of peft's: on linear layers that match a
pattern, with the same initial weights and dropout. They and their states have the type of the base. A 4-bit base can
only be read from weights, but the file has a config. Any optimizer class can be named
(``components/optim/optimizer.py``).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from steelyard.engines.capabilities import Capabilities, dimensions_of
from steelyard.engines.config_entries import hub_config
from steelyard.engines.engine import Engine, Taken
from steelyard.engines.execution import FUSED, Execution
from steelyard.engines.megatron_bridge import TE_SPEEDUP
from steelyard.engines.peft import one_of, refuse_kind, whole_if_so
from steelyard.engines.transformers import TRANSFORMERS
from steelyard.engines.writing import ROUTERS_BY_RANK, Draft, PipelinePart, Request, Target, UniformPlan, refuse_untold
from steelyard.errors import UserError
from steelyard.levers import Levers
from steelyard.levers.optimizer import Optimizer
from steelyard.levers.train import ALL_LINEAR, Train
from steelyard.levers.weights import Weights
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.plan.dimensions.ep import DEGREE
from steelyard.plan.strategy import Remat
from steelyard.precision import DTYPES
from steelyard.schedules import SCHEDULES

_OWN_CODE = frozenset(
    {
        *("deepseek_v3", "deepseek_v32", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss"),
        *("minimax_m2", "nemotron_h", "qwen3_moe", "qwen3_next"),
    }
)
"""Types of models with experts that Automodel has its own code for."""
_OWN_TP_PLANS = frozenset({"falcon_h1"})
"""Types without a tp plan in transformers that Automodel has one of (``components/distributed/optimized_tp_plans.py``).
Of others it would divide the head alone."""
CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of(
        *("fsdp", "dp+fsdp", "tp", "fsdp+tp", "dp+fsdp+tp"),
        *("fsdp+cp", "fsdp+cp+tp", "dp+fsdp+cp", "dp+fsdp+cp+tp", "fsdp+ep"),
    ),
    experts_of=_OWN_CODE,
    shares_heads=False,  # components/distributed/parallelizer.py of 0.7.0, validate_tp_mesh
    never_divided=_OWN_CODE | (TRANSFORMERS.capabilities.never_divided - _OWN_TP_PLANS),
    modes={"zero": frozenset({2, 3}), "sp": frozenset({False, True}), "ep": frozenset(DEGREE.texts)},
    modes_piped={"zero": frozenset({1})},  # torch's PipelineStage, backward_maybe_with_nosync
    why_not={"dp": "which FSDP2 supports only together with fsdp"},
    pipes_tied=False,  # components/distributed/pipelining/hf_utils.py, validate_hf_model_for_pipeline_support
    remats=frozenset(Remat),
    schedules=frozenset(
        each.name for each in SCHEDULES.values() if each.torchtitan_name is not None and not each.splits_backward
    ),
)
_REMATS: Mapping[Remat, bool | str] = {Remat.NONE: False, Remat.SELECTIVE: "selective", Remat.FULL: True}


def _refuse(chain: ModelChain, seq_len: int) -> None:
    refuse_untold("automodel", chain)
    if chain.family.task is not Task.CAUSAL_LM:
        raise UserError(
            field="--to",
            found=f"automodel for {chain.name} ({chain.family.model_type})",
            expected="a model that predicts the next token, which NeMoAutoModelForCausalLM builds from a config",
            hint="run the plan with `steelyard train`, or export --to torchrun for a script that starts it",
        )


def _write(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    chain = request.plan.chain()
    has_own_code = chain.family.model_type in _OWN_CODE
    levers = request.plan.chosen_levers
    left_out = {
        "tokenizer, learning rate and initial weights: set them in the file": True,
        "fp32 adapters: Automodel keeps them and their states in the type of the base; base weights: they "
        "are loaded if model._target_ is NeMoAutoModelForCausalLM.from_pretrained": not levers.value(Train).is_default,
        "exact full remat: Automodel recomputes attention, MLP and norms separately and keeps the input of "
        "each": view.remat is Remat.FULL and not view.has_experts,
        "exact selective remat: Automodel also recomputes every second matrix product (priced)": view.remat
        is Remat.SELECTIVE,
        "ZeRO-3: with unsharded experts, Automodel's own models keep parameters gathered after the forward "
        "pass": has_own_code and view.ep == 1 and view.zero == 3,
    }
    return Draft(
        files=(("automodel.yaml", yaml.safe_dump(_content(view, chain, levers), sort_keys=False, width=120)),),
        left_out=tuple(line for line, holds in left_out.items() if holds),
        launch=f"{request.torchrun} -m nemo_automodel.cli.app automodel.yaml",
        usage=("the data is synthetic: set yours under dataset",),
    )


_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"_target_": "torch.optim.AdamW", "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "adamw-8bit": {"_target_": "torchao.optim.AdamW8bit", "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "adamw-4bit": {"_target_": "torchao.optim.AdamW4bit", "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "sgd": {"_target_": "torch.optim.SGD", "lr": 3e-4},
}


def _peft(train: Train) -> dict[str, Any]:
    is_all = train.targets == (ALL_LINEAR,)
    places = {"exclude_modules": ["lm_head"]} if is_all else {"target_modules": [f"*.{each}" for each in train.targets]}
    return {
        "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
        **places,
        "dim": train.r,
        "alpha": whole_if_so(train.alpha),
        "dropout": train.dropout,
        "dropout_position": "pre",
        "lora_A_init": "uniform",  # Kaiming's, as in peft
        "use_memory_efficient_lora": False,
        "use_triton": False,
    }


def _refuse_part(train: Train) -> str | None:
    return refuse_kind(train) or ("which scales adapters only by alpha / r" if train.rslora else None)


def _content(view: UniformPlan, chain: ModelChain, levers: Levers) -> dict[str, Any]:
    has_stages = view.pipeline.num_stages > 1
    number = "bfloat16" if view.precision == "bf16" else "float32"
    weights = "float32" if levers.value(Weights).is_default else number
    # samples of one data rank in one forward pass: all microbatches of a pipeline, or one without a pipeline
    samples = view.microbatch_per_rank * (view.pipeline.num_microbatches if has_stages else 1)
    distributed: dict[str, Any] = {
        "strategy": "fsdp2",
        "dp_size": view.data_degree,
        "dp_replicate_size": view.dp,
        "tp_size": view.tp,
        "cp_size": view.cp,
        "pp_size": view.pipeline.num_stages,
        "ep_size": view.ep,
        "sequence_parallel": view.sp,
        "activation_checkpointing": _REMATS[view.remat],
        "defer_fsdp_grad_sync": False,
        "reshard_after_forward": view.fsdp > 1 and view.zero == 3,
        "mp_policy": {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
            "param_dtype": number,
            "reduce_dtype": weights,
            "output_dtype": number,
        },
    }
    if has_stages:
        distributed["pipeline"] = {
            "pp_schedule": view.pipeline.schedule.torchtitan_name,
            "pp_microbatch_size": view.microbatch_per_rank,
            "module_fqns_per_model_part": [_fqns(part) for part in view.parts],
            "scale_grads_in_schedule": False,
        }
    if view.ep > 1:
        distributed["moe"] = {"reshard_after_forward": view.zero == 3}
    train = levers.value(Train)
    return {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {"global_batch_size": view.global_batch, "local_batch_size": samples, "max_steps": 1000},
        "dist_env": {"backend": "nccl", "timeout_minutes": 10},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "config": {"_target_": "transformers.AutoConfig.for_model", **hub_config(chain)},
            "torch_dtype": weights if train.is_default else DTYPES[view.precision],
        },
        **({} if train.is_default else {"peft": _peft(train)}),
        "distributed": distributed,
        "checkpoint": {"enabled": False, "model_save_format": "safetensors", "save_consolidated": True},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": dict(_OPTIMIZERS[str(levers.value(Optimizer))]),
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset",
            "vocab_size": chain.vocab_size,
            "seq_len": view.seq_len,
            "batch_size": samples,
        },
        "dataloader": {"_target_": "torch.utils.data.DataLoader", "batch_size": None},
    }


def _fqns(part: PipelinePart) -> list[str]:
    names = ["model.embed_tokens"] * part.has_embedding
    names += [f"model.layers.{block}" for block in part.blocks]
    return [*names, *["model.norm", "lm_head"] * part.has_head, "model.rotary_emb"]


_WITHOUT_EP = frozenset(each for each in CAPABILITIES.dimensions if all(one.name != "ep" for one in each))
AUTOMODEL = Engine(
    name="automodel",
    capabilities=CAPABILITIES,
    execution=Execution(
        kernels=replace(FUSED, selective="half of the matmuls", full="until last needed", expert_copies=2),
        tuned_linear_speedup=TE_SPEEDUP,
        shares_head=True,
    ),
    refuse=_refuse,
    levers={
        "train": Taken(refuse=_refuse_part, dimensions=_WITHOUT_EP),
        "weights": Taken(),
        "optimizer": replace(
            one_of(_OPTIMIZERS, "which has no optimizer of whole matrices, because FSDP2 shards all of them"),
            dimensions=frozenset(each for each in _WITHOUT_EP if all(one.name != "tp" for one in each)),
        ),
    },
    targets=(
        Target(
            name="automodel",
            software="NeMo Automodel 0.7.0",
            summary="automodel.yaml: sizes of FSDP2, tp, cp, ep and pipeline, activation checkpointing, the config",
            write=_write,
            weights="model._target_ NeMoAutoModelForCausalLM.from_pretrained reads the Hugging Face format; "
            "checkpoints with save_consolidated have it",
            routers=ROUTERS_BY_RANK,
        ),
    ),
)
"""FSDP2 as in the runtime, gradients reduced in fp32 in every microbatch (defer_fsdp_grad_sync is off), receive buffers
of 1F1B in a ring. Its selective policy is torchtitan's (``components/distributed/activation_checkpointing.py``); its
linear layers, norms and attention are Transformer Engine's (backend of its recipes)."""
